"""Reproductions: their registry, their runs and run folders, and the verdicts computed from the runs."""

import dataclasses
import json

import pytest
from cases import for_each

from fedcomp.errors import DataError, RunFolderError, UserError
from fedcomp.layout import Layout
from fedcomp.server.results import make_strategy
from fedcomp.strategies import resolved
from reproductions import (
    Claim,
    Experiment,
    Method,
    Reproduction,
    Verdict,
    available_reproductions,
    reproduction,
)
from reproductions.base import differences, lrs, more_accurate, within_margin
from reproductions.counterexamples import EFSIGN, PROBLEMS, SIGN, best
from reproductions.running import TIME_FILE, LocalOptions, choice_slug, config_of, reproduce
from reproductions.table import judge_claims, section, summary_line, write

NAMES = ("dgc-warmup", "ef-signsgd", "election", "fetchsgd", "sbc", "stc-cifar10", "stc-mnist")
LEARNS = Claim(
    "It learns more in more rounds.",
    "nowhere",
    "in words",
    lambda results: Verdict(
        f"{results['long']} and {results['short']}",
        more_accurate(results["long"], results["short"]),
    ),
)
UNLEARNS = dataclasses.replace(
    LEARNS,
    judge=lambda results: Verdict(
        str(results["short"]), more_accurate(results["short"], results["long"])
    ),
)
TINY = Reproduction(
    name="tiny", title="long runs against short ones", paper="Nobody", setting="Digits.", full_setting="The same.",
    small=Experiment({"task": "digits", "clients": 2, "participation": 1.0, "local_steps": 2, "uplink": "identity", "downlink": "identity",
          "memory": "none", "downlink_memory": "none"},
         {"short": Method({"rounds": 1}, lrs(0.0001, 0.05)), "long": Method({"rounds": 12, "lr": 0.1})}, seeds=2),
    full=Experiment({}, {}), claims=(LEARNS, UNLEARNS), minutes=0.1,
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the folder, the results, the time and the printed lines of the runs of TINY."""
    folder, said = tmp_path_factory.mktemp("tiny"), []
    return (
        folder,
        *reproduce(TINY, TINY.small, folder, LocalOptions(device="cpu"), said.append),
        said,
    )


def test_each_paper_has_a_reproduction():
    assert tuple(sorted(available_reproductions())) == NAMES


def test_an_unknown_name_is_refused_with_a_similar_one():
    with pytest.raises(UserError, match="did you mean 'stc-mnist'"):
        reproduction("stc-mnits")


@for_each("name", NAMES)
def test_claims_have_a_text_and_a_source(name):
    chosen = reproduction(name)
    assert chosen.name == name and chosen.claims and 0 < chosen.minutes < 10
    for text in (chosen.title, chosen.paper, chosen.setting, chosen.full_setting):
        assert text.strip() == text and text
    for claim in chosen.claims:
        assert all(text.strip() for text in (claim.text, claim.source, claim.paper))


@for_each("full", [False, True])
@for_each("name", NAMES)
def test_every_run_has_options_that_its_strategy_accepts(name, full):
    form = reproduction(name).experiment(full)
    assert form.seeds >= 1
    for method in form.methods.values():
        for choice in method.choices:
            config = resolved(config_of(form, method, choice, seed=0))
            assert (
                make_strategy(config, Layout.from_shapes({"w": (40, 40)})).name in config.strategy
            )
            assert config.rounds > 1


@for_each("name", NAMES)
def test_all_methods_have_the_same_number_of_choices(name):
    """A method with a finer grid of hyperparameters would have an advantage."""
    for full in (False, True):
        assert (
            len(
                {
                    len(method.choices)
                    for method in reproduction(name).experiment(full).methods.values()
                }
            )
            == 1
        )


@for_each("name", NAMES)
def test_runs_have_folders_of_their_own(name):
    for full in (False, True):
        folders = [
            f"{method}-{choice_slug(choice)}"
            for method, m in reproduction(name).experiment(full).methods.items()
            for choice in m.choices
        ]
        assert len(set(folders)) == len(folders)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_claims_are_judged_from_runs(name, tmp_path):
    """Runs the small form of each reproduction, with one round on digits for each method."""
    chosen = reproduction(name)
    short = {"rounds": 1, "local_steps": 1}
    methods = {
        method: Method(m.options | m.choices[0] | short)
        for method, m in chosen.small.methods.items()
    }
    common = chosen.small.common | {
        "task": "digits",
        "clients": min(20, chosen.small.common["clients"]),
    }
    runs = dataclasses.replace(chosen, needs="")
    results, _ = reproduce(
        runs,
        Experiment(common, methods, seeds=1),
        tmp_path,
        LocalOptions(device="cpu"),
        lambda line: None,
    )
    for claim, judgement in judge_claims(chosen, results):
        assert judgement.holds in (True, False) and any(
            character.isdigit() for character in judgement.ours
        ), claim.text


def test_the_best_choice_at_the_first_seed_is_run_with_the_others(done):
    folder, results, _, said = done
    assert results["short"].choice == {"lr": 0.05}
    assert max(results["short"].tried.values()) == results["short"].accuracies[0]
    assert [run.options["seed"] for run in results["short"].runs] == [0, 1]
    assert {path.name for path in folder.iterdir()} == {
        "short-lr-0.0001-seed-0", "short-lr-0.05-seed-0", "short-lr-0.05-seed-1", "long-seed-0", "long-seed-1"}  # fmt: skip
    assert len(said) == 5 and said[0].startswith("short, lr 0.0001, seed 0: ")


def test_numbers_are_those_of_the_run_folders(done):
    folder, results, _, _ = done
    ends = [
        json.loads((folder / f"long-seed-{seed}" / "summary.json").read_text()) for seed in (0, 1)
    ]
    assert results["long"].accuracies == [end["accuracy"] for end in ends]
    assert results["long"].bytes("uplink") == sum(end["uplink_bytes"] for end in ends) / 2
    assert differences(results["long"], results["short"]) == [
        a - b for a, b in zip(results["long"].accuracies, results["short"].accuracies, strict=True)]  # fmt: skip


def test_verdicts_follow_from_the_accuracies(done):
    _, results, _, _ = done
    assert more_accurate(results["long"], results["short"]) and not more_accurate(
        results["short"], results["long"]
    )
    assert within_margin(results["long"], results["long"], 0.0) and not within_margin(
        results["short"], results["long"], 0.0
    )
    (_, first), (_, second) = found = judge_claims(TINY, results)
    assert (first.holds, second.holds) == (True, False)
    assert summary_line(found[:1]) == "the claim holds here"
    assert summary_line(found[1:]) == f"the claim does not hold here: {results['short']}"
    assert (
        summary_line(found)
        == f"claim 2 does not hold here: {results['short']}; the other one holds"
    )
    assert summary_line([found[0]] * 3) == "all 3 claims hold here"


def test_finished_runs_are_not_repeated(done):
    folder, results, spent, _ = done
    said = []
    again, took = reproduce(TINY, TINY.small, folder, LocalOptions(device="cpu"), said.append)
    assert all(line.endswith("done before") for line in said)
    assert took == spent and spent.processor_s > 0
    assert {name: m.accuracies for name, m in again.items()} == {
        name: m.accuracies for name, m in results.items()
    }


def test_an_interrupted_run_is_resumed_with_the_same_result(done, tmp_path):
    from fedcomp.callbacks import Callback
    from fedcomp.sim import simulate

    class Stops(Callback):
        def on_round_end(self, record):
            if record.round == 8:
                raise KeyboardInterrupt

    form = dataclasses.replace(TINY.small, methods={"long": TINY.small.methods["long"]}, seeds=1)
    config = config_of(form, form.methods["long"], {}, 0, LocalOptions(device="cpu"))
    with pytest.raises(KeyboardInterrupt):
        simulate(dataclasses.replace(config, out=str(tmp_path / "long-seed-0")), Stops())
    results, _ = reproduce(TINY, form, tmp_path, LocalOptions(device="cpu"), lambda line: None)
    (run,) = results["long"].runs
    assert len(run.records) == 12 and (tmp_path / "long-seed-0" / TIME_FILE).is_file()
    same = done[1]["long"].runs[0].folder / "model.safetensors"
    assert (run.folder / "model.safetensors").read_bytes() == same.read_bytes()


def test_a_folder_with_other_runs_is_refused(done):
    other = dataclasses.replace(TINY.small, common=TINY.small.common | {"batch_size": 10})
    with pytest.raises(RunFolderError, match="a different 'batch_size'; give another --out"):
        reproduce(TINY, other, done[0], LocalOptions(device="cpu"), lambda line: None)


def test_missing_data_is_reported_before_anything_runs(tmp_path):
    said = []
    with pytest.raises(DataError, match="needs the data folder mnist/.*--data"):
        reproduce(
            dataclasses.replace(TINY, needs="mnist"),
            TINY.small,
            tmp_path / "runs",
            LocalOptions(data=str(tmp_path)),
            said.append,
        )
    assert not said and not (tmp_path / "runs").exists()


def test_sections_are_written_between_marks(done, tmp_path):
    _, results, spent, _ = done
    page = tmp_path / "page.md"
    page.write_text("# Page\n\ntext\n")
    found = judge_claims(TINY, results)
    write("tiny", section(TINY, False, results, found, spent), page)
    write("other", "second", page)
    once = page.read_text()
    write("tiny", section(TINY, False, results, found, spent), page)
    assert page.read_text() == once
    assert once.startswith("# Page\n\ntext\n\n<!-- tiny -->") and once.endswith(
        "second\n\n<!-- end of other -->\n"
    )
    assert f"| 1. {LEARNS.text} | in words | {found[0][1].ours} | yes |" in once
    with pytest.raises(UserError, match="leave --write out"):
        write("tiny", "text", tmp_path / "absent.md")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_signs_without_error_feedback_do_not_converge(name):
    assert best(PROBLEMS[name](), SIGN) >= 1.0
    assert best(PROBLEMS[name](), EFSIGN) < 0.01
