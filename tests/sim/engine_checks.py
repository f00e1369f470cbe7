"""Jobs of five clients, and the results of the serial engine, to test engines in other processes."""

from pathlib import Path

import numpy as np
import torch
import worker_tasks

from fedcomp.layout import Layout
from fedcomp.tasks import initial_model, load
from fedcomp.tasks.data import Data
from fedcomp.training.engine import Job, SequentialJobs, SerialEngine
from fedcomp.training.local_sgd import LocalSGD, Traces, plan_batches

TASKS = Path(worker_tasks.__file__)
SGD = LocalSGD(
    steps=3,
    batch_size=8,
    lr=0.1,
    momentum=0.9,
    weight_decay=0.01,
    clip=1.0,
    keep_momentum=True,
    proximal=0.3,
)
SHARDS = [
    np.arange(20),
    np.arange(5) + 20,
    np.arange(40) + 25,
    np.arange(20) + 65,
    np.arange(35) + 85,
]  # the second client has smaller batches


def serial(name: str = "task") -> SequentialJobs:
    task = load(f"{TASKS}:{name}")
    model = initial_model(task, 3)
    return SequentialJobs(SerialEngine(task, model, Layout.of(model), "cpu"))


def jobs(
    start: torch.Tensor, sgd: LocalSGD = SGD, round: int = 1, buffers: dict[int, dict] | None = None
) -> list[Job]:
    momentum = torch.linspace(-1e-3, 1e-3, len(start))
    return [
        Job(
            round,
            who,
            plan_batches(sgd, shard, 0, round, who),
            (buffers or {}).get(who),
            Traces.for_round(sgd, True, start, momentum),
        )
        for who, shard in enumerate(SHARDS)
    ]


def start_of(engine: SequentialJobs) -> torch.Tensor:
    return engine.engine.layout.gather(engine.engine.model).clone()


def two_rounds(engine, start: torch.Tensor, data: Data, sgd: LocalSGD = SGD) -> list[tuple]:
    """Return the updates, results and jobs of two rounds. The second round starts with the buffers of the first."""
    found, buffers = [], {}
    for round in (1, 2):
        mine = jobs(start, sgd, round, buffers)
        updates, results = engine.train(start, data, mine, sgd, seed=5)
        found.append((updates.clone(), results, mine))
        buffers = {job.client: result.buffers for job, result in zip(mine, results, strict=True)}
    return found


def assert_same(found: list[tuple], expected: list[tuple]) -> None:
    for (updates, results, mine), (expected_updates, expected_results, theirs) in zip(
        found, expected, strict=True
    ):
        assert torch.equal(updates, expected_updates) and updates.any()
        assert [r.loss for r in results] == [r.loss for r in expected_results]
        for result, other in zip(results, expected_results, strict=True):
            assert result.buffers.keys() == other.buffers.keys()
            names = {name.removeprefix("inner.") for name in other.buffers}
            assert names == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
            assert all(
                torch.equal(result.buffers[name], other.buffers[name]) for name in other.buffers
            )
        for job, other in zip(mine, theirs, strict=True):
            assert torch.equal(job.traces.momentum, other.traces.momentum)
            assert all(
                torch.equal(a, b)
                for a, b in zip(job.traces.moments, other.traces.moments, strict=True)
            )
