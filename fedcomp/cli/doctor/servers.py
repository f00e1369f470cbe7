"""Check that a server can be reached, that its certificate is trusted, and how long the certificate is valid."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import KEYS, keys_command
from ...errors import KeysError, UnreachableError
from .asked import Asked
from .check import OK, SKIPPED, Check, refused, validity

if TYPE_CHECKING:
    from ...keys.enrolment import Enrolment

TIMEOUT_S = 5.0


def checks(asked: Asked) -> Iterator[Check]:
    if where := asked.address():
        yield from reaching(where, asked.trust, asked.keys or KEYS)


def reaching(
    where: tuple[str, int], trust: "Enrolment | str | None", keys: str | Path
) -> Iterator[Check]:
    """Connect to the server with the certificate of an enrolment, and check the server's certificate."""
    from ...keys.connection import contact, join_address
    from ...keys.enrolment import utc_now

    name = join_address(*where)
    try:
        met = contact(*where, trust, TIMEOUT_S)
    except UnreachableError as error:
        if trust is None and error.cause == "tls":
            yield Check(
                "server",
                SKIPPED,
                f"{name} has a certificate that was not checked",
                "give --client FILE, or --keys DIR",
            )
        else:
            yield refused("server", error)
        return
    except KeysError as error:
        yield refused("server", error)
        return
    yield Check(
        "server",
        OK,
        f"{name} is there{'' if met.certificate else ', without TLS'}, {1000 * met.seconds:.0f} ms",
    )
    if met.certificate:
        renew = f"on the server: {keys_command(keys, 'renew', 'server')}"
        yield validity("server's", met.certificate, utc_now(), renew)
