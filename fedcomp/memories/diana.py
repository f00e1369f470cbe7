"""DIANA, for unbiased codecs: a client sends the compressed difference between its update and a learned shift.

Mishchenko, Gorbunov, Takáč and Richtárik, "Distributed learning with compressed gradient differences", 2019, algorithm 1. With the update
x, the client's shift h, and the codec C with variance bound ω (`Codec.variance`):

    send C(x − h);  client and server set h ← h + α·C(x − h), with α ≤ 1/(1 + ω).
    The server's update is the mean of h over all clients, plus the mean of C(x − h) over the clients in the round. It is an unbiased
    estimate of the mean update of all clients.

With `@layer`, ω is the largest variance bound among the tensors. The server stores the shift of each client, not only the mean of all
shifts, so that it can reset the shift of a client that lost its state. Before the first accepted update of a client, its shift h is 0. With
a robust strategy or `--clip-update`, which must bound the influence of each client, the server instead aggregates h + C(x − h) of the
clients in the round, and ignores the shifts of all other clients.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..codecs import Codec, LayerWise, Update
from ..codecs.update import Dense
from ..errors import MismatchError
from .shift import ShiftCounterpart, ShiftMemory


@dataclass(frozen=True)
class DianaOptions:
    # α: step size of the shift, above 0 and at most 1/(1 + ω), where ω is the codec's variance bound; None = 1/(1 + ω)
    alpha: float | None = None


class DianaCounterpart(ShiftCounterpart):
    """The server's part of DIANA: the shifts of all clients."""

    def correction(
        self, weights: Mapping[int, float], present: Mapping[int, float]
    ) -> Update | None:
        total = torch.zeros(self.numel, dtype=torch.float64)
        for client in sorted(self.clients & (weights.keys() | present.keys())):
            counted = present.get(client, 0.0) * self.rates.get(client, self.rate)
            if weight := weights.get(client, 0.0) * self.rate - counted:
                total.add_(self.shift_of(client), alpha=weight)
        return Dense(total.to(torch.float32).numpy())


class Diana(ShiftMemory):
    """The client's part of DIANA."""

    name = "diana"
    source = "Mishchenko et al. 2019"
    Options = DianaOptions
    counterpart = DianaCounterpart

    def _check_codec(self) -> None:
        bound = self._bound(self.codec)
        if bound is None:
            raise MismatchError(
                f"{{memory}} diana needs an unbiased codec, and {self.codec} is biased; use {{uplink}} qsgd, or {{memory}} ef21"
            )
        if not 0 < self.step <= bound:
            raise MismatchError(
                f"{{memory}} diana: alpha is {self.step:g}; with {self.codec} it must be above 0 and at most {bound:g}"
            )

    @property
    def step(self) -> float:
        """The step size α of the shift. A density schedule does not change α, so that client and server always have the same α."""
        alpha = self.options.alpha
        return self._bound(self._configured_codec) if alpha is None else alpha

    def _bound(self, codec: Codec) -> float | None:
        if isinstance(codec, LayerWise) and self.layout is not None:
            omegas = [codec.inner.variance(e.numel) for e in self.layout if e.numel]
            omega = None if None in omegas else max(omegas, default=0.0)
        else:
            omega = codec.variance(self.numel)
        return None if omega is None else 1 / (1 + omega)
