"""The text format of Prometheus: every page can be read by the grammar, and says what was put in."""

import math

import pytest
from cases import for_each
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_text import parsed

from fedcomp.server.exposition import Family, Histogram, number, text

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)


@given(
    st.dictionaries(
        st.tuples(st.tuples(st.just("a"), TEXTS), st.tuples(st.just("b_2"), TEXTS)),
        st.floats(allow_nan=False),
    ),
    TEXTS,
)
def test_labels_values_and_help_come_back_whatever_they_hold(values, help):
    page = text(
        [Family("x", "gauge", "h" + help, values), Family("y_total", "counter", "more", {(): 1})]
    )
    assert parsed(page) == {("x", labels): value for labels, value in values.items()} | {
        ("y_total", ()): 1
    }


@for_each(
    "value, written",
    [
        (math.nan, "NaN"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (3, "3"),
        (3.0, "3"),
        (0.1, "0.1"),
        (-0.5, "-0.5"),
        (1e300, "1e+300"),
        (2**53 + 1, "9007199254740993"),
        (True, "1"),
    ],
)
def test_numbers_are_written_as_go_reads_them(value, written):
    assert number(value) == written


@given(st.floats(allow_nan=False) | st.integers(0, 2**62))
def test_a_number_loses_nothing(value):
    assert float(number(value)) == float(value)


def test_not_a_number_is_one_sample():
    (value,) = parsed(text([Family("x", "gauge", "h", {(): math.nan})])).values()
    assert math.isnan(value)


def test_a_family_is_explained_once_even_without_samples():
    assert (
        text([Family("x", "gauge", "what\nit \\ is", {})])
        == "# HELP x what\\nit \\\\ is\n# TYPE x gauge\n"
    )


@given(st.lists(st.floats(0, 100), max_size=30))
@example([0.5, 1.0, 20.0, 20.1])
def test_a_histogram_counts_what_is_at_most_a_bound(values):
    histogram = Histogram((0.5, 1, 20))
    for value in values:
        histogram.add(value)
    read = parsed(text([Family("x_seconds", "histogram", "h", histogram)]))
    for bound, le in ((0.5, "0.5"), (1, "1"), (20, "20"), (math.inf, "+Inf")):
        assert read["x_seconds_bucket", (("le", le),)] == sum(value <= bound for value in values)
    assert read["x_seconds_sum", ()] == pytest.approx(sum(values)) and read[
        "x_seconds_count", ()
    ] == len(values)


@for_each(
    "name, kind",
    [("x_total", "gauge"), ("x", "counter"), ("9x", "gauge"), ("x y", "gauge"), ("x", "summary")],
)
def test_a_name_that_is_none_is_refused(name, kind):
    with pytest.raises(ValueError, match=name):
        Family(name, kind, "h", {})


@for_each("label", ["", "9", "a-b", "__a"])
def test_a_label_that_is_none_is_refused(label):
    with pytest.raises(ValueError, match="none"):
        text([Family("x", "gauge", "h", {((label, "v"),): 1})])


def test_half_a_character_does_not_break_the_page():
    assert parsed(text([Family("x", "gauge", "h", {(("a", "\udcff"),): 1})])) == {
        ("x", (("a", "?"),)): 1
    }
