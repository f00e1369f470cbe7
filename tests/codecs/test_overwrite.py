"""Overwrite frames: the weights in a frame replace the receiver's weights bit for bit, and all other weights do not change."""

import tracemalloc

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import reseal, same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError
from fedcomp.codecs import overwrite
from fedcomp.codecs.frame import LAYER, MODEL, OVERWRITE, Section, seal

NUMEL = 300
WEIGHTS = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1))
WEIGHTS[[0, 7, 8, 299]] = torch.tensor([-0.0, 2.0**-149, 3.4e38, -(2.0**-140)])
OLD = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
FRAME = overwrite.encode(WEIGHTS, np.arange(0, NUMEL, 7))


def assert_replaces(weights: torch.Tensor, positions: np.ndarray) -> None:
    frame = overwrite.encode(weights, positions)
    new = torch.full_like(weights, 0.25)
    wanted = new.clone()
    wanted[positions] = weights[positions]
    overwrite.apply(frame, new)
    assert same_bits(new, wanted)


@given(st.sets(st.integers(0, NUMEL - 1)))
def test_overwritten_weights_are_bit_identical(positions):
    assert_replaces(WEIGHTS, np.array(sorted(positions), np.int64))


@for_each("step", [1, 3, 400, 99_999])
def test_overwritten_weights_of_large_models_are_bit_identical(step):
    assert_replaces(
        torch.randn(200_000, generator=torch.Generator().manual_seed(3)),
        np.arange(5, 200_000, step),
    )


@for_each("count", [0, 1, 8, 9, 150, 300])
def test_no_frame_is_smaller_than_min_bytes(count):
    """The first `count` coordinates have the shortest gaps, and therefore the smallest frame."""
    least = overwrite.min_bytes(count)
    assert least <= len(overwrite.encode(WEIGHTS, np.arange(count))) <= least + 1 + count // 4


def test_a_model_without_weights_can_be_overwritten():
    assert_replaces(torch.empty(0), np.empty(0, np.int64))


def assert_refused(data: bytes) -> None:
    weights = OLD.clone()
    with pytest.raises(FrameError):
        overwrite.apply(data, weights)
    assert same_bits(weights, OLD)


@given(st.integers(0, 8 * len(FRAME) - 1))
def test_a_frame_with_a_flipped_bit_does_not_change_the_weights(bit):
    data = bytearray(FRAME)
    data[bit // 8] ^= 1 << bit % 8
    assert_refused(bytes(data))


@given(st.integers(0, len(FRAME) - 1), st.binary(min_size=1, max_size=20))
def test_truncated_frames_and_trailing_bytes_are_rejected(length, tail):
    assert_refused(FRAME[:length])
    assert_refused(FRAME + tail)
    assert_refused(reseal(FRAME + tail, NUMEL))
    if length >= 9:
        assert_refused(reseal(FRAME[:length], NUMEL))


@given(st.integers(0, NUMEL + 1), st.binary(max_size=100))
def test_any_body_with_a_valid_checksum_is_applied_or_rejected(count, body):
    data, weights = seal(OVERWRITE, MODEL, NUMEL, [Section(count, body)]), OLD.clone()
    try:
        overwrite.apply(data, weights)
    except FrameError:
        assert same_bits(weights, OLD)
    else:
        assert weights.isfinite().all() and int((weights != OLD).sum()) <= count


@for_each("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(value):
    weights = WEIGHTS.clone()
    weights[14] = value
    assert_refused(overwrite.encode(weights, np.array([3, 14, 200])))


def test_other_frames_are_rejected():
    assert_refused(overwrite.encode(WEIGHTS[:-1], np.array([3, 14, 200])))
    assert_refused(reseal(FRAME[:3] + bytes([3]) + FRAME[4:], NUMEL))
    assert_refused(seal(OVERWRITE, LAYER, NUMEL, [Section(0, b"")]))
    assert_refused(seal(OVERWRITE, 7, NUMEL, [Section(0, b"")]))


@for_each("count", [NUMEL, NUMEL + 1, 2**40, 2**62])
def test_claimed_sizes_are_not_allocated(count):
    data = seal(OVERWRITE, MODEL, NUMEL, [Section(count, bytes(40))])
    tracemalloc.start()
    try:
        assert_refused(data)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
