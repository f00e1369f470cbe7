"""Values that change by round: each form of schedule against values computed by hand, valid texts, and errors."""

import math
import re

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import ConfigError, SpecError
from fedcomp.schedules import COUNT, CURVES, FRACTION, RATE, OptionSchedule, needs_horizon


def values(text: str, rounds, own: float = 1.0, kind=RATE, **also) -> list[float]:
    schedule = OptionSchedule("--x-schedule", text, kind, own, **also)
    return [schedule.at(round) for round in rounds]


@for_each(
    "text, own, expected",
    [
        (None, 5, [5, 5, 5, 5, 5]),
        ("1,8@3", 5, [1, 1, 8, 8, 8]),
        ("1@1,8@3", 5, [1, 1, 8, 8, 8]),
        ("8@3", 5, [5, 5, 8, 8, 8]),
        ("7", 5, [7, 7, 7, 7, 7]),
        (" 2 , 3 @ 2 , 4@5 ", 5, [2, 3, 3, 3, 4]),
    ],
)
def test_a_list_of_values_changes_at_its_rounds(text, own, expected):
    found = values(text, range(1, 6), own, COUNT)
    assert found == expected and all(type(value) is int for value in found)


def test_values_in_a_list_may_be_percentages_and_fractions():
    assert values("10%,1/400@2,1e-3@3", (1, 2, 3), kind=FRACTION) == [0.1, 0.0025, 0.001]


