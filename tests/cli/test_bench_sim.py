"""`fedcomp bench sim`: real rounds, the time of each part, and PyTorch loops on the same examples."""

import json
import re
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from command_line import error_message, fedcomp
from torch import nn

from fedcomp import Data, Layout, Task
from fedcomp.cli.bench_sim import (
    LOCAL,
    OTHER,
    PARTS,
    TRAINING,
    WHOLE,
    MeasurementComplete,
    RoundMeasurement,
    largest_costs,
    parse_loops,
)
from fedcomp.cli.pytorch_loops import big_batch, flops_of_an_example, lean_loop, usual_loop
from fedcomp.profiling import recording, timed
from fedcomp.server.recovery import Recovery
from fedcomp.tasks import initial_model
from fedcomp.training.engine import SerialEngine
from fedcomp.training.local_sgd import LocalSGD, plan_batches
from fedcomp.training.own_loop import client_engine

TASK = str(Path(__file__).parents[1] / "tiny_task.py") + ":task"
WORDS = ["--task", TASK, "--clients", 8, "--participation", 1 / 2, "--device", "cpu", "--rounds", 2]


@pytest.fixture(scope="module")
def measured():
    return json.loads(fedcomp("bench", "sim", *WORDS, "--json").stdout)


@pytest.mark.slow
def test_rounds_are_real_and_the_times_of_their_parts_add_up(measured):
    found = measured
    assert (found["clients"], found["cohort"], found["rounds"], found["accepted"]) == (8, 4, 2, 8)
    assert found["parameters"] == 42 and 0 <= found["accuracy"] <= 1
    assert list(found["parts"]) == [*PARTS, OTHER]
    assert sum(part["share"] for part in found["parts"].values()) == pytest.approx(1)
    # Two rounds take less time than the interval between checkpoints.
    assert all((found["parts"][name]["seconds"] > 0) == (name != "checkpoint") for name in PARTS)


@pytest.mark.slow
def test_each_loop_has_its_time_and_its_operations(measured):
    found = measured
    assert [way["name"] for way in found["ways"]] == [WHOLE, LOCAL, "lean loop"]
    for way in found["ways"]:
        assert way["client_updates_per_s"] == pytest.approx(4 / way["seconds"])
        assert way["flops_per_s"] == pytest.approx(
            way["client_updates_per_s"] * found["client_flops"]
        )
        assert (
            0
            < way["share_of_peak"]
            == pytest.approx(way["flops_per_s"] / found["peak_flops_per_s"])
        )
    assert found["client_flops"] == 5 * 20 * 2 * (
        3 * 8 * 2 + 2 * 2 * 8
    )  # products of both layers, without the gradient of the inputs


def test_rounds_count_once_the_engine_has_settled(fake_run):
    """Rounds are not counted while worker processes are starting. Loops run once then, as a warm-up that is not measured."""
    run, settled, turns = fake_run(rounds=9), iter([False, False, True]), RoundMeasurement(rounds=3)
    ran = []
    turns.settled, turns.loops = (
        lambda: next(settled),
        {"lean loop": lambda: ran.append(len(turns.parts))},
    )
    turns.on_run_start(run.header)
    for record in run.records[:7]:
        turns.on_round_end(record)
    with pytest.raises(MeasurementComplete):
        turns.on_round_end(run.records[7])
    assert [record.round for record in turns.records] == [4, 6, 8]
    assert ran == [0, 1, 2, 3] and len(turns.seconds["lean loop"]) == len(turns.seconds[WHOLE]) == 3


def test_time_outside_of_all_events_is_counted_as_the_rest(fake_run):
    run, turns = fake_run(rounds=2), RoundMeasurement(rounds=2)
    turns.on_run_start(run.header)
    with recording(turns.recorder):
        turns.on_round_end(run.records[0])
        with timed("evaluation"), timed("unheard of"):
            pass
        with suppress(MeasurementComplete):
            turns.on_round_end(run.records[1])
    (parts,) = turns.parts
    assert parts["evaluation"] > 0 and parts[OTHER] > 0 and parts["local SGD"] == 0
    assert sum(parts.values()) == pytest.approx(turns.seconds[WHOLE][0])


