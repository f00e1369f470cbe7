"""The commands `fedcomp server start`, `fedcomp client` and `fedcomp relay`: check their options, and print their messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click
import typer

from ..config import KEYS, RunConfig, data_folder, expand_home
from ..errors import ConfigError, UserError
from ..formatting import one_line
from ..run_display import RunDisplay
from . import flags
from .exits import stoppable
from .flags import option, switch
from .identities import identities, relay_target

PORT = 8080
TRANSPORTS = click.Choice(["grpc", "flower"])
TRANSPORT_HELP = "gRPC, or stock flower-superlink and flower-supernode processes"

Server = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Address of the server. Default: the address in the enrolment."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Connect without TLS and keys, for a trial.")
]
Patience = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=10**9,
        help="How long to try to reach the server. Default: without limit.",
    ),
]
Stay = Annotated[bool, typer.Option("--stay", help="Wait for the next run when a run is over.")]
LogJson = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Log file with a JSON object per message; - = standard output, instead of text.",
    ),
]


def serve(
    config: RunConfig,
    display: RunDisplay,
    port: int | None = None,
    host: str | None = None,
    keys: str | None = None,
    insecure: bool | None = None,
    transport: str | None = None,
) -> None:
    """Run the server, and show the run in `display`. Raises UserError."""
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
    run(config, Endpoint(PORT if port is None else port, host or "", folder), display)


def print_message(message: str) -> None:
    """Print a message with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {one_line(message)}", flush=True)


@contextmanager
def message_log(log_json: str | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a message and, with `log_json`, also writes it to that log.

    With "-", the log is written to standard output instead of the text. Raises ConfigError if the log cannot be written.
    """
    from ..server.logs import STDOUT, JsonLog

    if log_json is None:
        yield print_message
        return
    with JsonLog(log_json) as log:

        def print_and_log(message: str) -> None:
            print_message(message)
            log.write_message(message)

        yield log.write_message if log_json == STDOUT else print_and_log


def client(
    server: Server = None,
    enrolment: Path | None = option(
        "FILE",
        "Enrolment of this client, clients/ID.toml in the folder of keys, or a folder of enrolments for several clients. "
        "Default: FEDCOMP_ENROLMENT, or ~/.config/fedcomp/enrolment.toml.",
    ),
    insecure: Insecure = False,
    partition_id: int | None = option(
        "K",
        "Index of this client's partition of the data, from 0. Default: all data. With --insecure also the client's id.",
        min=0,
    ),
    partitions: int | None = option(
        "N", "Number of partitions of the data. Default: the number of clients of the run.", min=1
    ),
    client_id: int | None = option("K", "Id of this client, with --insecure.", min=0),
    state_dir: Path | None = option(
        "DIR",
        "State folder. Default: fedcomp-client-ID. With several clients, DIR contains a state folder for each.",
    ),
    task: str = typer.Option("digits", help="Task: a built-in name or path/file.py:name."),
    data: flags.Data = None,
    device: flags.Device = "auto",
    patience: Patience = None,
    stay: Stay = False,
    count: int | None = option(
        "N",
        "Run N clients: of the first N enrolments in the folder --enrolment, or with --insecure of the ids from --client-id on. "
        "They use the partitions from --partition-id on.",
        min=1,
    ),
    roster: Path | None = option(
        "FILE",
        "Public keys of the clients, registry.toml in the folder of keys, for elections with sealed ballots. "
        "Default: those that the server announces.",
    ),
    sealed: bool = switch("--sealed", "Take part only in elections with sealed ballots."),
    log_json: LogJson = None,
    transport: str = typer.Option(
        "grpc", click_type=TRANSPORTS, help=f"Transport of the server: {TRANSPORT_HELP}."
    ),
) -> None:
    """Take part in a federation until its run is over. The client executes no code that the server sends."""

    def stop_message(cause: str) -> str:
        return f"{cause}; the state of this client is in its state folder, and the same command continues"

    with stoppable(stop_message), message_log(log_json) as report, ExitStack() as stack:
        clients = identities(server, enrolment, insecure, client_id, partition_id, state_dir, count)
        if partitions is not None and partition_id is None:
            meaning = "--partitions is the number of partitions of the data"
            raise ConfigError(f"{meaning}; give --partition-id as well")
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
            from ..deployment.flower.client import ClientOptions, FlowerClient
            from ..keys.enrolment import default_enrolment

            (one,) = clients
            file, colon, name = task.rpartition(":")
            key_file = (enrolment or default_enrolment()) if one.enrolled else None
            options = ClientOptions(
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
        devices.keep_freed_memory(threads=len(clients) > 1)
        examples, hosted_clients = data_of(loaded, "train"), {}
        common = ClientSetup(
            loaded, examples, target, partitions=partitions, roster=keys, sealed=sealed
        )
        for one in clients:
            own = replace(common, client_id=one.id, partition_id=one.partition_id)
            state = StateFolder(one.folder)
            stack.callback(state.close)
            key = one.enrolled.pair[0] if one.enrolled else None
            hosted_clients[one.id] = HostedClient(one.target, DeployedClient(own, state, key))
        ClientProcess(hosted_clients, report, patience_s=patience, stay=stay).run()


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def relay(
    server: Server = None,
    port: int = option(
        "N", "Port that clients connect to; 0 = a free one.", default=8081, min=0, max=65_535
    ),
    host: str | None = option(
        "HOST",
        "Address of this machine to listen on. Default: all addresses, loopback with --insecure.",
    ),
    enrolment: Path | None = option(
        "FILE",
        "This relay's enrolment, relays/ID.toml in the folder of keys. Default: FEDCOMP_ENROLMENT, or "
        "~/.config/fedcomp/enrolment.toml.",
    ),
    insecure: Insecure = False,
    patience: Patience = None,
    stay: Stay = False,
    log_json: LogJson = None,
) -> None:
    """Run a relay between clients and a server. Each broadcast crosses the server's link once, and reports are sent together."""
    from ..deployment.relay_process import RelayProcess
    from ..deployment.start import LOOPBACK

    def stop_message(cause: str) -> str:
        return f"{cause}; the same command continues, and clients reconnect to it"

    with stoppable(stop_message), message_log(log_json) as report:
        target = relay_target(server, enrolment, insecure)
        host = host or (LOOPBACK if insecure else "0.0.0.0")
        RelayProcess(target, host, port, report, patience_s=patience, stay=stay).run()
