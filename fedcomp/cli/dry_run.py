"""`fedcomp sim --dry-run`: estimate the bytes that a run would send, without executing the run and without a run folder.

The first rounds are simulated with the strategy, codecs and error-feedback memories of the run, but with random updates. One client trains
the initial model for at most five steps. A random update is the update of this client, with each coordinate multiplied by a standard normal
value. The bytes of later rounds are extrapolated. Byte counts are exact if all rounds are simulated and the length of an encoded update
does not depend on its values.
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
from ..strategies.base import cohort_size
from ..tasks import Data, initial_model
from ..tasks.data import Examples
from ..training.engine import Job, JobResult
from ..training.local_sgd import LocalSGD, plan_batches
from ..training.own_loop import client_engine
from .comparison.alternatives import Alternative, alternative_error
from .results import RATIO_TO_DENSE, RATIO_TO_FLOAT32
from .tables import aligned, print_table

# MIN_SIMULATED_ROUNDS rounds are always simulated. More rounds are simulated, up to MAX_SIMULATED_ROUNDS rounds and up to MAX_COORDINATES
# coordinates of all random updates together.
MAX_COORDINATES = 100_000_000
MIN_SIMULATED_ROUNDS, MAX_SIMULATED_ROUNDS = 3, 2000
COLUMNS: tuple[str, ...] = ("", "update", "longest", "broadcast")
COLUMNS += ("up a round", "down a round", "up", "down", "ratio")


@dataclass(frozen=True)
class Forecast:
    """The estimated bytes of one run. A frame is an encoded client update or an encoded broadcast of the server."""

    name: str
    parameters: int
    tensors: int
    rounds: int
    simulated_rounds: int
    frame_up: tuple[int, int]  # bytes of the (shortest, longest) simulated client update
    longest_up: int | None  # bytes of the longest possible client update, or None if unknown
    frame_down: tuple[int, int]  # bytes of the (shortest, longest) simulated broadcast
    longest_down: int | None  # bytes of the longest possible broadcast, or None if unknown
    uplink_bytes: int  # bytes from all clients in all rounds
    downlink_bytes: int  # bytes to all clients in all rounds
    dense_bytes: int  # bytes of the same messages in float32

    @property
    def sent_bytes(self) -> int:
        """Uplink plus downlink bytes."""
        return self.uplink_bytes + self.downlink_bytes

    @property
    def exact(self) -> bool:
        """Whether the estimate is exact if every client answers in every round."""
        return (
            set(self.frame_up) == {self.longest_up}
            and set(self.frame_down) == {self.longest_down}
            and self.simulated_rounds == self.rounds
        )


class RandomUpdates:
    """A training engine that does not train. A client's update is the vector `update` with each coordinate multiplied by a random value."""

    def __init__(self, update: Tensor, device: torch.device):
        self.update, self.device = update, device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        factors = np.empty((len(jobs), len(self.update)), np.float32)
        for row, job in zip(factors, jobs, strict=True):
            generator = seeds.generator(seed, "imagined", job.round, job.client)
            row[:] = generator.standard_normal(len(row))
        updates = torch.from_numpy(factors) * self.update
        return updates.to(self.device), [JobResult(0.0)] * len(jobs)

    def place_data(self, data: Data) -> Data:
        return data

    def close(self) -> None: ...