@pytest.mark.slow
@for_each(
    "loops, names",
    [
        ([], ["lean loop"]),
        (["--loops", "big-batch,usual"], ["one big batch", "usual loop"]),
        (["--loops", "none"], []),
    ],
)
def test_the_tables_have_a_line_for_each_loop_and_part_and_name_the_largest_costs(loops, names):
    done = fedcomp("bench", "sim", *WORDS, "--rounds", 1, *loops)
    *lines, costs = done.stdout.splitlines()
    cells = [line.split("\t") for line in lines]
    assert [len(row) for row in cells] == [6] * (3 + len(names)) + [3] * (2 + len(PARTS))
    ways, parts = cells[1 : 3 + len(names)], cells[4 + len(names) :]
    assert [row[0] for row in ways] == [WHOLE, LOCAL, *names]
    assert all((row[3] == "–") == ("lean loop" not in names) for row in ways)
    assert [row[0] for row in parts] == [*PARTS, OTHER]
    fake_run = re.fullmatch(r"Largest costs besides training: (.*)\.", costs)[1].split(", ")
    ranked = sorted(float(row[1].replace(",", "")) for row in parts if row[0] != TRAINING)
    assert [float(cost.split()[-3].replace(",", "")) for cost in fake_run] == ranked[:-4:-1]


def test_the_largest_costs_exclude_training():
    seconds = {TRAINING: 0.5, "compression": 0.03, "memories": 0.004, "downlink": 0.2, OTHER: 1.5}
    parts = {name: {"seconds": s, "share": s / 2.234} for name, s in seconds.items()}
    assert largest_costs(parts) == (
        "Largest costs besides training: rest 1,500.0 ms (67.1%), downlink 200.0 ms (9.0%), compression 30.0 ms (1.3%)."
    )


def test_repeated_names_of_loops_are_removed():
    assert parse_loops("usual,lean,usual") == ["usual", "lean"] and parse_loops("none") == []


@pytest.mark.slow
def test_temporary_folders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []
    save = Recovery.save
    monkeypatch.setattr(
        Recovery,
        "save",
        lambda *given, **named: (made.extend(tmp_path.iterdir()), save(*given, **named)),
    )
    assert fedcomp("bench", "sim", *WORDS, "--rounds", 1).exit_code == 0
    assert made and not list(tmp_path.iterdir())


@for_each(
    "words, output",
    [
        (["--rounds", "0"], "invalid value for '--rounds'"),
        (["--out", "x"], "no such option '--out'"),
        (["--clients", "0"], "--clients is 0; give at least 1"),
        (["--task", "nothing"], "unknown task 'nothing'"),
        (["--uplink", "stcc"], "unknown codec 'stcc'; did you mean 'stc'"),
        (["--loops", "leen"], "--loops cannot be 'leen'; did you mean 'lean'?"),
        (
            ["--loops", "lean,none"],
            "--loops is 'lean,none', but 'none' cannot be combined with names of loops",
        ),
    ],
)
def test_a_user_error_is_one_error_message(words, output):
    assert output in error_message(fedcomp("bench", "sim", *words))


SGD = LocalSGD(steps=3, batch_size=4, lr=0.1)
DATA = Data(torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)
PLAIN = Task("plain", lambda: nn.Linear(6, 3), lambda: DATA, lambda: DATA)
SHARDS = np.array_split(np.arange(60), 5)
PLANS = [plan_batches(SGD, shard, 0, 1, who) for who, shard in enumerate(SHARDS)]


OPTIONS = {
    "plain": {},
    "clip": {"clip": 0.05},
    "proximal": {"proximal": 2.0},
    "all": {"clip": 0.3, "proximal": 0.5, "momentum": 0.5, "weight_decay": 0.1},
}


@for_each("options", OPTIONS.values(), ids=OPTIONS)
def test_the_lean_loop_and_the_engine_have_the_same_updates(options):
    model, sgd = initial_model(PLAIN, 0), replace(SGD, **options)
    layout = Layout.of(model)
    engine, start = (
        SerialEngine(PLAIN, initial_model(PLAIN, 0), layout, "cpu"),
        layout.gather(model),
    )
    for update, plan in zip(lean_loop(PLAIN, DATA, SHARDS, PLANS, sgd)(), PLANS, strict=True):
        mine = torch.cat([update[e.name].flatten() for e in layout])
        torch.testing.assert_close(mine, engine.train(start, DATA, plan, sgd).update)


@for_each("options", OPTIONS.values(), ids=OPTIONS)
def test_every_loop_takes_the_same_steps(options):
    """The steps are compared for one client whose batches contain all of its examples."""
    sgd, made = replace(SGD, batch_size=20, **options), []
    plans = [plan_batches(sgd, np.arange(20), 0, 1, 0)]
    (lean,), (usual,) = (
        lean_loop(PLAIN, DATA, [np.arange(20)], plans, sgd)(),
        usual_loop(PLAIN, DATA, [np.arange(20)], plans, sgd)(),
    )
    big_batch(
        replace(PLAIN, model=lambda: made.append(PLAIN.model()) or made[-1]), DATA, plans, sgd
    )()
    before, after = initial_model(PLAIN, 0).state_dict(), made[-1].state_dict()
    for name, update in lean.items():
        torch.testing.assert_close(usual[name], update)
        torch.testing.assert_close(after[name] - before[name], update)


