"""The encoding of values as float16: errors at every scale, and invalid bytes."""

import numpy as np
import pytest
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.codecs import floats
from fedcomp.errors import FrameError

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def through(values: np.ndarray) -> np.ndarray:
    data = floats.pack(values, floats.FP16)
    assert len(data) == floats.size(values.size, floats.FP16) == 2 + 2 * values.size
    return floats.unpack_all(data, values.size, floats.FP16)


@given(st.lists(finite, min_size=1, max_size=40))
def test_relative_errors_are_below_a_2048th_or_2_to_the_minus_39_of_the_largest(values):
    v = np.array(values, np.float32)
    off = abs(through(v).astype(np.float64) - v)
    assert (
        off <= np.maximum(2.0**-11 * abs(v.astype(np.float64)), 2.0**-39 * float(abs(v).max()))
    ).all()


@for_each("scale", [1e38, 1.0, 1e-30, 1e-38, 2.0**-140])
def test_no_scale_overflows_or_vanishes(scale):
    v = (scale * np.array([3.4, -1.0, 0.5, 1 / 64])).astype(np.float32)
    assert np.allclose(through(v), v, rtol=2.0**-11, atol=2.0**-150)


@for_each(
    "value",
    [2.0**-149, 3 * 2.0**-149, 2.0**-126, 1.0, 2047.0, 2.0**127, float(np.finfo(np.float32).max)],
)
def test_the_largest_and_smallest_values(value):
    v = np.array([value, -value, 0.0], np.float32)
    assert np.allclose(through(v), v, rtol=2.0**-11, atol=0)


def test_numbers_of_eleven_bits_are_exact():
    v = np.arange(-2048, 2049, dtype=np.float32) * np.float32(2.0**-60)
    assert np.array_equal(through(v), v)


def test_signs_of_zeros_and_vectors_of_zeros_are_kept():
    assert np.array_equal(
        np.signbit(through(np.array([0.0, -0.0, 1.0], np.float32))), [False, True, False]
    )
    assert floats.pack(np.zeros(3, np.float32), floats.FP16) == bytes(8)
    assert through(np.empty(0, np.float32)).size == 0


@for_each("bits", [0x7C00, 0xFC00, 0x7E00, 0x7D01, 0x7FFF])
def test_nan_and_infinity_in_the_bytes_are_refused(bits):
    data = np.array([0, 15360, bits], "<u2").tobytes()
    with pytest.raises(FrameError, match="NaN or infinity"):
        floats.unpack_all(data, 2, floats.FP16)


@for_each("exponent", [113, 128, 1000, 32767])
def test_an_exponent_that_overflows_is_refused(exponent):
    data = np.array([exponent], "<i2").tobytes() + np.array([65504], "<f2").tobytes()
    with pytest.raises(FrameError, match="NaN or infinity"):
        floats.unpack_all(data, 1, floats.FP16)


def test_an_exponent_that_vanishes_gives_zeros():
    data = np.array([-32768], "<i2").tobytes() + np.array([1.0, -2.0], "<f2").tobytes()
    assert np.array_equal(floats.unpack_all(data, 2, floats.FP16), [0, 0])


@for_each("length", [0, 1, 5, 7])
def test_another_length_is_refused(length):
    with pytest.raises(FrameError, match="wrong length"):
        floats.unpack_all(bytes(length), 2, floats.FP16)
