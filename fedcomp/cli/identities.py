"""The identities of the clients that `fedcomp client` runs, and of a relay, from enrolments or, with --insecure, from flags."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, UserError

if TYPE_CHECKING:
    from ..deployment.client_process import Target
    from ..keys.enrolment import Enrolment


@dataclass(frozen=True)
class Identity:
    """One client: its server, logical id, partition of the data, state folder, and enrolment."""

    target: "Target"
    id: int
    partition_id: int | None
    folder: Path
    enrolled: "Enrolment | None" = None


def identities(
    server: str | None,
    enrolment: Path | None,
    insecure: bool,
    client_id: int | None,
    partition_id: int | None,
    state_dir: Path | None,
    count: int | None,
) -> list[Identity]:
    """Return the clients that the options describe. Raises UserError or ConfigError."""
    _refuse_enrolment(insecure, enrolment)
    if not insecure and client_id is not None:
        raise ConfigError(
            "--client-id needs --insecure, since an enrolment contains the id of its client; leave --client-id out, "
            "or give the --enrolment of that client"
        )
    multiple = count is not None or (enrolment is not None and enrolment.is_dir())
    if multiple and partition_id is None:
        raise ConfigError(
            "several clients in one process divide its data; give --partition-id K: the first client uses partition K, "
            "the next one partition K+1, and so on"
        )
    if insecure:
        target = _target(server)
        ids = _claimed_ids(client_id, partition_id, count or 1)
        clients: list[tuple[Target, int, Enrolment | None]] = [(target, id, None) for id in ids]
    else:
        clients = [*_enrolled(server, enrolment, count)]

    result = []
    for i, (target, id, enrolled) in enumerate(clients):
        folder = Path(f"fedcomp-client-{id}")
        if state_dir:
            folder = state_dir / folder if multiple else state_dir
        partition = None if partition_id is None else partition_id + i
        result.append(Identity(target, id, partition, folder, enrolled))
    return result


def relay_target(server: str | None, enrolment: Path | None, insecure: bool) -> "Target":
    """Return the server of a relay with the relay's credentials. Raises UserError or ConfigError."""
    from ..keys.enrolment import Enrolment, default_enrolment

    _refuse_enrolment(insecure, enrolment)
    if insecure:
        return _target(server)
    path = default_enrolment() if enrolment is None else enrolment
    make = "fedcomp keys add --relay --host HOST"
    if enrolment is None and not path.exists():
        raise UserError(
            f"this relay has no enrolment: make one on the server with {make}, copy it to {path} or give --enrolment FILE; or "
            "give --insecure for a trial"
        )
    enrolled = Enrolment.read(path)
    if not enrolled.relay:
        raise UserError(
            f"{path} is the enrolment of client {enrolled.id}, but a relay needs its own; make one on the server with: {make}"
        )
    return _target(server, path, enrolled)


def _refuse_enrolment(insecure: bool, enrolment: Path | None) -> None:
    if insecure and enrolment is not None:
        raise ConfigError(
            "--insecure uses no keys, but --enrolment is given; give only one of the two"
        )


def _target(
    server: str | None, path: Path | None = None, enrolled: "Enrolment | None" = None
) -> "Target":
    """Return --server, or else the server in the enrolment. Raises UserError if both are missing, or if the enrolment has expired."""
    from ..deployment.client_process import Target
    from ..keys.connection import address

    if enrolled:
        enrolled.refuse_expired()
        server = server or enrolled.server
    if not server:
        missing = f"{path} does not name a server" if enrolled else "--server is missing"
        raise UserError(f"{missing}; give --server host:port")
    return Target(*address(server), enrolled)


def _enrolled(
    server: str | None, enrolment: Path | None, count: int | None
) -> list[tuple["Target", int, "Enrolment"]]:
    """Return server, id and enrolment of each client that has an enrolment. Raises UserError."""
    from ..keys.enrolment import default_enrolment

    if enrolment is None:
        enrolment = default_enrolment()
        if not enrolment.exists():
            raise UserError(
                f"this client has no enrolment: copy clients/ID.toml of the server's keys to {enrolment}, give "
                "--enrolment FILE, or --insecure for a trial"
            )
    clients = []
    for path, enrolled in _enrolments(enrolment, count):
        if enrolled.relay:
            raise UserError(
                f"{path} is the enrolment of relay {enrolled.id}; give the enrolment of a client, or run a relay with: fedcomp relay"
            )
        clients.append((_target(server, path, enrolled), enrolled.id, enrolled))
    return clients


def _enrolments(path: Path, count: int | None) -> Sequence[tuple[Path, "Enrolment"]]:
    """Return the enrolment in a file, or the first `count` enrolments of a folder in the order of their ids."""
    from ..keys.enrolment import Enrolment
    from ..keys.key_folder import CLIENTS, REGISTRY

    if (path / REGISTRY).is_file():  # a folder of keys
        path = path / CLIENTS
    if not path.is_dir():
        if count not in (None, 1):
            advice = "give --enrolment the folder that holds them"
            raise ConfigError(f"--count {count} needs as many enrolments; {advice}")
        return [(path, Enrolment.read(path))]
    enrolments = [(file, Enrolment.read(file)) for file in path.glob("*.toml")]
    enrolments.sort(key=lambda entry: entry[1].id)
    if len({enrolled.id for _, enrolled in enrolments}) < len(enrolments):
        raise UserError(
            f"--enrolment {path} holds two enrolments of one client; remove one of them"
        )
    if len(enrolments) < (count or 1):
        raise UserError(
            f"--enrolment {path} holds {len(enrolments)} enrolments, ID.toml; copy {count or 'some'} there, or give a lower --count"
        )
    return enrolments[:count]


def _claimed_ids(client_id: int | None, partition_id: int | None, count: int) -> Sequence[int]:
    """Return the ids of clients without enrolments. Raises UserError."""
    from ..keys.enrolment import MAX_ID

    flag = "--partition-id" if client_id is None else "--client-id"
    first = partition_id if client_id is None else client_id
    if first is None:
        raise UserError(
            "without an enrolment a client has to claim an id; give --partition-id, or --client-id for a client with its own data"
        )
    if (last := first + count - 1) > MAX_ID:
        advice = f"give {flag} and --count so that no id is above {MAX_ID}"
        raise ConfigError(f"client {last} cannot exist; {advice}")
    return range(first, first + count)