@for_each("loop", [lean_loop, usual_loop])
def test_loops_run_a_train_fn(loop):
    def train(model, data, local_round):
        optimizer = torch.optim.Adam(model.parameters(), local_round.lr)
        for inputs, target in data:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        return {"loss": 0.0}

    task = replace(PLAIN, train_fn=train)
    layout = Layout.of(PLAIN.model())
    engine = client_engine(task, initial_model(task, 0), layout, "cpu")
    start = layout.gather(initial_model(task, 0))
    updates = loop(task, DATA, SHARDS, PLANS, SGD)()
    for update, plan, shard in zip(updates, PLANS, SHARDS, strict=True):
        mine = torch.cat([update[e.name].flatten() for e in layout])
        expected = engine.train(start, DATA, plan, SGD, rows=shard).update
        torch.testing.assert_close(mine, expected)


class Frozen(nn.Module):
    """A model that takes its inputs by keyword and has a frozen first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.first(x))


def test_loops_support_keyword_inputs_and_frozen_parameters():
    sgd, shards = replace(SGD, batch_size=20, optimizer="adamw", lr=0.01), [np.arange(20)]
    data = Data({"x": DATA.inputs}, DATA.targets)
    task = Task("frozen", Frozen, data, data)
    plans = [plan_batches(sgd, shards[0], 0, 1, 0)]
    (lean,), (usual,) = (loop(task, data, shards, plans, sgd)() for loop in (lean_loop, usual_loop))
    layout = Layout.of(Frozen())
    model = initial_model(task, 0)
    engine = client_engine(task, model, layout, "cpu")
    expected = engine.train(layout.gather(model), data, plans[0], sgd).update
    for update in (lean, usual):
        assert list(update) == ["head.weight", "head.bias"]
        mine = torch.cat([update[e.name].flatten() for e in layout])
        torch.testing.assert_close(mine, expected)


@pytest.mark.slow
def test_the_big_batch_cannot_run_a_train_fn(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom tiny_task import task\n"
        "task = replace(task, train_fn=lambda model, data, local_round: {'loss': 0.0})\n"
    )
    done = fedcomp("bench", "sim", "--task", f"{tmp_path}/mine.py:task", "--loops", "big-batch")
    assert "--loops big-batch cannot run the task's train_fn" in error_message(done)


def test_the_usual_loop_takes_the_same_number_of_steps_for_small_shards():
    seen = []

    def loss(outputs, targets):
        seen.append(len(targets))
        return nn.functional.cross_entropy(outputs, targets)

    task = Task("counting", PLAIN.model, PLAIN.train, PLAIN.test, loss)
    short = [shard[:8] for shard in SHARDS]  # two batches per pass, three steps
    updates = usual_loop(task, DATA, short, PLANS, SGD)()
    assert (
        len(updates) == 5
        and seen == [4] * 15
        and all(float(u["weight"].abs().sum()) > 0 for u in updates)
    )


def test_the_big_batch_uses_the_same_examples_and_number_of_steps(monkeypatch):
    seen = []

    def loss(outputs, targets):
        seen.append(len(targets))
        return nn.functional.cross_entropy(outputs, targets)

    task = Task("counting", PLAIN.model, PLAIN.train, PLAIN.test, loss)
    big_batch(task, DATA, PLANS, SGD)()
    assert seen == [20, 20, 20]
    seen.clear()
    monkeypatch.setattr("fedcomp.cli.pytorch_loops.MAX_PIECE_VALUES", 6 * 15)
    big_batch(task, DATA, PLANS, SGD)()
    assert seen == [15, 5] * 3


@for_each(
    "module, shape, flops",
    [
        (lambda: nn.Linear(6, 3), (6,), 2 * 2 * 18),  # forward pass and gradient of the weights
        (
            lambda: nn.Sequential(
                nn.Conv2d(2, 4, 3, bias=False), nn.Flatten(), nn.Linear(4 * 36, 3)
            ),
            (2, 8, 8),
            2 * 2 * (36 * 4 * 18) + 3 * 2 * (4 * 36 * 3),
        ),
    ],
)
def test_the_operations_of_an_example_are_those_of_its_matrix_products(module, shape, flops):
    data = Data(torch.randn(10, *shape), torch.zeros(10, dtype=torch.int64))
    assert (
        flops_of_an_example(Task("counted", module, lambda: data, lambda: data), data, 5) == flops
    )


def test_the_products_of_an_lstm_are_counted():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    data = Data(torch.randn(10, 4, 5), torch.zeros(10, dtype=torch.int64))
    found = flops_of_an_example(Task("recurs", Last, lambda: data, lambda: data), data, 5)
    forward = 2 * (4 * 4 * 7 * (5 + 7) + 7 * 3)
    assert 2 * forward <= found <= 3 * forward
