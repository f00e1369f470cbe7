"""A test loss that is not finite is null in files, and causes one warning in a run, even if the run is resumed."""

from dataclasses import replace

import torch
from cases import for_each
from small_runs import TASKS, TINY, Records, StopsAt, assert_the_same_when_stopped, out, rounds_of

from fedcomp.deployment.start import Deployment, Endpoint
from fedcomp.server.exchange import Traffic
from fedcomp.server.results import WarningLog, check_loss
from fedcomp.server.round_loop import RoundResult
from fedcomp.sim import simulate
from fedcomp.tasks import Data

SPOILT = (
    "round 1: the test loss is nan (null in metrics.jsonl), and the run continues: the test data holds NaN or infinity in 1 of 400 "
    "examples; correct test()"
)
DATA = Data(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))


class Warnings(Records):
    def __init__(self):
        super().__init__()
        self.warnings = []

    def on_warning(self, sentence):
        self.warnings.append(sentence)


@for_each(
    "test, remedy",
    [
        (DATA, "the model may have diverged; try a smaller --lr"),
        (
            replace(DATA, inputs=DATA.inputs / 0),
            "the test data holds NaN or infinity in 3 of 3 examples; correct test()",
        ),
        (
            replace(DATA, targets=DATA.targets / 0),
            "the test data holds NaN or infinity in 3 of 3 examples; correct test()",
        ),
    ],
)
def test_one_warning_names_the_first_round_and_a_remedy(test, remedy):
    warnings = []
    warn = WarningLog(warnings.append)
    for round, loss in enumerate([0.5, None, float("inf"), float("nan"), 0.5, float("nan")], 1):
        check_loss(warn, round, loss, test)
    assert warnings == [
        f"round 3: the test loss is inf (null in metrics.jsonl), and the run continues: {remedy}"
    ]


def test_test_data_with_nan_is_warned_about_once_and_does_not_end_the_run(tmp_path):
    watched = Warnings()
    summary = simulate(
        replace(TINY, task=f"{TASKS}:tested_on_nan", out=out(tmp_path, "run")), watched
    )
    assert watched.warnings == [SPOILT] == list(summary.warnings)
    lines = rounds_of(out(tmp_path, "run"))
    assert [line["loss"] for line in lines] == [None] * 6 and [
        line["warnings"] for line in lines
    ] == [[SPOILT], *[[]] * 5]


def test_a_resumed_run_does_not_repeat_warnings(tmp_path):
    assert_the_same_when_stopped(
        tmp_path, replace(TINY, task=f"{TASKS}:tested_on_nan"), StopsAt(1), StopsAt(3, 2)
    )


def test_there_is_a_warning_if_the_model_diverges(tmp_path):
    watched = Warnings()
    raw = {"uplink": "identity", "memory": "none", "downlink": "identity"}
    simulate(replace(TINY, lr=1e30, local_steps=1, **raw, out=out(tmp_path, "run")), watched)
    first = next(
        record
        for record in watched.records
        if record.loss != record.loss or record.loss == float("inf")
    )
    assert [sentence for sentence in watched.warnings if "test loss" in sentence] == [
        f"round {first.round}: the test loss is {first.loss} (null in metrics.jsonl), and the run continues: the model may have diverged; "
        "try a smaller --lr"
    ]


def test_a_finite_loss_gives_no_warning(tmp_path):
    watched = Warnings()
    simulate(replace(TINY, eval_every=4, out=out(tmp_path, "run")), watched)
    assert not watched.warnings


def test_a_deployment_also_warns_once(tmp_path):
    watched = Warnings()
    deployed = Deployment(
        replace(TINY, task=f"{TASKS}:tested_on_nan", out=out(tmp_path, "run")), Endpoint(0), watched
    )
    records = [
        deployed.record(RoundResult(round, [], [], [], Traffic(), None), 0.0) for round in (1, 2)
    ]
    assert watched.warnings == [SPOILT] and [record.warnings for record in records] == [
        (SPOILT,),
        (),
    ]
