"""The commands `fedcomp client` and `fedcomp relay`, and the part of `fedcomp server start` that serves a run."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import typer

from .. import malloc
from ..config import KEYS, RunConfig, data_folder, expand_home
from ..errors import ConfigError, UserError
from ..formatting import one_line
from ..run_display import RunDisplay
from . import flags
from .exits import stoppable
from .flags import option, switch

if TYPE_CHECKING:
    from ..deployment.client_process import Target
    from ..keys.enrolment import Enrolment

PORT = 8080
TRANSPORTS = click.Choice(["grpc", "flower"])
TRANSPORT_HELP = "grpc, or flower (messages pass through Flower's programs flower-superlink and flower-supernode)"

SERVER = option("HOST:PORT", "Address of the server. Default: the address in the enrolment file.")
INSECURE = switch("--insecure", "Connect without TLS and keys, for a trial.")


def _reject_nan(seconds: float | None) -> float | None:
    """Raise BadParameter for NaN, which the limits `min` and `max` do not exclude."""
    if seconds is not None and math.isnan(seconds):
        raise click.BadParameter("nan is not a number of seconds; give a number such as 600")
    return seconds


PATIENCE = option(
    "SECONDS",
    "Exit if the server cannot be reached for this number of seconds. Default: retry without a limit.",
    min=0,
    max=10**9,
    callback=_reject_nan,
)
STAY = switch("--stay", "Do not exit when the run is over, but wait for the next run.")
LOG_JSON = option(
    "FILE",
    "Append log messages as JSON to this file; - = print JSON instead of text.",
)


def serve(
    config: RunConfig,
    display: RunDisplay,
    port: int | None = None,
    host: str | None = None,
    keys: str | None = None,
    insecure: bool | None = None,
    transport: str | None = None,
) -> None:
    """Serve the run `config`, and show its progress in `display`. Raises UserError for invalid options."""
    malloc.share_freed_memory()  # before the imports, which start threads
    from ..deployment.start import Endpoint

    if transport == "flower":
        from ..deployment.flower.server import serve as run
    else:
        from ..deployment.start import serve as run

    if insecure and keys:
        raise ConfigError("--insecure uses no keys, but --keys is given; leave one of them out")
    folder = None if insecure else expand_home(keys or KEYS, "--keys")
    if folder is not None and not folder.is_dir():
        raise UserError(
            f"the folder of keys {folder} does not exist; make it with: fedcomp keys init --out {folder} --clients {config.clients} "
            "--host HOST, or give --insecure for a trial on this machine"
        )
    # Exclude the objects of imported modules from garbage collection, which would otherwise block the event loop for up to 0.2 s.
    gc.freeze()
    run(config, Endpoint(PORT if port is None else port, host or "", folder), display)


@contextmanager
def message_log(log_json: str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a log message as text, as JSON, or both, depending on --log-json.

    Raises ConfigError if the file cannot be written.
    """
    from ..server.logs import STDOUT, JsonLog

    with ExitStack() as stack:
        log = None if log_json is None else stack.enter_context(JsonLog(log_json))

        def report(message: str) -> None:
            if log_json != STDOUT:
                print(f"{time.strftime('%H:%M:%S')} {one_line(message)}", flush=True)
            if log is not None:
                log.write_message(message)

        yield report


