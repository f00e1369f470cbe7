"""Federated averaging of compressed updates.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized data. AISTATS 2017.
Updates and broadcasts are compressed, as in Sattler et al. 2019, algorithm 2. Client i sends C(a_i): its update plus the residual of its
memory, compressed by the uplink codec C. The server computes the weighted mean

    y = Σ w_i C(a_i) / Σ w_i.

The weight w_i is 1 (--weights uniform) or the number of examples of client i (--weights examples). With --weight-cap, it is at most
--weight-cap times the mean weight. With --clip-update c, the server multiplies each C(a_i) by min(1, c/‖C(a_i)‖₂). This is the norm bound
of Sun, Kairouz, Suresh, McMahan (Can you really backdoor federated learning? 2019). The client's memory does not keep the part that
clipping removes, because the client would otherwise send this part in a later round, in spite of the bound.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..codecs import Update, add_all
from ..codecs.update import Sections, Sparse
from ..kernels.sums import sum_squares
from ..memories import Counterpart
from .base import AcceptedUpdate, Aggregation, RoundStrategy, RoundUpdates

BLOCK = 1 << 17  # number of coordinates of a dense update that `norm` reads at a time


class Average(RoundStrategy):
    """The weighted mean of the updates."""

    name: ClassVar[str] = "average"
    supports_clipping: ClassVar[bool] = True

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        accepted, bound = updates.accepted, self.config.clip_update
        weights = self.client_weights(accepted)
        factors = [
            clip_factor(a.update, bound) if bound and a.update is not None else 1.0
            for a in accepted
        ]
        sent = [
            (a.update, weight * (factor * self.discount(a)))
            for a, weight, factor in zip(accepted, weights, factors, strict=True)
            if a.update is not None
        ]
        counterpart = self.counterpart
        if counterpart is None:
            add_all([update for update, _ in sent], [weight for _, weight in sent], into)
        else:  # updates may share a buffer, so add them one by one
            for update, weight in sent:
                update.add_to(into, weight)
        into.div_(sum(weights))
        if counterpart is not None and not bound:
            self._correct(counterpart, updates, weights, into)
        return Aggregation(clipped=sum(factor < 1 for factor in factors))

    def discount(self, accepted: AcceptedUpdate) -> float:
        """Return the factor d, from 0 to 1, by which an accepted update is multiplied.

        The mean is Σ w·d·update / Σ w. The divisor does not contain d, so a small d also reduces the norm of the mean.
        """
        return 1.0

    def _correct(
        self,
        counterpart: Counterpart,
        updates: RoundUpdates,
        weights: Sequence[float],
        into: Tensor,
    ) -> None:
        """Add the correction that the server half of the clients' memory (`counterpart`) computes to the mean `into` [numel]."""
        accepted = updates.accepted
        examples = {a.client: a.examples for a in accepted}
        examples |= {c: n for c, n in updates.examples.items() if c not in examples}
        fresh = {a.client for a in accepted if a.fresh}
        all_weights = self._weights_of(examples.values())
        n_clients = max(self.config.clients, updates.clients, len(examples))
        total = sum(all_weights) * n_clients / len(examples)
        fractions = {
            client: weight / total
            for client, weight in zip(examples, all_weights, strict=True)
            if client not in fresh
        }
        present = {
            a.client: weight * self.discount(a) / sum(weights)
            for a, weight in zip(accepted, weights, strict=True)
            if not a.fresh
        }
        correction = counterpart.correction(fractions, present)
        if correction is not None:
            correction.add_to(into)

    def weighted_updates(self, accepted: Sequence[AcceptedUpdate]) -> list[tuple[Update, float]]:
        """Return a pair (update, weight) for each client that sent an update. The weights of all accepted clients sum to 1."""
        weights = self.client_weights(accepted)
        return [
            (a.update, weight / sum(weights))
            for a, weight in zip(accepted, weights, strict=True)
            if a.update is not None
        ]

    def weighted_mean(self, accepted: Sequence[AcceptedUpdate], numel: int) -> Tensor:
        """Return the weighted mean of the accepted updates, float32 [numel]."""
        mean = torch.zeros(numel, dtype=torch.float32)
        for update, weight in self.weighted_updates(accepted):
            update.add_to(mean, weight)
        return mean

    def client_weights(self, accepted: Sequence[AcceptedUpdate]) -> list[float]:
        """Return the aggregation weights of the accepted clients, not normalized."""
        return self._weights_of([a.examples for a in accepted])

    def _weights_of(self, examples: Collection[int]) -> list[float]:
        by_examples = self.config.weights == "examples"
        weights = [float(n) if by_examples else 1.0 for n in examples]
        if not self.config.weight_cap:
            return weights
        cap = self.config.weight_cap * sum(weights) / len(weights)
        return [min(weight, cap) for weight in weights]


def clip_factor(update: Update, max_norm: float) -> float:
    """Return min(1, max_norm/‖update‖₂)."""
    length = norm(update)
    return max_norm / length if length > max_norm else 1.0


def norm(update: Update) -> float:
    """Return ‖update‖₂, where infinite values count as the largest float32, and NaN as 0."""
    return math.sqrt(_sum_squares(update))


def _sum_squares(update: Update) -> float:
    if isinstance(update, Sections):
        return math.fsum(_sum_squares(part) for _, part in update.parts)
    if isinstance(update, Sparse):
        blocks: Iterable[np.ndarray] = [update.values]
    else:
        starts = range(0, update.numel, BLOCK)
        blocks = (update.block(start, min(start + BLOCK, update.numel)) for start in starts)
    return math.fsum(sum_squares(torch.from_numpy(np.nan_to_num(block))) for block in blocks)
