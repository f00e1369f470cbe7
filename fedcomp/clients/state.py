"""The state of a client between rounds, and its serialised form: named vectors, and a record (bytes) with all other values."""

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
from ..memories.base import mask
from ..messages import compact_json
from ..training import nested_state

BUFFERS, TRAINING = "buffers", "training"  # names of entries in the serialised record
MOMENTUM = "local-momentum"  # name of the momentum vector


@dataclass
class ClientState:
    """The state of a client between rounds, without its copy of the model."""

    memory: Memory
    version: str  # version of the client's copy of the model
    ticket: str = ""  # ticket (hash) of the client's latest frame
    # Buffers of the model, such as batch-norm statistics, and the tensors that `ClientAlgorithm.after_training` returned
    buffers: dict[str, Tensor] | None = None
    momentum: Tensor | None = None  # momentum of local SGD, with --keep-momentum
    # State of the optimizer or of the user's train_fn, if it is kept between rounds.
    training: dict[str, Any] | None = None
    committed: str = ""  # ticket (hash) of the last frame that was committed to the memory

    def move(self, to_place: Callable[[Tensor], Tensor]) -> None:
        """Replace each vector by `to_place(vector)`, for example by a copy on the GPU."""
        state = self.memory.state_dict(copy=False)
        state |= {name: to_place(v) for name, v in state.items() if isinstance(v, Tensor)}
        self.memory.load_state_dict(state, copy=False)
        if self.momentum is not None:
            self.momentum = to_place(self.momentum)

    def settle(self, accepted: str, returned: bytes = b"") -> None:
        """Commit the latest update to the memory (error feedback) if the server accepted it, else roll the memory back.

        `accepted` is the ticket (hash) of the last accepted update. `returned` is a frame with the part of this update that the server did
        not use. The momentum of local SGD, if it is kept, is set to zero at the accepted coordinates. The call has no effect if the latest
        update has already been committed or rolled back. Raises FrameError, and changes nothing, if `returned` is damaged.
        """
        memory = self.memory
        if memory.pending is None:
            return
        if self.ticket != accepted:
            memory.rollback()
            return
        sent = memory.sent_positions if self.momentum is not None else None
        dropped = memory.commit(returned=returned or None)
        self.committed = self.ticket
        if self.momentum is not None:
            mask([self.momentum], sent, dropped)

    def pack(self, name: str) -> tuple[dict[str, Tensor], list[bytes]]:
        """Return vectors [numel], whose names begin with `name`, and the parts of the record. Vectors are not copied."""
        state = self.memory.state_dict(copy=False)
        if self.momentum is not None:
            state = state | {MOMENTUM: self.momentum}
        items = sorted(state.items(), key=lambda item: item[0])
        vectors = {key: value for key, value in items if isinstance(value, Tensor)}
        values = {key: value for key, value in items if not isinstance(value, Tensor)}
        if self.buffers:
            buffers = {key: value.cpu().contiguous() for key, value in self.buffers.items()}
            values[BUFFERS] = save_tensors(buffers)
        if self.training:
            values[TRAINING] = nested_state.pack(self.training)
        record = {
            "version": self.version,
            "ticket": self.ticket,
            "after": self.committed,
            "vectors": list(vectors),
            "values": {key: len(value) for key, value in values.items()},
        }
        head = compact_json(record).encode() + b"\n"
        return {f"{name}.{key}": vectors[key] for key in vectors}, [head, *values.values()]

    @classmethod
    def unpack(
        cls,
        name: str,
        record: bytes,
        vector: Callable[[str], Tensor | None],
        make_memory: Callable[[], Memory],
    ) -> Self:
        """Restore a state from the vectors and the record that `pack` returned. Raises CheckpointError if the record is damaged.

        `vector(name)` returns a packed vector. `make_memory()` returns a new memory, into which the stored memory is loaded.
        """
        try:
            head, _, rest = record.partition(b"\n")
            fields = json.loads(head)
            ends = itertools.pairwise(itertools.accumulate(fields["values"].values(), initial=0))
            values = {key: rest[a:b] for key, (a, b) in zip(fields["values"], ends, strict=True)}
            buffers = values.pop(BUFFERS, None)
            training = values.pop(TRAINING, None)
            vectors: dict[str, Any] = {key: vector(f"{name}.{key}") for key in fields["vectors"]}
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
                f"the stored client state '{name}' is damaged ({error}); start a new run"
            ) from error
