"""Numbers for people: three digits, decimal units, and never 1000 of a unit."""

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.formatting import UNITS, decimal, duration, human_bytes, named_clients, percent, ratio


@for_each(
    "count, text",
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1234, "1.23 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (123_456, "123 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (1_724_320, "1.72 MB"),
        (10**9, "1.00 GB"),
        (5 * 10**18, "5.00 EB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@given(st.integers(1, 10**20))
def test_human_bytes_has_an_error_below_half_a_percent_and_at_most_seven_characters(count):
    text = human_bytes(count)
    value, unit = text.split()
    assert float(value) * 1000 ** UNITS.index(unit) == pytest.approx(count, rel=0.005)
    assert len(text) <= 7


@for_each(
    "dense, sent, text",
    [
        (400, 1, "×400"),
        (1000, 333, "×3.00"),
        (399, 10, "×39.9"),
        (1, 1, "×1.00"),
        (1, 2, "×0.50"),
        (10, 0, "–"),
        (0, 0, "–"),
        (0, 5, "–"),
    ],
)
def test_ratio(dense, sent, text):
    assert ratio(dense, sent) == text


@for_each(
    "share, text",
    [
        (None, "–"),
        (0.0, "0.00 %"),
        (0.97314, "97.31 %"),
        (1.0, "100.00 %"),
        (float("nan"), "nan %"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


@for_each(
    "loss, text",
    [
        (None, "–"),
        (0.09123, "0.0912"),
        (123.4, "123.4000"),
        (1234.5, "1.23e+03"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_decimal(loss, text):
    assert decimal(loss) == text


@for_each(
    "seconds, text",
    [
        (0.0, "0.00 s"),
        (0.837, "0.84 s"),
        (9.996, "10.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (72.3, "1 min 12 s"),
        (3599.6, "1 h 00 min"),
        (7625, "2 h 07 min"),
        (86399, "23 h 59 min"),
        (86400, "1 d 00 h"),
        (1e6, "11 d 13 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@for_each(
    "clients, text",
    [
        ([3], "client 3"),
        ([2, 0], "clients 0, 2"),
        ([0, 1], "clients 0, 1"),
        ([5, 0, 3, 4, 3], "clients 0, 3 to 5"),
        (range(50), "clients 0 to 49"),
    ],
)
def test_named_clients(clients, text):
    assert named_clients(clients) == text
