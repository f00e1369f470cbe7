"""The alternatives that options with several values make, their names, and the Pareto front of their results."""

import io
import random
import re
from dataclasses import replace

import pytest
import tomli_w
from cases import for_each
from command_line import error_message, fedcomp
from rich.console import Console

from fedcomp.baseline import CODECS, COMPRESSING_STRATEGIES, dense
from fedcomp.cli import flags
from fedcomp.cli.comparison import comparison
from fedcomp.cli.comparison.alternatives import alternatives, compares_compression, has_alternatives
from fedcomp.cli.results import FRONT, Result, cells, front, parse_accuracy
from fedcomp.config import ALTERNATIVE_OPTIONS, RunConfig
from fedcomp.errors import ConfigError, UserError
from fedcomp.layout import Layout
from fedcomp.server.results import make_strategy
from fedcomp.strategies import available_strategies, resolved

GIVEN = {
    "uplink": ["stc:density=1/400", "topk:density=1%,values=fp16@layer"],
    "memory": ["residual", "ef21"],
    "seed": ["3", "1"],
    "clients": ["20"],
}


def test_options_with_several_values_make_all_combinations():
    values = flags.run_values(GIVEN, ALTERNATIVE_OPTIONS)
    assert values["clients"] == 20 and values["seed"] == [3, 1]
    found = alternatives(values)
    assert [each.name for each in found[:3]] == [
        "stc-1-400_residual_seed-3",
        "stc-1-400_residual_seed-1",
        "stc-1-400_ef21_seed-3",
    ]
    assert len({each.name for each in found}) == 8
    assert found[-1].config == RunConfig(
        uplink=GIVEN["uplink"][1], memory="ef21", seed=1, clients=20
    )
    assert not has_alternatives(flags.run_values({"uplink": ["stc"]}, ALTERNATIVE_OPTIONS))