def client(
    server: str | None = SERVER,
    enrolment: Path | None = option(
        "FILE",
        "Enrolment file (key and certificate) of this client: clients/ID.toml in the server's folder of keys. If a folder of such files is "
        f"given, this process runs one client per file. Default: {flags.ENROLMENT_DEFAULT}.",
    ),
    insecure: bool = INSECURE,
    partition_id: int | None = option(
        "K",
        "Index, from 0, of the partition of the data on which this client trains. Default: train on all data.",
        min=0,
    ),
    partitions: int | None = option(
        "N", "Number of partitions of the data. Default: the number of clients of the run.", min=1
    ),
    client_id: int | None = option(
        "K",
        "Id of this client, only with --insecure. Default: --partition-id. Without --insecure, the enrolment file contains the id.",
        min=0,
    ),
    state_dir: Path | None = option(
        "DIR",
        "Folder in which the client stores its state between rounds, such as its error-feedback memory. Default: fedcomp-client-ID. With "
        "several clients in this process, DIR contains a folder fedcomp-client-ID for each client.",
    ),
    task: str = typer.Option(
        "digits", help="Task (model and data): a built-in name or path/file.py:name."
    ),
    data: Path | None = flags.DATA,
    device: flags.Device = "auto",
    patience: float | None = PATIENCE,
    stay: bool = STAY,
    count: int | None = option(
        "N",
        "Run N clients in this process, with the first N enrolment files in the folder that --enrolment names. The clients use N "
        "consecutive partitions, of which --partition-id is the first. With --insecure, they have N consecutive ids, of which --client-id "
        "(default: --partition-id) is the first.",
        min=1,
    ),
    roster: Path | None = option(
        "FILE",
        "File with the public keys of all clients: registry.toml in the server's folder of keys. If the strategy is "
        "election:form=ballots,sealed=true, clients encrypt their votes with these keys. Default: the keys that the server announces.",
    ),
    sealed: bool = switch(
        "--sealed",
        "Take part only in runs with the strategy election:form=ballots,sealed=true, which hides the clients' votes from the server.",
    ),
    log_json: str | None = LOG_JSON,
    transport: str = typer.Option(
        "grpc", click_type=TRANSPORTS, help=f"Transport of the server: {TRANSPORT_HELP}."
    ),
) -> None:
    """Take part in a run as a client, until the run is over.

    With --transport grpc, the client executes no code that the server sends. With --transport flower, it executes the server's Flower App.
    """
    advice = "the state folder contains the state of the client; repeat the command to continue"
    stop = stoppable(lambda cause: f"{cause}; {advice}")
    with stop, message_log(log_json) as report, ExitStack() as stack:
        clients = identities(server, enrolment, insecure, client_id, partition_id, state_dir, count)
        if partitions is not None and partition_id is None:
            raise ConfigError("--partitions needs --partition-id; give both, or neither")
        if transport == "flower" and len(clients) > 1:
            raise ConfigError(
                "--transport flower runs one client per process; start each client with a separate command"
            )

        from ..deployment.client_process import ClientProcess, HostedClient
        from ..deployment.deployed_client import DeployedClient
        from ..deployment.handshake import ClientSetup
        from ..keys.keyring import read_roster
        from ..state_folder import StateFolder
        from ..tasks import load
        from ..tasks.check import data_of
        from ..training import devices

        target = devices.parse_device(device)
        folder = data_folder(data)
        loaded = load(task, folder)
        keys = read_roster(roster) if roster is not None else None
        if transport == "flower":
            from ..deployment.flower.client import FlowerClient
            from ..keys.enrolment import default_enrolment

            (one,) = clients
            file, colon, name = task.rpartition(":")
            key_file = (enrolment or default_enrolment()) if one.target.enrolment else None
            options = dict(
                task=f"{Path(file).absolute()}{colon}{name}" if colon else task,
                data=_absolute(folder),
                device=str(target),
                client=one.id,
                partition_id=one.partition_id,
                partitions=partitions,
                roster=_absolute(roster),
                sealed=sealed,
                enrolment=_absolute(key_file),
            )
            FlowerClient(
                one.target, options, one.folder, report, patience_s=patience, stay=stay
            ).run()
            return
        malloc.keep_freed_memory(threads=len(clients) > 1)
        examples, hosted_clients = data_of(loaded, "train"), {}
        shared = ClientSetup(
            loaded, examples, target, partitions=partitions, roster=keys, sealed=sealed
        )
        for one in clients:
            own = replace(shared, client_id=one.id, partition_id=one.partition_id)
            state = StateFolder(one.folder)
            stack.callback(state.close)
            key = one.target.enrolment.key_pair[0] if one.target.enrolment else None
            hosted_clients[one.id] = HostedClient(one.target, DeployedClient(own, state, key))
        ClientProcess(hosted_clients, report, patience_s=patience, stay=stay).run()


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def relay(
    server: str | None = SERVER,
    port: int = option(
        "N", "Port that clients connect to; 0 = any free port.", default=8081, min=0, max=65_535
    ),
    host: str | None = option(
        "HOST",
        "Address of this machine to listen on. Default: all addresses; with --insecure, only the loopback address.",
    ),
    enrolment: Path | None = option(
        "FILE",
        "Enrolment file (key and certificate) of this relay: relays/ID.toml in the server's folder of keys. "
        f"Default: {flags.ENROLMENT_DEFAULT}.",
    ),
    insecure: bool = INSECURE,
    patience: float | None = PATIENCE,
    stay: bool = STAY,
    log_json: str | None = LOG_JSON,
) -> None:
    """Run a relay, which forwards messages between its clients and a server.

    The server sends each broadcast only once to the relay, which forwards it to all its clients. The relay sends the messages of its
    clients to the server in bundles. If the server was started with --relays, the relay also sums its clients' encoded updates.
    """
    malloc.share_freed_memory()  # before the imports, which start threads
    from ..deployment.ports import LOOPBACK
    from ..deployment.relay_process import RelayProcess

    advice = "repeat the command to continue; the clients will reconnect to the relay"
    with stoppable(lambda cause: f"{cause}; {advice}"), message_log(log_json) as report:
        target = relay_target(server, enrolment, insecure)
        host = host or (LOOPBACK if insecure else "0.0.0.0")
        RelayProcess(target, host, port, report, patience_s=patience, stay=stay).run()