class DryRun(Simulation):
    """A simulation whose clients do not train, but send random updates."""

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
    """Estimate the bytes of the run `alternative`. Raises UserError if its options are invalid."""
    config = dataclasses.replace(alternative.config, out=None, resume=False)
    run = DryRun(config, Callback())
    cohort = cohort_size(config.participation, config.clients)
    affordable = min(MAX_COORDINATES // (run.layout.numel * cohort), MAX_SIMULATED_ROUNDS)
    simulated_rounds = min(config.rounds, max(MIN_SIMULATED_ROUNDS, affordable))
    up, down, dense = [], [], []
    frames_up: list[int] = []
    frames_down: list[int] = []
    for result in run.loop.rounds(range(1, simulated_rounds + 1)):
        if run.timing:
            run.timing.on_round_end(result)
        traffic = result.traffic
        up.append(run.relays.take()[0] if run.relays else sum(traffic.uplink.values()))
        down.append(sum(traffic.downlink.values()))
        dense.append(4 * run.layout.numel * (len(result.cohort) + len(traffic.downlink)))
        frames_up += traffic.uplink.values()
        frames_down += [len(result.broadcast.frame)] if result.broadcast else []
    one_phase = len(run.strategy.client_algorithm.phases) == 1
    return Forecast(
        name=alternative.name,
        parameters=run.layout.numel,
        tensors=len(run.layout),
        rounds=config.rounds,
        simulated_rounds=simulated_rounds,
        frame_up=_bounds(frames_up),
        longest_up=longest_frame(run.strategy.uplink, run.sent_layout) if one_phase else None,
        frame_down=_bounds(frames_down),
        longest_down=longest_frame(run.strategy.downlink, run.layout),
        uplink_bytes=_extrapolated(up, config.rounds),
        downlink_bytes=_extrapolated(down, config.rounds),
        dense_bytes=_extrapolated(dense, config.rounds),
    )


def _bounds(lengths: Sequence[int]) -> tuple[int, int]:
    return (min(lengths), max(lengths)) if lengths else (0, 0)


def _extrapolated(bytes_: Sequence[int], rounds: int) -> int:
    """Return the bytes of `rounds` rounds. `bytes_` contains the bytes of each simulated round.

    Each round that was not simulated is assumed to send the mean bytes of the second half of the simulated rounds.
    """
    return sum(bytes_) + round((rounds - len(bytes_)) * mean(bytes_[-math.ceil(len(bytes_) / 2) :]))


def print_forecasts(alternatives: Sequence[Alternative]) -> None:
    """Print a table of the estimated bytes of the alternatives."""
    forecasts = []
    for alternative in alternatives:
        try:
            forecasts.append(forecast(alternative))
        except FedcompError as error:
            raise alternative_error(alternative.name, str(error), error.exit_status) from error
    baselines = [_baseline(alternative, alternatives, forecasts) for alternative in alternatives]
    for numel, tensors in dict.fromkeys((f.parameters, f.tensors) for f in forecasts):
        print(f"{numel:,} parameters in {tensors} tensors, {human_bytes(4 * numel)} as float32")
    rows = [_cells(f, baseline) for f, baseline in zip(forecasts, baselines, strict=True)]
    if sys.stdout.isatty():
        print_table(COLUMNS, rows, left={COLUMNS[0]})
    else:
        print("\n".join(aligned([COLUMNS, *rows], left=1)))
    print(RATIO_TO_DENSE if any(baselines) else RATIO_TO_FLOAT32)
    if not all(f.exact for f in forecasts):
        print("~: estimated with random updates; a real run may send more or fewer bytes")
    if any(f.simulated_rounds < f.rounds for f in forecasts):
        fewest = min(f.simulated_rounds for f in forecasts)
        print(f"bytes of all rounds are extrapolated from {fewest} simulated rounds")


def _baseline(
    alternative: Alternative, alternatives: Sequence[Alternative], forecasts: Sequence[Forecast]
) -> Forecast | None:
    """Return the forecast of the uncompressed run that has the other options of `alternative`, or None if there is no such run."""
    wanted = dense(alternative.options)
    for other, forecast in zip(alternatives, forecasts, strict=True):
        if is_dense(other.options) and dense(other.options) == wanted and len(alternatives) > 1:
            return forecast
    return None


def _cells(f: Forecast, baseline: Forecast | None) -> tuple[str, ...]:
    sign = "" if f.exact and (baseline is None or baseline.exact) else "~"
    per_round = f.uplink_bytes / f.rounds, f.downlink_bytes / f.rounds
    sent = (*per_round, f.uplink_bytes, f.downlink_bytes)
    reference_bytes = f.dense_bytes if baseline is None else baseline.sent_bytes
    return (
        f.name,
        _range(f.frame_up),
        NOTHING if f.longest_up is None else human_bytes(f.longest_up),
        _range(f.frame_down),
        *(sign + human_bytes(round(count)) for count in sent),
        sign + ratio(reference_bytes, f.sent_bytes),
    )


def _range(bounds: tuple[int, int]) -> str:
    low, high = map(human_bytes, bounds)
    return low if low == high else f"{low}–{high}"