def test_a_list_in_toml_makes_the_same_alternatives(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text(
        tomli_w.dumps(
            {"uplink": GIVEN["uplink"], "memory": GIVEN["memory"], "seed": [3, 1], "clients": 20}
        )
    )
    assert alternatives(
        flags.run_values({"config": str(path)}, ALTERNATIVE_OPTIONS)
    ) == alternatives(flags.run_values(GIVEN, ALTERNATIVE_OPTIONS))
    assert (
        flags.run_values({"config": str(path), "uplink": ["identity"]}, ALTERNATIVE_OPTIONS)[
            "uplink"
        ]
        == "identity"
    ), "a flag must have precedence over the file"
    with pytest.raises(ConfigError, match="'uplink' has more than one value; give one$"):
        flags.run_config({"config": str(path)})


@for_each(
    "values",
    [
        {"attack": ["a/../b:1", "a//b:1"]},
        {"network": ["../x.csv", "x.csv"]},
        {"uplink": ["topk:density=1%", "topk:values=1%"]},
        {"partition": ["a" * 300, "a" * 301]},
        {"lr": [1e-05, 0.1]},
    ],
)
def test_alternatives_have_different_names_that_are_valid_folder_names(values):
    names = [each.name for each in alternatives(values)]
    assert len(set(names)) == len(names) == 2
    for name in names:
        assert (
            "/" not in name
            and not name.startswith((".", "-"))
            and len(name) <= 90
            and name.isprintable()
            and " " not in name
        )


@for_each(
    "values, output",
    [
        ({"uplink": ["stc", "stc"]}, "--uplink stc is given twice; give it once"),
        ({"lr": ["0.1", "fast"]}, "--lr cannot be 'fast'; give a number"),
    ],
)
def test_repeated_and_invalid_values_are_refused(values, output):
    with pytest.raises(UserError, match=output):
        flags.run_values(values, ALTERNATIVE_OPTIONS)


def test_the_last_value_of_an_option_without_alternatives_is_used():
    assert flags.run_values({"out": ["x", "y"], "rounds": ["3", "4"]}, ALTERNATIVE_OPTIONS) == {
        "out": "y",
        "rounds": 4,
    }


@for_each("command", [("bench", "sim"), ("server", "start")])
def test_commands_of_one_run_refuse_several_values_of_an_option(command):
    done = fedcomp(*command, "--clients", 2, "--uplink", "stc", "--uplink", "topk")
    assert error_message(done) == (
        "--uplink is given 2 times; give it once, or compare the values with fedcomp sim"
    )


def test_too_many_alternatives_are_refused():
    with pytest.raises(
        ConfigError,
        match="40 × 40 option values make 1,600 combinations; give at most 1,000",
    ):
        alternatives({"seed": list(range(40)), "clients": list(range(1, 41))})
    with pytest.raises(ConfigError, match="--clients is 0"):
        alternatives({"clients": [1, 0]})


def test_the_command_to_continue_has_every_value():
    given = {
        "uplink": ["stc", "identity"],
        "target_accuracy": "90%",
        "dry_run": None,
        "plain": True,
    }
    command = "fedcomp sim --uplink stc --uplink identity --target-accuracy 90% --plain --out 'x y' --resume"
    assert flags.resume_command(given, "x y", ("fedcomp", "sim")) == command


# The dense baseline.


def added(values) -> list[str]:
    plain = [each.name for each in alternatives(values)]
    found = [each.name for each in alternatives(values, baseline=True)]
    assert found[: len(plain)] == plain
    return found[len(plain) :]


def test_the_baseline_has_the_same_options_without_compression():
    values = {
        "uplink": ["stc", "topk"],
        "memory": ["dgc", "residual"],
        "density_warmup": 5,
        "partition": ["iid", "classes:2"],
        "seed": [0, 1],
        "lr": 0.1,
        "strategy": "median",
    }
    assert added(values) == [
        "dense_iid_seed-0",
        "dense_iid_seed-1",
        "dense_classes-2_seed-0",
        "dense_classes-2_seed-1",
    ]
    kept = {"partition": "classes:2", "seed": 1, "lr": 0.1, "strategy": "median"}
    assert alternatives(values, baseline=True)[-1].config == RunConfig(**CODECS, **kept)


def test_an_alternative_that_is_dense_both_ways_is_the_baseline():
    assert added({"uplink": ["stc", "identity"]}) == ["dense"]
    assert added({"uplink": ["stc", "identity"], "downlink": "identity"}) == []


def test_comparisons_of_compression_have_a_baseline():
    assert compares_compression({"downlink": ["stc", "identity"]})
    assert compares_compression({"strategy": ["average", "powersgd:rank=4"]})
    assert not compares_compression({"strategy": ["average", "median"], "lr": [0.1, 0.2]})


def test_every_strategy_has_a_baseline_that_can_run():
    for name in available_strategies():
        config = RunConfig(**dense({"strategy": name, "clients": 10, "participation": 1.0}))
        assert (config.strategy == name) == (name not in COMPRESSING_STRATEGIES)
        make_strategy(resolved(config), Layout.from_shapes({"w": (40, 40)}))


# Results.


def line(accuracy, sent, **more) -> Result:
    return Result(f"{accuracy} {sent}", (), accuracy, uplink_bytes=sent, **more)


def test_the_front_has_the_lines_that_no_other_line_dominates():
    lines = [
        line(0.9, 100),
        line(0.9, 50),
        line(0.8, 50),
        line(0.7, 10),
        line(0.7, 10),
        line(0.95, 500),
        line(0.99, 1, note="failed: x"),
        line(None, 1),
    ]
    assert front(lines) == [False, True, False, True, True, True, False, False]


def test_problems_have_fronts_of_their_own():
    iid, skewed, other = (
        {"task": "digits", "partition": "iid"},
        {"task": "digits", "partition": "classes:2"},
        {"task": "mine.py:task", "partition": "iid"},
    )
    assert front(
        [
            line(0.9, 50, problem=iid),
            line(0.8, 60, problem=iid),
            line(0.7, 60, problem=skewed),
            line(None, 70, loss=0.3, problem=other),
        ]
    ) == [True, False, True, True]


def test_the_front_of_random_lines_matches_its_definition():
    draw = random.Random(5)
    for _ in range(50):
        lines = [
            line(draw.randint(1, 6) / 10, draw.randint(1, 6)) for _ in range(draw.randint(1, 9))
        ]
        for mine, on in zip(lines, front(lines), strict=True):
            beaten = any(
                (o.accuracy > mine.accuracy and o.sent_bytes <= mine.sent_bytes)
                or (o.accuracy >= mine.accuracy and o.sent_bytes < mine.sent_bytes)
                for o in lines
            )
            assert on is not beaten


def test_a_task_without_accuracy_is_judged_by_its_loss():
    lines = [line(None, 10, loss=0.5), line(None, 10, loss=0.7), line(None, 5, loss=0.7)]
    assert front(lines) == [True, False, True]
    assert cells(lines[0], None)["accuracy"] == "loss 0.5000"


def test_a_text_table_has_a_column_for_each_number():
    lines = [
        replace(line(0.9, 100, accuracy_spread=0.01), on_front=True),
        line(0.5, 200, note="diverged: the loss is not finite"),
    ]
    title, first, second = comparison.as_text(lines, 0.9)
    assert title.split("  ")[-1] == "bytes to 90 %"
    assert first.startswith(f"{FRONT}  ") and "90.00 % ± 1.00" in first
    assert second.startswith("   ") and ", diverged " in second
    assert len({len(row) for row in (title, first, second)}) == 1


@for_each("width", [80, 100, 120])
def test_a_table_on_a_terminal_does_not_cut_off_numbers(width):
    label = "topk:density=1%,values=fp16@layer (3 seeds)"
    lines = [
        Result(label, (), 0.9181, 0.0014, 0.3, 60, 290e3, 586e3, 52.7, 13.7, 21.5, 235e3, True),
        line(0.5, 23.1e6),
    ]
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    console.print(comparison.as_rich_table(lines, 0.8, width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    numbers = ("91.81 % ± 0.14", "290 kB", "586 kB", "×52.7", "13.7 s", "21.5", "235 kB", "to 80 %")
    assert all(number in shown for number in numbers), shown
    assert shown.splitlines()[2].startswith(f"{FRONT} ")


@for_each("width", [18, 30, 45, 60, 66])
def test_a_table_on_a_narrow_terminal_leaves_out_columns_but_cuts_off_no_number(width):
    lines = [
        Result(
            "eden:bits=2", (), 0.8472, None, 0.3, 40, 391e3, 146e3, 22.9, 68.87, 15, 179e3, True
        ),
        line(0.5, 23.1e6),
    ]
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    console.print(comparison.as_rich_table(lines, 0.5, width))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    row = next(line for line in shown.splitlines() if line.startswith(FRONT)).split()[2:]
    assert re.fullmatch(
        r"(84\.72 %( 391 kB)?( 146 kB)?( ×22\.9)?( 40)?( 15)?( 179 kB)?)?", " ".join(row)
    ), shown
    assert width < 60 or {"391", "146", "15", "179"} <= set(row), shown


def test_a_target_accuracy_is_above_0_and_at_most_1():
    assert (parse_accuracy("90%"), parse_accuracy("0.9"), parse_accuracy(None)) == (0.9, 0.9, None)
    for text in ("0", "101%", "x"):
        with pytest.raises(
            UserError, match="--target-accuracy is '.*'; give a number above 0 and up to 1"
        ):
            parse_accuracy(text)
