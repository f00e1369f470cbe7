"""What `fedcomp bench` prints: a table, JSON, a picture."""

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__, spec
from ..codecs import available_codecs, codec
from ..errors import UserError
from ..formatting import NOTHING, human_bytes
from .measure import Measured, Vector, measure

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = (
    1180,
    560,
    80,
    60,
    400,
    60,
)  # pixels of the picture and its margins
LEGEND = """encode, decode: million values a second, and how many plain copies of the vector take as long
bits, bound: a parameter, as sent and by the entropy of what is decoded;  error: ‖x−C(x)‖²/‖x‖²;  memory: what both add at their peak"""
COLUMNS = (
    "codec",
    "encode",
    "copies",
    "decode",
    "copies",
    "frame",
    "bits",
    "bound",
    "error",
    "memory",
)


def codecs(
    vector: Vector, specs: Sequence[str], repeats: int, as_json: bool, picture: Path | None
) -> None:
    """Measure the codecs of spec strings, all that there are where none is given, and show what came out."""
    if picture is not None and (picture.suffix != ".svg" or not picture.parent.is_dir()):
        raise UserError(
            f"--picture {picture} cannot be written; name a file that ends in .svg in a folder that is there"
        )
    with spec.reading(flag="--codec"):
        made = [codec(text) for text in specs or available_codecs()]
    rows = []
    for row in measure(vector, made, repeats):
        rows.append(row)
        if not as_json and sys.stderr.isatty():
            print(
                f"\r\033[K{len(rows)} of {len(made)}: {row.codec}",
                end="",
                file=sys.stderr,
                flush=True,
            )
    if not as_json and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    machine = {
        "device": str(vector.values.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "fedcomp": __version__,
    }
    if as_json:
        print(
            json.dumps(
                {
                    "vector": vector.what,
                    **machine,
                    "codecs": [dataclasses.asdict(row) for row in rows],
                },
                indent=2,
            )
        )
    else:
        print_table(vector, rows, repeats)
    if picture is not None:
        try:
            picture.write_text(drawn(vector.what, rows), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"--picture {picture} cannot be written ({error.strerror}); name another file"
            ) from None


def print_table(vector: Vector, rows: Sequence[Measured], repeats: int) -> None:
    """A table on a terminal, lines with tabs elsewhere."""
    cells = [_cells(row) for row in rows]
    if not sys.stdout.isatty():
        print("\n".join("\t".join(line) for line in [COLUMNS, *cells]))
        return
    title = f"{vector.what}; {vector.values.device}, {torch.get_num_threads()} threads, medians of {repeats}"
    table = Table(
        title=title,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for name in COLUMNS:
        table.add_column(
            name,
            justify="left" if name == "codec" else "right",
            style="bold" if name == "codec" else "",
        )
    for line in cells:
        table.add_row(*line)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(LEGEND, style="dim")


def _cells(row: Measured) -> list[str]:
    return [
        row.codec,
        f"{row.encode_values_per_s / 1e6:,.0f} M/s",
        f"{row.encode_copies:.1f}",
        f"{row.decode_values_per_s / 1e6:,.0f} M/s",
        f"{row.decode_copies:.1f}",
        human_bytes(row.frame_bytes),
        f"{row.bits_per_parameter:.3f}",
        NOTHING if row.bound_bits_per_parameter is None else f"{row.bound_bits_per_parameter:.3f}",
        f"{row.error:.3g}",
        NOTHING if row.peak_bytes is None else human_bytes(row.peak_bytes),
    ]


def drawn(what: str, rows: Sequence[Measured]) -> str:
    """An SVG: bits a parameter across, error upwards, both logarithmic; exact codecs on the lowest line. Points are numbered by bits."""
    least = min([row.error for row in rows if row.error > 0], default=1e-9)
    height = max(HEIGHT, TOP + 20 * len(rows) + 20)
    floor = 10.0 ** (math.floor(math.log10(least)) - 1)
    points = [(row.codec, max(row.bits_per_parameter, 1e-6), max(row.error, floor)) for row in rows]
    across, up = _decades([x for _, x, _ in points]), _decades([y for _, _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        inner_w, inner_h = WIDTH - LEFT - RIGHT, height - TOP - BOTTOM
        right = (math.log10(x) - across[0]) / (across[1] - across[0])
        top = (math.log10(y) - up[0]) / (up[1] - up[0])
        return LEFT + right * inner_w, height - BOTTOM - top * inner_h

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="26" font-size="16">{escape(what)}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{height - 14}" text-anchor="end">bits a parameter</text>',
        f'<text x="14" y="{TOP - 12}">error ‖x−C(x)‖²/‖x‖²</text>',
    ]
    for power in range(across[0], across[1] + 1):
        x, y = at(10.0**power, 10.0 ** up[0])
        parts.append(
            f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{10.0**power:g}</text>'
        )
    for power in range(up[0], up[1] + 1):
        x, y = at(10.0 ** across[0], 10.0**power)
        name = "0" if 10.0**power <= floor else f"{10.0**power:g}"
        parts.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{name}</text>'
        )
    points.sort(key=lambda point: point[1])
    dots, taken = [at(x, y) for _, x, y in points], []
    for number, ((name, _, _), (left, top)) in enumerate(zip(points, dots, strict=True), 1):
        x, y = _free(left, top, dots, taken)
        taken.append((x, y))
        parts += [
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="4"/>',
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" font-size="12">{number}</text>',
            f'<text x="{WIDTH - RIGHT + 20}" y="{TOP + 20 * number - 8}">'
            f'<tspan font-weight="bold">{number}</tspan>  {escape(name)}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around positive values, at least one apart."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _free(
    left: float,
    top: float,
    dots: Sequence[tuple[float, float]],
    taken: Sequence[tuple[float, float]],
) -> tuple[float, float]:
    """Where a point's number touches no other point and no other number: beside it, or a little further around it."""
    around = [
        (r * math.cos(step * math.pi / 4), r * math.sin(step * math.pi / 4))
        for r in (13, 20, 28)
        for step in range(8)
    ]
    places = [(left + dx, top + dy) for dx, dy in around]

    def free(place: tuple[float, float]) -> bool:
        others = [dot for dot in dots if dot != (left, top)]
        return all(math.dist(place, other) > 11 for other in others) and all(
            math.dist(place, other) > 15 for other in taken
        )

    return next(filter(free, places), places[0])
