"""`fedcomp server start`, `fedcomp client` and `fedcomp relay`: checks of their options, and messages on the terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from .. import spec
from ..config import RunConfig, at_home, data_folder
from ..errors import ConfigError, UserError
from ..formatting import one_line
from ..watch import Watch
from . import flags
from .identities import Identity, identities, relay_target

DOOR, DOOR_NAMES = "The server's port", ("port", "host", "keys", "insecure", "transport")
TRANSPORTS = ("grpc", "flower")
TRANSPORT_HELP = (
    "what carries the messages: gRPC, or stock flower-superlink and flower-supernode processes"
)


def door_flags() -> list[Any]:
    """Return the options of `fedcomp server start` that `fedcomp sim` does not have."""

    def option(name: str, kind: type, flag: str, metavar: str | None, help: str) -> Any:
        return flags.parameter(
            name, kind, typer.Option(flag, metavar=metavar, rich_help_panel=DOOR, help=help)
        )

    return [
        option("port", str, "--port", "N", r"port to listen on [dim]\[default: 8080][/dim]"),
        option(
            "host",
            str,
            "--host",
            "HOST",
            "address of this machine to listen on; all addresses by default, loopback with --insecure",
        ),
        option(
            "keys",
            str,
            "--keys",
            "DIR",
            r"folder of keys, made by fedcomp keys init [dim]\[default: keys][/dim]",
        ),
        option(
            "insecure", bool, "--insecure", None, "without TLS and keys, for a trial on one machine"
        ),
        option(
            "transport",
            str,
            "--transport",
            f"[{'|'.join(TRANSPORTS)}]",
            rf"{TRANSPORT_HELP} [dim]\[default: grpc][/dim]",
        ),
    ]


def over_flower(transport: str | None) -> bool:
    """Return whether --transport names Flower. Raises ConfigError for a transport that does not exist."""
    if transport not in (None, *TRANSPORTS):
        raise ConfigError(f"--transport is '{transport}'; give one of: {', '.join(TRANSPORTS)}")
    return transport == "flower"


def serve(given: Mapping[str, Any], config: RunConfig, watch: Watch) -> None:
    """Run the server. Raises UserError."""
    from ..deployment.start import Door

    if over_flower(given.get("transport")):
        from ..deployment.flower.server import serve as run
    else:
        from ..deployment.start import serve as run

    insecure, keys = bool(given.get("insecure")), given.get("keys")
    if insecure and keys:
        raise ConfigError("--insecure uses no keys, but --keys is given; give only one of the two")
    folder = None if insecure else at_home(keys or "keys", "--keys")
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"there is no folder of keys {folder}; make one with: fedcomp keys init --out {folder} --clients {config.clients} "
            "--host HOST, or give --insecure for a trial on this machine"
        )
    door = Door(_port(given.get("port")), given.get("host") or "", folder)
    run(config, door, watch)


def _port(text: str | None) -> int:
    port = spec.convert(text, int, "--port") if text is not None else 8080
    if not 0 <= port < 65536:
        raise ConfigError(f"--port is {port}; give 1 to 65535, or 0 for a free one")
    return port


def say(sentence: str) -> None:
    """Print a message after the time."""
    print(f"{time.strftime('%H:%M:%S')} {one_line(sentence)}", flush=True)


@contextmanager
def saying(log_json: str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints messages and, with `log_json`, also writes them to that log.

    With "-" the log is on standard output, and messages are not printed. Raises ConfigError if the log cannot be written.
    """
    from ..server.logs import STDOUT, JsonLog

    if log_json is None:
        yield say
        return
    with JsonLog(log_json) as log:
        yield (
            log.said if log_json == STDOUT else lambda sentence: (say(sentence), log.said(sentence))
        )


def check_patience(patience: float | None) -> None:
    """Raise ConfigError unless --patience is finite or not given."""
    if patience is not None and not math.isfinite(patience):
        raise ConfigError(
            f"--patience is {patience:g}; give seconds, or leave it out to try for ever"
        )


