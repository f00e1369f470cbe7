"""Comparisons: worker processes, the folder of a comparison, results equal to those of single runs, and resumption."""

import json
import re
import shlex
import shutil
import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from cases import for_each
from command_line import error_message, fedcomp
from deployment import Command

from fedcomp import RunConfig
from fedcomp.cli.comparison import comparison
from fedcomp.cli.comparison.alternatives import alternatives
from fedcomp.cli.comparison.displays import ComparisonLines
from fedcomp.cli.comparison.folder import ComparisonFolder
from fedcomp.cli.comparison.worker_pool import WorkerPool
from fedcomp.cli.results import RATIO_TO_DENSE, Result
from fedcomp.config import settings
from fedcomp.runs import load
from fedcomp.sim import simulate

pytestmark = pytest.mark.deploy  # every comparison starts processes
TASKS = Path(__file__).resolve().parents[1]
TASK = f"{TASKS / 'tiny_task.py'}:task"
COMMON = ["sim", "--task", TASK, *"--clients 6 --participation 1 --lr 0.1".split()]
FOUR = [*COMMON, *"--rounds 3 --uplink stc:density=10% --uplink identity --seed 0 --seed 1".split()]
NAMES = ["stc-10pct_seed-0", "stc-10pct_seed-1", "identity_seed-0", "identity_seed-1"]
ONE_PROCESS = ["--side-by-side", "1"]  # torch is imported only once
DENSE = ["dense_seed-0", "dense_seed-1"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "all"
    done = fedcomp(*FOUR, "--out", out, "--target-accuracy", "60%")
    assert done.exit_code == 0, done.output
    return out, done.stdout


def copy_of(compared, tmp_path) -> Path:
    out = tmp_path / "copy"
    shutil.copytree(compared[0], out)
    return out


def stored(out: Path) -> list[Result]:
    lines = json.loads((out / "comparison.json").read_text())["results"]
    return [Result(**line | {"folders": tuple(line["folders"])}) for line in lines]


def test_every_alternative_has_a_run_folder_with_a_report(compared):
    out, output = compared
    assert {path.name for path in out.iterdir()} == {
        *NAMES,
        *DENSE,
        "alternatives.toml",
        "comparison.json",
        "report.html",
    }
    for name in NAMES + DENSE:
        run = load(out / name)
        assert len(run.records) == 3 and run.summary is not None
        assert "<svg" in (out / name / "report.html").read_text(encoding="utf-8")
        assert f"{name}: round 3 of 3, accuracy" in output and f"{name}: done" in output
    assert output.splitlines()[-1] == str(out / "report.html")


def test_the_table_json_and_report_show_the_spread_over_seeds(compared):
    out, output = compared
    stc, identity, dense = stored(out)
    for line, of in ((stc, NAMES[:2]), (identity, NAMES[2:]), (dense, DENSE)):
        reached = [load(out / name).accuracy for name in of]
        assert (
            line.label.endswith("(2 seeds)")
            and [Path(folder).name for folder in line.folders] == of
        )
        assert line.accuracy == pytest.approx(
            sum(reached) / 2
        ) and line.accuracy_spread == pytest.approx(abs(reached[0] - reached[1]) / 2)
        assert line.sent_bytes == sum(load(out / name).sent_bytes for name in of) / 2
        costs = [load(out / name).cost_to(0.6) for name in of]
        assert (line.bytes_to_target is None) == (None in costs)
        page = (out / "report.html").read_text(encoding="utf-8")
        assert f"{100 * line.accuracy:.2f} % ± {100 * line.accuracy_spread:.2f}" in page
    assert "\n".join(comparison.as_text([stc, identity, dense], 0.6)) in output
    assert (
        any(line.on_front for line in (stc, identity, dense))
        and "on the Pareto front" in output
        and "on the Pareto front" in page
    )


def test_ratios_compare_measured_bytes_with_the_dense_line(compared):
    out, output = compared
    lines = stored(out)
    dense = lines[-1]
    assert dense.label == "dense (2 seeds)"
    assert load(out / DENSE[0]).options["downlink"] == "identity"
    for line in lines:
        assert line.baseline == "dense"
        assert line.ratio == pytest.approx(dense.sent_bytes / line.sent_bytes)
    page = (out / "report.html").read_text(encoding="utf-8")
    assert RATIO_TO_DENSE in output and RATIO_TO_DENSE in page and "×1.00" in page


def test_resume_keeps_the_choice_of_a_baseline(tmp_path):
    values = {"task": TASK, "uplink": ["stc", "topk"]}

    def names(**more) -> list[str]:
        resumed = values | {"out": str(tmp_path), "resume": True}
        return [each.name for each in comparison.Comparison(resumed, ComparisonLines(), **more).all]

    file = tmp_path / "alternatives.toml"
    file.write_text(tomli_w.dumps(values | {"resolved": {"baseline": False}}))
    assert names() == ["stc", "topk"] and names(baseline=True) == ["stc", "topk", "dense"]
    file.write_text(tomli_w.dumps(values | {"resolved": {"baseline": True}}))
    assert names() == ["stc", "topk", "dense"] and names(baseline=False) == ["stc", "topk"]


def test_an_alternative_equals_a_single_run(compared, tmp_path):
    out, _ = compared
    options = {
        "clients": 6,
        "participation": 1.0,
        "rounds": 3,
        "lr": 0.1,
        "uplink": "stc:density=10%",
        "seed": 1,
    }
    simulate(RunConfig(task=TASK, out=str(tmp_path / "x"), **options))
    alone, beside = load(tmp_path / "x"), load(out / NAMES[1])
    assert alone.resolved["engine"] == beside.resolved["engine"]
    assert [replace(r, seconds=0.0) for r in alone.records] == [
        replace(r, seconds=0.0) for r in beside.records
    ]
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == (
        out / NAMES[1] / "model.safetensors"
    ).read_bytes()


def test_resume_continues_unfinished_alternatives(compared, tmp_path):
    out = copy_of(compared, tmp_path)
    shutil.rmtree(out / NAMES[2])
    times = {
        name: (out / name / "metrics.jsonl").stat().st_mtime_ns
        for name in NAMES + DENSE
        if name != NAMES[2]
    }
    done = fedcomp("sim", "--out", out, "--resume", *ONE_PROCESS)
    assert done.exit_code == 0, done.output
    assert {name: (out / name / "metrics.jsonl").stat().st_mtime_ns for name in times} == times
    assert (
        load(out / NAMES[2]).records[-1].round == 3 and f"{NAMES[2]}: round 1 of 3" in done.stdout
    )
    assert [replace(line, seconds=0.0, folders=()) for line in stored(out)] == [
        replace(line, seconds=0.0, folders=()) for line in stored(compared[0])
    ]
    assert "rounds to 60 %" in done.stdout  # the target that was given at the start


def test_resume_may_increase_the_rounds_and_replace_an_invalid_stored_target(compared, tmp_path):
    out = copy_of(compared, tmp_path)
    file = out / "alternatives.toml"
    file.write_text(file.read_text().replace("target_accuracy = 0.6", "target_accuracy = 60"))
    refused = fedcomp("sim", "--out", out, "--resume")
    assert error_message(refused) == (
        "--target-accuracy is '60'; give a number above 0 and up to 1, such as 90% or 0.9"
    )
    done = fedcomp(
        *FOUR, "--rounds", "4", "--target-accuracy", "1/2", "--out", out, "--resume", *ONE_PROCESS
    )
    assert done.exit_code == 0, done.output
    assert [[r.round for r in load(out / name).records] for name in NAMES] == [[1, 2, 3, 4]] * 4
    assert "rounds to 50 %" in done.stdout
    assert tomllib.loads(file.read_text())["resolved"]["target_accuracy"] == 0.5


def test_a_resumed_alternative_keeps_the_codecs_that_its_strategy_chose(tmp_path):
    """A later version of the strategy may choose other codecs."""
    values = {"out": str(tmp_path / "all"), "strategy": "scaffold", "seed": [0, 1], "rounds": 2}
    each = alternatives(values)[0]
    folder = ComparisonFolder(values)
    assert "uplink" not in folder.run_options(each) and not folder.run_options(each)["resume"]
    run = folder.path / each.name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        tomli_w.dumps(settings(replace(each.config, uplink="stc:density=1/50", lr=3.0)))
    )
    found = folder.run_options(each)
    assert (found["uplink"], found["downlink"], found["resume"]) == (
        "stc:density=1/50",
        "stc:density=1/100",
        True,
    ) and "lr" not in found
    given = alternatives(values | {"uplink": "identity"})[0]
    assert folder.run_options(given)["uplink"] == "identity"


