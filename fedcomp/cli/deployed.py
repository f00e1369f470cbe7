"""`fedcomp server start` and `fedcomp client`: what the flags mean, and what the screen says."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from .. import spec
from ..config import RunConfig, at_home, data_folder
from ..errors import ConfigError, UserError
from . import flags
from .watch import Watch, one_line

DOOR, DOOR_NAMES = "Where clients come in", ("port", "host", "keys", "insecure")
GIVEN_UP = ("--insecure: no TLS and no keys; whoever reaches {where} can take part as any client, and read and change what is sent; "
            "for more than a trial: fedcomp keys init")


def door_flags() -> list[Any]:
    """The options of `fedcomp server start` that a simulation has not."""
    def option(name: str, kind: type, flag: str, metavar: str | None, help: str) -> Any:
        return flags.parameter(name, kind, typer.Option(flag, metavar=metavar, rich_help_panel=DOOR, help=help))

    return [
        option("port", str, "--port", "N", r"port that clients reach [dim]\[default: 8080][/dim]"),
        option("host", str, "--host", "HOST", "address of this machine that clients reach; all when not given, loopback with --insecure"),
        option("keys", str, "--keys", "DIR", r"folder of keys, made by fedcomp keys init [dim]\[default: keys][/dim]"),
        option("insecure", bool, "--insecure", None, "without TLS and keys, for a trial on one machine"),
    ]


def serve(given: Mapping[str, Any], config: RunConfig, watch: Watch) -> None:
    """Run the server. Raises UserError."""
    from ..server.start import Door
    from ..server.start import serve as run

    insecure, keys = bool(given.get("insecure")), given.get("keys")
    if insecure and keys:
        raise ConfigError("--insecure is without the keys that --keys names; give one of them")
    folder = None if insecure else at_home(keys or "keys", "--keys")
    if folder is not None and not folder.is_dir():
        raise UserError(f"there is no folder of keys {folder}; make one with: fedcomp keys init --out {folder} --clients {config.clients} "
                        "--host HOST, or give --insecure for a trial on this machine")
    door = Door(_port(given.get("port")), given.get("host") or "", folder)
    if insecure:
        watch.warning(GIVEN_UP.format(where=door.address))
    run(config, door, watch)


def _port(text: str | None) -> int:
    port = spec.convert(text, int, "--port") if text is not None else 8080
    if not 0 <= port < 65536:
        raise ConfigError(f"--port is {port}; give 1 to 65535, or 0 for a free one")
    return port


def say(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {one_line(sentence)}", flush=True)


def take_part(
    server: str | None, enrolment: Path | None, insecure: bool, client_id: int | None, partition_id: int | None, partitions: int | None,
    state_dir: Path | None, task: str, data: str | None, device: str, patience: float | None, stay: bool,
) -> None:
    """Run a client. Raises UserError."""
    target_of, claimed = _secure(server, enrolment) if not insecure else _trial(server, enrolment, client_id, partition_id)
    if partitions is not None and partition_id is None:
        raise ConfigError("--partitions is the number of parts of the data; give --partition-id as well")

    from ..clients import devices
    from ..clients.joining import Own
    from ..clients.process import Member, Process
    from ..clients.state import StateFolder
    from ..tasks import load
    from ..tasks.check import data_of

    where = devices.choose(device)
    devices.keep_freed_memory()
    folder = data_folder(RunConfig(data=data))
    if data and not folder.is_dir():
        raise ConfigError(f"--data {data} is no folder; give the one that holds the task's data")
    what = load(task, folder)
    own = Own(what, data_of(what, "train"), where, claimed, partition_id, partitions)
    state = StateFolder(state_dir or Path(f"fedcomp-client-{claimed}"))
    try:
        Process(target_of, Member(own, state), say, patience_s=patience, stay=stay).run()
    finally:
        state.close()


def _secure(server: str | None, enrolment: Path | None) -> tuple[Any, int]:
    """The target of a client with an enrolment, and its logical id."""
    from ..clients.connection import address
    from ..clients.enrolment import Enrolment
    from ..clients.process import Target

    if enrolment is None:
        raise UserError("a client needs an enrolment file, clients/ID.toml of the server's keys; give --enrolment FILE, or --insecure for "
                        "a trial")
    enrolled = Enrolment.read(enrolment)
    enrolled.refuse_expired()
    if not (where := server or enrolled.server):
        raise UserError(f"{enrolment} does not say where the server is; give --server host:port")
    return Target(*address(where), enrolled.ca.encode(), enrolled.pair[0]), enrolled.id


def _trial(server: str | None, enrolment: Path | None, client_id: int | None, partition_id: int | None) -> tuple[Any, int]:
    from ..clients.connection import address
    from ..clients.process import Target

    if enrolment is not None:
        raise ConfigError("--insecure is without the keys in --enrolment; give one of them")
    if server is None:
        raise UserError("where is the server? give --server host:port")
    who = partition_id if client_id is None else client_id
    if who is None:
        raise UserError("without an enrolment a client has to say who it is; give --partition-id, or --client-id for one with its own data")
    return Target(*address(server), None, None), who
