"""Sketches that do not contract, found by reading the mean update of the first rounds as the server would.

Which vectors a sketch contracts is no promise of its size: it is a matter of how much of ‖x‖ lies in few coordinates. Where
‖x − C(x)‖ ≥ ‖x‖, reading takes away nothing of what waits, and a server that subtracts what it has read (Rothchild et al. 2020,
algorithm 1) holds more after every round. x is the plain mean of the updates: what has waited is flatter still, and read worse.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..codecs import Codec, LayerWise
from ..codecs.sketch import Sketch
from ..layout import Layout

ROUNDS = 3  # that are looked at
SURE = 0.95  # an error from which other rounds and seeds are below 1 as well
SURELY = 1.1  # an error from which every run diverged that was tried on MNIST; below it some still learned, without momentum


class Contraction:
    """Follows the first whole rounds of a run and warns once, if none was read to less than the length of its mean update.

    `feeds_back`: what is read is subtracted from what waits.
    """

    def __init__(self, warn: Callable[[str], None], feeds_back: bool = False):
        self.warn, self.feeds_back, self.over = warn, feeds_back, False
        self.errors: list[float] = []  # ‖x − C(x)‖/‖x‖ of the rounds that are whole
        self.round, self.total, self.count = (
            0,
            None,
            0,
        )  # of the round that runs: the sum of its updates, and how many they are
        self.sent: tuple[Codec, int, Layout | None]  # by which codec, with which seed and layout

    def resume(self, rounds: int) -> None:
        """Continue a run after so many rounds."""
        self.over |= rounds >= ROUNDS

    def look(
        self, round: int, codec: Codec, seed: int, layout: Layout | None, updates: Tensor
    ) -> None:
        """Before a part of a round's cohort sends `updates` [m, n], in frames of one seed."""
        if not isinstance(_inner(codec), Sketch):
            self.over = True
        if not self.over and round != self.round:
            self._measure()
            self.round, self.total, self.count, self.sent = round, None, 0, (codec, seed, layout)
        if not self.over:
            finite = updates[updates.isfinite().all(dim=1)]
            added = finite.sum(0, dtype=torch.float32)
            self.total = (
                added if self.total is None else self.total.add_(added.to(self.total.device))
            )
            self.count = self.count + len(finite)

    def _measure(self) -> None:
        """The round is whole."""
        if not self.count or not self.total.isfinite().all() or not self.total.any():
            return
        mean = self.total.cpu() / self.count
        self.errors.append(error(mean, *self.sent))
        self.over = self.errors[-1] < 1 or len(self.errors) == ROUNDS
        if min(self.errors) >= 1 and self.over:
            self.warn(self._sentence(mean))

    def _sentence(self, mean: Tensor) -> str:
        codec, seed, layout = self.sent
        size = (
            f"of {_inner(codec).rows} rows a tensor"
            if isinstance(codec, LayerWise)
            else f"{codec.rows} × {codec.width(mean.numel())}"
        )
        away = f"{min(self.errors):.2f} to {max(self.errors):.2f} of its length"
        will = "will" if min(self.errors) >= SURELY else "may"
        so = (
            f"what is misread is fed back, and this size {will} diverge"
            if self.feeds_back
            else (
                f"this is more noise than update, and error feedback by subtraction {will} diverge at this size"
            )
        )
        wide, found = enough(mean, codec, seed, layout)
        fix = (
            f"use --uplink {written(wide)} ({found:.2f})"
            if wide
            else "nor does any doubling, use --uplink topk"
        )
        when = f"in {len(self.errors)} rounds up to {self.round}"
        return f"a sketch {size} does not contract, {fix}: {when} it read the mean update {away} away; {so}"


def error(x: Tensor, codec: Codec, seed: int, layout: Layout | None) -> float:
    """‖x − C(x)‖/‖x‖ of a finite x [n] that is not zero."""
    x = torch.ldexp(
        x, -torch.frexp(x.abs().max()).exponent
    )  # no square is too large, and cells are rounded as they are
    read = codec.decode(codec.encode(x, seed=seed, layout=layout), numel=x.numel(), layout=layout)
    return float(torch.linalg.vector_norm(x - read) / torch.linalg.vector_norm(x))


def enough(x: Tensor, codec: Codec, seed: int, layout: Layout | None) -> tuple[Codec | None, float]:
    """The first codec with twice the columns, four times … whose error of x is clearly below 1, else the best, and that error."""
    best: tuple[Codec | None, float] = None, 1.0
    while best[1] >= SURE and (codec := _doubled(codec, x.numel())) is not None:
        best = min(best, (codec, error(x, codec, seed, layout)), key=lambda pair: pair[1])
    return best


def _doubled(codec: Codec, numel: int) -> Codec | None:
    if isinstance(codec, LayerWise):
        wide = _doubled(codec.inner, numel)
        return wide and LayerWise(wide)
    if codec.width(numel) >= numel:
        return None
    return (
        replace(codec, columns=2 * codec.columns)
        if codec.columns
        else replace(codec, ratio=codec.ratio / 2)
    )


def written(codec: Codec) -> str:
    """The spec string: rows, and what is not as usual."""
    if isinstance(codec, LayerWise):
        return f"{written(codec.inner)}@layer"
    name, _, options = str(codec).partition(":")
    usual = str(Sketch()).partition(":")[2].split(",")[1:]
    return f"{name}:" + ",".join(option for option in options.split(",") if option not in usual)


def _inner(codec: Codec) -> Codec:
    return codec.inner if isinstance(codec, LayerWise) else codec
