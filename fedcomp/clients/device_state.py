"""The stored state of a client: its own, its session's copy of the model, and the round that it is in.

Devices write it to a file in their state folder before a report leaves.
"""

import json

from torch import Tensor

from ..errors import CheckpointError
from ..strategies.client_algorithm import RoundState
from .session import ClientSession
from .state import ClientState

CLIENT, WEIGHTS, SESSION, VALUES = "client", "weights", "session", "round."
MAX_PAST_VERSIONS = 32  # past versions that are remembered


def pack(session: ClientSession, client: int) -> dict[str, Tensor | bytes | list[bytes]]:
    """Return the state of a session and its client, by name; a list is the parts of one byte string. Nothing large is copied."""
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


def restore(session: ClientSession, client: int, kept: dict[str, Tensor | bytes]) -> None:
    """Return a client of a session to the state that `pack` returned, and the copy of the model if it is not newer.

    Raises CheckpointError for anything else than `pack` returned.
    """
    try:
        state = session.states.at(client)
        found = ClientState.unpack(CLIENT, kept[CLIENT], kept.__getitem__, lambda: state.memory)
        head = json.loads(kept[SESSION])
        replica = session.replica
        new = len(replica.past_versions) == 1
        if new or replica.version in head["passed"]:  # else it has moved on with other clients
            replica.restore(kept[WEIGHTS], head["version"], head["passed"])
        vars(state).update(vars(found))
        if round_state := unpack_round(kept):
            session.rounds[client] = round_state
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"the stored state is damaged ({error})") from error


def unpack_round(kept: dict[str, Tensor | bytes]) -> RoundState | None:
    """Return the round state in what `pack` returned. Raises KeyError, TypeError or ValueError for anything else."""
    stored = json.loads(kept[SESSION])["round"]
    if not stored:
        return None
    round, loss, examples, metrics = stored
    values = {name[len(VALUES) :]: v for name, v in kept.items() if name.startswith(VALUES)}
    return RoundState(round, loss, values, examples, bytes.fromhex(metrics))