@dataclass(frozen=True)
class ClientIdentity:
    """A client that this process will run: its server and credentials, id, partition of the data, and state folder."""

    target: "Target"
    id: int
    partition_id: int | None
    folder: Path


def identities(
    server: str | None,
    enrolment: Path | None,
    insecure: bool,
    client_id: int | None,
    partition_id: int | None,
    state_dir: Path | None,
    count: int | None,
) -> list[ClientIdentity]:
    """Return the clients that a command `fedcomp client` with these options runs. Raises UserError for invalid options."""
    _refuse_enrolment(insecure, enrolment)
    if not insecure and client_id is not None:
        raise ConfigError(
            "--client-id needs --insecure, because otherwise the enrolment file determines the client's id; leave --client-id out, or give "
            "the --enrolment of another client"
        )
    multiple = count is not None or (enrolment is not None and enrolment.is_dir())
    if multiple and partition_id is None:
        raise ConfigError(
            "several clients in one process need different partitions of the data; give --partition-id K, with which the first client uses "
            "partition K, the second client partition K+1, and so on"
        )
    if insecure:
        target = _target(server)
        clients = [(target, id) for id in _claimed_ids(client_id, partition_id, count or 1)]
    else:
        enrolments = _enrolments(enrolment, count)
        clients = [(_target(server, path, each), each.id) for path, each in enrolments]
    result = []
    for i, (target, id) in enumerate(clients):
        folder = Path(f"fedcomp-client-{id}")
        if state_dir:
            folder = state_dir / folder if multiple else state_dir
        partition = None if partition_id is None else partition_id + i
        result.append(ClientIdentity(target, id, partition, folder))
    return result


