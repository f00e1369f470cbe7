"""Who `fedcomp client` is: one client or many, with the keys of their enrolments or, in a trial, without."""

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
    """One client: where it goes, who it is, which part of the data it has and where it keeps its state."""

    target: "Target"
    id: int
    partition_id: int | None
    folder: Path
    enrolled: "Enrolment | None" = None


def identities(
    server: str | None,
    enrolment: str | Path | None,
    insecure: bool,
    client_id: int | None,
    partition_id: int | None,
    state_dir: Path | None,
    count: int | None,
) -> list[Identity]:
    """The clients that the flags mean. Raises UserError or ConfigError."""
    if insecure and enrolment is not None:
        raise ConfigError("--insecure is without the keys in --enrolment; give one of them")
    if not insecure and client_id is not None:
        raise ConfigError(
            "--client-id is for --insecure alone, and an enrolment says itself which client it is; leave --client-id out, "
            "or give the --enrolment of that client"
        )
    enrolment = None if enrolment is None else Path(enrolment)
    many = count is not None or (enrolment is not None and enrolment.is_dir())
    if many and partition_id is None:
        raise ConfigError(
            "many clients in one process share its data; give --partition-id K, and the first of them takes part K of it, "
            "the next one part K+1, and so on"
        )
    if insecure:
        found = _trial(server, client_id, partition_id, count or 1)
    else:
        found = _secure(server, enrolment, count)

    def part(i: int) -> int | None:
        return None if partition_id is None else partition_id + i

    def folder(id: int) -> Path:
        own = f"fedcomp-client-{id}"
        return (state_dir / own if many else state_dir) if state_dir else Path(own)

    return [
        Identity(target, id, part(i), folder(id), enrolled)
        for i, (target, id, enrolled) in enumerate(found)
    ]


def _secure(
    server: str | None, enrolment: Path | None, count: int | None
) -> list[tuple["Target", int, "Enrolment | None"]]:
    """Of clients with enrolments."""
    from ..deployment.client_process import Target
    from ..keys.connection import address
    from ..keys.enrolment import default_enrolment

    if enrolment is None:
        enrolment = default_enrolment()
        if not enrolment.exists():
            raise UserError(
                f"this client has no enrolment: copy clients/ID.toml of the server's keys to {enrolment}, give "
                "--enrolment FILE, or --insecure for a trial"
            )
    found = []
    for path, enrolled in _enrolments(enrolment, count):
        enrolled.refuse_expired()
        if not (where := server or enrolled.server):
            raise UserError(f"{path} does not say where the server is; give --server host:port")
        found.append((Target(*address(where), enrolled), enrolled.id, enrolled))
    return found


def _enrolments(given: Path, count: int | None) -> Sequence[tuple[Path, "Enrolment"]]:
    """Those of a file, or of the files in a folder, by their ids; the first `count` of them."""
    from ..keys.enrolment import Enrolment

    if not given.is_dir():
        if count not in (None, 1):
            raise ConfigError(
                f"--count {count} needs as many enrolments; give --enrolment the folder that holds them"
            )
        return [(given, Enrolment.read(given))]
    read = sorted(
        ((path, Enrolment.read(path)) for path in given.glob("*.toml")), key=lambda one: one[1].id
    )
    if len({enrolled.id for _, enrolled in read}) < len(read):
        raise UserError(
            f"--enrolment {given} holds two enrolments of one client; leave one of them there"
        )
    if len(read) < (count or 1):
        raise UserError(
            f"--enrolment {given} holds {len(read)} enrolments, ID.toml; copy {count or 'some'} there, or give a lower --count"
        )
    return read[:count]


def _trial(
    server: str | None, client_id: int | None, partition_id: int | None, count: int
) -> list[tuple["Target", int, None]]:
    from ..deployment.client_process import Target
    from ..keys.connection import address
    from ..keys.enrolment import LARGEST_ID

    if server is None:
        raise UserError("where is the server? give --server host:port")
    who = partition_id if client_id is None else client_id
    if who is None:
        raise UserError(
            "without an enrolment a client has to say who it is; give --partition-id, or --client-id for one with its own data"
        )
    if (last := who + count - 1) > LARGEST_ID:
        flag = "--partition-id" if client_id is None else "--client-id"
        raise ConfigError(
            f"client {last} cannot exist; give {flag} and --count so that no id is above {LARGEST_ID}"
        )
    return [(Target(*address(server)), who + i, None) for i in range(count)]
