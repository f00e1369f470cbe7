"""Packed votes are tallied like sums of ±1, for any number of voters. Ties are decided by random bits of the seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_threads import torch_threads

from fedcomp.codecs import codec
from fedcomp.errors import FrameError
from fedcomp.kernels import bits, philox, sign_values, votes

SIZES = (1, 8, 63, 64, 65, 1001)
VOTERS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 46)


def drawn(m: int, numel: int) -> np.ndarray:
    """Return flags [m, numel]: random, but at both ends coordinates on which all, or all but one, agree."""
    flags = np.random.default_rng(m * numel).integers(0, 2, (m, numel), np.uint8)
    flags[:, 0], flags[:, -1] = 1, 0
    flags[0, -1] = 1
    return flags


def plain_majority(flags: np.ndarray, seed: int) -> np.ndarray:
    """Return the majority by its definition. A tie is decided by bit i of the seed's words as bytes, most significant bit first."""
    m, numel = flags.shape
    tossed = np.unpackbits(
        philox.words(seed, -(-numel // 32), stream=votes.TIE_STREAM).astype("<u4").view(np.uint8),
        count=numel,
    )
    twice = 2 * flags.sum(0, dtype=np.int64)
    return np.packbits(np.where(twice == m, tossed, twice > m))


@pytest.mark.parametrize("numel", SIZES)
def test_counts_and_majorities_equal_those_of_sums(numel):
    for m in VOTERS:
        flags = drawn(m, numel)
        packed, ones = np.packbits(flags, axis=1), flags.sum(0, dtype=np.int64)
        held, margin = [row.tobytes() for row in packed], abs(2 * ones - m)
        result = votes.majority(held, numel, 7)
        assert result.dtype == np.uint8 and np.array_equal(result, plain_majority(flags, 7)), m
        against = flags != np.unpackbits(result, count=numel)
        for wide in {1, 2, m // 2 + 1, m, m + 1}:
            lost, widely = votes.disagreement(held, result, numel, wide)
            assert lost.dtype == np.int64 and lost.tolist() == against.sum(1).tolist()
            assert widely.tolist() == (against & (margin >= wide)).sum(1).tolist(), (m, wide)


@pytest.mark.slow
@pytest.mark.parametrize("m", [256, 2**16])
def test_many_votes_are_tallied_like_sums(m):
    flags = np.random.default_rng(m).integers(0, 2, (m, 70), np.uint8)
    flags[:, :4], flags[: m // 2, 1], flags[: m // 2 + 1, 2] = [1, 0, 0, 0], 1, 1
    packed = np.packbits(flags, axis=1)
    assert np.array_equal(votes.majority(packed, 70, 1), plain_majority(flags, 1))


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32), st.integers(0, 2**64 - 1))
def test_any_votes_are_tallied_like_sums(m, numel, draw, seed):
    flags = np.random.default_rng(draw).integers(0, 2, (m, numel), np.uint8)
    assert np.array_equal(
        votes.majority(np.packbits(flags, axis=1), numel, seed), plain_majority(flags, seed)
    )


@pytest.mark.parametrize(("m", "threads"), [(15, 3), (17, 1), (17, 3)])
def test_large_votes_do_not_depend_on_the_number_of_threads(m, threads):
    numel = 2**22 + 77
    flags = drawn(m, numel)
    packed, ones = np.packbits(flags, axis=1), flags.sum(0, dtype=np.int32)
    with torch_threads(threads):
        result = votes.majority(packed, numel, 5)
        lost, widely = votes.disagreement(packed, result, numel, m - 2)
    margin, against = abs(2 * ones - m), np.unpackbits(packed[3] ^ result, count=numel).astype(bool)
    assert np.array_equal(result, plain_majority(flags, 5))
    assert (lost[3], widely[3]) == (against.sum(), (against & (margin >= m - 2)).sum())


def test_votes_may_be_unaligned_or_strided():
    flags = drawn(6, 1001)
    packed = np.packbits(flags, axis=1)
    expected = plain_majority(flags, 9)
    frames = [b"odd" + row.tobytes() for row in packed]
    for held in (
        [memoryview(frame)[3:] for frame in frames],
        list(packed),
        np.asfortranarray(packed),
    ):
        assert np.array_equal(votes.majority(held, 1001, 9), expected)
    assert np.array_equal(packed, np.packbits(flags, axis=1))  # the input does not change


def test_votes_from_frames_give_a_valid_frame():
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    updates = codec("sign").open_batch([codec("sign").encode(row) for row in x], 300)
    result = votes.majority([update.raw for update in updates], 300, 0)
    assert np.array_equal(sign_values(result, 300, 0.5), 0.5 * np.sign(np.sign(x.numpy()).sum(0)))


def test_random_bits_are_fair_and_do_not_depend_on_the_length():
    long = bits.random_bits(5, 300_000, votes.TIE_STREAM)
    assert abs(np.unpackbits(long).mean() - 0.5) < 0.005
    assert np.array_equal(
        bits.random_bits(5, 800, votes.TIE_STREAM), long[:100]
    ) and not np.array_equal(bits.random_bits(6, 800, votes.TIE_STREAM), long[:100])
    zeros = np.frombuffer(
        bits.signs(torch.zeros(800), 5), np.uint8
    )  # bits of the stream that decides ties
    assert not np.array_equal(bits.random_bits(5, 800, votes.TIE_STREAM), zeros)


def test_invalid_votes_are_refused():
    good = np.full(2, 0xF0, np.uint8)  # 12 coordinates
    for bad in (b"", b"\xf0", bytes(10), b"\xf0\x01", b"\xf0\x00\x00\x01"):
        for call in (
            lambda v: votes.majority(v, 12, 0),
            lambda v: votes.disagreement([good], v[1], 12, 1),
        ):
            with pytest.raises(FrameError):
                call([good, bad])
    with pytest.raises(ValueError, match="at least one vote"):
        votes.majority([], 12, 0)


def test_votes_without_coordinates_have_no_bytes():
    assert votes.majority([b"", b""], 0, 1).size == 0


def test_arrays_and_tensors_are_packed_alike():
    x = np.array([[1, -1, 1], [-1, -1, -1]])
    assert votes.pack(x).tolist() == votes.pack(torch.from_numpy(x)).tolist() == [[0b10100000], [0]]
