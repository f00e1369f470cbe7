"""The dashboard of a comparison fits every terminal at any time, and is readable without colours."""

import io
import math
from dataclasses import replace

from cases import for_each
from rich.cells import cell_len
from rich.console import Console

from fedcomp.callbacks import RoundRecord
from fedcomp.cli.comparison.displays import (
    CURVE_CHARACTERS,
    DONE,
    FAILED,
    AlternativeProgress,
    ComparisonLines,
    ComparisonView,
)

ROUNDS = 50
FACTS = [
    ("task", "digits"),
    ("clients", "200"),
    ("downlink", "stc:density=1/100"),
    ("parameters", "9,610"),
    ("engine", "batched"),
]


def record(number: int, of: int) -> RoundRecord:
    accuracy = 1 - 0.9 * math.exp(-number / (5 + of))
    return RoundRecord(
        round=number,
        accuracy=accuracy,
        loss=1 - accuracy,
        train_loss=0.5,
        cohort=20,
        accepted=20,
        rejected=0,
        uplink_bytes=2_000 * (of + 1),
        downlink_bytes=9_000,
        dense_uplink_bytes=768_800,
        dense_downlink_bytes=768_800,
        seconds=0.1,
    )


def feed(display, alternatives: int, ended: int = 0):
    """Call the hooks of a comparison in which `ended` alternatives are done or have failed, two are running and the others wait."""
    display.on_run_start(
        "runs/digits-20260101-120000",
        FACTS,
        [AlternativeProgress(f"topk-{i}pct_ef21_lr-0.{i}", ROUNDS) for i in range(alternatives)],
    )
    for i in range(min(ended + 2, alternatives)):
        display.on_message(i, {"started": True})
        display.on_message(
            i, {"started": {"first_round": 1, "rounds": ROUNDS, "cohort": 20}, "earlier": []}
        )
        for number in range(1, (ROUNDS if i < ended else 17) + 1):
            display.on_message(i, {"round": record(number, i)})
        if i < ended:
            display.on_message(
                i,
                {
                    "end": {"failed": "its process was killed by SIGKILL", "status": 1}
                    if i % 3 == 2
                    else {"done": "x"}
                },
            )
    return display


def view_of(alternatives: int, ended: int = 0) -> ComparisonView:
    view = ComparisonView(Console(file=io.StringIO(), width=100, height=40))
    with view:  # opens and closes the alternate screen
        return feed(view, alternatives, ended)


def lines(view: ComparisonView, width: int, height: int) -> list[str]:
    console = Console(
        file=io.StringIO(), width=width, height=height, color_system=None, force_terminal=True
    )
    console.print(view.picture(width, height))
    return console.file.getvalue().rstrip("\n").split("\n")


@for_each("alternatives", [1, 2, 8, 60])
def test_the_dashboard_fits_the_terminal(alternatives):
    view = view_of(alternatives, alternatives // 2)
    for width in (40, 60, 79, 80, 100, 120, 200):
        for height in (4, 8, 12, 16, 24, 40, 60):
            shown = lines(view, width, height)
            assert len(shown) <= height and max(map(cell_len, shown)) <= width, (width, height)


def test_each_alternative_has_a_line_with_its_numbers_and_curve(capsys):
    view = view_of(8, 3)
    shown = lines(view, 120, 40)
    of = {
        name: next(line for line in shown if name in line)
        for name in ("topk-0pct", "topk-2pct", "topk-4pct", "topk-7pct")
    }
    assert (
        of["topk-0pct"].startswith("✓")
        and "50/50" in of["topk-0pct"]
        and "100 kB" in of["topk-0pct"]
        and CURVE_CHARACTERS[-1] in of["topk-0pct"]
    )
    assert (
        of["topk-2pct"].startswith("×")
        and of["topk-4pct"].startswith("▸")
        and "17/50" in of["topk-4pct"]
    )
    assert of["topk-7pct"].startswith("·") and "0/50" in of["topk-7pct"]
    assert "3 of 8 done" in shown[0]
    assert "× topk-2pct_ef21_lr-0.2: its process was killed" in view.console.file.getvalue()
    facts = capsys.readouterr().out
    assert "parameters    9,610" in facts and "folder        runs/digits-2026" in facts


def test_running_alternatives_are_shown_if_there_is_no_room_for_all():
    shown = lines(view_of(60, 20), 100, 20)
    assert sum(line.startswith("▸") for line in shown) == 2
    assert any(line.strip().startswith("and ") and line.strip().endswith("more") for line in shown)


def test_plain_lines_report_the_same_events(capsys):
    display = feed(ComparisonLines(), 3, 3)
    output = capsys.readouterr().out
    assert (
        "topk-0pct_ef21_lr-0.0: round 50 of 50, accuracy 100.00 %" in output
        and "topk-1pct_ef21_lr-0.1: done (2 of 3)" in output
    )
    assert "topk-2pct_ef21_lr-0.2: failed: its process was killed by SIGKILL (3 of 3)" in output
    assert [p.state for p in display.all] == [DONE, DONE, FAILED]


def test_rounds_before_a_resumption_count_as_done_but_not_for_the_speed():
    time = iter([0.0, 10.0])
    display = ComparisonLines(clock=lambda: next(time))
    display.on_run_start("x", FACTS, [AlternativeProgress("a", 10)])
    display.on_message(0, {"earlier": [record(n, 0) for n in range(1, 6)]})
    display.on_message(0, {"round": record(6, 0)})
    assert display.remaining_s == 40.0 and display.all[0].totals.uplink_bytes == 6 * 2_000


def test_a_task_without_accuracy_shows_its_loss():
    progress = AlternativeProgress("a", 10)
    display = ComparisonLines()
    display.on_run_start("x", FACTS, [progress])
    display.on_message(0, {"round": replace(record(1, 0), accuracy=None, loss=0.25)})
    assert progress.quality == "0.2500"
