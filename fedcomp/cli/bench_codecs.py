"""`fedcomp bench codecs`: measure the speed, encoded size and error of codecs, and compare their time with the time to copy the vector."""

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import __version__, spec
from ..codecs import Codec, available_codecs, codec
from ..errors import UserError, os_errors
from ..formatting import NOTHING, human_bytes
from ..layout import Layout
from ..tasks import initial_model, load
from ..tasks.check import check, data_of
from ..training.local_sgd import LocalSGD, plan_batches
from ..training.own_loop import client_engine
from .pytorch_loops import seconds_of
from .report import svg
from .tables import print_table

COLUMNS = "codec encode encode/copy decode decode/copy frame bits bound error".split()
LEGEND = """encode, decode: million values per second
encode/copy, decode/copy: time to encode or decode the vector, divided by the time to copy it
frame: size of the encoded vector;  bits: bits per parameter;  bound: entropy of the decoded values in bits per parameter
error: ‖x−C(x)‖²/‖x‖² for a vector x that is decoded to C(x)"""
# A decoded vector counts as quantized if it has at most MAX_LEVELS distinct values, and repeats each value at least MIN_REPEATS times on
# average.
MAX_LEVELS, MIN_REPEATS = 1 << 12, 16


@dataclass(frozen=True)
class Vector:
    """A vector of shape [numel] to compress, with its layout (names and shapes of the tensors that the vector contains)."""

    description: str  # shown above the results
    values: Tensor
    layout: Layout


@dataclass(frozen=True)
class CodecMeasurement:
    """The measurements of one codec on one vector. Times are medians, in seconds."""

    codec: str
    encode_s: float
    decode_s: float
    encode_values_per_s: float
    decode_values_per_s: float
    encode_copies: float  # encode_s divided by the time to copy the vector
    decode_copies: float  # decode_s divided by the time to copy the vector
    frame_bytes: int
    bits_per_parameter: float
    # Entropy of the decoded vector (see `_bound_bits`), in bits per parameter. None if decoding draws random numbers, or if the decoded
    # values are neither sparse nor quantized.
    bound_bits_per_parameter: float | None
    error: float  # ‖x − C(x)‖² / ‖x‖², where C(x) is the decoded vector


def normal(numel: int, device: torch.device | str = "cpu") -> Vector:
    """Return a vector of `numel` standard normal values. Its layout is a square matrix, followed by a vector of the remaining values."""
    side = math.isqrt(numel)
    shapes: dict[str, tuple[int, ...]] = {"weight": (side, side)}
    if rest := numel - side * side:
        shapes["rest"] = (rest,)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return Vector(f"{numel:,} normal values", values.to(device), Layout.from_shapes(shapes))


def update_of(task_name: str, data: Path | None, device: torch.device) -> Vector:
    """Return the update of a client that trains a task's initial model for five local steps with batches of twenty examples."""
    task, sgd = load(task_name, data), LocalSGD()
    examples = data_of(task, "train")
    layout, model = check(task, sgd.batch_size, examples), initial_model(task, 0)
    engine = client_engine(task, model, layout, "cpu")
    batches = plan_batches(sgd, np.arange(len(examples)), 0, 1, 0)
    update = engine.train(layout.gather(model), examples, batches, sgd).update
    description = f"an update of {task.name}, {layout.numel:,} parameters"
    return Vector(description, update.to(device), layout)


def measure(vector: Vector, codecs: Iterable[Codec], repeats: int) -> Iterator[CodecMeasurement]:
    """Yield the measurements of each codec. Each repetition copies, encodes and decodes the vector once."""
    x, layout = vector.values, vector.layout
    numel = x.numel()
    copy = partial(torch.empty_like(x).copy_, x)
    for c in codecs:
        encode = partial(c.encode, x, seed=1, layout=layout)
        frame = encode()
        decode = partial(c.decode, frame, numel=numel, device=x.device, layout=layout)
        y = decode()
        error, bound = _error(x, y), None if c.seeded else _bound_bits(y)
        del y
        times = [
            [seconds_of(function, x.device) for function in (copy, encode, decode)]
            for _ in range(repeats)
        ]
        copy_s, encode_s, decode_s = (max(statistics.median(each), 1e-9) for each in zip(*times))
        yield CodecMeasurement(
            codec=str(c),
            encode_s=encode_s,
            decode_s=decode_s,
            encode_values_per_s=numel / encode_s,
            decode_values_per_s=numel / decode_s,
            encode_copies=encode_s / copy_s,
            decode_copies=decode_s / copy_s,
            frame_bytes=len(frame),
            bits_per_parameter=8 * len(frame) / max(numel, 1),
            bound_bits_per_parameter=None if bound is None else bound / max(numel, 1),
            error=error,
        )