def take_part(
    server: str | None,
    enrolment: Path | None,
    insecure: bool,
    client_id: int | None,
    partition_id: int | None,
    partitions: int | None,
    state_dir: Path | None,
    task: str,
    data: str | None,
    device: str,
    patience: float | None,
    stay: bool,
    say: Callable[[str], None] = say,
    count: int | None = None,
    roster: Path | None = None,
    sealed: bool = False,
    transport: str | None = None,
) -> None:
    """Run a client, or `count` of them. Raises UserError."""
    check_patience(patience)
    who = identities(server, enrolment, insecure, client_id, partition_id, state_dir, count)
    if partitions is not None and partition_id is None:
        raise ConfigError(
            "--partitions is the number of parts of the data; give --partition-id as well"
        )
    if over_flower(transport):
        if len(who) > 1:
            raise ConfigError(
                "--transport flower runs one client per process; start each client with a command of its own"
            )
        _under_supernode(
            who[0], enrolment, partitions, task, data, device, patience, stay, say, roster, sealed
        )
        return

    from ..deployment.client_process import ClientProcess, Seat
    from ..deployment.handshake import Own
    from ..deployment.member import Member
    from ..keys.keyring import read_roster
    from ..state_folder import StateFolder
    from ..tasks import load
    from ..tasks.check import data_of
    from ..training import devices

    where = devices.choose(device)
    devices.keep_freed_memory(threads=len(who) > 1)
    folder = data_folder(RunConfig(data=data))
    if data and not folder.is_dir():
        raise ConfigError(f"--data {data} is no folder; give the one that holds the task's data")
    what = load(task, folder)
    known = read_roster(roster) if roster is not None else None
    own = Own(
        what, data_of(what, "train"), where, partitions=partitions, roster=known, sealed=sealed
    )
    with ExitStack() as ends:
        seats = {}
        for one in who:
            state = StateFolder(one.folder)
            ends.callback(state.close)
            key = one.enrolled.pair[0] if one.enrolled else None
            itself = replace(own, client_id=one.id, partition_id=one.partition_id)
            seats[one.id] = Seat(one.target, Member(itself, state, key))
        ClientProcess(seats, say, patience_s=patience, stay=stay).run()


def relay(
    server: str | None,
    enrolment: Path | None,
    insecure: bool,
    host: str | None,
    port: int,
    patience: float | None,
    stay: bool,
    say: Callable[[str], None] = say,
) -> None:
    """Run a relay. Raises UserError."""
    from ..deployment.client_process import Target
    from ..deployment.relay_process import RelayProcess
    from ..deployment.start import LOOPBACK
    from ..keys.connection import address

    check_patience(patience)
    if insecure:
        if enrolment is not None:
            raise ConfigError(
                "--insecure uses no keys, but --enrolment is given; give only one of the two"
            )
        if server is None:
            raise UserError("--server is missing; give --server host:port")
        target = Target(*address(server))
    else:
        target = relay_target(server, enrolment)
    RelayProcess(
        target,
        host or (LOOPBACK if insecure else "0.0.0.0"),
        port,
        say,
        patience_s=patience,
        stay=stay,
    ).run()


def _under_supernode(
    who: Identity,
    enrolment: Path | None,
    partitions: int | None,
    task: str,
    data: str | None,
    device: str,
    patience: float | None,
    stay: bool,
    say: Callable[[str], None],
    roster: Path | None,
    sealed: bool,
) -> None:
    """Run a client under Flower's SuperNode. Raises UserError."""
    from ..deployment.flower.client import ClientOptions, FlowerClient
    from ..keys.enrolment import default_enrolment
    from ..tasks import load
    from ..training import devices

    folder = data_folder(RunConfig(data=data))
    load(task, folder)
    file, colon, name = task.rpartition(":")
    setup = ClientOptions(
        task=f"{Path(file).absolute()}{colon}{name}" if colon else task,
        data=str(folder.absolute()) if folder else None,
        device=str(devices.choose(device)),
        client=who.id,
        partition_id=who.partition_id,
        partitions=partitions,
        roster=str(roster.absolute()) if roster else None,
        sealed=sealed,
        enrolment=str((enrolment or default_enrolment()).absolute()) if who.enrolled else None,
    )
    FlowerClient(who.target, setup, who.folder, say, patience_s=patience, stay=stay).run()
