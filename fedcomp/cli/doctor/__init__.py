"""`fedcomp doctor`: check a machine, a port, a server, an enrolment file, a folder of keys or a folder of data.

It prints one line for each check: ✓ passed, ✗ failed and the fix, – skipped and the reason. Checked packages are imported inside of the
checks, so that a broken package is reported and does not end the command.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import typer

from ...config import KEYS, expand_home
from ...errors import KeysError, UserError
from ...formatting import one_line
from ..flags import Json
from . import key_files, machine
from .check import FAILED, Check, refused

WIDTH = 18  # of the column with the checks' names


def doctor(
    server: str | None = typer.Option(
        None,
        metavar="HOST:PORT",
        help="A server to connect to. Default: the server in the enrolment of --client.",
    ),
    client: Path | None = typer.Option(
        None,
        "--client",
        "--enrolment",
        metavar="FILE",
        help="An enrolment file. Default without --keys: FEDCOMP_ENROLMENT or "
        "~/.config/fedcomp/enrolment.toml.",
    ),
    keys: Path | None = typer.Option(
        None, metavar="DIR", help="A folder of keys, written by fedcomp keys init."
    ),
    data: Path | None = typer.Option(
        None, metavar="DIR", help="A folder with the data of built-in tasks."
    ),
    port: int | None = typer.Option(
        None, metavar="N", min=1, max=65_535, help="A port on which a server will listen."
    ),
    as_json: Json = False,
) -> None:
    """Check this machine and what the options name, and print fixes. The exit status is 2 if a check fails."""
    if client:
        client = expand_home(client, "--client")
    elif not keys:
        client = _default_enrolment()
    keys, data = keys and expand_home(keys, "--keys"), data and expand_home(data, "--data")
    results = []
    for check in _checks(server, client, keys, data, port):
        results.append(check)
        if not as_json:
            print(one_line(check.line(WIDTH)), flush=True)
    passed = all(check.state != FAILED for check in results)
    if as_json:
        print(json.dumps({"ok": passed, "checks": [asdict(check) for check in results]}, indent=2))
    if not passed:
        raise typer.Exit(UserError.exit_status)


def _checks(
    server: str | None, client: Path | None, keys: Path | None, data: Path | None, port: int | None
) -> Iterator[Check]:
    """Yield the results of all checks. Raises ConfigError for a malformed --server, before the first check."""
    address = _address(server) if server else None
    yield from machine.checks()
    if port is not None:
        yield machine.listening(port)
    enrolment = None
    if client:
        from ...keys.enrolment import Enrolment

        try:
            enrolment = Enrolment.read(client)
        except KeysError as error:
            yield refused("client", error)
        else:
            yield from key_files.enrolment_file(client, enrolment, keys or KEYS)
    if keys:
        yield from key_files.keys_folder(keys, enrolment)
    if not address and enrolment and enrolment.server:
        address = _address(enrolment.server, f"'server' in {client}")
    if address:
        yield from key_files.reachable(address, enrolment, keys)
    if data:
        yield from machine.data_folder(data)


def _address(*text: str) -> tuple[str, int]:
    from ...keys.connection import address

    return address(*text)


def _default_enrolment() -> Path | None:
    """Return the path of this machine's enrolment file, None if there is none and FEDCOMP_ENROLMENT names none."""
    from ...keys.enrolment import VARIABLE, default_enrolment

    path = default_enrolment()
    return path if path.exists() or os.environ.get(VARIABLE) else None
