"""EF21: error feedback in which a client sends the compressed difference between its update and the server's estimate of this update.

Richtárik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically faster error feedback", NeurIPS 2021,
algorithm 2. With the update x, the server's estimate g of the update, and the codec C:

    c = C(x − g);  send c;  client and server set g ← g + c;  the server moves the model by the mean of all g.

If a client is not in the round, or its reply is lost, the server's estimate g of its last accepted update still counts in the mean, as in
EF21-PP (Fatkhullin, Sokolov, Gorbunov, Li and Richtárik, "EF21 with bells & whistles", 2021). In EF21-PP, every client has an estimate from
the start. In fedcomp, a client has no estimate before its first accepted update. Until then, it does not count in the mean.
"""

from ..codecs.product import contraction
from ..errors import MismatchError
from .shift import ShiftCounterpart, ShiftMemory


class EF21Counterpart(ShiftCounterpart):
    """The server's estimates of the clients' updates. The mean of every round includes all estimates."""

    counts_absent = True


class EF21(ShiftMemory):
    """The client's part of EF21."""

    name = "ef21"
    source = "Richtárik et al. 2021"
    counterpart = EF21Counterpart

    def _check_codec(self) -> None:
        if not contraction(self.codec, self.numel):
            raise MismatchError(
                f"{{memory}} ef21 does not converge with {self.codec}, which is not contractive; use {{uplink}} stc, or {{memory}} none"
            )
