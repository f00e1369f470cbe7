"""The curve has the requested size, labels its ends, and shows a long run from its first to its last round."""

import math
from dataclasses import replace

from cases import for_each

from fedcomp.cli.dashboard import Dashboard
from fedcomp.cli.screen import curve


def drawn(accuracies: list[float], width: int = 40, height: int = 10) -> list[str]:
    points = [*enumerate(accuracies, 1)]
    return [line.plain for line in curve(points, "accuracy", width, height)]


@for_each(
    "accuracies",
    [[], [0.5], [0.1, 0.1], [0.0, 1.0], [0.97311, 0.97312], [math.sin(i) ** 2 for i in range(300)]],
    ids=["none", "one", "flat", "whole", "tiny", "many"],
)
@for_each("width, height", [(30, 2), (40, 3), (80, 12), (200, 40)])
def test_a_curve_has_the_given_height_and_at_most_the_given_width(accuracies, width, height):
    lines = drawn(accuracies, width, height)
    assert len(lines) == height
    assert max(map(len, lines)) <= width


def test_an_increase_is_drawn_from_the_lower_left_to_the_upper_right():
    *rows, axis = drawn([i / 19 for i in range(20)], 40, 10)
    dots = [[i for i, c in enumerate(row) if 0x2800 < ord(c) <= 0x28FF] for row in rows]
    assert all(dots)
    assert [max(row) for row in dots] == sorted((max(row) for row in dots), reverse=True)
    assert rows[0].startswith("100 % ┤") and rows[-1].startswith("  0 % ┤")
    assert len(rows[0]) == 40  # the last point is at the right edge
    assert axis.split()[1] == "1" and axis.split()[-1] == "20"


@for_each(
    "accuracies, low, high",
    [
        ([0.113, 0.973], "10 %", "100 %"),
        ([0.9731, 0.9738], "97.3 %", "97.4 %"),
        ([0.0, 0.02], "0.0 %", "2.0 %"),
        ([0.61, 0.69], "61 %", "69 %"),
    ],
)
def test_the_axis_ends_at_round_numbers_around_the_values(accuracies, low, high):
    lines = drawn(accuracies)
    assert (lines[-2].partition(" ┤")[0].strip(), lines[0].partition(" ┤")[0].strip()) == (
        low,
        high,
    )


def test_values_that_are_not_finite_are_left_out(fake_run):
    run, dashboard = fake_run(3), Dashboard()
    run.header = replace(run.header, judged="loss")
    run.records = [
        replace(r, loss=loss) for r, loss in zip(run.records, (0.5, math.nan, 0.1), strict=True)
    ]
    run.to(dashboard, end=False)
    dashboard.console.begin_capture()
    dashboard.console.print(dashboard.picture(100, 40))
    text = dashboard.console.end_capture()
    assert "0.5 ┤" in text and "0.1 ┤" in text


def test_the_curve_of_a_long_run_includes_its_ends():
    lines = drawn([number / 100_000 for number in range(1, 100_001)], 80, 10)
    assert lines[-1].split()[1] == "1" and lines[-1].split()[-1] == "100000"
    assert all(any(0x2800 < ord(c) <= 0x28FF for c in line) for line in lines[:-1])


def test_a_long_run_has_the_same_resolution_at_its_beginning_and_end():
    """The curve is 0 in the first half and 1 in the second."""
    lines = drawn([i // 50_000 for i in range(100_000)], 80, 10)
    top, bottom = ([i for i, c in enumerate(lines[row]) if ord(c) > 0x2800] for row in (0, 8))
    middle = (min(bottom) + max(top)) / 2
    assert abs(max(bottom) - middle) <= 2 and abs(min(top) - middle) <= 2
