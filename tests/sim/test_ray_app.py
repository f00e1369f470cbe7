"""A client is trained in an actor's ClientApp as it is in this process: whatever goes on with it crosses in the message."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_task
import torch
from cases import for_each
from fedcomp.clients.flower import identify_process, name_messages
from flwr.app import Context, Message, RecordDict
from torch import nn

from fedcomp import Data, RunConfig, Task
from fedcomp.layout import Layout
from fedcomp.sim.ray_app import (
    DONE,
    REASON,
    Bench,
    Errand,
    Setup,
    Stored,
    Untrained,
    asked_of,
    done_of,
)
from fedcomp.tasks import initial_model
from fedcomp.training.batches import plan_batches
from fedcomp.training.engine import Done, Job, OneByOne
from fedcomp.training.local_sgd import LocalSGD, SerialEngine, Traces

CPU = torch.device("cpu")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


moody = Task(
    "moody",
    model,
    train=lambda: tiny_task.two_clouds(400, 1),
    test=lambda: tiny_task.two_clouds(200, 2),
)
NAMED = f"{Path(__file__).absolute()}:moody"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def errand(task: str, run: str, data: Data, start: torch.Tensor) -> Errand:
    """One whose references are the things themselves."""
    setup = Setup(RunConfig(task=task, seed=3), "cpu", torch.float32)
    return Errand(
        run,
        setup,
        lambda thing: thing,
        (Stored.of(data.inputs), Stored.of(data.targets)),
        Stored.of(start),
    )


def ask(errand: Errand, kind: str, content: RecordDict) -> RecordDict:
    identify_process()
    message = Message(content, 5, kind)
    name_messages([message])
    return errand()(message, Context(1, 5, {}, RecordDict(), {})).content


def jobs(
    sgd: LocalSGD, layout: Layout, start: torch.Tensor, before: list[Done | None]
) -> list[Job]:
    """What three clients do in a round; each draws its momentum anew, so that two lists hold equal tensors and share none."""
    made = []
    for who, last in enumerate(before):
        momentum = (
            torch.randn(layout.numel, generator=torch.Generator().manual_seed(who))
            if sgd.keep_momentum
            else None
        )
        batches = plan_batches(sgd, np.arange(100 * who, 100 * who + 90), 3, 2, who)
        made.append(
            Job(2, who, batches, last and last.buffers, Traces.begin(sgd, True, start, momentum))
        )
    return made


@for_each(
    "sgd",
    [
        LocalSGD(steps=4, batch_size=8),
        LocalSGD(
            epochs=2,
            batch_size=40,
            momentum=0.9,
            keep_momentum=True,
            clip=0.5,
            weight_decay=0.01,
            proximal=0.2,
        ),
    ],
)
def test_an_actor_trains_a_client_as_this_process_does(sgd):
    data, first = moody.train(), initial_model(moody, 3)
    layout = Layout.of(first)
    start = layout.gather(first)
    here = OneByOne(SerialEngine(moody, first, layout, CPU))
    sent = errand(NAMED, "train", data, start)
    torch.set_num_threads(1)

    before: list[Done | None] = [None] * 3
    for _ in range(2):  # the second time with what the first left behind
        mine, theirs = jobs(sgd, layout, start, before), jobs(sgd, layout, start, before)
        updates, done = here.train(start, data, mine, sgd, seed=3)
        for job, other, update, result in zip(mine, theirs, updates, done, strict=True):
            into = torch.empty(layout.numel)
            answer = done_of(ask(sent, "train", asked_of(other, sgd, 3)), into, other.traces)
            assert torch.equal(into, update) and answer.loss == result.loss
            assert answer.buffers.keys() == result.buffers.keys()
            assert all(
                torch.equal(answer.buffers[name], result.buffers[name]) for name in result.buffers
            )
            assert all(
                torch.equal(a, b)
                for a, b in zip(other.traces.moments, job.traces.moments, strict=True)
            )
            assert not sgd.keep_momentum or torch.equal(other.traces.momentum, job.traces.momentum)
        before = done
        start = start + updates.mean(0)
        sent = replace(sent, start=Stored.of(start))


def test_what_fails_in_training_comes_back_as_a_sentence():
    task = f"{Path(tiny_task.__file__)}:one_raises"
    data, layout = tiny_task.one_raises.train(), Layout.of(tiny_task.one_raises.model())
    sgd = LocalSGD(steps=1, batch_size=10)
    answer = ask(
        errand(task, "fails", data, torch.zeros(layout.numel)),
        "train",
        asked_of(Job(1, 0, [np.arange(10)]), sgd, 0),
    )
    failed = done_of(answer, torch.empty(layout.numel), Traces())
    assert isinstance(failed, Untrained)
    assert str(failed).endswith("in forward: ValueError: a sensor reports nonsense")


def test_an_actor_says_why_it_cannot_load_the_task():
    def asked(task: str) -> str:
        return ask(errand(task, task, moody.train(), torch.zeros(1)), "query", RecordDict())[DONE][
            REASON
        ]

    assert asked(NAMED) == ""
    assert "nowhere.py" in asked("/nowhere.py:task")


def test_an_actor_that_takes_anothers_place_makes_its_own_bench():
    data, start = moody.train(), Layout.of(model()).gather(initial_model(moody, 3))
    sent = errand(NAMED, "place", data, start)
    Bench._last = None
    answer = ask(sent, "train", asked_of(Job(1, 0, [np.arange(4)]), LocalSGD(), 3))
    assert isinstance(done_of(answer, torch.empty_like(start), Traces()), Done)


@for_each(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3),
        torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
        torch.tensor(True),
        torch.arange(12.0).reshape(3, 4).T,
    ],
)
def test_the_object_store_holds_tensors_of_every_kind(tensor):
    stored = Stored.of(tensor)
    stored.raw.flags.writeable = False
    assert stored.tensor().dtype == tensor.dtype and torch.equal(stored.tensor(), tensor)
