"""The base class of memories whose state is one or more vectors.

A subclass names the vectors and writes `_update_vectors`, a pure function of one update. It overrides `_on_accepted` if an accepted update
changes more than the residual.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs import Codec, Context, Update, at_density
from ..codecs.checks import nonfinite_errors
from ..codecs.selection import Selective
from ..errors import ConfigError, MismatchError, NonFiniteError
from ..kernels import Rows
from .base import Memory, State, add_saturating

NamedVectors = Mapping[str, Tensor]  # name → vector [numel]


class VectorMemory(Memory):
    """A memory of vectors [numel], float32, on the device of the last update; each is None while it is zero."""

    vectors: ClassVar[tuple[str, ...]] = ("residual",)  # names of attributes

    def _update_vectors(
        self, vectors: NamedVectors, x: Tensor, context: Context
    ) -> tuple[NamedVectors, Tensor]:
        """Return the vectors after the update x [numel], and the vector to encode. The arguments are not modified.

        The returned vectors must be valid even if no frame is ever accepted. `context.moments` are [numel].
        """
        raise NotImplementedError(f"{type(self).__name__} has neither _update_vectors nor _propose")

    def _on_accepted(self, update: Update, dropped: Update | None) -> None:
        add_saturating(self.residual, update, -1.0)
        if dropped is not None:
            add_saturating(self.residual, dropped)

    @classmethod
    def _propose(
        cls, memories: Sequence["VectorMemory"], x: Rows, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        rows, layout = [row.to(torch.float32) for row in x], memories[0].layout
        updated, send = zip(
            *(
                memory._update_vectors(memory._vectors_on(rows[0]), row, context.row(i))
                for i, (memory, row) in enumerate(zip(memories, rows, strict=True))
            ),
            strict=True,
        )
        proposals = cls._encode(memories, send, seeds, context)
        what = "the residual with the update added"
        checks = [nonfinite_errors([new[n] for new in updated], layout, what) for n in cls.vectors]
        checks.append(nonfinite_errors(rows, layout, "the update"))
        for errors in checks:
            proposals = [error or frame for error, frame in zip(errors, proposals, strict=True)]
        for memory, new, proposal in zip(memories, updated, proposals, strict=True):
            if not isinstance(proposal, NonFiniteError):
                for name in cls.vectors:
                    setattr(memory, name, new[name])
        return proposals

    def _vectors_on(self, like: Tensor) -> NamedVectors:
        """Return the vectors, on the device of a float32 vector [numel]."""
        vectors = {name: getattr(self, name) for name in self.vectors}
        return {
            name: torch.zeros_like(like) if vector is None else vector.to(like.device)
            for name, vector in vectors.items()
        }

    def _state(self) -> State:
        vectors = {name: getattr(self, name) for name in self.vectors}
        return super()._state() | {
            name: torch.zeros(self.numel, dtype=torch.float32) if vector is None else vector
            for name, vector in vectors.items()
        }

    def _load_state(self, state: State) -> None:
        missing = [name for name in self.vectors if name not in state]
        if "pending" in state and missing:
            raise ConfigError(
                f"the state has a pending proposal but no '{missing[0]}'; pass the whole state_dict()"
            )
        super()._load_state(state)
        for name in self.vectors:
            setattr(self, name, state.get(name))


def at_full_density(codec: Codec, name: str) -> Codec:
    """Return the codec at density 1, for the memory `name`, which selects coordinates itself. Raises ConfigError for other codecs."""
    if not isinstance(codec.unscoped, Selective) or codec.unscoped.draws:
        raise MismatchError(
            f"{{memory}} {name} selects the coordinates itself, and {codec} cannot send a selection; use {{uplink}} topk or stc"
        )
    return at_density(codec, 1.0)
