"""The curve has the requested size, labels its ends, and keeps few points in a long run."""

import math

from cases import for_each

from fedcomp.cli.screen import MAX_POINTS, CurvePlot


def drawn(
    shares: list[float], width: int = 40, height: int = 10, rounds: list[int] | None = None
) -> list[str]:
    curve = CurvePlot()
    for number, share in zip(rounds or range(1, len(shares) + 1), shares, strict=True):
        curve.add(number, share)
    return [line.plain for line in curve.lines(width, height)]


@for_each(
    "shares",
    [[], [0.5], [0.1, 0.1], [0.0, 1.0], [0.97311, 0.97312], [math.sin(i) ** 2 for i in range(300)]],
    ids=["none", "one", "flat", "whole", "tiny", "many"],
)
@for_each("width, height", [(30, 2), (40, 3), (80, 12), (200, 40)])
def test_a_curve_has_the_given_height_and_at_most_the_given_width(shares, width, height):
    lines = drawn(shares, width, height)
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
    "shares, low, high",
    [
        ([0.113, 0.973], "10 %", "100 %"),
        ([0.9731, 0.9738], "97.3 %", "97.4 %"),
        ([0.0, 0.02], "0.0 %", "2.0 %"),
        ([0.61, 0.69], "61 %", "69 %"),
    ],
)
def test_the_axis_ends_at_round_numbers_around_the_values(shares, low, high):
    lines = drawn(shares)
    assert (lines[-2].partition(" ┤")[0].strip(), lines[0].partition(" ┤")[0].strip()) == (
        low,
        high,
    )


def test_values_that_are_not_finite_are_left_out():
    assert drawn([0.1, math.nan, 0.9, math.inf]) == drawn([0.1, 0.9], rounds=[1, 3])


def test_a_long_run_keeps_few_points_including_its_ends():
    curve = CurvePlot()
    for number in range(1, 100_001):
        curve.add(number, number / 100_000)
    assert len(curve._points) <= MAX_POINTS
    lines = [line.plain for line in curve.lines(80, 10)]
    assert lines[-1].split()[1] == "1" and lines[-1].split()[-1] == "100000"
    assert all(any(0x2800 < ord(c) <= 0x28FF for c in line) for line in lines[:-1])


def test_a_long_run_has_the_same_resolution_at_its_beginning_and_end():
    """The curve is 0 in the first half and 1 in the second."""
    lines = drawn([i // 50_000 for i in range(100_000)], 80, 10)
    top, bottom = ([i for i, c in enumerate(lines[row]) if ord(c) > 0x2800] for row in (0, 8))
    middle = (min(bottom) + max(top)) / 2
    assert abs(max(bottom) - middle) <= 2 and abs(min(top) - middle) <= 2
