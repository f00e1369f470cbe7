"""Tables of what there is to choose from."""

import dataclasses
import inspect
import sys

from rich.console import Console
from rich.table import Table

from .. import spec
from ..codecs import available_codecs


def print_codecs() -> None:
    """Each codec's spec string with its defaults, what it sends, its source: a table on a terminal, lines with tabs elsewhere."""
    rows = [(_with_defaults(name, cls), inspect.getdoc(cls).partition("\n")[0], cls.source) for name, cls in available_codecs().items()]
    if not sys.stdout.isatty():
        print("\n".join("\t".join(row) for row in rows))
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("codec", style="bold", overflow="fold")
    table.add_column("what it sends")
    table.add_column("source", style="dim")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def _with_defaults(name: str, cls: type) -> str:
    required = [f.name for f in dataclasses.fields(cls) if f.init and f.default is f.default_factory is dataclasses.MISSING]
    return f"{name}:{','.join(f'{option}=…' for option in required)}" if required else spec.show(name, cls())
