"""Error accumulation: what was not sent is added to the next update.

Seide, Fu, Droppo, Li, Yu: 1-bit stochastic gradient descent. Interspeech 2014. Stich, Cordonnier, Jaggi: Sparsified
SGD with memory. NeurIPS 2018. Karimireddy, Rebjock, Stich, Jaggi: Error feedback fixes SignSGD. ICML 2019.

    a = x + e;  send C(a);  e ← a − C(a) when it was accepted, e ← a when it was not

so that at every moment Σ accepted + e = Σ inputs, to rounding. The subtraction waits for the news: until then
`residual` holds a, and a rollback has nothing to undo.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ..codecs import Codec, Context, Update
from ..codecs.base import NO_CONTEXT
from ..errors import ConfigError, MismatchError, NonFiniteError
from ..kernels.backend import compile_vector
from ..kernels.parallel import starmap
from .base import Memory, State, add_all_within, add_within, of_row


class Residual(Memory):
    """Error feedback: a residual [numel] in float32, on the device of the last update."""

    name: ClassVar[str] = "residual"
    source: ClassVar[str] = "Seide et al. 2014, Stich et al. 2018"

    def check_codec(self) -> None:
        if self.codec.contraction(self.numel) is None:
            raise MismatchError(
                f"memory 'residual' diverges with {self.codec}, which does not contract; use {{memory}} none, "
                f"or {{uplink}} {_contracting(self.codec, self.numel)}"
            )

    def _propose(self, x: Tensor, seed: int, context: Context) -> bytes:
        self._follow(x)
        if self.residual is None:
            self.residual = torch.zeros(self.numel, dtype=torch.float32, device=x.device)
        return self.codec.encode_added(
            self.residual, x.to(torch.float32), seed=seed, layout=self.layout, context=context
        )

    @classmethod
    def propose_stack(
        cls,
        memories: Sequence["Residual"],
        x: Tensor,
        seeds: Sequence[int],
        context: Context = NO_CONTEXT,
    ) -> list[bytes | None | NonFiniteError]:
        if not memories:
            return []
        if x.device.type == "cpu" and compile_vector(x.shape[1]):
            return starmap(
                partial(_proposed, context),
                list(zip(range(len(memories)), memories, x.unbind(), seeds, strict=True)),
            )
        cls._check_all_ready(memories, x)
        first, x = memories[0], x.to(torch.float32)
        rows = list(x.unbind())
        for memory, row in zip(memories, rows, strict=True):
            memory._follow(row)
        kept = [
            (row, memory.residual)
            for memory, row in zip(memories, rows, strict=True)
            if memory.residual is not None
        ]
        fresh = [row for memory, row in zip(memories, rows, strict=True) if memory.residual is None]
        if kept:
            torch._foreach_add_(*map(list, zip(*kept, strict=True)))  # one launch
        if fresh:
            torch._foreach_add_(fresh, 0.0)  # makes of −0 what propose() makes of it
        proposals = first.codec.encode_batch(x, seeds, layout=first.layout, context=context)
        held: tuple[list[Tensor], list[Tensor]] = ([], [])  # residuals, and what they become
        for memory, row, proposal in zip(memories, rows, proposals, strict=True):
            if isinstance(proposal, NonFiniteError):
                continue
            memory.pending = proposal
            if memory.residual is None:
                memory.residual = row.clone()
            else:
                held[0].append(memory.residual)
                held[1].append(row)
        if held[0]:
            torch._foreach_copy_(*held)
        return proposals

    @classmethod
    def commit_stack(cls, memories: Sequence["Residual"]) -> None:
        if memories:
            first = memories[0]
            taken = first.codec.open_batch(
                [memory._settle() for memory in memories], first.numel, first.layout
            )
            add_all_within([memory.residual for memory in memories], taken, -1.0)

    def _commit(self, frame: bytes, dropped: Update | None) -> None:
        add_within(self.residual, self.codec.open(frame, self.numel, self.layout), -1.0)
        if dropped is not None:
            add_within(self.residual, dropped)

    def _rollback(self, frame: bytes) -> None: ...

    def _follow(self, x: Tensor) -> None:
        """Bring the residual to where the updates are."""
        if self.residual is not None:
            self.residual = self.residual.to(x.device)

    def _state(self) -> State:
        residual = (
            torch.zeros(self.numel, dtype=torch.float32) if self.residual is None else self.residual
        )
        return super()._state() | {"residual": residual}

    def _load_state(self, state: State) -> None:
        if "pending" in state and "residual" not in state:
            raise ConfigError(
                "the state holds a waiting proposal without its residual; give the whole state_dict()"
            )
        super()._load_state(state)
        self.residual = state.get("residual")


def _proposed(
    context: Context, place: int, memory: Residual, x: Tensor, seed: int
) -> bytes | NonFiniteError:
    """The frame of one of a stack, at `place` of it: large vectors are passed over once, each by a thread."""
    try:
        return memory.propose(x, seed=seed, context=of_row(context, place))
    except NonFiniteError as error:
        return error


def _contracting(codec: Codec, numel: int) -> str:
    """The codec with an option changed so that it contracts; stc where there is no such option."""
    return next(
        (str(other) for other in _tamer(codec) if other.contraction(numel) is not None), "stc"
    )


def _tamer(codec: Codec) -> Iterator[Codec]:
    """A codec with what makes it unbiased turned off, in itself or in what it is made of."""
    options = {f.name for f in fields(codec)}
    if "damped" in options:
        yield replace(codec, damped=True)
    if "scaled" in options:
        yield replace(codec, scaled=False)
    for part in ("inner", "first", "second"):
        if part in options:
            yield from (replace(codec, **{part: other}) for other in _tamer(getattr(codec, part)))
