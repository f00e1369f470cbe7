"""A virtual network from a CSV file: a line for each client, under a line of names.

    client,up,down,latency,step,absent
    0,250kB,2MB,40ms,15ms,5%
    1,30kB,500kB,0.2,20ms,0

`client`, `up` and `down` are needed; the others are the options of `--network` of the same names (network.py), with 0 where a column is
not there, but for stretch (10 min) and factor (4). Numbers without a unit are bytes a second, seconds, shares. The order of lines and
columns is free, and lines of clients that the run has not are left aside.
"""

import csv
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import numpy as np

from .. import spec
from ..config import at_home
from ..errors import ConfigError, SpecError, nearest
from .network import COLUMNS, KINDS, Profiles, Rate, Seconds, out_of_range

TYPES: Mapping[str, type] = {
    "up": Rate,
    "down": Rate,
    "latency": Seconds,
    "step": Seconds,
    "stretch": Seconds,
}
DEFAULTS: Mapping[str, float] = {"stretch": 600.0, "factor": 4.0}
NEEDED = "client", "up", "down"
LONGEST = 1 << 16  # characters of a line


def is_file(text: str) -> bool:
    """Whether --network names a file, and no network, whose options may hold a slash: `lognormal:spread=1/2`."""
    name, colon, _ = text.partition(":")
    return (text.endswith(".csv") or "/" in text) and not (colon and name.strip() in KINDS)


def read_file(text: str, clients: int) -> Profiles:
    """The clients 0..clients-1 of a file. Raises ConfigError that names line and column."""
    path = at_home(text, "--network")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _profiles(text, csv.reader(_lines(file, text), strict=True), clients)
    except OSError as error:
        raise ConfigError(
            f"--network {text} cannot be read ({error.strerror}); give a CSV file that can"
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--network {text} is no CSV file in UTF-8 ({error}); write it as comma-separated lines"
        ) from error


def _lines(file: TextIO, text: str) -> Iterator[str]:
    """The lines of a file. Raises ConfigError for one that does not end, such as that of a device."""
    while line := file.readline(LONGEST):
        if len(line) == LONGEST:
            raise ConfigError(
                f"--network {text} is no CSV file: it has a line of {LONGEST} characters; write it as comma-separated lines"
            )
        yield line


def _profiles(text: str, lines: Any, clients: int) -> Profiles:
    titles = next((cells for cells in lines if any(cell.strip() for cell in cells)), None)
    if titles is None:
        raise ConfigError(
            f"--network {text} is empty; name the columns in its first line, such as client,up,down,latency,step"
        )
    names = _names(f"--network {text}, line {lines.line_num}", titles)
    values = {name: np.full(clients, DEFAULTS.get(name, 0.0)) for name in COLUMNS}
    seen: dict[int, int] = {}  # client → line
    for cells in lines:
        if not any(cell.strip() for cell in cells):
            continue
        where = f"--network {text}, line {lines.line_num}"
        if len(cells) != len(names):
            raise ConfigError(
                f"{where} has {len(cells)} cells; give {len(names)}, one for each of {', '.join(names)}"
            )
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        client = _client(where, row.pop("client"))
        if client in seen:
            raise ConfigError(
                f"{where}, column client: client {client} stands in line {seen[client]} already; keep one of them"
            )
        seen[client] = lines.line_num
        for name, cell in row.items():
            value = _value(where, name, cell)
            if client < clients:
                values[name][client] = value
    missing = [client for client in range(clients) if client not in seen]
    if missing:
        raise ConfigError(
            f"--network {text} has no line for client {missing[0]} of {clients}, 0 to {clients - 1}; add it, or give fewer "
            "--clients"
        )
    return Profiles(**values)


def _names(where: str, cells: list[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(names) == 1 and ";" in names[0]:
        raise ConfigError(
            f"{where} has semicolons between its cells; write commas there, and in numbers points"
        )
    for name in names:
        if name not in ("client", *COLUMNS):
            raise ConfigError(
                f"{where}: unknown column '{name}'; {nearest(name, ('client', *COLUMNS))}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{where}: there are {names.count(name)} columns '{name}'; keep one")
    for name in NEEDED:
        if name not in names:
            raise ConfigError(
                f"{where}: there is no column '{name}'; name the columns there, such as client,up,down,latency,step"
            )
    return names


def _client(where: str, cell: str) -> int:
    if not (cell.isascii() and cell.isdecimal() and len(cell) < 10):
        raise ConfigError(
            f"{where}, column client: '{cell}' is no client; give a whole number from 0 up"
        )
    return int(cell)


def _value(where: str, name: str, cell: str) -> float:
    what = f"{where}, column {name}:"
    try:
        value = float(spec.convert(cell, TYPES.get(name, float), what))
    except SpecError as error:
        raise ConfigError(str(error)) from None
    if why := out_of_range(name, value):
        raise ConfigError(f"{what} it {why}")
    return value
