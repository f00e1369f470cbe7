"""Signs as bits: the same bits by every implementation, and unpacking."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st
from torch_threads import torch_threads

from fedcomp.codecs.update import Bits
from fedcomp.errors import FrameError
from fedcomp.kernels import bits, pack_signs, philox, unpack_signs

SIZES = (0, 1, 7, 8, 31, 32, 127, 128, 129, 401)


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal(shape, np.float32))


@given(st.lists(st.booleans(), max_size=70))
def test_signs_of_arrays_and_tensors_are_unpacked_as_packed(signs):
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


@for_each(
    "data, count",
    [(b"", 1), (b"\x80\0", 8), (b"\x80", 9), (b"\x01", 7), (b"\xff\x7f", 9), (b"", -1)],
)
def test_another_length_and_padding_that_is_not_zero_are_refused(data, count):
    with pytest.raises(FrameError):
        unpack_signs(data, count)


# Signs of vectors.


def plain_signs(x: torch.Tensor, seed: int | None) -> bytes:
    """Return signs by the definition. The random sign i of a zero is bit i of the seed's words as bytes, most significant bit first."""
    coins = np.ones(x.numel(), bool)
    if seed is not None:
        words = philox.words(seed, -(-x.numel() // 32), stream=bits.ZERO_STREAM)
        drawn = words.astype("<u4").view(np.uint8)
        coins = np.unpackbits(drawn, count=x.numel()).astype(bool)
    v = x.float().numpy()
    return np.packbits((v > 0) | ((v == 0) & coins)).tobytes()


@for_each("seed", [None, 0, 2**64 - 1])
def test_the_bit_is_1_for_positive_0_for_negative_and_random_for_zero(seed):
    for numel in SIZES:
        for name, x in vectors(numel).items():
            assert bits.signs(x, seed) == plain_signs(x, seed), (numel, name)


@for_each("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_same_signs(dtype):
    for x in (torch.round(normal(300_001)).to(dtype), normal(401).to(dtype)):
        assert bits.signs(x, 5) == plain_signs(x, 5)


@for_each("threads", [1, 2, 3])
def test_signs_of_a_large_vector_do_not_depend_on_the_number_of_threads(threads):
    x = torch.round(normal(2**21 + 77))
    x[3::7] = -0.0
    with torch_threads(threads):
        for v in (x, x[1::2], x.clone().requires_grad_()):
            assert bits.signs(v, 5) == plain_signs(v.detach(), 5)


@for_each("shape", [(0, 9), (2, 0), (1, 1), (5, 401)])
def test_signs_of_a_row_do_not_depend_on_the_other_rows(shape):
    x, seeds = torch.round(normal(*shape)), list(range(shape[0]))
    assert bits.signs_rows(x, seeds) == [bits.signs(row, seed) for row, seed in zip(x, seeds)]
    assert bits.signs_rows(x) == [bits.signs(row) for row in x]


def test_other_devices_pack_the_same_bits():
    for numel in SIZES:
        flags = torch.round(normal(2, numel)) > 0
        assert np.array_equal(bits.pack_torch(flags).numpy(), np.packbits(flags.numpy(), axis=1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a CPU with a CUDA device")
def test_a_cuda_device_gives_the_same_bits():
    x = torch.round(normal(3, 200_001))
    assert bits.signs_rows(x.cuda(), [1, 2, 3]) == bits.signs_rows(x, [1, 2, 3])
    update = Bits(200_001, bits.read_bits(bits.signs(x[0]), 200_001), *normal(2, 3).numpy())
    into, there = x[1].clone(), x[1].cuda()
    update.add_to(into)
    update.add_to(there)
    assert same_bits(there.cpu(), into)


# Values of bits.


@for_each("columns", [1, 2, 31, 32, 33, 200, 5000])
def test_a_bit_is_the_high_or_the_low_value_of_its_column(columns):
    numel = columns * (10_000 // columns)
    x, (high, low) = normal(numel), normal(2, columns).numpy()
    raw = bits.read_bits(bits.signs(x), numel)
    plain = np.where(x.numpy() >= 0, np.resize(high, numel), np.resize(low, numel))
    for start, stop in [
        (0, numel),
        (0, 0),
        (numel, numel),
        (5, numel - 3),
        (32, 96),
        (4999, 5002),
        (numel - 1, numel),
    ]:
        assert same_bits(bits.values(raw, start, stop, high, low), plain[start:stop])
        assert np.array_equal(bits.flags(raw, start, stop), x.numpy()[start:stop] >= 0)
    into = torch.from_numpy(normal(2, numel)[1].numpy())
    added = into.numpy() + plain
    Bits(numel, raw, high, low).add_to(into)
    assert same_bits(into, added)


def test_threads_add_many_bits_in_place_also_with_a_stride():
    numel = 2**21 + 77
    x, into, (high, low) = normal(numel), torch.zeros(2 * numel), normal(2, 3).numpy()
    raw, at = bits.read_bits(bits.signs(x), numel), np.arange(numel) % 3
    with torch_threads(2):
        Bits(numel, raw, high, low).add_to(into[::2])
    assert same_bits(into[::2].contiguous(), np.where(x.numpy() >= 0, high[at], low[at]))
    assert not into[1::2].any()
