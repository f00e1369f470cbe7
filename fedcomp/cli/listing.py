"""Tables of what there is to choose from."""

import inspect
import sys

from rich.console import Console
from rich.table import Table

from .. import spec
from ..codecs import available_codecs
from ..formatting import NOTHING
from .measure import normal

NUMEL = 1 << 16  # of the vector of normal values that sizes are measured on
COLUMNS = (
    "codec",
    "bits",
    "unbiased",
    "contracts",
    "linear",
    "portable",
    "source",
    "what it sends",
)
LEGEND = f"""bits: a parameter, in a frame of {NUMEL:,} normal values;  unbiased: ω with E‖x−C(x)‖² ≤ ω‖x‖²
contracts: δ with ‖x−C(x)‖² ≤ (1−δ)‖x‖²;  linear: frames add;  portable: the same bytes on every device"""


def print_codecs() -> None:
    """Each codec's spec string with its defaults and what may be done with it: a table on a terminal, lines with tabs elsewhere."""
    vector = normal(NUMEL)
    rows = []
    for name, cls in available_codecs().items():
        made = cls()
        frame = made.encode(vector.values, seed=1, layout=vector.layout)
        facts = [
            _factor(made.variance(NUMEL)),
            _factor(made.contraction(NUMEL)),
            _yes(made.linear),
            _yes(made.portable),
        ]
        what = inspect.getdoc(cls).partition("\n")[0]
        rows.append(
            [spec.show(name, made), f"{8 * len(frame) / NUMEL:.3g}", *facts, cls.source, what]
        )
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in [list(COLUMNS), *rows]))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in COLUMNS:
        table.add_column(
            name,
            justify="right" if name == "bits" else "left",
            style="bold" if name == "codec" else "",
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    console.print(LEGEND, style="dim")


def _factor(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2g}"


def _yes(fact: bool) -> str:
    return "yes" if fact else NOTHING
