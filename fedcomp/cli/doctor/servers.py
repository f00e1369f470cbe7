"""A server: whether it is there and the one that it should be, how long its certificate is good, and both clocks."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import KEYS, keys_command
from ...errors import KeysError, UnreachableError
from .asked import Asked
from .check import FAILED, OK, SKIPPED, Check, ending, refused

if TYPE_CHECKING:
    from ...keys.connection import Contact

AHEAD_S, BEHIND_S = (
    4,
    240,
)  # of a client's clock; Flower refuses what is signed 5 s ahead or 305 s behind the server's
TIMEOUT_S = 5.0


def checks(asked: Asked) -> Iterator[Check]:
    where = asked.address()
    yield from reaching(where, asked.ca, asked.keys or KEYS) if where else [own_clock()]


def reaching(where: tuple[str, int], ca: str | None, keys: str | Path) -> Iterator[Check]:
    """The server's certificate and health, and both clocks."""
    from ...keys.connection import contact

    host, port = where
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        met = contact(host, port, ca, TIMEOUT_S)
    except UnreachableError as error:
        if ca is None and error.cause == "tls":
            yield Check(
                "server",
                SKIPPED,
                f"{name} has a certificate that was not checked",
                "give --client FILE, or --keys DIR",
            )
        else:
            yield refused("server", error)
        yield own_clock()
        return
    except KeysError as error:
        yield refused("server", error)
        yield own_clock()
        return
    yield Check(
        "server",
        OK,
        f"{name} is there{'' if met.certificate else ', without TLS'}, {1000 * met.seconds:.0f} ms",
    )
    if met.certificate:
        yield ending(
            "server's",
            met.certificate.not_valid_after_utc,
            met.asked,
            f"on the server: {keys_command(keys, 'renew', 'server')}",
        )
    yield clock(met)


def clock(met: "Contact") -> Check:
    """This machine's clock against the server's, which tells whole seconds."""
    from ...keys.enrolment import iso

    if met.date is None:
        return Check("clock", SKIPPED, f"{iso(met.asked)} here; the server does not tell its own")
    ahead = (met.asked - met.date).total_seconds() - 0.5
    apart = f"{iso(met.asked)} here, {iso(met.date)} on the server"
    if not -BEHIND_S <= ahead <= AHEAD_S:
        return Check(
            "clock",
            FAILED,
            f"{apart}, which refuses clients whose clock is more than 5 s ahead or 5 min behind",
            "set both clocks by NTP: timedatectl set-ntp true",
        )
    return Check("clock", OK, f"{apart}")


def own_clock() -> Check:
    from ...keys.enrolment import iso, utc_now

    return Check(
        "clock", SKIPPED, f"{iso(utc_now())} here; compared with a server's where one is reached"
    )
