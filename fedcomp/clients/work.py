"""The client half of a strategy: in which phases of a round clients take part, and what they answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import seeds
from ..codecs import Codec, Context
from ..errors import FedcompError, ProtocolError
from ..layout import Layout
from ..memories import Memory
from ..memories.base import of_row
from ..messages import TRAIN, Assignment
from ..training.local_sgd import LocalSGD


@dataclass
class Held:
    """What a client holds for the time of a round, from the phase that opens it on."""

    round: int
    loss: float  # of its training
    kept: dict[str, Any] = field(default_factory=dict)  # what the strategy's `Work` puts there


@dataclass(frozen=True)
class Part:
    """Training data that several clients train on, with one result: what is drawn for it is keyed by its number."""

    number: int
    data_sets: tuple[int, ...]  # by the logical ids of the clients whose shards they are


@dataclass(frozen=True)
class Work:
    """One proposal of the memory: made in the phase that opens the round, proceeded with in those after it.

    In the first of `phases`, and in no other, clients settle, download and train. It has no state: what a client holds from phase to
    phase is in its memory, or in `held`, which is the client's alone.
    """

    phases: tuple[str, ...] = (TRAIN,)

    shares: ClassVar[bool] = False  # trains on parts of the data that others train on too

    def opens(self, assignment: Assignment, held: Held | None) -> bool:
        """Whether an assignment opens a round. Raises ProtocolError for one that the client has no part in, or was not there to open."""
        if assignment.phase not in self.phases:
            raise ProtocolError(
                f"this client has no part in a phase '{assignment.phase}'; both sides need the same strategy"
            )
        first = self.phases[0]
        if assignment.phase != first and (held is None or held.round != assignment.round):
            raise ProtocolError(
                f"this client holds nothing of phase '{first}' of round {assignment.round}; ask it again in the next round"
            )
        return assignment.phase == first

    def outlasting(self, held: Held | None, assignment: Assignment) -> dict[str, Any]:
        """What a client holds from the start of the round that an assignment opens, given what it `held` of the one before."""
        return {}

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        """Of the frame: the round's where frames have to add, else the client's own, so that rounding errors do not."""
        return seeds.key(
            run_seed, "encode", assignment.round, 0 if codec.shares_seed else assignment.client
        )

    def parts(self, assignment: Assignment) -> Sequence[Part]:
        """What to train on in place of the client's own data, part by part from the same weights; () = the client's own."""
        return ()

    def keep(self, part: Part, update: Tensor, seed: int, round: int) -> Any:
        """What is kept of the update [numel] of a part. `seed` is the run's."""
        return update

    def join(self, assignment: Assignment, kept: Sequence[Any], numel: int, seed: int) -> Tensor:
        """The client's update [numel], on the CPU, of what was kept of its parts, in their order. `seed` is the run's."""
        raise ProtocolError("this client half makes nothing of parts")

    # What travels besides the weights of the model: in most strategies nothing.

    def travels(self, layout: Layout) -> Layout:
        """Of the vectors that go up and down and have versions, given the model's."""
        return layout

    def first(self, weights: Tensor) -> Tensor:
        """Such a vector before round 1, given the model's weights."""
        return weights

    def model(self, state: Tensor) -> Tensor:
        """The model's weights in such a vector, not copied."""
        return state

    def pull(self, state: Tensor, kept: Mapping[str, Tensor], sgd: LocalSGD) -> Tensor | None:
        """What local SGD adds to every gradient; None: nothing. `kept`: what the client keeps by name. `sgd`: the run's options."""
        return None

    def trained(
        self, update: Tensor, state: Tensor, kept: Mapping[str, Tensor], sgd: LocalSGD, path: float
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What a client proposes, given the update of its model, and what it keeps from then on beside its buffers.

        `path`: the sum of the learning rates of its steps.
        """
        return update, {}

    def trained_stack(
        self,
        updates: Tensor,
        state: Tensor,
        kept: Sequence[Mapping[str, Tensor]],
        sgd: LocalSGD,
        paths: Sequence[float],
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor]]]:
        """`trained` for a cohort; updates [m, n], what is proposed [m, numel]."""
        if type(self).trained is Work.trained or not len(updates):
            return updates, [{}] * len(updates)
        state = state.to(updates.device)
        made = [
            self.trained(update, state, own, sgd, path)
            for update, own, path in zip(updates, kept, paths, strict=True)
        ]
        return torch.stack([x for x, _ in made]), [own for _, own in made]

    def hear(
        self, memory: Memory, held: dict[str, Any], seed: int, context: Context
    ) -> Tensor | None:
        """What a client makes [numel] of what it is told in a phase after the one that opens; None: it only proceeds."""
        return None

    def answer(
        self, memory: Memory, x: Tensor | None, held: dict[str, Any], seed: int, context: Context
    ) -> bytes | None:
        """The frame for a phase, None for nothing. x [1, numel] is what was trained or made of what was heard, else None."""
        return (
            memory.proceed(seed=seed, context=context)
            if x is None
            else memory.propose(x[0], seed=seed, context=context)
        )

    def answer_stack(
        self,
        memories: Sequence[Memory],
        x: Tensor | None,
        held: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        context: Context,
    ) -> list[bytes | None | FedcompError]:
        """`answer` for a cohort; x [m, 1, numel] may be overwritten. An error in the place of a client that cannot answer."""
        if x is not None and type(self).answer is Work.answer:
            return type(memories[0]).propose_stack(memories, x[:, 0], seeds, context)
        answers: list[bytes | None | FedcompError] = []
        for i, memory in enumerate(memories):
            try:
                answers.append(
                    self.answer(
                        memory, None if x is None else x[i], held[i], seeds[i], of_row(context, i)
                    )
                )
            except FedcompError as error:
                answers.append(error)
        return answers
