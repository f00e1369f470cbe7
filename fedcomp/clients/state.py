"""The state of a client between rounds, and its serialised form: named vectors, and a record with all other values.

Devices store it in their state folder, simulations in a `ClientStore`.
"""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..errors import CheckpointError, ConfigError, TaskError
from ..memories import Memory
from ..messages import compact_json

BUFFERS, TRAINING = "buffers", "training"  # names in the record
MOMENTUM = "local-momentum"  # name of a vector


@dataclass
class ClientState:
    """The state of a client between rounds, without its copy of the model, which belongs to the session."""

    memory: Memory
    version: str  # of the client's copy of the model
    ticket: str = ""  # of the memory's pending proposal
    buffers: dict[str, Tensor] | None = None  # running statistics, and tensors of the algorithm
    momentum: Tensor | None = None  # of local SGD after the last round, with --keep-momentum
    # State of the optimizer or of the user's loop, if it is kept between rounds.
    training: dict[str, Any] | None = None
    after: str = ""  # ticket of the last proposal that the memory committed

    def move(self, to_place: Callable[[Tensor], Tensor]) -> None:
        """Replace each vector by `to_place(vector)`, which has the same values on another device."""
        state = self.memory.state_dict(copy=False)
        state |= {name: to_place(v) for name, v in state.items() if isinstance(v, Tensor)}
        self.memory.load_state_dict(state, copy=False)
        if self.momentum is not None:
            self.momentum = to_place(self.momentum)

    def pack(self, name: str) -> tuple[dict[str, Tensor], list[bytes]]:
        """Return the vectors [numel], named `<name>.<vector>`, and the parts of the record with all other values. Nothing is copied."""
        state = self.memory.state_dict(copy=False)
        if self.momentum is not None:
            state = state | {MOMENTUM: self.momentum}
        vectors: dict[str, Tensor] = {}
        values: dict[str, bytes] = {}
        for key, value in sorted(state.items(), key=lambda item: item[0]):
            if isinstance(value, Tensor):
                vectors[key] = value
            else:
                values[key] = value
        if self.buffers:
            buffers = {key: value.cpu().contiguous() for key, value in self.buffers.items()}
            values[BUFFERS] = save_tensors(buffers)
        if self.training:
            values[TRAINING] = pack_nested(self.training)
        record = {
            "version": self.version,
            "ticket": self.ticket,
            "after": self.after,
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
        """Return the state that `pack` packed. `vector` returns a vector by its name.

        Raises CheckpointError for anything that `pack` did not return.
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
                unpack_nested(training) if training else None,
                fields["after"],
            )
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise CheckpointError(
                f"the state of {name} in the checkpoint is damaged; start a new run"
            ) from error


def pack_nested(value: Any) -> bytes:
    """Return nested dicts, lists and tuples of tensors, numbers and strings as bytes: JSON, followed by the tensors as safetensors.

    Raises TaskError for values of other types, which a device cannot store.
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_tree(value, tensors), separators=(",", ":"))
    return tree.encode() + b"\n" + save_tensors(tensors)


def unpack_nested(packed: bytes) -> Any:
    """Return the value that `pack_nested` packed. Raises ValueError, KeyError or TypeError for other bytes."""
    tree, _, tensors = packed.partition(b"\n")
    return _value(json.loads(tree), load_tensors(tensors))


def _tree(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_tree(k, tensors), _tree(v, tensors)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_tree(part, tensors) for part in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TaskError(
        f"the state to keep contains a {type(value).__name__}; use tensors, numbers, strings, and dicts and lists of them"
    )


def _value(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_value(key, tensors): _value(value, tensors) for key, value in content}
    parts = [_value(part, tensors) for part in content]
    return parts if kind == "list" else tuple(parts)
