"""`fedcomp sim --dry-run`: what would be sent, without training and without a folder.

The rounds are gone through as in a run, by the same strategy, codecs and memories; in place of training, a client's update is made up: that
of one client that did train the initial model, each coordinate times a normal value. So frames whose length does not depend on what is in
them are as long as in the run, and others about as long.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from .. import seeds
from ..baseline import dense, is_dense
from ..callbacks import Callback
from ..codecs import longest_frame
from ..config import RunConfig
from ..errors import FedcompError
from ..formatting import NOTHING, human_bytes, ratio
from ..sim.run import Simulation
from ..strategies.cohort import size as cohort_size
from ..tasks import Data, initial_model
from ..training.batches import plan_batches
from ..training.engine import Done, Job
from ..training.local_sgd import LocalSGD, SerialEngine
from .comparison.alternatives import Alternative, refused
from .results import OF_DENSE, OF_FLOATS

COORDINATES = (
    100_000_000  # of updates that are made up; the rounds beyond are reckoned from those before
)
FEWEST = 3  # rounds that are gone through
HEAD = (
    "",
    "frame up",
    "longest",
    "frame down",
    "up a round",
    "down a round",
    "up",
    "down",
    "ratio",
)


@dataclass(frozen=True)
class Forecast:
    """What an alternative would send. Sizes of frames are the shortest and the longest that were made."""

    name: str
    parameters: int
    tensors: int
    rounds: int
    rehearsed: int  # rounds that were gone through
    frame_up: tuple[int, int]  # what a client sends in a round
    longest_up: int | None  # that a frame of this codec can be; None where the codec knows no bound
    frame_down: tuple[int, int]  # the broadcast of a round
    longest_down: int | None
    uplink_bytes: int  # of the run
    downlink_bytes: int
    dense_bytes: int  # of the same exchanges in 32-bit floats, both ways

    @property
    def sent_bytes(self) -> int:
        """Bytes of the run, both ways."""
        return self.uplink_bytes + self.downlink_bytes

    @property
    def exact(self) -> bool:
        """Whether the run will send these bytes, as long as every client answers."""
        full = self.frame_up == (self.longest_up, self.longest_up) and self.frame_down == (
            self.longest_down,
            self.longest_down,
        )
        return full and self.rehearsed == self.rounds


class Imagined:
    """An engine that makes updates up, like the `model` one [n] of a client that trained."""

    def __init__(self, model: Tensor, device: torch.device):
        self.model, self.device = model, device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[Done | Exception]]:
        rows = [
            np.asarray(
                seeds.generator(seed, "imagined", job.round, job.who).standard_normal(
                    len(self.model)
                ),
                np.float32,
            )
            for job in jobs
        ]
        factors = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, len(self.model))
        return (factors * self.model).to(self.device), [Done(0.0)] * len(jobs)

    def resident(self, data: Data) -> Data:
        return data

    def close(self) -> None: ...


class Rehearsal(Simulation):
    """A simulation whose clients do not train."""

    def _engine(
        self, model: torch.nn.Module, weights: Tensor, data: Data, shard: np.ndarray
    ) -> Any:
        sgd = dataclasses.replace(self.sgd, augment=False)
        trained = SerialEngine(
            self.task, initial_model(self.task, self.config.seed), self.layout, self.device
        ).train(
            weights.to(self.device),
            data,
            plan_batches(sgd, shard, self.config.seed, 1, 0)[:5],
            sgd,
            seed=self.config.seed,
        )
        return Imagined(trained.update.cpu(), self.device)


def forecast(alternative: Alternative) -> Forecast:
    """Go through the rounds of an alternative. Raises UserError for one that cannot be."""
    config = RunConfig(
        **{
            name: value
            for name, value in alternative.values.items()
            if name not in ("out", "resume")
        }
    )
    rehearsal = Rehearsal(config, Callback())
    cohort = cohort_size(config.participation, config.clients)
    rehearsed = min(config.rounds, max(FEWEST, COORDINATES // (rehearsal.layout.numel * cohort)))
    up, down, dense, frames_up, frames_down = [], [], [], [], []
    for outcome in rehearsal.loop.rounds(range(1, rehearsed + 1)):
        if rehearsal.timing:
            rehearsal.timing.on_round_end(outcome)
        traffic = outcome.traffic
        up.append(
            rehearsal.relays.take().client_bytes
            if rehearsal.relays
            else sum(traffic.uplink.values())
        )
        down.append(sum(traffic.downlink.values()))
        dense.append(4 * rehearsal.layout.numel * (len(outcome.cohort) + len(traffic.downlink)))
        frames_up += traffic.uplink.values()
        frames_down += [len(outcome.broadcast.frame)] if outcome.broadcast else []
    return Forecast(
        alternative.name,
        rehearsal.layout.numel,
        len(rehearsal.layout),
        config.rounds,
        rehearsed,
        _ends(frames_up),
        longest_frame(rehearsal.strategy.uplink, rehearsal.sent_layout)
        if len(rehearsal.strategy.client_algorithm.phases) == 1
        else None,
        _ends(frames_down),
        longest_frame(rehearsal.strategy.downlink, rehearsal.layout),
        *(_of_run(bytes_, config.rounds) for bytes_ in (up, down, dense)),
    )


def _ends(lengths: Sequence[int]) -> tuple[int, int]:
    return (min(lengths), max(lengths)) if lengths else (0, 0)


def _of_run(bytes_: Sequence[int], rounds: int) -> int:
    """Of all rounds, those that were not gone through like the later half of those that were."""
    return sum(bytes_) + round((rounds - len(bytes_)) * mean(bytes_[-math.ceil(len(bytes_) / 2) :]))


def show(alternatives: Sequence[Alternative]) -> None:
    """Print a table: fitted to a terminal, in columns elsewhere."""
    found = [_named(alternative) for alternative in alternatives]
    baselines = [_baseline(alternative, alternatives, found) for alternative in alternatives]
    for model in dict.fromkeys(
        f"{f.parameters:,} parameters in {f.tensors} tensors, {human_bytes(4 * f.parameters)} as float32"
        for f in found
    ):
        print(model)
    rows = [_cells(f, baseline) for f, baseline in zip(found, baselines, strict=True)]
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        for i, title in enumerate(HEAD):
            table.add_column(title, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        Console(highlight=False, markup=False).print(table)
    else:
        widths = [max(len(row[i]) for row in [HEAD, *rows]) for i in range(len(HEAD))]
        for row in [HEAD, *rows]:
            print(
                "  ".join(
                    cell.rjust(w) if i else cell.ljust(w)
                    for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                ).rstrip()
            )
    print(OF_DENSE if any(baselines) else OF_FLOATS)
    if not all(f.exact for f in found):
        print(
            "~: depends on what is in the updates; made-up updates, like that of a client that trained, were encoded"
        )
    if any(f.rehearsed < f.rounds for f in found):
        print(
            f"{min(f.rehearsed for f in found)} rounds were gone through, the others reckoned from them"
        )


def _named(alternative: Alternative) -> Forecast:
    try:
        return forecast(alternative)
    except FedcompError as error:
        raise refused(alternative.name, str(error), error.exit_status) from error


def _baseline(
    alternative: Alternative, alternatives: Sequence[Alternative], found: Sequence[Forecast]
) -> Forecast | None:
    """Return the forecast of the dense alternative with otherwise the same options, or None."""
    wanted = dense(alternative.values)
    for other, told in zip(alternatives, found, strict=True):
        if is_dense(other.values) and dense(other.values) == wanted and len(alternatives) > 1:
            return told
    return None


def _cells(f: Forecast, baseline: Forecast | None) -> tuple[str, ...]:
    about = "" if f.exact and (baseline is None or baseline.exact) else "~"
    whole = f.dense_bytes if baseline is None else baseline.sent_bytes
    return (
        f.name,
        _between(f.frame_up),
        NOTHING if f.longest_up is None else human_bytes(f.longest_up),
        _between(f.frame_down),
        *(
            about + human_bytes(round(bytes_))
            for bytes_ in (
                f.uplink_bytes / f.rounds,
                f.downlink_bytes / f.rounds,
                f.uplink_bytes,
                f.downlink_bytes,
            )
        ),
        about + ratio(whole, f.sent_bytes),
    )


def _between(ends: tuple[int, int]) -> str:
    low, high = map(human_bytes, ends)
    return (
        low
        if low == high
        else f"{low.removesuffix(high[-2:]).strip() if low[-2:] == high[-2:] else low}–{high}"
    )
