"""A virtual network from a CSV file: a header line with the names of the columns, then a line for each client.

    client,up,down,latency,step,absent
    0,250kB,2MB,40ms,15ms,5%
    1,30kB,500kB,0.2,20ms,0

`client`, `up` and `down` are required. The others are the options of `--network` with the same names (network.py). They default to 0,
stretch to 10 min and factor to 4. Numbers without a unit are bytes a second, seconds, or fractions. Lines and columns may be in any order.
Lines of clients that the run does not have are ignored.
"""

import csv
from typing import Any

import numpy as np

from .. import spec
from ..config import expand_home
from ..errors import ConfigError, SpecError, nearest
from .network import COLUMNS, NETWORKS, Profiles, Rate, Seconds, out_of_range

TYPES = {
    "client": int,
    "up": Rate,
    "down": Rate,
    "latency": Seconds,
    "step": Seconds,
    "stretch": Seconds,
}
DEFAULTS = {"stretch": 600.0, "factor": 4.0}
REQUIRED = "client", "up", "down"


def is_file(text: str) -> bool:
    """Return whether --network names a file. Options of a network may contain a slash as well: `lognormal:spread=1/2`."""
    name, colon, _ = text.partition(":")
    return (text.endswith(".csv") or "/" in text) and not (colon and name.strip() in NETWORKS)


def read_profiles(text: str, clients: int) -> Profiles:
    """Return the profiles of clients 0..clients-1. Raises ConfigError, which names line and column."""
    path = expand_home(text, "--network")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _profiles(f"--network {text}", csv.reader(file, strict=True), clients)
    except OSError as error:
        raise ConfigError(
            f"--network {text} cannot be read ({error.strerror}); give a readable CSV file"
        ) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--network {text} is not a CSV file in UTF-8 ({error}); write it as comma-separated lines"
        ) from error


def _profiles(flag: str, lines: Any, clients: int) -> Profiles:
    rows = (
        [cell.strip() for cell in cells] for cells in lines if any(cell.strip() for cell in cells)
    )
    names = next(rows, [])
    _check_columns(f"{flag}, line {lines.line_num}", names)
    values = {name: np.full(clients, DEFAULTS.get(name, 0.0)) for name in COLUMNS}
    line_of: dict[int, int] = {}  # by client
    for cells in rows:
        where = f"{flag}, line {lines.line_num}"
        if len(cells) != len(names):
            raise ConfigError(
                f"{where} has {len(cells)} cells; give {len(names)}, one for each of {', '.join(names)}"
            )
        row = {
            name: _value(f"{where}, column {name}:", name, cell)
            for name, cell in zip(names, cells, strict=True)
        }
        client = int(row.pop("client"))
        if client in line_of:
            raise ConfigError(
                f"{where}, column client: client {client} is in line {line_of[client]} already; remove one of the lines"
            )
        line_of[client] = lines.line_num
        if client < clients:
            for name, value in row.items():
                values[name][client] = value
    missing = [client for client in range(clients) if client not in line_of]
    if missing:
        raise ConfigError(
            f"{flag} has no line for client {missing[0]} of {clients}, 0 to {clients - 1}; add it, or give fewer --clients"
        )
    return Profiles(**values)


def _check_columns(where: str, names: list[str]) -> None:
    for name in names:
        if name not in ("client", *COLUMNS):
            raise ConfigError(
                f"{where}: unknown column '{name}'; {nearest(name, ('client', *COLUMNS))}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{where} has {names.count(name)} columns '{name}'; keep one")
    for name in REQUIRED:
        if name not in names:
            raise ConfigError(
                f"{where} has no column '{name}'; add it, as in client,up,down,latency,step"
            )


def _value(where: str, name: str, cell: str) -> float:
    try:
        value = spec.convert(cell, TYPES.get(name, float), where)
    except SpecError as error:
        raise ConfigError(str(error)) from None
    if name == "client":
        if value < 0:
            raise ConfigError(f"{where} the id is {value}; give a whole number of at least 0")
    elif problem := out_of_range(name, value):
        raise ConfigError(f"{where} the value {problem}")
    return value
