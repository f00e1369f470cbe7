"""`fedcomp doctor`: check a machine, a port, a server, an enrolment file, a folder of keys or a folder of data.

It prints one line for each check: ✓ passed, ✗ failed and the fix, – skipped and the reason. Checked packages are imported inside of the
checks, so that a broken package is a finding and does not end the command. To add a kind of check, write a module with `checks(asked)`
and list it in KINDS.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ...config import at_home
from ...errors import UserError
from . import data_folders, key_files, machine, ports, servers
from .asked import Asked
from .check import FAILED, Check

KINDS = (machine, ports, key_files, servers, data_folders)  # in the order of their lines
WIDTH = 12  # of the column with the checks' names


def doctor(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A server to connect to; by default that of --client."
        ),
    ] = None,
    client: Annotated[
        Path | None,
        typer.Option(
            "--client",
            "--enrolment",
            metavar="FILE",
            help="An enrolment file. Default without --keys: FEDCOMP_ENROLMENT or "
            "~/.config/fedcomp/enrolment.toml.",
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder that fedcomp keys init made.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A folder with the data of built-in tasks."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, max=65_535, help="A port that a server is to listen on."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of lines.")] = False,
) -> None:
    """Check this machine and everything that the options name, and print fixes. The exit status is 2 if a check fails."""
    from ...formatting import one_line

    asked = Asked(
        server,
        at_home(client, "--client") if client else None if keys else _default_enrolment(),
        keys and at_home(keys, "--keys"),
        data and at_home(data, "--data"),
        port,
    )
    done = []
    for check in checks(asked):
        done.append(check)
        if not as_json:
            print(one_line(check.line(WIDTH)), flush=True)
    well = all(check.state != FAILED for check in done)
    if as_json:
        print(json.dumps({"ok": well, "checks": [asdict(check) for check in done]}, indent=2))
    if not well:
        raise typer.Exit(UserError.exit_status)


def checks(asked: Asked) -> Iterator[Check]:
    """Run the checks and yield their results. Raises UserError for a malformed --server."""
    if asked.server:
        asked.address()  # before the first line
    for kind in KINDS:
        yield from kind.checks(asked)


def _default_enrolment() -> Path | None:
    """Return the path of this machine's enrolment file, None if there is none and FEDCOMP_ENROLMENT names none."""
    from ...keys.enrolment import VARIABLE, default_enrolment

    path = default_enrolment()
    return path if path.exists() or os.environ.get(VARIABLE) else None
