import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.errors import FrameError
from fedcomp.kernels import pack_signs, unpack_signs


@given(st.lists(st.booleans(), max_size=70))
def test_signs_come_back_from_arrays_and_tensors(signs):
    data = pack_signs(np.array(signs, bool))
    assert data == pack_signs(torch.tensor(signs, dtype=torch.bool))
    assert len(data) == (len(signs) + 7) // 8
    unpacked = unpack_signs(memoryview(data), len(signs))
    assert unpacked.dtype == bool and unpacked.tolist() == signs


def test_the_first_sign_is_the_most_significant_bit():
    assert pack_signs(np.array([1, 0, 0, 0, 0, 0, 0, 1, 1], bool)) == b"\x81\x80"


@given(st.binary(max_size=6), st.integers(-9, 60))
def test_any_bytes_are_refused_or_canonical(data, count):
    try:
        signs = unpack_signs(data, count)
    except FrameError:
        return
    assert len(signs) == count and pack_signs(signs) == data


@pytest.mark.parametrize("data, count", [(b"", 1), (b"\x80\0", 8), (b"\x80", 9), (b"\x01", 7), (b"\xff\x7f", 9), (b"", -1)])
def test_another_length_and_padding_that_is_not_zero_are_refused(data, count):
    with pytest.raises(FrameError):
        unpack_signs(data, count)