@pytest.mark.parametrize("left", [b"\xff\xfe", b"{", b"[1]\n", b'{"round": 1}\n', None])
def test_a_damaged_finished_alternative_is_an_error_and_can_be_run_again(compared, tmp_path, left):
    out = copy_of(compared, tmp_path)
    metrics = out / NAMES[0] / "metrics.jsonl"
    metrics.unlink()
    if left is not None:
        metrics.write_bytes(left)
    done = fedcomp("sim", "--out", out, "--resume")
    assert done.exit_code == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert (
        f"{metrics} is damaged" in done.stderr
        and f"remove {out / NAMES[0]}, and repeat the command to execute this run again"
        in done.stderr
    )


def test_a_report_on_a_comparison_has_all_started_alternatives(compared, tmp_path):
    out = copy_of(compared, tmp_path)
    shutil.rmtree(out / NAMES[3])
    done = fedcomp("report", out)
    assert (done.exit_code, done.stdout) == (0, f"{out / 'report.html'}\n")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert all(str(out / name) in page for name in NAMES[:3]) and str(out / NAMES[3]) not in page
    assert page.index(NAMES[0]) < page.index(NAMES[2])  # in the order in which they were given
    twice = fedcomp("report", out, out / NAMES[0], "--out", tmp_path)
    assert twice.exit_code == 2 and "is given twice" in twice.stderr
    for name in NAMES[:3] + DENSE:
        shutil.rmtree(out / name)
    none = fedcomp("report", out)
    assert none.exit_code == 2 and f"no run in {out} was started" in none.stderr
    (out / "alternatives.toml").write_bytes(b"\xff")
    damaged = fedcomp("report", out)
    assert (
        damaged.exit_code == 2
        and "alternatives.toml cannot be read" in damaged.stderr
        and damaged.stderr.count("\n") == 1
    )


