"""Small runs whose every frame is recorded: all strategies, codecs and memories in 34 configurations of five rounds.

`make record` writes tests/golden/runs.json; tests/test_recorded_runs.py runs the configurations again and compares. Run `make record` only
after a change that is meant to change frames or models, and say in the commit which configurations changed and why.

The model's loss is linear in its parameters, and initial weights and gradients are short binary fractions, so sums are exact in any order.
The update that reaches the memory and the codec is therefore the same on every processor and with every version of torch.
"""

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedcomp import Data, RunConfig, Task
from fedcomp.callbacks import Callback
from fedcomp.messages import Assignment, Report
from fedcomp.sim.run import Simulation
from fedcomp.transports.inprocess import Population

GOLDEN = Path(__file__).with_name("golden") / "runs.json"

BASE = {
    "clients": 8,
    "participation": 0.5,
    "rounds": 5,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.125,
    "seed": 7,
    "engine": "serial",
}
SPARSE = {"uplink": "topk:density=10%", "downlink": "topk:density=20%"}
CONFIGURATIONS = {
    "average": {"clip_update": 0.5, "uplink": "stc:density=10%", "downlink": "stc:density=10%"},
    "layer-wise": {"uplink": "sbc:density=10%@layer", "downlink": "topk:density=20%@layer"}
    | {"weights": "examples", "partition": "dirichlet:1"},
    "product": {"uplink": "topk:density=10%+fp16", "downlink": "bf16"},
    "ecq": {"uplink": "efsign", "memory": "ecq:alpha=0.3,beta=0.5", "downlink": "fp16"},
    "dgc": {"uplink": "topk:density=10%", "memory": "dgc", "density_warmup": 3},
    "adacomp": {"memory": "adacomp", **SPARSE},
    "variance": {"memory": "variance", "local_steps": 4, **SPARSE},
    "ef21": {"memory": "ef21", "lr_schedule": "step:every=2,factor=0.5", **SPARSE},
    "diana": {"memory": "diana", "uplink": "qsgd:levels=4", "downlink": "natural"}
    | {"downlink_memory": "none"},
    "laq": {"memory": "laq", "uplink": "fp16", "downlink": "identity"},
    "quantizers": {"uplink": "terngrad", "memory": "none", "downlink": "adaptive"}
    | {"downlink_memory": "none"},
    "rotations": {"uplink": "drive", "memory": "none", "downlink": "eden:bits=2"}
    | {"downlink_memory": "none"},
    "variable length": {"uplink": "vlc", "memory": "none", "downlink": "srq"}
    | {"downlink_memory": "none"},
    "atoms": {"uplink": "atomo", "memory": "none", "downlink": "onebit"},
    "random masks": {"uplink": "randomk:density=20%", "downlink": "s2", "participation": 1.0},
    "threshold": {"uplink": "threshold:tau=0.1", "server_optimizer": "sgd:momentum=0.5"},
    "relays": {"uplink": "sketch", "memory": "none", "relays": 2},
    "asynchronous": {"strategy": "asynchronous", "network": "mobile", **SPARSE},
    "fetchsgd": {"strategy": "fetchsgd"},
    "sketched-sgd": {"strategy": "sketched-sgd"},
    "gtopk": {"strategy": "gtopk"},
    "powersgd": {"strategy": "powersgd"},
    "scaffold": {"strategy": "scaffold", **SPARSE},
    "shared-scale": {"strategy": "shared-scale"},
    "median": {"strategy": "median", "attack": "inverted:1", **SPARSE},
    "trimmed-mean": {"strategy": "trimmed-mean", "attack": "gaussian:1", **SPARSE},
    "krum": {"strategy": "krum", "participation": 1.0, **SPARSE},
    "multi-krum": {
        "strategy": "multi-krum",
        "participation": 1.0,
        "attack": "infinity:1",
        **SPARSE,
    },
    "geometric-median": {"strategy": "geometric-median", **SPARSE},
    "centered-clipping": {"strategy": "centered-clipping", **SPARSE},
    "vote": {"strategy": "vote", "weight_decay": 0.01},
    "signum": {"strategy": "vote", "memory": "signum"},
    "election": {"strategy": "election", "clients": 5, "participation": 1.0},
    "sealed election": {
        "strategy": "election:form=ballots,sealed=true,byzantine=2",
        "clients": 5,
        "participation": 1.0,
    },
}


class Linear(nn.Module):
    """A model of two matrices and two vectors with 160 parameters. Its output is the inner product of an example and the parameters."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"first": (12, 8), "bias": (12,), "second": (4, 12), "shift": (4,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randint(-16, 17, shape) / 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([p.flatten() for p in self.parameters()])


def examples(count: int, seed: int) -> Data:
    """Return data with inputs [count, 160], short binary fractions. Magnitudes differ by coordinate, so that codecs have to choose."""
    draws = torch.Generator().manual_seed(seed)
    scale = 2.0 ** -(torch.arange(160) % 5)
    inputs = torch.randint(-8, 9, (count, 160), generator=draws) / 16 * scale
    return Data(inputs, torch.arange(count) % 4)


TASK = Task(
    "recorded",
    Linear,
    train=examples(96, 1),
    test=examples(8, 2),
    loss=lambda outputs, targets: outputs.mean(),
    accuracy=None,
)


@dataclass
class Recording(Population):
    """Passes assignments to the clients of a simulation, and records the bytes that are sent down and up."""

    clients_of_run: Population
    down: dict[int, list[bytes]] = field(default_factory=dict)  # round → frames and announcements
    up: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def clients(self) -> int:
        return self.clients_of_run.clients

    @property
    def at_once(self) -> int:
        return self.clients_of_run.at_once

    def handle(self, assignments: Sequence[Assignment]) -> list[Report]:
        for a in assignments:
            self.down.setdefault(a.round, []).extend([*a.frames, *a.announced, a.returned])
        reports = self.clients_of_run.handle(assignments)
        for report in reports:
            self.up.setdefault(report.round, []).append(report.frame)
        return reports


def digest(parts: Sequence[bytes], hashed: bool = True) -> str:
    """Describe byte strings by their number and sizes, and if `hashed` by a part of their SHA-256."""
    sizes = f"{len(parts)} of {min(map(len, parts))} to {max(map(len, parts))} bytes"
    if not hashed:
        return sizes
    content = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    return f"{sizes}: {content.hexdigest()[:24]}"


def recorded(name: str) -> dict[str, list[str] | str]:
    """Run a configuration and describe the frames of each round, down and up, and the tensors of the final model."""
    config = RunConfig(**BASE | CONFIGURATIONS[name])
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, task="OBJECT:recorded", out=f"{folder}/run")
        simulation = Simulation(config, Callback(), TASK)
        timing = simulation.timing
        inner = timing.transport.transport if timing else simulation.transport
        inner.population = recording = Recording(inner.population)
        simulation.run()
        model = load_file(f"{folder}/run/model.safetensors")
    hashed = "sealed" not in config.strategy  # sealed ballots are encrypted with fresh keys
    return {
        "down": [digest(parts, hashed) for _, parts in sorted(recording.down.items())],
        "up": [digest(parts, hashed) for _, parts in sorted(recording.up.items())],
        "model": digest([model[tensor].numpy().tobytes() for tensor in sorted(model)]),
    }


def main() -> None:
    """Write the recording of every configuration."""
    GOLDEN.write_text(
        json.dumps({name: recorded(name) for name in CONFIGURATIONS}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
