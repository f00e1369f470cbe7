"""Saving and restoring a run: the server's state and, in a simulation, the clients' state."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from ..errors import CheckpointError, RunFolderError
from ..memories.base import Changes, ReadValue, ReadVector
from ..messages import compact_json
from ..tasks.data import Examples
from .asynchronous_loop import AsynchronousLoop
from .checkpoint import Checkpoint
from .round_loop import RoundLoop
from .run_folder import CHECKPOINT, METRICS, RunFolder

# RUN and WEIGHTS are names of entries in the checkpoint; DOWNLINK_MEMORY and CLIENT are prefixes of names.
RUN, WEIGHTS, DOWNLINK_MEMORY, CLIENT = "run", "weights", "downlink.", "server/"


class Stateful(Protocol):
    """An object that stores its state in the checkpoint, such as a strategy, the server optimizer, or the simulated clients."""

    def take_changes(self) -> Changes:
        """Return the vectors and the values (bytes) that changed since the last call, by name. The value None deletes an entry."""

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        """Restore the state. `vector(name)` and `value(name)` return an entry, or None if there is none."""


class Recovery:
    """The saving and restoring of a run. Call `restore` before the first round, and `save` for each checkpoint."""

    def __init__(
        self,
        folder: RunFolder,
        loop: RoundLoop,
        data: Examples | None,
        rounds: int,
        others: Mapping[str, Stateful],
    ):
        """`data`: the server's training data, or None if it has none. A resumed run must have the same data.

        `others`: further objects with state, by the prefix of the names of their entries.
        """
        self.folder, self.loop, self.rounds, self.others = folder, loop, rounds, others
        self.checkpoint = Checkpoint(folder.path / CHECKPOINT, flushed=[folder.path / METRICS])
        self.saved_round = 0  # round of the last checkpoint
        # Hashes of the model's layout and of the data, which must not change. The keys are parts of an error message.
        self.identity = {
            "another model": loop.broadcasts.layout.fingerprint,
            "other examples": data.digest if data is not None else "none",
        }

    def restore(self) -> int:
        """Restore the run from the checkpoint, or save a checkpoint of round 0 for a new run. Return the last saved round.

        Raises RunFolderError if the model or the data have changed since the start of the run, or if the run has already done more than
        `rounds` rounds. Raises CheckpointError if the checkpoint is damaged.
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
            run = json.loads(stored)
            self._check(run)
            self._restore(run)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.checkpoint.folder} is damaged; start a new run with another --out"
            ) from error
        return self.saved_round

    def _check(self, run: dict[str, Any]) -> None:
        """Raise RunFolderError if the run cannot be resumed with this model, data and number of rounds.

        `run`: the parsed checkpoint entry RUN.
        """
        where = f"the run in {self.folder.path}"
        for difference, value in self.identity.items():
            if run[difference] != value:
                raise RunFolderError(
                    f"{where} was started with {difference}; undo the change to the task, or start a new run with another --out"
                )
        if run["round"] > self.rounds:
            raise RunFolderError(
                f"{where} has done {run['round']} rounds; give --rounds {run['round']} or more"
            )

    def _restore(self, run: dict[str, Any]) -> None:
        loop, checkpoint = self.loop, self.checkpoint
        weights: Any = checkpoint.vector(WEIGHTS)
        memory = {
            name: (checkpoint.vector if is_vector else checkpoint.value)(DOWNLINK_MEMORY + name)
            for name, is_vector in run["downlink_memory"].items()
        }
        cache = checkpoint.broadcasts(until=run["round"])
        loop.broadcasts.restore(weights, memory, cache, run["version"], run["newest_bytes"])
        for client, record in checkpoint.values(CLIENT).items():
            version, ticket, dropped, examples = json.loads(record)
            if version is not None:
                loop.versions[int(client)] = version
            if ticket is not None:
                loop.tickets[int(client)] = ticket
            if dropped:
                loop.dropped[int(client)] = bytes.fromhex(dropped)
            if examples is not None:
                loop.examples[int(client)] = examples
        for prefix, part in self._parts().items():
            self._restore_part(prefix, part)
        self.folder.truncate_metrics(run["metrics_length"])
        self.saved_round = run["round"]

    def _restore_part(self, prefix: str, part: Stateful) -> None:
        checkpoint = self.checkpoint
        part.restore(
            lambda name: checkpoint.vector(prefix + name),
            lambda name: checkpoint.value(prefix + name),
        )

    def save(self, round: int, metrics_length: int) -> None:
        """Save a checkpoint after a round. `metrics_length` is the size of metrics.jsonl in bytes after this round."""
        loop, broadcasts = self.loop, self.loop.broadcasts
        cache = broadcasts.cache
        vectors: dict[str, Tensor] = {WEIGHTS: broadcasts.weights}
        values: dict[str, bytes | None] = {}
        memory = broadcasts.memory.state_dict(copy=False)
        is_vector = {name: isinstance(value, Tensor) for name, value in memory.items()}
        for name, value in memory.items():
            if isinstance(value, Tensor):
                vectors[DOWNLINK_MEMORY + name] = value
            else:
                values[DOWNLINK_MEMORY + name] = value
        for client in loop.changed_clients:
            version, ticket = loop.versions.get(client), loop.tickets.get(client)
            dropped = loop.dropped.get(client, b"").hex()
            record = [version, ticket, dropped, loop.examples.get(client)]
            values[f"{CLIENT}{client}"] = compact_json(record).encode()
        for prefix, part in self._parts().items():
            own_vectors, own_values = part.take_changes()
            vectors |= {prefix + name: vector for name, vector in own_vectors.items()}
            values |= {prefix + name: value for name, value in own_values.items()}
        run = {
            "round": round,
            "metrics_length": metrics_length,
            "version": broadcasts.version,
            "newest_bytes": broadcasts.newest_bytes,
            "downlink_memory": is_vector,
        }
        values[RUN] = json.dumps(run | self.identity).encode()
        new = [broadcast for broadcast in cache if broadcast.round > self.saved_round]
        self.checkpoint.save(vectors, values, new, oldest=cache[0].round if cache else round + 1)
        loop.changed_clients.clear()
        self.saved_round = round

    def _parts(self) -> dict[str, Stateful]:
        """Return the objects with state, by the prefix of the names of their entries."""
        loop, counterpart = self.loop, self.loop.strategy.counterpart
        parts: dict[str, Stateful] = {"strategy/": loop.strategy, "optimizer/": loop.optimizer}
        if isinstance(loop, AsynchronousLoop):
            parts["loop/"] = loop
        if counterpart is not None:
            parts["counterpart/"] = counterpart
        return {**parts, **self.others}
