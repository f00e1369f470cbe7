"""What a virtual client is between rounds, and how a checkpoint holds it: its vectors, and one small value for all the rest."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..compact_json import compact
from ..errors import CheckpointError, ConfigError
from ..memories import Memory

BUFFERS = "buffers"  # among a client's values in a checkpoint
MOMENTUM = "local-momentum"  # among its vectors


@dataclass
class Resting:
    """A client between rounds."""

    memory: Memory
    version: str
    ticket: str = ""  # of the proposal that waits in the memory
    buffers: dict[str, Tensor] | None = (
        None  # running statistics, and what the strategy's `Work` keeps, which stay with the client
    )
    momentum: Tensor | None = None  # where the client's last round left it, if it is kept
    after: str = ""  # ticket of the proposal that the memory last committed

    def move(self, moved: Callable[[Tensor], Tensor]) -> None:
        """Keep every vector as what `moved` gives for it: the same values, elsewhere."""
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


def name_of(client: int) -> str:
    """The name of a client's value in a checkpoint; its vectors are named `client/7.residual`."""
    return f"client/{client}"


def packed(name: str, state: Resting) -> tuple[dict[str, Tensor], bytes]:
    """A client's vectors [numel] by name, as they are, not copied; and the value `name` that says what belongs to it."""
    kept = state.memory.state_dict(copy=False)
    if state.momentum is not None:
        kept = kept | {MOMENTUM: state.momentum}
    mine: list[str] = []
    small: dict[str, bytes] = {}
    for key in sorted(kept):
        if isinstance(kept[key], Tensor):
            mine.append(key)
        else:
            small[key] = kept[key]
    if state.buffers:
        small[BUFFERS] = save_tensors(state.buffers)
    lengths = {key: len(value) for key, value in small.items()}
    record = {
        "version": state.version,
        "ticket": state.ticket,
        "after": state.after,
        "vectors": mine,
        "values": lengths,
    }
    return {f"{name}.{key}": kept[key] for key in mine}, b"\n".join(
        [compact(record).encode(), b"".join(small.values())]
    )


def unpacked(
    name: str,
    record: bytes,
    vector: Callable[[str], Tensor | None],
    make_memory: Callable[[], Memory],
) -> Resting:
    """What `packed` wrote down. Raises CheckpointError for anything else."""
    try:
        head, _, rest = record.partition(b"\n")
        fields = json.loads(head)
        ends = itertools.pairwise(itertools.accumulate(fields["values"].values(), initial=0))
        small = {key: rest[a:b] for key, (a, b) in zip(fields["values"], ends, strict=True)}
        memory, buffers = make_memory(), small.pop(BUFFERS, None)
        vectors = {key: vector(f"{name}.{key}") for key in fields["vectors"]}
        momentum = vectors.pop(MOMENTUM, None)
        memory.load_state_dict(vectors | small, copy=False)
        running = load_tensors(buffers) if buffers else None
        return Resting(
            memory, fields["version"], fields["ticket"], running, momentum, fields["after"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"what the checkpoint holds of {name} is damaged; start a new run"
        ) from error
