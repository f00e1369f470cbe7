"""The base class of memories whose state is one or more vectors.

A subclass names the vectors and writes `_update_vectors`, a pure function of one update. It overrides `_on_accepted` if an accepted update
changes more than the residual.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs import Codec, Context, Update, at_density
from ..codecs.checks import nonfinite_rows
from ..codecs.selection import Selective
from ..errors import ConfigError, MismatchError, NonFiniteError
from ..kernels import Rows
from .base import Memory, State, add_saturating

NamedVectors = Mapping[str, Tensor]  # name of a vector → the vector [numel]


class VectorMemory(Memory):
    """A memory of vectors [numel], float32, on the device of the last update; each is None while it is zero."""

    vectors: ClassVar[tuple[str, ...]] = ("residual",)  # names of the attributes

    def _update_vectors(
        self, kept: NamedVectors, x: Tensor, context: Context
    ) -> tuple[NamedVectors, Tensor]:
        """Return the vectors after the update x [numel], and the vector to encode. The arguments are not modified.

        The returned vectors must hold if no frame is ever accepted. `context.moments` are [numel].
        """
        raise NotImplementedError(f"{type(self).__name__} has neither _move nor _propose")

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        add_saturating(self.residual, update, -1.0)
        if dropped is not None:
            add_saturating(self.residual, dropped)

    @classmethod
    def _propose(
        cls, memories: Sequence["VectorMemory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        rows, layout = [row.to(torch.float32) for row in x], memories[0].layout
        moved, send = zip(
            *(
                memory._update_vectors(memory._vectors_on(rows[0]), row, context.row(i))
                for i, (memory, row) in enumerate(zip(memories, rows, strict=True))
            ),
            strict=True,
        )
        proposals = cls._encode(memories, send, seeds, context)
        what = "the residual with the update added"
        found = [nonfinite_rows([kept[n] for kept in moved], layout, what) for n in cls.vectors]
        found.append(nonfinite_rows(rows, layout, "the update"))
        for errors in found:
            proposals = [error or made for error, made in zip(errors, proposals, strict=True)]
        for memory, kept, proposal in zip(memories, moved, proposals, strict=True):
            if not isinstance(proposal, NonFiniteError):
                for name in cls.vectors:
                    setattr(memory, name, kept[name])
        return proposals

    def _vectors_on(self, like: Tensor) -> NamedVectors:
        """Return the vectors, on the device of a float32 vector [numel]."""
        held = {name: getattr(self, name) for name in self.vectors}
        return {
            name: torch.zeros_like(like) if vector is None else vector.to(like.device)
            for name, vector in held.items()
        }

    def _state(self) -> State:
        kept = {name: getattr(self, name) for name in self.vectors}
        return super()._state() | {
            name: torch.zeros(self.numel, dtype=torch.float32) if vector is None else vector
            for name, vector in kept.items()
        }

    def _load_state(self, state: State) -> None:
        missing = [name for name in self.vectors if name not in state]
        if "pending" in state and missing:
            raise ConfigError(
                f"the state holds a waiting proposal without its {missing[0]}; give the whole state_dict()"
            )
        super()._load_state(state)
        for name in self.vectors:
            setattr(self, name, state.get(name))


def at_full_density(codec: Codec, name: str) -> Codec:
    """Return the codec at density 1, for the memory `name`, which chooses coordinates itself. Raises ConfigError for other codecs."""
    if not isinstance(codec.unscoped, Selective) or codec.unscoped.draws:
        raise MismatchError(
            f"{{memory}} {name} chooses the coordinates itself, which {codec} cannot carry; use {{uplink}} topk or stc"
        )
    return at_density(codec, 1.0)
