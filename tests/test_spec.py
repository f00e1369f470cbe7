"""Spec strings: formatting and parsing are inverse, and errors say how to fix the text."""

from dataclasses import dataclass, field
from typing import Literal, Optional

import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import spec
from fedcomp.errors import SpecError
from fedcomp.spec import Spec, SpecPart


@dataclass(frozen=True)
class Everything:
    share: float = 0.01
    count: int = 5
    flag: bool = False
    text: str = "a"
    values: Literal["fp32", "fp16"] = "fp32"
    bits: Literal[1, 2, 4] = 1
    limit: float | None = None
    width: Literal["narrow", "wide"] | None = None
    old: Optional[int] = None  # noqa: UP045 (the syntax of older dataclasses)
    made: int = field(default=3, init=False)


@dataclass(frozen=True)
class Needy:
    rows: int
    columns: int = 2


@dataclass(frozen=True)
class Bare:
    pass


KNOWN = {"everything": Everything, "needy": Needy, "bare": Bare}


def build(text: str):
    (part,) = spec.parse(text).parts
    return spec.build(part, KNOWN, "codec")


@for_each(
    "text, parsed",
    [
        ("stc", Spec((SpecPart("stc"),))),
        ("stc:density=1/400", Spec((SpecPart("stc", (("density", "1/400"),)),))),
        (
            "topk:density=1%,values=fp16@layer",
            Spec((SpecPart("topk", (("density", "1%"), ("values", "fp16"))),), "layer"),
        ),
        ("dirichlet:0.1", Spec((SpecPart("dirichlet", (("", "0.1"),)),))),
        (
            " topk : density = 1% + qsgd:levels=4 ",
            Spec((SpecPart("topk", (("density", "1%"),)), SpecPart("qsgd", (("levels", "4"),)))),
        ),
    ],
)
def test_parse_returns_the_parts_of_a_spec(text, parsed):
    assert spec.parse(text) == parsed


@for_each(
    "text",
    [
        "",
        " ",
        ":",
        "stc:",
        "stc@",
        "@layer",
        "stc+",
        "+stc",
        "stc:density=",
        "stc:=1",
        "stc:density=1,",
    ],
)
def test_an_incomplete_spec_is_refused_with_an_example(text):
    with pytest.raises(SpecError, match="write"):
        spec.parse(text)


@for_each(
    "text, expected",
    [
        ("everything", Everything()),
        ("everything:1%", Everything(share=0.01)),
        ("everything:share=1/400,count=7", Everything(share=1 / 400, count=7)),
        ("everything:flag=yes,values=fp16,bits=4", Everything(flag=True, values="fp16", bits=4)),
        ("everything:limit=3,width=wide,old=2", Everything(limit=3.0, width="wide", old=2)),
        ("needy:3", Needy(3)),
        ("needy:rows=3,columns=4", Needy(3, 4)),
        ("bare", Bare()),
    ],
)
def test_build_returns_an_object_with_the_options(text, expected):
    assert build(text) == expected


def test_a_dash_in_an_option_name_means_an_underscore():
    @dataclass
    class Long:
        power_of_two: int = 1

    assert spec.build(SpecPart("long", (("power-of-two", "8"),)), {"long": Long}, "codec") == Long(
        8
    )


@for_each(
    "text, sentence",
    [
        (
            "everythink",
            "unknown codec 'everythink'; did you mean 'everything'? known: bare, everything, needy",
        ),
        (
            "needy:row=3",
            "codec 'needy' has no option 'row'; did you mean 'rows'? known: columns, rows",
        ),
        ("needy:3,rows=4", "rows is given twice; keep one"),
        ("needy", "codec 'needy' needs rows; write needy:rows=VALUE"),
        ("needy:rows=2.5", "rows cannot be '2.5'; give a whole number"),
        ("bare:7", "codec 'bare' has no option '7'; it takes no options"),
        ("everything:made=4", "codec 'everything' has no option 'made'; known: bits, count, "),
        ("everything:share=much", "cannot be 'much'; give a number such as 0.01, 1% or 1/100"),
        ("everything:flag=perhaps", "cannot be 'perhaps'; give true or false"),
        ("everything:values=fp17", "cannot be 'fp17'; did you mean 'fp16'? known: fp16, fp32"),
        ("everything:bits=3", "cannot be '3'; known: 1, 2, 4"),
    ],
)
def test_an_invalid_option_is_refused_with_advice(text, sentence):
    with pytest.raises(SpecError) as raised:
        build(text)
    assert sentence in str(raised.value)


