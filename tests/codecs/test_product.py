"""Products: every codec that selects coordinates, combined with the codecs that encode their values."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, reseal, same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st
from test_golden import NUMEL as FEW
from test_golden import dense, golden, nonzeros, vector
from test_hostile_frames import read

from fedcomp import FrameError, RunConfig, available_codecs, codec, kernels, memory
from fedcomp.codecs import at_density, longest_frame
from fedcomp.codecs.frame import PRODUCT, SECTIONS, unseal
from fedcomp.codecs.matrices import MatrixCodec
from fedcomp.codecs.product import Product, contraction
from fedcomp.codecs.selection import Selective
from fedcomp.errors import ConfigError, SpecError
from fedcomp.sim import simulate

TINY = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
NUMEL = 401
SELECTIONS = [name for name, cls in available_codecs().items() if issubclass(cls, Selective)]
MATRICES = [name for name, cls in available_codecs().items() if issubclass(cls, MatrixCodec)]
SUMS = [
    name for name, cls in available_codecs().items() if cls.shares_seed
]  # sketch; s2 has products of its own, in test_s2.py
VALUES = [name for name in available_codecs() if name not in SELECTIONS + MATRICES + SUMS]
PAIRS = [  # every selection and every codec of values at least once
    f"{a}+{b}" for a, b in zip(itertools.cycle(SELECTIONS), VALUES, strict=False)
]
SPREAD = {"threshold": "threshold:tau=1"} | {
    name: f"{name}:density=1/10" for name in SELECTIONS if name != "threshold"
}
MORE = [
    "randomk:density=1/10,scaled=true+natural",
    "randomk:density=1/10,by=magnitude,scaled=true+qsgd",
    "topk:density=1%+qsgd:levels=4",
]
every_product = for_each(
    "spec", [f"{SPREAD[a]}+{b}" for a, b in (s.split("+") for s in PAIRS)] + MORE
)


# The definition of a product.


@every_product
def test_a_product_sends_values_of_the_second_codec_at_positions_of_the_first(spec):
    c = codec(spec)
    for name in ("normal", "ties", "zero", "huge", "all scales"):
        x = vectors(NUMEL)[name]
        y = c.decode(c.encode(x, seed=9), numel=NUMEL)
        (at, _), chosen = c.first.choose([x], [9])
        expected = torch.zeros(NUMEL)
        expected[at] = c.second.decode(c.second.encode(chosen, seed=9), numel=len(at))
        assert y.isfinite().all() and same_bits(y, expected), name


@every_product
def test_layers_stacks_and_sums_are_encoded_in_the_same_way(spec):
    c, layout, x = (
        codec(f"{spec}@layer"),
        layout_of(NUMEL),
        torch.stack([normal(NUMEL), 0 * normal(NUMEL), normal(NUMEL, seed=2)]),
    )
    frames = [c.encode(row, seed=seed, layout=layout) for seed, row in enumerate(x)]
    assert c.encode_batch(x, [0, 1, 2], layout=layout) == frames
    assert c.encode_batch(x[2:], [2], onto=[torch.zeros(NUMEL)], layout=layout) == frames[2:]
    y = c.decode(frames[2], numel=NUMEL, layout=layout)
    for i, e in enumerate(layout):
        assert same_bits(
            y[e.span], c.inner.decode(c.inner.encode(x[2, e.span], seed=2 + i), numel=e.numel)
        )
    opened = c.inner.open_batch(
        [c.inner.encode(row, seed=5) for row in x] + [frames[0][:-1]], NUMEL
    )
    assert [isinstance(update, FrameError) for update in opened] == [False, False, False, True]
    assert all(
        same_bits(update.dense(), c.inner.decode(c.inner.encode(row, seed=5), numel=NUMEL))
        for update, row in zip(opened, x)
    )


@every_product
def test_a_frame_has_the_bytes_of_its_halves_and_little_more(spec):
    """Besides the values and the positions, a product sends only the ids of its codecs, a length and a second count."""
    c, x = codec(spec), normal(10_000)
    (at, _), chosen = c.first.choose([x], [3])
    positions = b"" if c.draws else kernels.positions.pack(at.numpy(), 10_000)[1]
    assert len(c.encode(x, seed=3)) <= len(c.second.encode(chosen, seed=3)) + len(positions) + 18


@every_product
def test_the_header_names_the_halves_once(spec):
    c, x = codec(spec), normal(NUMEL)
    frame = c.encode(x, seed=3)
    assert frame[3] == PRODUCT == c.id and frame[SECTIONS : SECTIONS + 2] == bytes(
        [c.first.id, c.second.id]
    )
    seed, ((_, section),) = unseal(frame, c.id, NUMEL, None, c.seeded)
    assert seed == 3 * c.seeded and len(frame) - len(section.body) <= 24
    assert c.seeded == (c.first.seeded or c.second.seeded) and c.portable == (
        c.first.portable and c.second.portable
    )
    for other in ("topk+identity", "stc+identity", "randomk+identity", "topk+fp16"):
        if codec(other).name != c.name:
            with pytest.raises(
                FrameError, match="encoded with .*, but is decoded with .*same codecs"
            ):
                codec(other).decode(frame, numel=NUMEL)
    for half in (c.first, c.second):
        with pytest.raises(
            FrameError, match="encoded with a product of two codecs, but is decoded with the codec"
        ):
            half.decode(frame, numel=NUMEL)
        with pytest.raises(FrameError, match="is decoded with a product of two codecs"):
            c.decode(half.encode(x), numel=NUMEL)


@for_each("name", VALUES)
def test_a_frame_decodes_with_any_options_of_its_halves(name):
    x = normal(NUMEL)
    for a, b in [
        ("topk:density=1/10", "topk:density=1,values=fp16"),
        ("randomk:by=magnitude", "randomk:density=1/3,scaled=true"),
    ]:
        one, other = codec(f"{a}+{name}"), codec(f"{b}+{name}")
        frame = one.encode(x, seed=6)
        assert same_bits(other.decode(frame, numel=NUMEL), one.decode(frame, numel=NUMEL))


@for_each("spec", PAIRS + MORE + [f"{s}@layer" for s in MORE])
def test_a_product_writes_itself_as_a_spec_string(spec):
    c = codec(spec)
    assert codec(str(c)) == c and hash(codec(str(c))) == hash(c)
    assert copy.deepcopy(c) == c and bytes(copy.deepcopy(c).id.halves) == c.id.halves


# Declared properties.


def test_attributes_are_derived_from_both_codecs():
    c = codec("topk:density=1/10+fp16")
    assert (
        c.contraction(400) == 0.1 * (1 - 2.0**-21)
        and c.variance(400) is None
        and not c.linear
        and c.max_count(400) == 40
    )
    both = codec("randomk:density=1/10,scaled=true+natural")
    assert both.contraction(400) is None and both.variance(400) == 10 * 1.125 - 1
    assert codec("randomk:density=1/10+natural").contraction(400) == pytest.approx(0.1 * 7 / 8)
    assert (
        codec("topk:density=1/10+qsgd:levels=4").contraction(400) is None
    )  # the variance ω for 40 values is √40/4
    assert codec("topk:density=1/100+qsgd:levels=4").contraction(400) == 0.01 * (1 - 4 / 16)
    assert (
        codec("threshold+fp16").contraction(400) == 0
        and codec("threshold+qsgd").contraction(400) is None
    )
    assert (
        codec("topk+terngrad").seeded == codec("terngrad").seeded and codec("randomk+fp16").seeded
    )


def test_an_unbiased_codec_with_omega_below_one_contracts():
    assert contraction(codec("natural"), 10) == 7 / 8
    assert (
        contraction(codec("qsgd:levels=4"), 16) == 0
        and contraction(codec("qsgd:levels=4"), 17) is None
    )


@for_each("first, second", list(itertools.product(("topk", "stc", "sbc"), VALUES)))
def test_the_declared_contraction_holds(first, second):
    c = codec(f"{first}:density=1/10+{second}")
    if c.contraction(NUMEL) is None:
        with pytest.raises(ConfigError, match="--memory residual diverges"):
            memory("residual", c, NUMEL)
        return
    for name in ("normal", "one above, many below"):
        x = vectors(NUMEL)[name].double()
        lost = [
            float((x - c.decode(c.encode(x.float(), seed=seed), numel=NUMEL)).square().sum())
            for seed in range(4)
        ]
        bound = (1 + 1e-7 - c.contraction(NUMEL)) * float(x.square().sum())
        assert np.mean(lost) - 5 * np.std(lost) <= bound, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "randomk:density=1/2,scaled=true+natural",
        "randomk:density=3/4,by=magnitude,scaled=true+qsgd:levels=2",
    ],
)
def test_both_codecs_use_different_random_words(spec):
    """If rounding used the same random words as the selection, values would be biased."""
    c, x = codec(spec), torch.linspace(0.1, 2, 16)
    sent = torch.stack([c.decode(c.encode(x, seed=seed), numel=16) for seed in range(120)]).double()
    assert ((sent.mean(0) - x).abs() <= 5 * sent.std(0) / 120**0.5).all()
    omega = c.variance(16)
    assert float((sent - x).square().sum(1).mean()) <= 1.2 * omega * float(x.square().sum())


def test_the_density_of_a_product_can_be_changed():
    c = codec("topk:density=1%+fp16@layer")
    assert c.density == 0.01 and at_density(c, 0.5) == codec("topk:density=1/2+fp16@layer")
    assert not hasattr(codec("threshold+fp16"), "density")


@for_each("spec", [s for s in PAIRS if codec(s).longest_section(9) is not None])
def test_no_frame_exceeds_the_declared_size(spec):
    for density, numel in itertools.product((1e-9, 1 / 10, 1.0), (1, NUMEL)):
        c, layout = at_density(codec(f"{spec}@layer"), density), layout_of(numel)
        for x in (vectors(numel)[name] for name in ("normal", "constant", "one spike")):
            assert len(c.encode(x, layout=layout)) <= longest_frame(c, layout)
            assert len(c.inner.encode(x)) <= longest_frame(c.inner, layout)


@pytest.mark.parametrize(
    ("uplink", "memory_"),
    [
        ("topk:density=1%+qsgd:levels=4", "none"),
        ("topk:density=1%+qsgd:levels=4,damped=true", "residual"),
        ("randomk:density=5%+natural", "residual"),
    ],
)
def test_a_simulation_sends_products(tmp_path, uplink, memory_):
    simulate(
        RunConfig(
            task=TINY,
            clients=4,
            participation=0.5,
            rounds=2,
            uplink=uplink,
            memory=memory_,
            out=str(tmp_path / "run"),
        )
    )
    rounds = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [r["accepted"] for r in rounds] == [2, 2] and all(
        30 < r["uplink_bytes"] < 200 for r in rounds
    )


# Frames that no encoder makes.


@given(st.sampled_from(PAIRS + MORE), st.sampled_from([1, 8, 50, NUMEL]), st.data())
def test_any_change_with_a_valid_checksum_is_decoded_or_rejected(spec, numel, data):
    original = codec(spec).encode(vectors(numel)["ties"], layout=layout_of(numel))
    at = data.draw(st.integers(4, len(original)))
    new, kept = data.draw(st.binary(max_size=3)), data.draw(st.integers(0, 3))
    read(
        spec,
        reseal((original[:at] + new + original[at + kept :]).ljust(SECTIONS, b"\0"), numel),
        numel,
    )


@every_product
def test_truncated_and_extended_frames_are_detected(spec):
    original = codec(spec).encode(vectors(50)["normal"])
    for end in range(SECTIONS, len(original)):
        assert not read(spec, reseal(original[:end], 50), 50)
    assert not read(spec, reseal(original + b"\0", 50), 50)


# Spec strings.


@for_each("spec", ["topk+qsgd+fp16", "topk+fp16+fp16+fp16@layer"])
def test_a_product_has_two_parts(spec):
    with pytest.raises(
        SpecError,
        match="parts; give at most two: a codec that selects coordinates, and a codec for their values, such as topk",
    ):
        codec(spec)


@for_each(
    "first, second",
    list(itertools.product(VALUES + MATRICES + SUMS, ["fp16", *SELECTIONS[:1]])),
)
def test_the_first_codec_must_select_coordinates(first, second):
    with pytest.raises(
        SpecError, match=f"'{first}' does not; give (topk:density=1%.fp16|{second}.{first})"
    ):
        codec(f"{first}+{second}")


@for_each("first, second", list(itertools.product(SELECTIONS, [*SELECTIONS, *MATRICES, "sketch"])))
def test_the_second_codec_must_encode_every_value(first, second):
    why = (
        "(selects coordinates again|needs matrices|needs all clients to send the same coordinates)"
    )
    with pytest.raises(
        SpecError, match=f"'{second}' {why}; give another codec, such as {first}.fp16"
    ):
        codec(f"{first}+{second}")


def test_products_cannot_be_nested():
    inner = codec("topk+fp16")
    for halves in ((inner, codec("fp16")), (codec("topk"), inner)):
        with pytest.raises(SpecError):
            Product(*halves)


# Golden frames.


def test_frames_of_products_match_the_golden_files():
    layout, made = layout_of(FEW), {}
    for seed, spec in enumerate(
        [
            "topk:density=1/10+fp16",
            "stc:density=1/10+identity",
            "randomk:density=1/10+fp16",
            "randomk:density=1/10,by=magnitude,scaled=true+identity",
            "threshold:tau=1+fp16@layer",
            "sbc+fp16@layer",
        ]
    ):
        frame = codec(spec).encode(vector(FEW, seed), seed=seed, layout=layout)
        made[spec] = {
            "seed": seed,
            "frame": frame.hex(),
            "values": nonzeros(codec(spec).decode(frame, numel=FEW, layout=layout)),
        }
    for spec, case in golden("product", made).items():
        assert made[spec]["frame"] == case["frame"], spec
        assert same_bits(
            codec(spec).decode(bytes.fromhex(case["frame"]), numel=FEW, layout=layout),
            dense(case["values"]),
        ), spec
