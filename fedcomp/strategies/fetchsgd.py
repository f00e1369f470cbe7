"""FetchSGD: the server keeps momentum and error feedback in sketches, and clients have no state.

Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora: FetchSGD: Communication-efficient federated learning with sketching.
ICML 2020, algorithm 1. The server stores the sketch S_u of the momentum and the sketch S_e of the accumulated error. Client i sends the
count sketch S(x_i) of its update x_i. The server then updates the model W, with the weights w_i of the strategy `average`:

    S_u ← ρ S_u + (Σ w_i S(x_i)) / (λ Σ w_i)
    S_e ← S_e + S_u
    Δ   = the k largest of the estimates from S_e at their coordinates, and 0 elsewhere
    W   ← W + η C(λΔ).

Here λ is the learning rate of the round divided by --lr, η is --server-lr, and C is the downlink codec, which has no
error-feedback memory. Finally, the server removes the sent values C(Δ) from both sketches. The option `error` selects how:

    error=subtract:   S_e ← S_e − S(C(Δ));  S_u ← S_u − S(the estimates from S_u at the coordinates of C(Δ)).
    error=zero:       All cells of S_e and S_u that contain a nonzero coordinate of C(Δ) are set to 0.

A client's update is about proportional to λ. The division by λ makes S_u and S_e independent of the learning rates of the rounds. As in the
authors' code, Δ is multiplied by λ and η; the paper multiplies S_u by η, which is equivalent. The paper subtracts gradients, while fedcomp
adds updates. Removing the sent coordinates from S_u is the momentum masking of Lin et al. 2018.

The default, error=zero, is that of the authors' code. It also deletes the values of other coordinates in these cells, which keeps S_e
bounded. On MNIST, with a model of 7,850 parameters and large sketches (5 rows of 3000 cells), both values of `error` reach an accuracy of
91.4 % after 200 rounds. With small sketches (3 rows of 1308 cells), error=zero reaches 89.6 %, but error=subtract only 10 %.

All sketches of a run use the same hash functions. A sketch covers the whole model, so an uplink codec with the scope `@layer` is an error.
The strategy's option `density` determines k. The uplink codec must have the same density or its default density.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds, spec
from ..codecs import Codec, Update, at_density
from ..codecs.sketch import Sketch, SketchUpdate, sum_sketches
from ..codecs.topk import TopK
from ..errors import ConfigError, FrameError, NonFiniteError
from ..kernels import count_sketch
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from ..messages import Assignment
from .average import Average
from .base import Aggregation, ClientAlgorithm, Phase, RoundUpdates

MOMENTUM, ERROR = "momentum", "error"  # names of the sketches S_u and S_e in a checkpoint
FLOAT = np.dtype("<f4")


@dataclass(frozen=True)
class FetchSGDOptions:
    momentum: float = 0.9  # ρ: factor of the momentum; 0 = no momentum
    error: Literal["subtract", "zero"] = "zero"  # how to remove sent values from the sketches
    density: float = 1 / 100  # k divided by the number of coordinates

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")
        TopK(self.density)  # raises SpecError for an invalid density


def sketch_seed(run_seed: int) -> int:
    """Return the seed that all sketches of a run share."""
    return seeds.key(run_seed, "sketch")


def check_sketch_density(name: str, density: float, uplink_density: float) -> None:
    """Raise ConfigError if the density of the strategy `name` differs from a density in --uplink sketch."""
    if uplink_density not in (Sketch.density, density):
        raise ConfigError(
            f"--strategy {name} has density={density:g}, but --uplink has density={uplink_density:g}; leave the density of --uplink out, "
            f"or give --strategy {name}:density={uplink_density:g}"
        )


class FetchSGDClient(ClientAlgorithm):
    """Client half: send a sketch of the update, with the seed that all sketches of the run share."""

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return sketch_seed(run_seed)


class FetchSGD(Average):
    """The k largest coordinates of the accumulated mean update, estimated from sketches."""

    name: ClassVar[str] = "fetchsgd"
    Options: ClassVar[type] = FetchSGDOptions
    required_memory: ClassVar[str] = NoMemory.name
    fixed_frame_size: ClassVar[bool] = True
    replaces_server_optimizer: ClassVar[bool] = True
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClientAlgorithm = FetchSGDClient()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.uplink = at_density(self.uplink, self.options.density)
        self.seed = sketch_seed(self.config.seed)
        self.shape = self.uplink.rows, self.uplink.width(self.layout.numel)
        self.momentum = np.zeros(self.shape, FLOAT)  # S_u
        self.error = np.zeros(self.shape, FLOAT)  # S_e
        # S_u and S_e after `aggregate`, before the sent coordinates are removed
        self._next = self.momentum, self.error

    def _check_settings(self) -> None:
        super()._check_settings()
        if not isinstance(self.uplink, Sketch):
            raise ConfigError(
                f"--strategy {self.name} needs sketches of the whole model, not --uplink {self.uplink}; "
                "leave --uplink out, or give sketch"
            )
        check_sketch_density(self.name, self.options.density, self.uplink.density)
        if spec.parse(self.config.downlink_memory).parts[0].name != NoMemory.name:
            raise ConfigError(
                f"--strategy {self.name} stores the unsent part of the update in a sketch, and --downlink-memory "
                f"{self.config.downlink_memory} would store it a second time; leave --downlink-memory out, or give none"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        return {
            "uplink": Sketch.name,
            "downlink": str(TopK(options.density)),
            "downlink_memory": NoMemory.name,
        }

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        opened = self.uplink.open_batch(frames, self.layout.numel, self.layout)
        return [self._checked(update) for update in opened]

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        accepted = updates.accepted
        weights = np.array(self.client_weights(accepted))
        weighted = [
            (a.update, weight / a.rate)
            for a, weight in zip(accepted, weights / weights.sum(), strict=True)
            if a.update is not None
        ]
        sketched = sum_sketches(
            [update for update, _ in weighted], [weight for _, weight in weighted]
        )
        with np.errstate(over="ignore", invalid="ignore"):
            momentum = FLOAT.type(self.options.momentum) * self.momentum
            for total in sketched:
                momentum += total.cells
            error = self.error + momentum
        if not kernels.all_finite(error):
            raise NonFiniteError("the sum of the sketches contains NaN or infinity; lower --lr")
        self._next = momentum, error
        estimates = SketchUpdate(into.numel(), error, self.seed, self.uplink.count(into.numel()))
        estimates.add_to(into, self.schedule.rate(updates.round))
        return Aggregation()

    def on_round_end(self, round: int, broadcast: bytes | None) -> None:
        if broadcast is None:
            return
        self.momentum, self.error = self._next
        moved = self.downlink.decode(broadcast, numel=self.layout.numel, layout=self.layout).div_(
            self.config.server_lr * self.schedule.rate(round)
        )
        at = torch.nonzero(moved).flatten()
        positions, values = at.numpy(), moved[at].numpy()
        if self.options.error == "zero":
            for row, (buckets, _) in enumerate(
                count_sketch.buckets_and_signs(positions, *self.shape, self.seed)
            ):
                self.momentum[row, buckets] = self.error[row, buckets] = 0
            return
        self.error = self._without(self.error, positions, values)
        self.momentum = self._without(
            self.momentum, positions, count_sketch.estimates_at(self.momentum, positions, self.seed)
        )

    def take_changes(self) -> Changes:
        return {}, {MOMENTUM: self.momentum.tobytes(), ERROR: self.error.tobytes()}

    def restore(self, vector: ReadVector, value: ReadValue) -> None:
        self.momentum, self.error = self._stored(value(MOMENTUM)), self._stored(value(ERROR))

    def _checked(self, update: Update | FrameError) -> Update | FrameError:
        """Return the update if its sketch has the shape and the seed of this run's sketches, else a FrameError."""
        expected = self.shape, self.seed
        if isinstance(update, SketchUpdate) and (update.cells.shape, update.seed) != expected:
            return FrameError(
                f"the sketch has the shape {' × '.join(map(str, update.cells.shape))} and the seed {update.seed}; expected "
                f"{self.shape[0]} × {self.shape[1]} and the seed {self.seed}"
            )
        return update

    def _without(self, cells: np.ndarray, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return `cells` minus the sketch of the sparse vector that has `values` at `positions`."""
        with np.errstate(over="ignore"):
            rest = cells - count_sketch.sketch_at(positions, values, *self.shape, self.seed)
        return rest.clip(-count_sketch.LARGEST, count_sketch.LARGEST)

    def _stored(self, data: bytes | None) -> np.ndarray:
        """Return the cells of a sketch in a checkpoint. Raises ValueError or TypeError for invalid bytes."""
        cells = np.frombuffer(data, FLOAT).reshape(self.shape).copy()
        if not kernels.all_finite(cells):
            raise ValueError("a sketch of the checkpoint contains NaN or infinity")
        return cells