@for_each(
    "words, output",
    [
        (
            [*FOUR, "--out", "{out}"],
            "--out {out} exists and is not empty; give another name, or --resume to continue the comparison in it",
        ),
        (
            [*FOUR, "--seed", "2", "--out", "{out}", "--resume"],
            "the runs in {out} have --seed 0, 1, but this command has 0, 1, 2; give the same value, or another --out",
        ),
        (
            [*FOUR, "--clients", "7", "--out", "{out}", "--resume"],
            "the runs in {out} have --clients 6, but this command has 6, 7; give the same value, or another --out",
        ),
        (
            [*FOUR, "--rounds", "2", "--out", "{out}", "--resume"],
            "the run in {out}/stc-10pct_seed-0 has finished 3 rounds, but --rounds is 2; give --rounds 3 or more",
        ),
        (
            [*COMMON, "--task", "digits", "--uplink", "stc", "--uplink", "identity"],
            "--task is given 2 times, but all compared runs need the same task; give one task, and compare "
            "runs of several tasks with fedcomp report",
        ),
        (
            [*FOUR, "--resume"],
            "--resume needs --out with the folder of the comparison to continue",
        ),
        (
            [*FOUR, "--out", "{out}-absent", "--resume"],
            "--out {out}-absent contains no run to continue; leave --resume out to start a run",
        ),
        (
            [*FOUR, "--log-json", "x"],
            "--log-json applies to a single run, but the options define several runs; leave --log-json out, because metrics.jsonl in "
            "each run folder contains all rounds",
        ),
        (
            [*FOUR, "--side-by-side", "none"],
            "--side-by-side is 'none'; give a number of processes such as 2, or auto",
        ),
        (
            [*COMMON, "--side-by-side", "2"],
            "--side-by-side applies to comparisons only; give an option such as --uplink more than once, or leave --side-by-side out",
        ),
        (
            [*COMMON, "--no-baseline"],
            "--no-baseline applies to comparisons only; give an option such as --uplink more than once, or leave --no-baseline out",
        ),
    ],
)
def test_invalid_options_are_errors_before_anything_is_written(compared, words, output):
    out, _ = compared
    before = sorted(out.parent.iterdir())
    done = fedcomp(*(word.format(out=out) for word in words))
    assert error_message(done) == output.format(out=out)
    assert sorted(out.parent.iterdir()) == before