def relay_target(server: str | None, enrolment: Path | None, insecure: bool) -> "Target":
    """Return the server that a relay connects to, with the credentials of the relay. Raises UserError for invalid options."""
    from ..keys.enrolment import Enrolment, default_enrolment

    _refuse_enrolment(insecure, enrolment)
    if insecure:
        return _target(server)
    path = default_enrolment() if enrolment is None else enrolment
    make = "fedcomp keys add --relay --host HOST"
    if enrolment is None and not path.exists():
        raise UserError(
            f"this relay has no enrolment file {path}; make one on the server with: {make}, then copy it to this path or name it with "
            "--enrolment FILE (for a trial without keys, give --insecure)"
        )
    enrolled = Enrolment.read(path)
    if not enrolled.relay:
        raise UserError(
            f"{path} is the enrolment of client {enrolled.id}, but a relay needs its own enrolment; make one on the server with: {make}"
        )
    return _target(server, path, enrolled)


def _refuse_enrolment(insecure: bool, enrolment: Path | None) -> None:
    if insecure and enrolment is not None:
        raise ConfigError(
            "--insecure uses no keys, but --enrolment is given; leave one of them out"
        )


def _target(
    server: str | None, path: Path | None = None, enrolled: "Enrolment | None" = None
) -> "Target":
    """Return the server that --server names, or else the server in the enrolment file, with the credentials in this file.

    Raises UserError if no server is named, or if the enrolment has expired.
    """
    from ..deployment.client_process import Target
    from ..keys.connection import address

    if enrolled:
        enrolled.refuse_expired()
        server = server or enrolled.server
    if not server:
        missing = f"{path} does not name a server" if enrolled else "--server is missing"
        raise UserError(f"{missing}; give --server host:port")
    return Target(*address(server), enrolled)


def _enrolments(path: Path | None, count: int | None) -> Sequence[tuple[Path, "Enrolment"]]:
    """Return [(file, enrolment)] for the enrolment file `path`, or for the files in the folder `path`, ordered by client id.

    The list has at most `count` items. If `path` is None, the default enrolment file is read. Raises UserError for files that are missing
    or belong to a relay.
    """
    from ..keys.enrolment import Enrolment, default_enrolment
    from ..keys.key_folder import CLIENTS, REGISTRY

    if path is None:
        path = default_enrolment()
        if not path.exists():
            raise UserError(
                f"this client has no enrolment file {path}; copy clients/ID.toml in the server's folder of keys to this path, or name it "
                "with --enrolment FILE (for a trial without keys, give --insecure)"
            )
    if (path / REGISTRY).is_file():  # a folder of keys
        path = path / CLIENTS
    files = path.glob("*.toml") if path.is_dir() else [path]
    enrolments = [(file, Enrolment.read(file)) for file in files]
    enrolments.sort(key=lambda entry: entry[1].id)
    if len({enrolled.id for _, enrolled in enrolments}) < len(enrolments):
        raise UserError(
            f"--enrolment {path} contains two enrolments of the same client; remove one of them"
        )
    if len(enrolments) < (count or 1):
        raise UserError(
            f"--enrolment {path} contains {len(enrolments)} enrolment files (ID.toml), but {count or 1} are needed; give a folder with all "
            "files, or a lower --count"
        )
    for file, enrolled in enrolments[:count]:
        if enrolled.relay:
            raise UserError(
                f"{file} is the enrolment of relay {enrolled.id}; give the enrolment of a client, or run a relay with: fedcomp relay"
            )
    return enrolments[:count]


def _claimed_ids(client_id: int | None, partition_id: int | None, count: int) -> Sequence[int]:
    """Return the ids of clients without enrolments, from --client-id or else --partition-id. Raises UserError for invalid ids."""
    from ..keys.enrolment import MAX_ID

    flag = "--partition-id" if client_id is None else "--client-id"
    first = partition_id if client_id is None else client_id
    if first is None:
        raise UserError(
            "a client without an enrolment needs an id; give --partition-id, or --client-id if the client trains on all data of the task"
        )
    if (last := first + count - 1) > MAX_ID:
        raise ConfigError(
            f"client id {last} is above the maximum {MAX_ID}; give a lower {flag} or --count"
        )
    return range(first, first + count)
