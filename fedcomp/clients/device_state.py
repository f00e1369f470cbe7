"""The stored state of a client in a deployment: its state between rounds, its copy of the model, and its state in the current round.

The device, the machine on which the client runs, writes this state to a file before it sends a report. If the device is restarted, it can
send the report again.
"""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..strategies.base import RoundState
from .session import EncodingSession
from .state import ClientState

CLIENT, WEIGHTS, SESSION, VALUES = "client", "weights", "session", "round."
MAX_PAST_VERSIONS = 32  # maximum number of hashes of earlier model versions that a device stores


def pack(session: EncodingSession, client: int) -> dict[str, Tensor | bytes | list[bytes]]:
    """Return the entries that a device stores for a client, by name. Tensors are not copied.

    The device writes a list of byte strings to the file as one byte string.
    """
    state, round_state = session.states.at(client), session.rounds.get(client)
    vectors, record = state.pack(CLIENT)
    values = round_state.values if round_state else {}
    head = {
        "version": session.replica.version,
        "passed": [*session.replica.past_versions][-MAX_PAST_VERSIONS:],
        "round": round_state
        and [round_state.round, round_state.loss, round_state.examples, round_state.metrics.hex()],
    }
    return {
        **vectors,
        **{VALUES + name: value for name, value in values.items()},
        CLIENT: record,
        WEIGHTS: session.replica.weights,
        SESSION: json.dumps(head).encode(),
    }


def restore(session: EncodingSession, client: int, stored: Mapping[str, Any]) -> None:
    """Restore a client of a session from the result of `pack`. Raises CheckpointError if `stored` is not a result of `pack`."""
    try:
        state = session.states.at(client)
        restored = ClientState.unpack(
            CLIENT, stored[CLIENT], stored.__getitem__, lambda: state.memory
        )
        head = json.loads(stored[SESSION])
        replica = session.replica
        # All clients of the session share one copy of the model. Do not replace it by an older stored copy.
        if len(replica.past_versions) == 1 or replica.version in head["passed"]:
            replica.restore(stored[WEIGHTS], head["version"], head["passed"])
        vars(state).update(vars(restored))
        if round_state := unpack_round(stored):
            session.rounds[client] = round_state
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the stored state of this client is damaged ({error})") from error


def unpack_round(stored: Mapping[str, Any]) -> RoundState | None:
    """Return the client's state in the current round from the result of `pack`, or None if it has not started a round.

    Raises KeyError, TypeError or ValueError if `stored` is not a result of `pack`.
    """
    record = json.loads(stored[SESSION])["round"]
    if not record:
        return None
    round, loss, examples, metrics = record
    values = {name[len(VALUES) :]: v for name, v in stored.items() if name.startswith(VALUES)}
    return RoundState(round, loss, values, examples, bytes.fromhex(metrics))
