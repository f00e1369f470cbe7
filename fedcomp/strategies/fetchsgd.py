"""FetchSGD: momentum and error feedback on the server, in a sketch; clients keep nothing.

Rothchild, Panda, Ullah, Ivkin, Stoica, Braverman, Gonzalez, Arora: FetchSGD: Communication-efficient federated learning with sketching.
ICML 2020, algorithm 1.

    S_u ← ρ S_u + Σ w_i S(x_i)/λ / Σ w_i;   S_e ← S_e + S_u;   Δ = the k largest estimates of S_e;   W ← W + η C(λΔ)
    error=subtract   S_e ← S_e − S(C(Δ)), and S_u ← S_u − S(what it says of these coordinates)
    error=zero       the cells of S_e and S_u that C(Δ) touches become 0

λ is the round's learning rate as a multiple of the run's. Updates contain it; the sketches hold gradients, up to the run's rate, and the
final update is multiplied by the rate of its own round, as in the authors' code. So a schedule or a warm-up does not mix rates in a sketch.

C is the downlink codec, without a memory of its own: `subtract` leaves in S_e what it loses as well. The paper subtracts gradients, here
clients send what is to be added. η is the server's step (`server_lr`), which the loop takes once, of Δ: as in the authors' code, and the
same as the paper's η S_u, since it does not change. That S_u forgets what was sent is the masking of momentum of Lin et al. 2018. The
authors' code does what `zero` says: it throws away whatever else lay in these cells, and S_e stays bounded. With sketches that contract
both learned alike (MNIST, 5 × 3000 cells for 7,850 coordinates, 200 rounds: 91.4 % each), with shorter ones `zero` alone (3 × 1308: 89.6
and 10 %), so it is the default.

All frames of a run are made with one hash, and of the whole model: with `@layer` there would be no k largest of all. k is the strategy's
`density`, of which the uplink codec's own has no part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import kernels, seeds, spec
from ..codecs import Codec, Update, at_density
from ..codecs.sketch import Cells, Sketch, summed
from ..codecs.topk import TopK
from ..errors import ConfigError, FrameError, NonFiniteError
from ..kernels import count_sketch
from ..memories.base import Changes, ReadValue, ReadVector
from ..memories.none import NoMemory
from ..messages import Assignment
from .average import Average
from .base import Aggregation, Phase, RoundUpdates
from .client_algorithm import ClientAlgorithm

MOMENTUM, ERROR = "momentum", "error"  # S_u and S_e, in a checkpoint
FLOAT = np.dtype("<f4")


@dataclass(frozen=True)
class Options:
    momentum: float = 0.9  # ρ; 0 = none
    error: Literal["subtract", "zero"] = "zero"  # how the sketch forgets what moved the model
    density: float = 1 / 100  # share of the coordinates that a round moves

    def __post_init__(self) -> None:
        spec.check_decays(self, "momentum")
        TopK(self.density)  # checks it


def sketch_seed(run_seed: int) -> int:
    """Return the seed of all sketches of a run."""
    return seeds.key(run_seed, "sketch")


class FetchSGDClient(ClientAlgorithm):
    """Sketch every update of a run with the same hashes, so that sketches add over rounds as well as over clients."""

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return sketch_seed(run_seed)


class FetchSGD(Average):
    """The k largest estimates of a sketch of all that was sent and has not moved the model."""

    name: ClassVar[str] = "fetchsgd"
    Options: ClassVar[type] = Options
    required_memory: ClassVar[str] = NoMemory.name
    fixed_frame_size: ClassVar[bool] = True
    replaces_server_optimizer: ClassVar[bool] = True
    supports_clipping: ClassVar[bool] = False
    client_algorithm: ClassVar[ClientAlgorithm] = FetchSGDClient()

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.uplink = at_density(self.uplink, self.options.density)
        self.seed = sketch_seed(self.config.seed)
        self.shape = self.uplink.rows, self.uplink.width(self.layout.numel)
        self.momentum = np.zeros(self.shape, FLOAT)  # S_u
        self.error = np.zeros(self.shape, FLOAT)  # S_e
        self._next = self.momentum, self.error  # before anything is taken out, if the model moves

    def _check_settings(self) -> None:
        super()._check_settings()
        if not isinstance(self.uplink, Sketch):
            raise ConfigError(
                f"--strategy {self.name} adds sketches of the whole model, which {self.uplink} does not make; "
                "leave --uplink out, or give sketch"
            )
        if self.uplink.density not in (Sketch.density, self.options.density):
            raise ConfigError(
                f"--strategy {self.name} reads a share of {self.options.density:g}, the uplink {self.uplink.density:g}; "
                f"give --strategy {self.name}:density={self.uplink.density:g}"
            )
        if spec.parse(self.config.downlink_memory).parts[0].name != NoMemory.name:
            raise ConfigError(
                f"--strategy {self.name} keeps what was not sent in its sketch, and memory '{self.config.downlink_memory}' "
                "would keep it again; leave --downlink-memory out, or give none"
            )

    @classmethod
    def defaults(cls, options: Any) -> Mapping[str, str]:
        nothing = NoMemory.name
        return {
            "uplink": Sketch.name,
            "memory": nothing,
            "downlink": str(TopK(options.density)),
            "downlink_memory": nothing,
        }

    def open(self, phase: Phase, frames: Sequence[bytes]) -> list[Update | FrameError]:
        return [self._of_this_run(update) for update in super().open(phase, frames)]

    def aggregate(self, updates: RoundUpdates, into: Tensor) -> Aggregation:
        accepted = updates.accepted
        weights = np.array(self.client_weights(accepted))
        shares = [
            (a.update, share / a.rate)
            for a, share in zip(accepted, weights / weights.sum(), strict=True)
            if a.update is not None
        ]
        sketched = summed([update for update, _ in shares], [share for _, share in shares])
        with np.errstate(over="ignore", invalid="ignore"):
            momentum = FLOAT.type(self.options.momentum) * self.momentum
            for total in sketched:
                momentum += total.cells
            error = self.error + momentum
        if not kernels.all_finite(error):
            raise NonFiniteError("the sum of the sketches is not finite")
        self._next = momentum, error
        estimates = Cells(into.numel(), error, self.seed, self.uplink.count(into.numel()))
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
                count_sketch.places(positions, *self.shape, self.seed)
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

    def _of_this_run(self, update: Update | FrameError) -> Update | FrameError:
        """Return the update if its cells add to those of the server, else an error."""
        own = self.shape, self.seed
        if isinstance(update, Cells) and (update.cells.shape, update.seed) != own:
            return FrameError(
                f"the sketch has another size than {self.shape[0]} × {self.shape[1]}, or another hash than those of this run"
            )
        return update

    def _without(self, cells: np.ndarray, positions: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return cells less those of a sparse vector."""
        with np.errstate(over="ignore"):
            rest = cells - count_sketch.sketch_at(positions, values, *self.shape, self.seed)
        return rest.clip(-count_sketch.LARGEST, count_sketch.LARGEST)

    def _stored(self, data: bytes | None) -> np.ndarray:
        """Return cells from a checkpoint. Raises ValueError or TypeError for other bytes."""
        cells = np.frombuffer(data, FLOAT).reshape(self.shape).copy()
        if not kernels.all_finite(cells):
            raise ValueError("a sketch of the checkpoint is not finite")
        return cells
