"""EF21: error feedback that sends differences to an estimate of the update.

Richtárik, Sokolov, Fatkhullin: EF21: a new, simpler, theoretically better, and practically faster error feedback. NeurIPS 2021, algorithm
2.

    c = C(x − g) with the update x and the estimate g;  send c;  g ← g + c on both sides;  the server moves the model by the mean of all g

Clients outside the cohort, and clients whose reply is lost, count with the estimate g that the server stores for them, as in EF21-PP
(Fatkhullin, Sokolov, Gorbunov, Li, Richtárik 2021, "EF21 with bells & whistles"). In EF21-PP, every client has a g from the start. Here, a
client counts only after its first accepted update.
"""

from typing import ClassVar

from ..errors import MismatchError
from .base import Counterpart
from .shift import ShiftCounterpart, ShiftMemory, contraction


class EF21Counterpart(ShiftCounterpart):
    """The server's estimate g of every client's update. All clients that have an estimate count in every round."""

    counts_absent: ClassVar[bool] = True


class EF21(ShiftMemory):
    """A memory that sends the difference between an update and the server's estimate of it."""

    name: ClassVar[str] = "ef21"
    source: ClassVar[str] = "Richtárik et al. 2021"
    counterpart: ClassVar[type[Counterpart]] = EF21Counterpart

    def _check_codec(self) -> None:
        if contraction(self.codec, self.numel) <= 0:
            raise MismatchError(
                f"{{memory}} ef21 does not converge with {self.codec}, which does not contract; use {{uplink}} stc, or {{memory}} none"
            )