@for_each(
    "text, expected",
    [
        ("linear", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        ("linear:to=0.2", [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("poly", [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]),
        ("poly:to=0.2,power=1", [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0.0, 0.0]),
        ("cosine:0.5", [1.0, (6 + math.sqrt(2)) / 8, 0.75, (6 - math.sqrt(2)) / 8, 0.5, 0.5]),
        ("geometric:to=1/16", [1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16]),
        ("step:every=2", [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]),
        ("step:every=3,factor=2", [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]),
    ],
)
def test_curves_have_the_expected_values_within_and_after_four_rounds(text, expected):
    assert values(text, range(1, 7), horizon=4) == pytest.approx(expected, abs=1e-15)


@for_each("text", ["linear", "poly", "cosine", "geometric:to=1/16", "step:every=2"])
def test_a_curve_begins_after_the_warm_up(text):
    warm = values(text, range(1, 10), warmup=3, horizon=7)
    assert warm == [1.0] * 3 + values(text, range(1, 7), horizon=4)


def test_counts_are_rounded_half_up():
    assert values("linear:to=4", range(1, 6), 1, COUNT, horizon=2) == [1, 3, 4, 4, 4]
    assert values("step:every=1,factor=2", range(1, 6), 20, COUNT) == [20, 40, 80, 160, 320]


@given(
    st.sampled_from(["linear", "poly", "cosine", "geometric"]),
    st.floats(1e-3, 1.0),
    st.floats(1e-3, 1.0),
    st.integers(1, 300),
)
def test_a_curve_is_monotonic_from_the_initial_to_the_final_value(name, own, to, rounds):
    found = values(f"{name}:to={to!r}", range(1, rounds + 3), own, horizon=rounds)
    assert found[0] == pytest.approx(own) and found[-1] == pytest.approx(to) == found[-2]
    slack = 1e-12 if to < own else -1e-12
    steps = zip(found, found[1:], strict=False)
    assert all(
        (after <= before + slack) == (to < own) or math.isclose(before, after)
        for before, after in steps
    )


@for_each(
    "text, kind, sentence",
    [
        (
            "cosin",
            RATE,
            "unknown schedule 'cosin'; did you mean 'cosine'? known: cosine, geometric, linear, poly, step",
        ),
        ("cosine:form=1", RATE, "schedule 'cosine' has no option 'form'; known: to"),
        ("cosine:to=-1", RATE, "to is -1; give at least 0"),
        (
            "cosine+linear",
            RATE,
            "a schedule is a single curve, such as cosine, or values with rounds, such as 1,8@21 (8 from round 21 on); give one of them",
        ),
        (
            "cosine@3",
            RATE,
            "a schedule is a single curve, such as cosine, or values with rounds, such as 1,8@21 (8 from round 21 on); give one of them",
        ),
        ("geometric", RATE, "schedule 'geometric' needs to; write geometric:to=0.001"),
        ("geometric:to=0", RATE, "to is 0; give more than 0"),
        ("step", RATE, "schedule 'step' needs every; write step:every=20"),
        ("step:every=0", RATE, "every is 0; give at least 1"),
        (
            "step:every=2,factor=0",
            RATE,
            "factor is 0; give more than 0",
        ),
        ("poly:power=-1", RATE, "power is -1; give at least 0"),
        ("1,8", COUNT, "'8' in '1,8' does not say from which round on it applies; write 8@ROUND"),
        ("1,", COUNT, "'' in '1,' does not say from which round on it applies; write VALUE@ROUND"),
        ("1,8@0", COUNT, "the round in '8@0' is 0; give at least 1"),
        ("1,8@", COUNT, "the round in '8@' cannot be ''; give a whole number"),
        ("1,8@2.5", COUNT, "the round in '8@2.5' cannot be '2.5'; give a whole number"),
        ("1,8@1", COUNT, "round 1 follows round 1 in '1,8@1'; give rounds in ascending order"),
        (
            "1,8@9,4@5",
            COUNT,
            "round 5 follows round 9 in '1,8@9,4@5'; give rounds in ascending order",
        ),
        ("0", COUNT, "the value in '0' is 0; give at least 1"),
        ("2.5", COUNT, "the value in '2.5' cannot be '2.5'; give a whole number"),
        ("1_0", COUNT, "the value in '1_0' cannot be '1_0'; give a whole number"),
        ("1000001", COUNT, "the value in '1000001' is 1e+06; give at most 1e+06"),
        ("0.1,0@3", RATE, "the value in '0@3' is 0; give more than 0"),
        ("-0.1", RATE, "the value in '-0.1' is -0.1; give more than 0"),
        ("0.1,1e39@3", RATE, "the value in '1e39@3' is 1e+39; give at most 3e+38"),
        ("110%", FRACTION, "the value in '110%' is 1.1; give at most 1"),
    ],
)
def test_an_invalid_schedule_is_refused_in_one_sentence(text, kind, sentence):
    with pytest.raises(SpecError) as raised:
        kind.read(text)
    assert str(raised.value) == sentence


@given(
    st.text("cosinelartpgy0123456789.,@:=%+-/ ", max_size=12),
    st.sampled_from([RATE, COUNT, FRACTION]),
)
def test_any_text_is_a_schedule_or_an_error_with_advice(text, kind):
    try:
        form = OptionSchedule("--x-schedule", text or " ", kind, 1, horizon=9)
    except SpecError as error:
        assert re.search(r"; (give|write|did|known|it|keep)", str(error)), error
        return
    form.at(1), form.at(10**9)


@for_each(
    "text, kind, own, rounds, sentence",
    [
        (
            "cosine",
            RATE,
            0.1,
            5,
            "--x-schedule 'cosine' reaches 0 in round 5, but values must be more than 0; give --horizon 5, or another 'to'",
        ),
        ("linear", COUNT, 4, 4, None),
        (
            "linear",
            COUNT,
            1,
            4,
            "--x-schedule 'linear' reaches 0 in round 4, but values must be at least 1; give another 'to'",
        ),
        (
            "linear:to=2",
            FRACTION,
            0.1,
            4,
            "--x-schedule 'linear:to=2' reaches 1.525 in round 4, but values must be at most 1; give another 'to'",
        ),
        (
            "step:every=1,factor=1e-200",
            RATE,
            0.1,
            3,
            "--x-schedule 'step:every=1,factor=1e-200' reaches 0 in round 3, but values must be more than 0; "
            "give another 'factor' or a larger 'every'",
        ),
        (
            "step:every=1,factor=1e300",
            RATE,
            0.1,
            2,
            "--x-schedule 'step:every=1,factor=1e300' reaches 1e+299 in round 2, but values must be "
            "at most 3e+38; give another 'factor' or a larger 'every'",
        ),
        (
            "step:every=1,factor=10",
            COUNT,
            1,
            400,
            "--x-schedule 'step:every=1,factor=10' reaches inf in round 400, but values must be at most 1e+06; "
            "give another 'factor' or a larger 'every'",
        ),
        ("cosine", RATE, 0.1, 4, None),
        ("8@2", COUNT, 4, 4, None),
    ],
)
def test_a_curve_that_leaves_the_valid_range_is_refused(text, kind, own, rounds, sentence):
    schedule = OptionSchedule("--x-schedule", text, kind, own, horizon=4)
    if sentence is None:
        schedule.check(rounds)
        assert not kind.correction(min(schedule.values(rounds)))
        return
    with pytest.raises(ConfigError) as raised:
        schedule.check(rounds)
    assert str(raised.value) == sentence


def test_a_curve_needs_a_horizon():
    with pytest.raises(
        ConfigError,
        match="^--x-schedule 'cosine' ends at the last round, which is unknown; give --horizon$",
    ):
        OptionSchedule("--x-schedule", "cosine", RATE, 0.1)
    assert {name for name in CURVES if needs_horizon(f"{name}:to=1")} == {
        "cosine",
        "geometric",
        "linear",
        "poly",
    }
    assert not needs_horizon("0.1,0.01@3") and not needs_horizon(None)


def test_values_returns_the_extremes_of_a_schedule():
    assert OptionSchedule("", "10%,1%@3,30%@4,5%@99", FRACTION, 0.01).values(50) == {0.1, 0.01, 0.3}
    assert OptionSchedule("", "geometric:to=0.1%", FRACTION, 0.1, warmup=3, horizon=7).values(
        9
    ) == {
        0.1,
        0.001,
    }
