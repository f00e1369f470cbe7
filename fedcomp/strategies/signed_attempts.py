"""The attempts in which a client has signed, so that it signs each round of an attempt once.

A server draws a new attempt whenever it starts (sealed_election.py). A client stores the digests of a run's attempts in its round state,
and in its SignatureLog when it takes part in another run.
"""

import struct
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from ..errors import ProtocolError
from .base import RoundState
from .sealed_messages import attempt_of

ATTEMPTS = "attempts"  # in RoundState.values: the digests, newest last
SIGNED = "signed/"  # in a SignatureLog: the record of a run, by the client's logical id
MAX_ATTEMPTS, DIGEST = 1024, 16  # attempts of a run, bytes of a digest
ROUND = struct.Struct("<q")


def digest(announced: Mapping[str, bytes]) -> bytes:
    """Return the digest of the announced attempt. Raises ProtocolError."""
    return sha256(attempt_of(announced).encode()).digest()[:DIGEST]


def digests(values: Mapping[str, Any]) -> list[bytes]:
    """Return the digests in `RoundState.values`."""
    known = values.get(ATTEMPTS, b"")
    return [known[at : at + DIGEST] for at in range(0, len(known), DIGEST)]


def check(previous: RoundState | None, announced: Mapping[str, bytes], round: int) -> None:
    """Raise ProtocolError if the client may not start this round in the announced attempt, given the state of its previous round."""
    if previous is None:
        return
    attempt, known = digest(announced), digests(previous.values)
    if known and known[-1] == attempt and round <= previous.round:
        raise ProtocolError(
            f"the server asks again for round {round} of an attempt, after round {previous.round} of it"
        )
    if attempt in known[:-1]:
        raise ProtocolError(
            "the server returns to an earlier attempt of this run; a new attempt needs a new name"
        )
    if len(known) >= MAX_ATTEMPTS and known[-1] != attempt:
        raise ProtocolError(
            f"this is attempt {len(known) + 1} of the run, and at most {MAX_ATTEMPTS} are allowed; give the run a new name"
        )


def extended(previous: RoundState | None, announced: Mapping[str, bytes]) -> bytes:
    """Return the digests up to the announced attempt, for `RoundState.values`."""
    known, attempt = digests(previous.values) if previous else [], digest(announced)
    return b"".join(known if known[-1:] == [attempt] else [*known, attempt])


def pack(state: RoundState | None) -> bytes:
    """Return the record of a run for the SignatureLog, b"" if the client has signed nothing."""
    if state is None or ATTEMPTS not in state.values:
        return b""
    return ROUND.pack(state.round) + state.values[ATTEMPTS]


def unpack(record: bytes) -> RoundState:
    """Return the round state of a client that comes back to a run. It holds only the round and the attempts of the record."""
    return RoundState(ROUND.unpack_from(record)[0], 0.0, {ATTEMPTS: record[ROUND.size :]})
