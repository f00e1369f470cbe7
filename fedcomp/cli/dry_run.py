"""`fedcomp sim --dry-run`: the bytes that a run would send, without training and without a folder.

The rounds use the strategy, codecs and memories of the run. A client's update is random: the update of one client that trained the initial
model, each coordinate times a normal value. Frames whose length does not depend on their content have the length of the run's frames;
others have about that length.
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
from torch import Tensor

from .. import seeds
from ..baseline import dense, is_dense
from ..callbacks import Callback
from ..codecs import longest_frame
from ..errors import FedcompError
from ..formatting import NOTHING, human_bytes, ratio
from ..sim.run import Simulation
from ..strategies.cohort import cohort_size
from ..tasks import Data, initial_model
from ..tasks.data import Examples
from ..training.batches import plan_batches
from ..training.engine import Job, JobResult, client_engine
from ..training.local_sgd import LocalSGD
from .comparison.alternatives import Alternative, refused
from .results import OF_DENSE, OF_FLOATS
from .tables import aligned, print_table

COORDINATES = 100_000_000  # of random updates; further rounds are extrapolated
FEWEST = 3  # dry rounds
HEAD = (
    *("", "frame up", "longest", "frame down"),
    *("up a round", "down a round", "up", "down", "ratio"),
)


@dataclass(frozen=True)
class Forecast:
    """The bytes that an alternative would send. Sizes of frames are (shortest, longest) of the dry rounds."""

    name: str
    parameters: int
    tensors: int
    rounds: int
    dry_rounds: int
    frame_up: tuple[int, int]  # of a client in a round
    longest_up: int | None  # bound of the codec, None without a bound
    frame_down: tuple[int, int]  # of the broadcast of a round
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
        """Whether the run will send exactly these bytes if every client answers."""
        return (
            set(self.frame_up) == {self.longest_up}
            and set(self.frame_down) == {self.longest_down}
            and self.dry_rounds == self.rounds
        )


class RandomUpdates:
    """An engine whose updates are random multiples of the coordinates of `model` [n], the update of a client that trained."""

    def __init__(self, model: Tensor, device: torch.device):
        self.model, self.device = model, device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        rows = [
            seeds.generator(seed, "imagined", job.round, job.client)
            .standard_normal(len(self.model))
            .astype(np.float32)
            for job in jobs
        ]
        factors = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, len(self.model))
        return (factors * self.model).to(self.device), [JobResult(0.0)] * len(jobs)

    def resident(self, data: Data) -> Data:
        return data

    def close(self) -> None: ...


class DryRun(Simulation):
    """A simulation whose clients do not train."""

    def _engine(
        self, model: torch.nn.Module, weights: Tensor, data: Examples, shard: np.ndarray
    ) -> Any:
        sgd = dataclasses.replace(self.sgd, augment=False)
        model, seed = initial_model(self.task, self.config.seed), self.config.seed
        engine = client_engine(self.task, model, self.layout, self.device)
        batches = plan_batches(sgd, shard, seed, 1, 0)[:5]
        trained = engine.train(weights.to(self.device), data, batches, sgd, seed=seed, rows=shard)
        return RandomUpdates(trained.update.cpu(), self.device)


def forecast(alternative: Alternative) -> Forecast:
    """Go through the rounds of an alternative. Raises UserError if its options cannot work."""
    config = dataclasses.replace(alternative.config, out=None, resume=False)
    run = DryRun(config, Callback())
    cohort = cohort_size(config.participation, config.clients)
    dry_rounds = min(config.rounds, max(FEWEST, COORDINATES // (run.layout.numel * cohort)))
    up, down, dense = [], [], []
    frames_up: list[int] = []
    frames_down: list[int] = []
    for outcome in run.loop.rounds(range(1, dry_rounds + 1)):
        if run.timing:
            run.timing.on_round_end(outcome)
        traffic = outcome.traffic
        up.append(run.relays.take().client_bytes if run.relays else sum(traffic.uplink.values()))
        down.append(sum(traffic.downlink.values()))
        dense.append(4 * run.layout.numel * (len(outcome.cohort) + len(traffic.downlink)))
        frames_up += traffic.uplink.values()
        frames_down += [len(outcome.broadcast.frame)] if outcome.broadcast else []
    one_phase = len(run.strategy.client_algorithm.phases) == 1
    return Forecast(
        name=alternative.name,
        parameters=run.layout.numel,
        tensors=len(run.layout),
        rounds=config.rounds,
        dry_rounds=dry_rounds,
        frame_up=_ends(frames_up),
        longest_up=longest_frame(run.strategy.uplink, run.sent_layout) if one_phase else None,
        frame_down=_ends(frames_down),
        longest_down=longest_frame(run.strategy.downlink, run.layout),
        uplink_bytes=_of_run(up, config.rounds),
        downlink_bytes=_of_run(down, config.rounds),
        dense_bytes=_of_run(dense, config.rounds),
    )


def _ends(lengths: Sequence[int]) -> tuple[int, int]:
    return (min(lengths), max(lengths)) if lengths else (0, 0)


def _of_run(bytes_: Sequence[int], rounds: int) -> int:
    """Return the bytes of all rounds. Rounds that were not gone through count like the later half of the dry rounds."""
    return sum(bytes_) + round((rounds - len(bytes_)) * mean(bytes_[-math.ceil(len(bytes_) / 2) :]))


def show(alternatives: Sequence[Alternative]) -> None:
    """Print a table: fitted to a terminal, in columns elsewhere."""
    found = [_forecast_of(alternative) for alternative in alternatives]
    baselines = [_baseline(alternative, alternatives, found) for alternative in alternatives]
    models = (
        f"{f.parameters:,} parameters in {f.tensors} tensors, {human_bytes(4 * f.parameters)} as float32"
        for f in found
    )
    print("\n".join(dict.fromkeys(models)))
    rows = [_cells(f, baseline) for f, baseline in zip(found, baselines, strict=True)]
    if sys.stdout.isatty():
        print_table(HEAD, rows, left={HEAD[0]})
    else:
        print("\n".join(aligned([HEAD, *rows], left=1)))
    print(OF_DENSE if any(baselines) else OF_FLOATS)
    if not all(f.exact for f in found):
        print("~: depends on the values of the updates; random updates were encoded in their place")
    if any(f.dry_rounds < f.rounds for f in found):
        fewest = min(f.dry_rounds for f in found)
        print(f"{fewest} rounds were gone through; the others are extrapolated from them")


def _forecast_of(alternative: Alternative) -> Forecast:
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
    a_round = f.uplink_bytes / f.rounds, f.downlink_bytes / f.rounds
    sent = (*a_round, f.uplink_bytes, f.downlink_bytes)
    whole = f.dense_bytes if baseline is None else baseline.sent_bytes
    return (
        f.name,
        _range(f.frame_up),
        NOTHING if f.longest_up is None else human_bytes(f.longest_up),
        _range(f.frame_down),
        *(about + human_bytes(round(count)) for count in sent),
        about + ratio(whole, f.sent_bytes),
    )


def _range(ends: tuple[int, int]) -> str:
    low, high = map(human_bytes, ends)
    return low if low == high else f"{low}–{high}"
