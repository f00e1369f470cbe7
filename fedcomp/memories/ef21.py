"""Error feedback by differences.

Richtárik, Sokolov, Fatkhullin: EF21: a new, simpler, theoretically better, and practically faster error
feedback. NeurIPS 2021, algorithm 2.

    c = C(x − g), send c;  g ← g + c on both sides;  the server moves the model by the mean of all g

Clients that are not asked, or whose reply is lost, count with the g that the server has: EF21-PP (Fatkhullin, Sokolov, Gorbunov, Li,
Richtárik: EF21 with bells & whistles. 2021). Unlike there, a client counts only once it was first taken, where they begin
with a g of everybody.
"""

from typing import ClassVar

from ..errors import MismatchError
from .base import Counterpart
from .shift import ShiftCounterpart, ShiftMemory, contraction


class EF21Counterpart(ShiftCounterpart):
    """g of every client, all of which count in every round."""

    counts_absent: ClassVar[bool] = True


class EF21(ShiftMemory):
    """Sends what the server's estimate of the update lacks."""

    name: ClassVar[str] = "ef21"
    source: ClassVar[str] = "Richtárik et al. 2021"
    counterpart: ClassVar[type[Counterpart]] = EF21Counterpart

    def _check_codec(self) -> None:
        if contraction(self.codec, self.numel) <= 0:
            raise MismatchError(
                f"{{memory}} ef21 gets nowhere with {self.codec}, which does not contract; use {{uplink}} stc, or {{memory}} none"
            )
