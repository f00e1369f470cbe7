"""The client half of a strategy: in which phases of a round clients take part, and what they answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .. import seeds
from ..codecs import Codec, Context
from ..errors import FedcompError, ProtocolError
from ..memories import Memory
from ..memories.base import of_row
from ..messages import TRAIN, Assignment


@dataclass
class Held:
    """What a client holds for the time of a round, from the phase that opens it on."""

    round: int
    loss: float  # of its training
    kept: dict[str, Any] = field(default_factory=dict)  # what the strategy's `Work` puts there


@dataclass(frozen=True)
class Work:
    """One proposal of the memory: made in the phase that opens the round, proceeded with in those after it.

    In the first of `phases`, and in no other, clients settle, download and train. It has no state: what a client holds from phase to
    phase is in its memory, or in `held`, which is the client's alone.
    """

    phases: tuple[str, ...] = (TRAIN,)

    def opens(self, assignment: Assignment, held: Held | None) -> bool:
        """Whether an assignment opens a round. Raises ProtocolError for one that the client has no part in, or was not there to open."""
        if assignment.phase not in self.phases:
            raise ProtocolError(f"this client has no part in a phase '{assignment.phase}'; both sides need the same strategy")
        first = self.phases[0]
        if assignment.phase != first and (held is None or held.round != assignment.round):
            raise ProtocolError(f"this client holds nothing of phase '{first}' of round {assignment.round}; ask it again in the next round")
        return assignment.phase == first

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        """Of the frame: the round's where frames have to add, else the client's own, so that rounding errors do not."""
        return seeds.key(run_seed, "encode", assignment.round, 0 if codec.shares_seed else assignment.client)

    def answer(self, memory: Memory, x: Tensor | None, held: dict[str, Any], seed: int, context: Context) -> bytes | None:
        """The frame for a phase, None for nothing. x [parts, numel] is what was trained, None after the phase that opens."""
        return memory.proceed(seed=seed, context=context) if x is None else memory.propose(x[0], seed=seed, context=context)

    def answer_stack(
        self, memories: Sequence[Memory], x: Tensor | None, held: Sequence[dict[str, Any]], seeds: Sequence[int], context: Context
    ) -> list[bytes | None | FedcompError]:
        """`answer` for a cohort; x [m, parts, numel] may be overwritten. An error in the place of a client that cannot answer."""
        if x is not None and type(self).answer is Work.answer:
            return type(memories[0]).propose_stack(memories, x[:, 0], seeds, context)
        answers: list[bytes | None | FedcompError] = []
        for i, memory in enumerate(memories):
            try:
                answers.append(self.answer(memory, None if x is None else x[i], held[i], seeds[i], of_row(context, i)))
            except FedcompError as error:
                answers.append(error)
        return answers
