"""The checkpoint from which a run can be resumed: the server's state and, in a simulation, that of the clients."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..errors import CheckpointError, RunFolderError
from ..memories.base import Changes
from ..messages import compact
from ..tasks import Data
from .checkpoint import Checkpoint
from .round_loop import RoundLoop, RoundResult
from .run_folder import CHECKPOINT, METRICS, RunFolder

RUN, WEIGHTS, KEEPER, LEDGER = "run", "weights", "downlink.", "server/"  # names in the checkpoint
STRATEGY, COUNTERPART, OPTIMIZER, LOOP = "strategy/", "counterpart/", "optimizer/", "loop/"

T = TypeVar("T")


class Clients(Protocol):
    """The clients whose state is part of the checkpoint."""

    data: Data  # that the run learns from

    def keep_in(self, shelf: Checkpoint) -> None:
        """Where those that are not in memory may be left, between checkpoints too, and are read back from."""

    def take_changes(self) -> Changes: ...

    def restore(self, weights: Tensor, version: str, passed: Iterable[str]) -> None: ...


class Part(Protocol):
    """An object with its own state in the checkpoint: a strategy, its optimizer, a counterpart, or a virtual network."""

    def take_changes(self) -> Changes: ...

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None: ...


class Elsewhere:
    """Clients that keep their state themselves, on other machines."""

    def __init__(self, data: Data):
        self.data = data

    def keep_in(self, shelf: Checkpoint) -> None: ...

    def take_changes(self) -> Changes:
        return {}, {}

    def restore(self, *stored: object) -> None: ...


class Recovery:
    """The checkpoint of a run whose loop stands before round 1. `restore` first, then `keep` after every round."""

    def __init__(
        self,
        folder: RunFolder,
        loop: RoundLoop,
        clients: Clients,
        rounds: int,
        others: Mapping[str, Part] | None = None,
    ):
        """`others`: further objects with their own state, by the prefix of their names in the checkpoint."""
        self.folder, self.loop, self.clients, self.rounds = folder, loop, clients, rounds
        self.checkpoint = Checkpoint(folder.path / CHECKPOINT, beside=[folder.path / METRICS])
        self.saved = 0  # round of the last checkpoint
        self.others = dict(others or {})
        clients.keep_in(self.checkpoint)
        self.heard: set[int] = (
            set()
        )  # clients of whom the server may have learned something since the last checkpoint

    def close(self) -> None:
        self.checkpoint.close()

    def restore(self) -> int:
        """Bring loop, clients and metrics to where the last checkpoint stood. Returns its round, 0 before the first.

        Raises RunFolderError when the task's model or data are not those of the run, or when more than `rounds` are done.
        """
        stored = self.checkpoint.value(RUN)
        if stored is None:
            if self.folder.records():
                raise CheckpointError(
                    f"{self.checkpoint.folder} holds no checkpoint of the run; start a new run with another --out"
                )
            self.save(0, 0)
            return 0
        try:
            return self._restore(json.loads(stored))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.checkpoint.folder} is damaged; start a new run with another --out"
            ) from error

    def _restore(self, run: dict[str, Any]) -> int:
        where = f"the run in {self.folder.path}"
        for what, mine in self._identity.items():
            if run[what] != mine:
                raise RunFolderError(
                    f"{where} had {what}; undo the change to the task, or give another --out"
                )
        if run["round"] > self.rounds:
            raise RunFolderError(
                f"{where} has done {run['round']} rounds; give --rounds {run['round']} or more"
            )
        self._restore_server(run)
        self.folder.truncate_metrics(run["metrics_length"])
        passed = [broadcast.base for broadcast in self.loop.broadcasts.cache]
        self.clients.restore(self._vector(WEIGHTS), run["version"], passed)
        self.saved = run["round"]
        return self.saved

    def hear(self, outcome: RoundResult) -> None:
        """Take note of the clients of a round, whose entries the next checkpoint writes."""
        self.heard |= set(outcome.cohort)

    def save(self, round: int, metrics_length: int) -> None:
        """Save the state after a round and before the next. `metrics_length`: bytes of the metrics until then."""
        server, cache = self.loop, self.loop.broadcasts.cache
        vectors, values = self.clients.take_changes()
        vectors[WEIGHTS] = server.broadcasts.weights
        kept = server.broadcasts.memory.state_dict(copy=False)
        vectors |= {
            KEEPER + name: value for name, value in kept.items() if isinstance(value, Tensor)
        }
        values |= {
            KEEPER + name: value for name, value in kept.items() if not isinstance(value, Tensor)
        }
        for client in self.heard:
            dropped = server.dropped.get(client, b"").hex()
            known = [
                server.versions.get(client),
                server.tickets.get(client),
                dropped,
                server.examples.get(client),
            ]
            values[f"{LEDGER}{client}"] = compact(known).encode()
        for place, part in self._parts():
            own_vectors, own_values = part.take_changes()
            vectors |= {place + name: vector for name, vector in own_vectors.items()}
            values |= {place + name: value for name, value in own_values.items()}
        keeper = {name: isinstance(value, Tensor) for name, value in kept.items()}
        b = server.broadcasts
        run = {
            "round": round,
            "metrics_length": metrics_length,
            "version": b.version,
            "newest_bytes": b.newest_bytes,
            "keeper": keeper,
        }
        values[RUN] = json.dumps(run | self._identity).encode()
        new = [broadcast for broadcast in cache if broadcast.round > self.saved]
        self.checkpoint.save(vectors, values, new, oldest=cache[0].round if cache else round + 1)
        self.heard.clear()
        self.saved = round

    def _restore_server(self, run: dict[str, Any]) -> None:
        server = self.loop
        read = {True: self._vector, False: self.checkpoint.value}
        keeper = {name: read[is_vector](KEEPER + name) for name, is_vector in run["keeper"].items()}
        cache = self.checkpoint.broadcasts(until=run["round"])
        server.broadcasts.restore(
            self._vector(WEIGHTS), keeper, cache, run["version"], run["newest_bytes"]
        )
        for client, record in self.checkpoint.values(LEDGER).items():
            heard, ticket, dropped, examples = json.loads(record)
            if heard is not None:
                server.versions[int(client)] = heard
            if ticket is not None:
                server.tickets[int(client)] = ticket
            if dropped:
                server.dropped[int(client)] = bytes.fromhex(dropped)
            if examples is not None:
                server.examples[int(client)] = examples
        for place, part in self._parts():
            part.restore(
                _below(place, self.checkpoint.vector), _below(place, self.checkpoint.value)
            )

    def _parts(self) -> list[tuple[str, Part]]:
        """Return the objects with their own state in the checkpoint, and the prefixes of their names."""
        loop, kept = self.loop, self.loop.strategy.counterpart
        own = [(STRATEGY, loop.strategy), (OPTIMIZER, loop.optimizer), (LOOP, loop)]
        return [*own, *([(COUNTERPART, kept)] if kept is not None else []), *self.others.items()]

    def _vector(self, name: str) -> Tensor:
        vector = self.checkpoint.vector(name)
        if vector is None:
            raise CheckpointError(
                f"the checkpoint in {self.checkpoint.folder} lacks '{name}'; start a new run with another --out"
            )
        return vector

    @cached_property
    def _identity(self) -> dict[str, str]:
        """The properties that must not change when a run is resumed, by their names in error messages."""
        data = self.clients.data
        targets = hashlib.sha256(
            data.targets.cpu().contiguous().view(torch.uint8).numpy()
        ).hexdigest()[:16]
        return {
            "another model": self.loop.broadcasts.layout.fingerprint,
            "other examples": f"{list(data.inputs.shape)} {targets}",
        }


def _below(place: str, read: Callable[[str], T]) -> Callable[[str], T]:
    """`read` of names that stand below a place."""
    return lambda name: read(place + name)
