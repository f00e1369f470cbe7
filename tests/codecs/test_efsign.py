"""The codec `efsign`: its scale, its contraction, and vectors whose mean magnitude is subnormal."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, reseal, same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, codec
from fedcomp.codecs import longest_frame
from fedcomp.codecs.frame import MODEL, SECTIONS, Section, seal, varint

EFSIGN = codec("efsign")
NORMAL, LEAST = 2.0**-126, 2.0**-149


def through(x: torch.Tensor) -> torch.Tensor:
    return EFSIGN.decode(EFSIGN.encode(x), numel=x.numel())


def loss(x: torch.Tensor) -> Fraction:
    """Return ‖x − C(x)‖² in exact arithmetic."""
    return sum(
        ((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(x.tolist(), through(x).tolist())),
        Fraction(),
    )


def square(x: torch.Tensor) -> Fraction:
    return sum((Fraction(v) ** 2 for v in x.tolist()), Fraction())


def test_the_loss_is_that_of_the_paper():
    for numel in (1, 7, 401):
        for name in ("normal", "heavy tails", "ties", "constant", "one spike", "spike over noise"):
            x = vectors(numel)[name]
            share = (
                sum(map(abs, map(Fraction, x.tolist()))) ** 2 / (numel * square(x))
                if x.any()
                else 0
            )
            assert math.isclose(
                loss(x), (1 - share) * square(x), rel_tol=1e-6, abs_tol=1e-12 * square(x)
            ), (numel, name)


def test_one_nonzero_attains_the_bound():
    x = torch.zeros(401)
    x[7] = -3.0
    assert math.isclose(loss(x) / square(x), 1 - EFSIGN.contraction(401), rel_tol=1e-9)
    assert EFSIGN.contraction(401) == pytest.approx(1 / 401)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE | st.sampled_from([0.0, LEAST, -3 * LEAST]), min_size=1, max_size=40))
def test_every_vector_is_contracted_in_exact_arithmetic(values):
    x = torch.tensor(values)
    assert loss(x) <= (1 - Fraction(EFSIGN.contraction(x.numel()))) * square(x)


def test_a_zero_counts_as_positive():
    assert through(torch.tensor([0.0, -0.0, -6.0, 2.0])).tolist() == [2, 2, -2, 2]


@for_each("numel", [0, 1, 401])
def test_a_vector_of_zeros_is_sent_exactly(numel):
    assert (
        EFSIGN.encode(torch.zeros(numel))
        == EFSIGN.encode(-torch.zeros(numel))
        == seal(EFSIGN.id, MODEL, numel, [Section(0, b"")])
    )
    assert same_bits(through(torch.zeros(numel)), np.zeros(numel, np.float32))


def test_the_scale_is_an_exact_mean_in_any_order():
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(100_005).astype(np.float32)) ** 7
    scale = np.float32(math.fsum(abs(x).tolist()) / x.numel())
    assert same_bits(through(x), np.where(x >= 0, scale, -scale))
    assert through(x.flip(0)).abs().max() == scale
    largest = torch.finfo(torch.float32).max
    assert through(torch.full((1000,), largest)).tolist() == [largest] * 1000


def test_a_frame_has_one_bit_per_coordinate_and_a_scale():
    for numel in (2, 9, 1001):
        frame = EFSIGN.encode(vectors(numel)["normal"])
        assert (
            len(frame)
            == SECTIONS + len(varint(numel)) + 4 + (numel + 7) // 8
            <= longest_frame(EFSIGN, layout_of(numel))
        )
        assert len(EFSIGN.encode(LEAST * (torch.arange(numel) == numel - 1))) <= longest_frame(
            EFSIGN, layout_of(numel)
        )


# Vectors whose mean magnitude is below the normal numbers of float32.


def test_a_subnormal_mean_is_replaced_by_the_largest_coordinate():
    x = torch.tensor([0.0, LEAST, -2 * LEAST, 0.0])
    assert through(x).tolist() == [0, 0, -2 * LEAST, 0] and EFSIGN.open(
        EFSIGN.encode(x), 4
    ).positions.tolist() == [2]
    for value in (LEAST, -NORMAL / 2, NORMAL):
        assert through(torch.tensor([value])).tolist() == [value]  # a single value is its own mean
    assert through(torch.full((4,), NORMAL)).tolist() == [NORMAL] * 4
    assert through(torch.full((4,), NORMAL - LEAST)).tolist() == [NORMAL - LEAST, 0, 0, 0]


def refused(body: bytes, count: int, numel: int) -> bool:
    try:
        EFSIGN.decode(seal(EFSIGN.id, MODEL, numel, [Section(count, body)]), numel=numel)
    except FrameError:
        return True
    return False


def test_invalid_positions_and_values_are_rejected():
    value = struct.Struct("<f").pack
    assert not refused(b"\x09" + value(LEAST), 1, 10) and not refused(
        b"\x09" + value(-9 * NORMAL), 1, 10
    )
    sent = b"\x09" + value(LEAST)
    for body in (
        b"",
        b"\x09",
        sent[:-1],
        sent + b"\0",
        b"\x0a" + value(LEAST),
        b"\x89\0" + value(LEAST),
    ):
        assert refused(body, 1, 10)
    for wrong in (0.0, -0.0, math.inf, -math.inf, math.nan):
        assert refused(b"\x09" + value(wrong), 1, 10)
    assert refused(sent, 2, 10) and refused(sent, 9, 10)


@for_each("scale", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0])
def test_an_invalid_scale_is_rejected(scale):
    frame = EFSIGN.encode(vectors(50)["normal"])
    start = SECTIONS + 1
    with pytest.raises(FrameError, match="the magnitude of the values is"):
        EFSIGN.decode(
            reseal(frame[:start] + struct.pack("<f", scale) + frame[start + 4 :], 50), numel=50
        )
