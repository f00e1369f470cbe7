"""Golden bitstreams: frames of earlier versions can be decoded, and equal vectors are still encoded as the same bytes.

For each spec string of a codec, tests/golden/NAME.json contains the frame of `vector(NUMEL, seed)` in hexadecimal, and the nonzero
coordinates of the decoded vector. Codecs that are not portable may encode this vector as other bytes on another machine.

After a deliberate change of the frame format, or for a new option, delete the file. Then, as for a new codec, run this test twice, read the
difference and commit the file.
"""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import CHUNKED, built_in_codecs, layout_of, same_bits, variants

from fedcomp import codec
from fedcomp.codecs import overwrite

GOLDEN = Path(__file__).parents[1] / "golden"
NUMEL = 50


def vector(numel: int, seed: int) -> torch.Tensor:
    """Return the cubes of integers from −20 to 20, times 2⁻¹²: ties, zeros and a long tail, the same on every machine."""
    i = np.arange(numel, dtype=np.int64)
    return torch.from_numpy(
        (((i * i * 7919 + i * 104729 + seed * 1299709) % 41 - 20) ** 3 / 4096).astype(np.float32)
    )


def golden(name: str, made: dict[str, dict], complete: bool = True) -> dict[str, dict]:
    """Return the content of tests/golden/NAME.json. If the file is missing or empty, write `made` to it for review, and fail.

    `made`: the frames of this version. `complete=False`: the file may lack cases, such as those of new codecs.
    """
    path = GOLDEN / f"{name}.json"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text:
        lines = ",\n".join(
            f" {json.dumps(case)}: {json.dumps(content)}" for case, content in made.items()
        )
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        pytest.fail(f"tests/golden/{path.name} is written now; read it, then commit it")
    kept = json.loads(text)
    assert kept.keys() == made.keys() or not complete and kept.keys() < made.keys(), (
        f"tests/golden/{path.name} has other cases; delete it and run this test twice"
    )
    return kept


def dense(values: dict[str, float]) -> torch.Tensor:
    x = torch.zeros(NUMEL)
    for position, value in values.items():
        x[int(position)] = value
    return x


def nonzeros(x: torch.Tensor) -> dict[str, float]:
    return {str(i): x[i].item() for i in x.nonzero().flatten().tolist()}


@for_each("name", built_in_codecs())
def test_frames_of_codecs_match_the_golden_files(name):
    layout, made = layout_of(NUMEL), {}
    for spec in [spec + scope for spec in variants(name) for scope in ("", "@layer")]:
        seed = zlib.crc32(spec.encode()) % 1000
        frame = codec(spec).encode(vector(NUMEL, seed), seed=seed, layout=layout)
        made[spec] = {
            "seed": seed,
            "frame": frame.hex(),
            "values": nonzeros(codec(spec).decode(frame, numel=NUMEL, layout=layout)),
        }
    for spec, case in golden(name, made).items():
        assert made[spec]["frame"] == case["frame"] or not codec(spec).portable, spec
        assert torch.allclose(dense(made[spec]["values"]), dense(case["values"])), spec
        assert same_bits(
            codec(spec).decode(bytes.fromhex(case["frame"]), numel=NUMEL, layout=layout),
            dense(case["values"]),
        ), spec


def test_overwrite_frames_match_the_golden_files():
    made = {}
    for case, places in {
        "nothing": (),
        "first and last": (0, 49),
        "every third": range(0, NUMEL, 3),
        "all": range(NUMEL),
    }.items():
        positions = list(places)
        frame = overwrite.encode(1 + vector(NUMEL, 5), np.array(positions, np.int64))
        weights = torch.zeros(NUMEL)
        overwrite.apply(frame, weights)
        made[case] = {"positions": positions, "frame": frame.hex(), "values": nonzeros(weights)}
    for name, case in golden("overwrite", made).items():
        assert made[name]["frame"] == case["frame"], name
        weights = torch.zeros(NUMEL)
        overwrite.apply(bytes.fromhex(case["frame"]), weights)
        assert same_bits(weights, dense(case["values"])), name


def test_chunked_frames_match_the_golden_files():
    made, layout = {}, layout_of(NUMEL)
    for spec in CHUNKED:
        frame = codec(spec).encode(vector(NUMEL, 5), seed=5, layout=layout)
        values = nonzeros(codec(spec).decode(frame, numel=NUMEL, layout=layout))
        made[spec] = {"frame": frame.hex(), "values": values}
    for spec, case in golden("chunked", made, complete=False).items():
        assert made[spec]["frame"] == case["frame"], spec
        y = codec(spec).decode(bytes.fromhex(case["frame"]), numel=NUMEL, layout=layout)
        assert same_bits(y, dense(case["values"])), spec
