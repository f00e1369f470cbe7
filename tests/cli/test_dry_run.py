"""A dry run predicts the bytes of a run, exactly if the length of encoded updates does not depend on their values."""

import re
from pathlib import Path

import pytest
from command_line import error_message, fedcomp

from fedcomp.cli.comparison.alternatives import Alternative
from fedcomp.cli.dry_run import forecast
from fedcomp.cli.results import RATIO_TO_DENSE
from fedcomp.config import RunConfig
from fedcomp.formatting import human_bytes
from fedcomp.runs import load
from fedcomp.sim import simulate

TASK = f"{Path(__file__).resolve().parents[1] / 'tiny_task.py'}:task"
COMMON = {"task": TASK, "clients": 10, "participation": 0.3, "rounds": 8, "lr": 0.1}


@pytest.mark.parametrize(
    "options",
    [
        {"uplink": "identity", "downlink": "identity"},
        {"uplink": "sign", "memory": "none", "downlink": "efsign"},
        {"uplink": "fp16", "downlink": "bf16@layer", "cache": 0.0},
        {
            "uplink": "identity",
            "downlink": "identity",
            "strategy": "median:f=1",
            "attack": "inverted:1",
        },
    ],
    ids=lambda options: options["uplink"],
)
def test_the_prediction_is_exact_for_frames_of_fixed_length(options, tmp_path):
    estimate = forecast(Alternative("", COMMON | options))
    simulate(RunConfig(**COMMON | options, out=str(tmp_path / "run")))
    sent = load(tmp_path / "run")
    assert estimate.exact and estimate.simulated_rounds == estimate.rounds == 8
    assert estimate.uplink_bytes == sum(r.uplink_bytes for r in sent.records)
    assert estimate.downlink_bytes == sum(r.downlink_bytes for r in sent.records)
    assert (
        estimate.dense_bytes == sent.dense_bytes
        and estimate.parameters == sent.parameters == 42
        and estimate.tensors == 4
    )


def test_the_prediction_is_approximate_for_frames_that_depend_on_updates(tmp_path):
    options = {"uplink": "stc:density=25%", "downlink": "topk:density=25%"}
    estimate = forecast(Alternative("", COMMON | options))
    simulate(RunConfig(**COMMON | options, out=str(tmp_path / "run")))
    sent = load(tmp_path / "run")
    assert not estimate.exact and estimate.frame_up[1] <= estimate.longest_up
    assert estimate.uplink_bytes == pytest.approx(
        sum(r.uplink_bytes for r in sent.records), rel=0.15
    )
    assert estimate.downlink_bytes == pytest.approx(
        sum(r.downlink_bytes for r in sent.records), rel=0.3
    )


@pytest.mark.parametrize("limit, most", [("MAX_COORDINATES", 0), ("MAX_SIMULATED_ROUNDS", 3)])
def test_rounds_after_the_simulated_ones_are_extrapolated(limit, most, monkeypatch):
    whole = forecast(Alternative("", COMMON | {"uplink": "identity", "downlink": "identity"}))
    monkeypatch.setattr(f"fedcomp.cli.dry_run.{limit}", most)
    short = forecast(Alternative("", COMMON | {"uplink": "identity", "downlink": "identity"}))
    assert short.simulated_rounds == 3 and not short.exact
    assert short.uplink_bytes == whole.uplink_bytes and short.downlink_bytes == pytest.approx(
        whole.downlink_bytes, rel=0.2
    )


def test_the_command_prints_a_line_for_each_alternative_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [word for name, value in COMMON.items() for word in (f"--{name}", value)]
    done = fedcomp("sim", *words, *"--uplink identity --uplink stc:density=25% --dry-run".split())
    assert done.exit_code == 0 and [*tmp_path.iterdir()] == []
    model, head, identity, stc, dense, ratio, note = done.stdout.splitlines()
    assert model == "42 parameters in 4 tensors, 168 B as float32" and head.split()[:2] == [
        "update",
        "longest",
    ]
    estimate = forecast(Alternative("", COMMON | {"uplink": "identity", "downlink": "identity"}))
    assert re.split(r"\s{2,}", dense)[-3:] == [
        human_bytes(estimate.uplink_bytes),
        human_bytes(estimate.downlink_bytes),
        "×1.00",
    ]
    assert dense.startswith("dense ") and ratio == RATIO_TO_DENSE
    assert "~" in identity and "~" in stc and note.startswith("~: ")


def test_invalid_options_are_refused_as_in_a_run():
    options = "--uplink stc --uplink sign --memory residual --dry-run"
    message = error_message(fedcomp("sim", "--task", TASK, *options.split()))
    assert message.startswith("alternative sign: --memory residual diverges with sign")
