"""What memories share that move several vectors with every update, for a cohort at once.

An author names the vectors and writes how they move, `_move`, as a pure function of stacks; and, where what arrived touches more than
the residual, `_taken`. A proposal by itself is a stack of one.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs import Codec, Context, LayerWise, Update
from ..codecs.base import NO_CONTEXT, nonfinite_rows
from ..codecs.selection import Selective
from ..errors import ConfigError, MismatchError, NonFiniteError
from .base import Memory, State, add_within

Stacks = Mapping[str, Tensor]  # name of a vector → its rows [m, numel]


class Vectors(Memory):
    """A memory of vectors [numel], float32, on the device of the last update; each is None while it is zero."""

    vectors: ClassVar[tuple[str, ...]] = ("residual",)  # names of the attributes

    @abstractmethod
    def _move(self, kept: Stacks, x: Tensor, context: Context) -> tuple[Stacks, Tensor]:
        """The vectors [m, numel] after the updates x [m, numel], and what is to be encoded of each; nothing that is given is changed.

        What it gives must hold if no frame is ever taken. `context.moments` are [m, numel].
        """

    def _taken(self, update: Update, dropped: Update | None) -> None:
        """`update` arrived, but for what was `dropped` of it."""
        add_within(self.residual, update, -1.0)
        if dropped is not None:
            add_within(self.residual, dropped)

    def _propose(self, x: Tensor, seed: int, context: Context) -> bytes:
        alone = context.moments and (context.moments[0][None], context.moments[1][None])
        (proposal,) = self._propose_rows(
            [self], x.detach()[None].to(torch.float32), [seed], replace(context, moments=alone)
        )
        if isinstance(proposal, NonFiniteError):
            raise proposal
        return proposal

    @classmethod
    def propose_stack(
        cls,
        memories: Sequence["Vectors"],
        x: Tensor,
        seeds: Sequence[int],
        context: Context = NO_CONTEXT,
    ) -> list[bytes | None | NonFiniteError]:
        if not memories:
            return []
        for memory, row in zip(memories, x, strict=True):
            memory._check_ready(row)
        proposals = memories[0]._propose_rows(
            memories, x.detach().to(torch.float32), seeds, context
        )
        for memory, proposal in zip(memories, proposals, strict=True):
            memory.pending = None if isinstance(proposal, NonFiniteError) else proposal
        return proposals

    @classmethod
    def commit_stack(cls, memories: Sequence["Vectors"]) -> None:
        if memories:
            first = memories[0]
            taken = first.codec.open_batch(
                [memory._settle() for memory in memories], first.numel, first.layout
            )
            for memory, update in zip(memories, taken, strict=True):
                memory._taken(update, None)

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

    def _commit(self, frame: bytes, dropped: Update | None) -> None:
        self._taken(self.codec.open(frame, self.numel, self.layout), dropped)

    def _rollback(self, frame: bytes) -> None: ...

    def _propose_rows(
        self, memories: Sequence["Vectors"], x: Tensor, seeds: Sequence[int], context: Context
    ) -> list[bytes | NonFiniteError]:
        """Proposals for updates x [m, numel], float32; the vectors of those that can be sent are moved."""
        kept = {
            name: _stacked([getattr(memory, name) for memory in memories], x)
            for name in self.vectors
        }
        moved, send = self._move(kept, x, context)
        proposals = self.codec.encode_batch(send, seeds, layout=self.layout, context=context)
        for vector, what in (
            *((moved[name], "the residual with the update added") for name in self.vectors),
            (x, "the update"),
        ):
            found = nonfinite_rows(vector, self.layout, what)
            proposals = [
                error or proposal for error, proposal in zip(found, proposals, strict=True)
            ]
        for i, (memory, proposal) in enumerate(zip(memories, proposals, strict=True)):
            if not isinstance(proposal, NonFiniteError):
                for name in self.vectors:
                    row = moved[name][i]
                    setattr(
                        memory, name, row if len(memories) == 1 else row.clone()
                    )  # a view would keep the whole stack
        return proposals


def _stacked(vectors: Sequence[Tensor | None], like: Tensor) -> Tensor:
    """Vectors as a stack [m, numel] on the device of `like`."""
    if len(vectors) == 1 and vectors[0] is not None:
        return vectors[0][None].to(like.device)
    zero = like.new_zeros(like.shape[1])
    return torch.stack([zero if vector is None else vector.to(like.device) for vector in vectors])


def at_full_density(codec: Codec, name: str) -> Codec:
    """The codec as it sends all that is not zero, for the memory `name`, which chooses coordinates. Raises ConfigError where it cannot."""
    inner = codec.inner if isinstance(codec, LayerWise) else codec
    if not isinstance(inner, Selective) or inner.draws:
        raise MismatchError(
            f"memory '{name}' chooses the coordinates itself, which {codec} cannot carry; use {{uplink}} topk or stc"
        )
    return codec.at_density(1.0)
