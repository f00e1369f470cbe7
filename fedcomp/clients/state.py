"""The state of a client between rounds, and its serialised form: named vectors, and one small record for everything else.

Devices store both in their state folder, simulations in a `ClientStore`.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..memories import Memory
from ..messages import compact_json
from . import nested_state

BUFFERS = "buffers"  # among the values of a record
TRAINING = "training"  # likewise
MOMENTUM = "local-momentum"  # among the vectors


@dataclass
class ClientState:
    """What a client keeps between rounds. Its copy of the model belongs to the session, which other clients may share."""

    memory: Memory
    version: str  # of its copy of the model
    ticket: str = ""  # of the pending proposal of the memory
    buffers: dict[str, Tensor] | None = None  # running statistics, and what the algorithm keeps
    momentum: Tensor | None = None  # of local SGD after the last round, if it is kept
    training: dict[str, Any] | None = (
        None  # state of the optimizer or the user's loop, if it is kept
    )
    after: str = ""  # ticket of the proposal that the memory last committed

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Replace every vector by what `moved` returns for it: the same values in another place."""
        kept = self.memory.state_dict(copy=False)
        self.memory.load_state_dict(
            {
                name: moved(value) if isinstance(value, Tensor) else value
                for name, value in kept.items()
            },
            copy=False,
        )
        if self.momentum is not None:
            self.momentum = moved(self.momentum)

    def pack(self, name: str) -> tuple[dict[str, Tensor], list[bytes]]:
        """Return the vectors [numel], named `<name>.<vector>`, and the parts of the record of everything else. Neither is copied."""
        kept = self.memory.state_dict(copy=False)
        if self.momentum is not None:
            kept = kept | {MOMENTUM: self.momentum}
        vectors: list[str] = []
        values: dict[str, bytes] = {}
        for key in sorted(kept):
            if isinstance(kept[key], Tensor):
                vectors.append(key)
            else:
                values[key] = kept[key]
        if self.buffers:
            values[BUFFERS] = save_tensors(
                {key: value.cpu().contiguous() for key, value in self.buffers.items()}
            )
        if self.training:
            values[TRAINING] = nested_state.pack(self.training)
        record = {
            "version": self.version,
            "ticket": self.ticket,
            "after": self.after,
            "vectors": vectors,
            "values": {key: len(value) for key, value in values.items()},
        }
        head = compact_json(record).encode() + b"\n"
        return {f"{name}.{key}": kept[key] for key in vectors}, [head, *values.values()]

    @classmethod
    def unpack(
        cls,
        name: str,
        record: bytes,
        vector: Callable[[str], Tensor | None],
        make_memory: Callable[[], Memory],
    ) -> Self:
        """Restore a state from the record and the vectors of `pack`; `vector` returns a vector by its name.

        Raises CheckpointError for anything that `pack` did not write.
        """
        try:
            head, _, rest = record.partition(b"\n")
            fields = json.loads(head)
            ends = itertools.pairwise(itertools.accumulate(fields["values"].values(), initial=0))
            values = {key: rest[a:b] for key, (a, b) in zip(fields["values"], ends, strict=True)}
            buffers = values.pop(BUFFERS, None)
            training = values.pop(TRAINING, None)
            vectors = {key: vector(f"{name}.{key}") for key in fields["vectors"]}
            momentum = vectors.pop(MOMENTUM, None)
            memory = make_memory()
            memory.load_state_dict(vectors | values, copy=False)
            return cls(
                memory,
                fields["version"],
                fields["ticket"],
                load_tensors(buffers) if buffers else None,
                momentum,
                nested_state.unpack(training) if training else None,
                fields["after"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(
                f"what the checkpoint holds of {name} is damaged; start a new run"
            ) from error