@for_each("raw", ["0.01", "1%", " 1% ", "1/100", "1e-2", ".01"])
def test_a_number_has_several_spellings(raw):
    assert spec.parse_number(raw) == 0.01


@for_each(
    "raw", ["nan", "inf", "-inf%", "1e999", "", "%", "a/b", "1%%", "1_0", "1_0/3", "٣", "１%"]
)
def test_texts_other_than_finite_numbers_are_refused(raw):
    with pytest.raises(ValueError):
        spec.parse_number(raw)


@for_each("raw", ["1/0", "1e999", "9" * 400 + "/1"])
def test_infinite_numbers_are_refused_with_advice(raw):
    with pytest.raises(SpecError, match="give a number"):
        spec.convert(raw, float, "--lr")


@for_each("raw", ["1_0", "٣", "１", "9" * 5000])
def test_a_whole_number_needs_ascii_digits(raw):
    with pytest.raises(SpecError, match="give a whole number$"):
        spec.convert(raw, int, "--clients")


@for_each(
    "value, text",
    [
        (1 / 400, "0.0025"),
        (0.01, "0.01"),
        (1 / 300, "1/300"),
        (0.1 + 0.2, "0.30000000000000004"),
        (3.0, "3"),
        (1e20, "1e20"),
        (0.0, "0"),
    ],
)
def test_format_spec_writes_short_numbers(value, text):
    assert spec.format_spec("everything", Everything(share=value)).startswith(
        f"everything:share={text},count=5,flag=false,"
    )


def test_format_spec_leaves_out_options_that_are_none():
    assert (
        spec.format_spec("everything", Everything())
        == "everything:share=0.01,count=5,flag=false,text=a,values=fp32,bits=1"
    )
    assert spec.format_spec("bare", Bare()) == "bare"


WORDS = st.from_regex(r"[A-Za-z0-9_./-]+", fullmatch=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.builds(
        Everything,
        FINITE,
        st.integers(),
        st.booleans(),
        WORDS,
        st.sampled_from(["fp32", "fp16"]),
        st.sampled_from([1, 2, 4]),
        st.none() | FINITE,
        st.sampled_from([None, "narrow", "wide"]),
        st.none() | st.integers(),
    )
)
def test_parse_and_build_invert_format_spec(options):
    assert build(spec.format_spec("everything", options)) == options


@given(st.text(max_size=40))
def test_any_text_is_a_spec_or_a_spec_error(text):
    try:
        for part in spec.parse(text).parts:
            spec.build(part, KNOWN, "codec")
    except SpecError as error:
        assert str(error)


@for_each(
    "text, value",
    [
        ("4096", 4096),
        ("200kB", 200_000),
        ("1.5MB", 1_500_000),
        ("64KiB", 65_536),
        ("1/2MB", 500_000),
    ],
)
def test_sizes_are_bytes_in_decimal_or_binary_units(text, value):
    assert spec.parse_bytes(text) == value and spec.parse_budget(text) == (value, 0.0)


@for_each(
    "text, seconds", [("50ms", 0.05), ("20s", 20), ("1.5 min", 90), ("2h", 7200), ("0.5", 0.5)]
)
def test_durations_are_seconds(text, seconds):
    assert spec.parse_duration(text) == pytest.approx(seconds)