def _error(x: Tensor, y: Tensor) -> float:
    """Return the relative squared error ‖x − y‖² / ‖x‖² in float64. To save memory, the vectors are split into pieces."""
    lost = total = 0.0
    for a, b in zip(x.split(1 << 22), y.split(1 << 22), strict=True):
        wide = a.double()
        lost = lost + float((wide - b.double()).square().sum())
        total = total + float(wide.square().sum())
    return lost / total if total else 0.0


def _bound_bits(y: Tensor) -> float | None:
    """Return the entropy of the decoded vector `y` in bits, for all values together, or None if `y` is neither quantized nor sparse.

    For quantized values, the result is the entropy of the levels. For sparse values, the result is the entropy of the positions, plus 32
    bits for each nonzero value.
    """
    nonzero = int(y.count_nonzero())
    if y[y != 0][: MIN_REPEATS * MAX_LEVELS].unique().numel() <= MAX_LEVELS:
        counts = y.unique(return_counts=True)[1].cpu().numpy()
        if MIN_REPEATS * counts.size <= nonzero + MIN_REPEATS:
            return float((counts * np.log2(y.numel() / counts)).sum()) if counts.size else 0.0
    if 2 * nonzero > y.numel():
        return None
    p = np.array([nonzero, y.numel() - nonzero]) / y.numel()
    return float(-(p * np.log2(p)).sum() * y.numel() + 32 * nonzero)


def bench(
    vector: Vector, specs: Sequence[str], repeats: int, as_json: bool, picture: Path | None
) -> None:
    """Measure the codecs that `specs` describes, such as "stc:density=1%", and print the results. An empty `specs` means all codecs."""
    if picture is not None and (picture.suffix != ".svg" or not picture.parent.is_dir()):
        advice = "name a file that ends in .svg in an existing folder"
        raise UserError(f"--picture {picture} cannot be written; {advice}")
    with spec.error_context(flag="--codec"):
        codecs = [codec(text) for text in specs or available_codecs()]
    progress = not as_json and sys.stderr.isatty()
    rows = []
    for row in measure(vector, codecs, repeats):
        rows.append(row)
        if progress:
            end = "" if len(rows) < len(codecs) else "\r\033[K"
            print(f"\r\033[K{len(rows)} of {len(codecs)}: {row.codec}", end=end, file=sys.stderr)
            sys.stderr.flush()
    device, threads = str(vector.values.device), torch.get_num_threads()
    if as_json:
        results = {"vector": vector.description, "device": device, "threads": threads}
        results |= {"torch": torch.__version__, "fedcomp": __version__}
        print(json.dumps(results | {"codecs": [asdict(row) for row in rows]}, indent=2))
    else:
        title = f"{vector.description}; {device}, {threads} threads, medians of {repeats}"
        print_table(COLUMNS, [_cells(row) for row in rows], {"codec"}, title=title, legend=LEGEND)
    if picture is not None:
        with os_errors(UserError, f"--picture {picture} cannot be written", "name another file"):
            picture.write_text(chart(vector.description, rows), encoding="utf-8")


def _cells(row: CodecMeasurement) -> list[str]:
    bound = row.bound_bits_per_parameter
    return [
        row.codec,
        f"{row.encode_values_per_s / 1e6:,.0f} M/s",
        f"{row.encode_copies:.1f}",
        f"{row.decode_values_per_s / 1e6:,.0f} M/s",
        f"{row.decode_copies:.1f}",
        human_bytes(row.frame_bytes),
        f"{row.bits_per_parameter:.3f}",
        NOTHING if bound is None else f"{bound:.3f}",
        f"{row.error:.3g}",
    ]


def chart(title: str, rows: Sequence[CodecMeasurement]) -> str:
    """Return an SVG chart of the codecs' error against bits per parameter, with logarithmic axes.

    An error of 0, which has no logarithm, is drawn at a tick labelled 0.
    """
    smallest = min([row.error for row in rows if row.error > 0], default=1e-9)
    zero = 10.0 ** (math.floor(math.log10(smallest)) - 1)
    points = [(max(row.bits_per_parameter, 1e-6), max(row.error, zero)) for row in rows]
    bits, errors = zip(*points, strict=True)

    def tick(error: float) -> str:
        return "0" if error < 1.1 * zero else f"{error:g}"

    across = svg.Axis.around("bits per parameter", bits, "{:g}".format, across=True, log=True)
    up = svg.Axis.around("error ‖x−C(x)‖²/‖x‖²", [*errors, zero], tick, log=True)
    series = []
    for style, (row, (x, y)) in enumerate(zip(rows, points, strict=True)):
        text = f"{row.bits_per_parameter:.3f} bits, error {row.error:.3g}"
        series.append(svg.Series(row.codec, style, [svg.Point(x, y, text)]))
    return svg.picture(title, across, up, series)