def test_an_invalid_alternative_is_refused_before_any_training(tmp_path):
    done = fedcomp(
        *COMMON,
        *ONE_PROCESS,
        *"--uplink stc --uplink sign --memory residual --out".split(),
        tmp_path / "x",
    )
    pattern = r"alternative sign: --memory residual diverges with sign.*; use .*"
    assert re.fullmatch(pattern, error_message(done)) and not (tmp_path / "x").exists()


def test_two_alternatives_with_the_same_options_are_refused(tmp_path):
    done = fedcomp(*COMMON, *ONE_PROCESS, "--lr", "10%", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()
    assert error_message(done) == (
        "alternatives lr-0.1 and lr-0.1-2 have the same options; leave one of them out"
    )


def test_a_diverged_alternative_is_marked_in_its_line(tmp_path):
    out = tmp_path / "x"
    done = fedcomp(
        *COMMON,
        *ONE_PROCESS,
        *"--rounds 3 --lr 1e30 --uplink identity --memory none --out".split(),
        out,
    )
    assert done.exit_code == 0, done.output
    good, bad = stored(out)
    assert (good.note, good.on_front) == ("", True)
    assert bad.note.startswith("diverged: ") and not bad.on_front
    assert f"{bad.label} {bad.note}" in done.stdout and ", diverged " in done.stdout


def test_other_alternatives_continue_if_a_process_dies(monkeypatch, tmp_path):
    # The short run computes the loss less than 60 times, including checks and evaluations.
    monkeypatch.setenv("KILL_AT", "60")
    monkeypatch.syspath_prepend(str(TASKS))
    words = ["sim", "--task", f"{TASKS / 'deadly_task.py'}:task", *ONE_PROCESS]
    options = (
        "--clients 4 --participation 1 --engine serial --rounds 2 --local-steps 1 --local-steps 40"
    )
    done = fedcomp(*words, *options.split(), "--out", tmp_path / "x")
    assert done.exit_code == 0, done.output
    short, long = stored(tmp_path / "x")
    assert short.note == "" and short.rounds == 2
    assert (
        long.note.startswith("failed: its process was killed by SIGKILL")
        and "failed: its process was killed" in done.stdout
    )


def test_worker_processes_end_with_their_pool():
    with WorkerPool(1) as pool:
        (process,) = pool.free
        assert process.process.poll() is None
    assert process.process.poll() is not None


def test_control_c_prints_a_command_that_continues_the_comparison(tmp_path):
    seeds = ("--seed", "0", "--seed", "1")
    words = (*COMMON, "--rounds", "100000", *seeds, *ONE_PROCESS, "--out", "all")
    run = Command(tmp_path, "run", *words)
    try:
        run.wait_for("round 3 of")
        assert run.interrupt(signal.SIGINT) == 130
    finally:
        run.kill()
    (command,) = re.findall(
        r"^fedcomp: interrupted with 0 of 2 runs done; continue with: (fedcomp .*)$",
        run.output,
        re.MULTILINE,
    )
    done = len((tmp_path / "all" / "seed-0" / "metrics.jsonl").read_text().splitlines())
    words = shlex.split(command.replace("--rounds 100000", f"--rounds {done + 2}"))
    assert Command(tmp_path, "continued", *words[1:]).end() == 0
    assert [len(load(tmp_path / "all" / f"seed-{seed}").records) for seed in range(2)] == [
        done + 2
    ] * 2
