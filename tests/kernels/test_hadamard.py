"""Rotations: orthogonal, the same bits on every path, at every scale of float32, with hardly any padding."""

import math
import sys
from collections.abc import Iterable
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.kernels import backend, hadamard, philox

SIZES = (1, 7, 8, 33, 401, 1001, 16384, 40_000)


@contextmanager
def path(name: str):
    """Every vector goes one way: torch or numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "LARGE", 1 if name == "numba" else sys.maxsize)
        yield


def chunks(x: torch.Tensor, seed: int) -> list[hadamard.Turned]:
    """A vector turned by compiled loops."""
    parts: list[hadamard.Turned] = []
    with path("numba"):
        hadamard.turn(x, seed, parts.append)
    return sorted(parts, key=lambda part: part.span.start)


def joined(answers: Iterable[np.ndarray]) -> np.ndarray:
    """The answers of chunks, one behind the other."""
    return np.concatenate(list(answers), -1)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def sign_of(seed: int, count: int) -> np.ndarray:
    words = philox.words(seed, -(-count // 32), stream=hadamard.SIGNS)
    return np.array([-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(count)])


def matrix(d: int) -> np.ndarray:
    """W, by its recursion."""
    w = np.ones((1, 1))
    while len(w) < d:
        w = np.block([[w, w], [w, -w]])
    return w


def back(u: np.ndarray, exponents: np.ndarray, seed: int, numel: int) -> np.ndarray:
    """What u [N] was turned from."""
    scale = np.ldexp(1.0 / np.diff(hadamard.edges(numel)), exponents.astype(np.int32))
    return hadamard.turn_back(u.copy(), seed, numel, 0, scale, np.zeros_like(scale))


# Blocks.


@given(st.integers(0, 10**6))
def test_blocks_are_powers_of_two_that_hold_the_vector_and_few_zeros(numel):
    marks = hadamard.edges(numel)
    sizes = np.diff(marks)
    assert marks[0] == 0 and numel <= marks[-1] <= numel + hadamard.SPARE and (marks % 8 == 0).all()
    assert all(size & size - 1 == 0 and 8 <= size <= hadamard.BLOCK for size in sizes.tolist())
    assert (np.diff(sizes) <= 0).all() and (numel == 0 or marks[-2] < numel)
    assert (sizes[:-1] < hadamard.BLOCK).sum() < 14


@for_each(
    "numel, sizes",
    [
        (0, []),
        (1, [8]),
        (8, [8]),
        (9, [16]),
        (33, [64]),
        (1000, [1024]),
        (700, [512, 128, 64]),
        (2**14 + 5, [2**14, 8]),
        (2**15, [2**14] * 2),
    ],
)
def test_how_a_vector_is_cut(numel, sizes):
    assert np.diff(hadamard.edges(numel)).tolist() == sizes


# The rotation.


@for_each("numel", [1, 7, 33, 401, 1001])
def test_it_is_the_matrix_of_the_definition(numel):
    x, seed = normal(numel), 5
    stack = hadamard.Stack(x[None], [seed])
    marks = hadamard.edges(numel)
    signed = np.pad(x.numpy().astype(np.float64), (0, int(marks[-1]) - numel)) * sign_of(
        seed, int(marks[-1])
    )
    for i, (start, stop) in enumerate(zip(marks, marks[1:])):
        exact = matrix(stop - start) @ signed[start:stop] * 2.0 ** -float(stack.exponents[0, i])
        largest = abs(signed[start:stop]).max() * 2.0 ** -float(stack.exponents[0, i])
        assert 0.5 <= largest < 1
        assert np.allclose(
            stack.u[0, start:stop].numpy(), exact, rtol=0, atol=1e-6 * np.linalg.norm(exact)
        )


@for_each("numel", SIZES)
def test_both_paths_have_the_same_bits(numel):
    for name, x in vectors(numel).items():
        parts, stack = chunks(x, 2**63 + 9), hadamard.Stack(x[None], [2**63 + 9])
        assert same_bits(joined(part.u for part in parts), stack.u[0]), name
        assert np.array_equal(joined(part.exponents for part in parts), stack.exponents), name
        turned = []
        for way in ("numba", "torch"):
            with path(way):
                turned.append(back(stack.u[0].numpy(), stack.exponents[0], 2**63 + 9, numel))
        assert same_bits(*turned), name


@for_each("numel", SIZES[:-1])
def test_turning_back_gives_the_vector_to_rounding(numel):
    for name, x in vectors(numel).items():
        stack = hadamard.Stack(x[None], [3])
        y = back(stack.u[0].numpy(), stack.exponents[0], 3, numel).astype(np.float64)
        v, marks = x.double().numpy(), hadamard.edges(numel)
        for start, stop in zip(
            marks, marks[1:]
        ):  # a block is as exact as its largest value allows, and no more so than float32 is
            off, length = np.linalg.norm((y - v)[start:stop]), np.linalg.norm(v[start:stop])
            assert off <= 1e-6 * length + 2.0**-150 * math.sqrt(stop - start), name
        assert np.isfinite(y).all() and not np.signbit(y[y == 0]).any()


def test_rows_are_turned_as_vectors_are():
    x, seeds = normal(5, 1001), [0, 7, 2**40, 2**64 - 1, 7]
    x[1], x[2] = 0, 3.4e38
    together = hadamard.Stack(x, seeds)
    for row, seed, u, exponents in zip(x, seeds, together.u, together.exponents, strict=True):
        alone = hadamard.Stack(row[None], [seed])
        assert same_bits(u, alone.u[0]) and np.array_equal(exponents, alone.exponents[0])
    grid = normal(1001, 3)
    assert same_bits(
        hadamard.Stack(grid.T, [1, 1, 1]).u[1], hadamard.Stack(grid[:, 1][None].clone(), [1]).u[0]
    )


def test_a_spike_is_spread_over_its_block_and_no_further():
    x = torch.zeros(1001)
    x[300] = -3.0
    u = hadamard.Stack(torch.nn.functional.pad(x, (0, 1000))[None], [1]).u[0]
    assert np.diff(hadamard.edges(2001))[:2].tolist() == [1024, 512]
    assert (u[:1024].abs() == 0.75).all() and not u[1024:].any() and 400 < int((u > 0).sum()) < 624


def test_signs_depend_on_the_seed_and_the_coordinate_alone():
    whole = hadamard._sign_bytes(5, 0, 4096)
    for start, stop in [(0, 8), (8, 40), (1000, 1000), (24, 4096), (4088, 4096)]:
        for compiled in (False, True):
            assert np.array_equal(
                hadamard._sign_bytes(5, start, stop, compiled), whole[start // 8 : stop // 8]
            )
    assert np.array_equal(np.unpackbits(whole, bitorder="little"), sign_of(5, 4096) < 0)
    other = np.unpackbits(hadamard._sign_bytes(6, 0, 4096) ^ whole)
    assert abs(other.mean() - 0.5) < 0.04 and abs(np.unpackbits(whole).mean() - 0.5) < 0.04


# What quantizers ask.


@for_each("numel", [1, 401, 150_000])
def test_answers_of_both_paths_are_the_same_bit_by_bit(numel):
    for name in vectors(numel) if numel < 10_000 else ("all scales",):
        x, table = (
            vectors(numel)[name],
            np.array([-0.2, 0.2, -0.7, 0.7, -1.3, 1.3, -2.1, 2.1], np.float32),
        )
        parts, stack = chunks(x, 11), hadamard.Stack(x[None], [11])
        low, high = stack.extremes()
        assert np.array_equal([low, high], joined(np.array(part.extremes()) for part in parts)), (
            name
        )
        squares = stack.squares()
        assert np.array_equal(squares, joined(part.squares() for part in parts)), name
        norm = np.sqrt(squares / stack.sizes)
        thresholds = (norm[..., None] * [0.5, 1.0, 1.7]).astype(np.float32)
        codes = stack.bins(thresholds).numpy()
        assert np.array_equal(
            codes, joined(part.bins(thresholds[:, part.blocks]) for part in parts)
        ), name
        products = joined(np.array(part.products(table, codes[:, part.span])) for part in parts)
        assert np.array_equal(stack.products(table, torch.from_numpy(codes)), products), name
        for lows, step, top, kind in [
            (low, (high - low) / 15, 15, np.uint8),
            (0 * low, norm / 3, 32767, np.int16),
        ]:
            rounded = joined(
                part.rounded(lows[:, part.blocks], step[:, part.blocks], top, kind)
                for part in parts
            )
            assert rounded.dtype == kind and np.array_equal(
                stack.rounded(lows, step, top, kind).numpy(), rounded
            ), name


def test_answers_are_what_they_say():
    x = normal(3000)
    stack = hadamard.Stack(x[None], [2])
    marks, u = hadamard.edges(3000), stack.u[0].double().numpy()
    thresholds = np.full((1, stack.sizes.size, 2), [0.5, 3.0], np.float32)
    codes, table = stack.bins(thresholds), np.array([-1, 1, -2, 2, -3, 3], np.float32)
    assert np.array_equal(codes[0].numpy(), (u > 0) + 2 * ((abs(u) > 0.5) + 0 + (abs(u) > 3)))
    along, squared = stack.products(table, codes)
    q = table[codes[0].numpy()].astype(np.float64)
    for i, (start, stop) in enumerate(zip(marks, marks[1:])):
        piece = slice(start, stop)
        assert math.isclose(stack.squares()[0, i], math.fsum(u[piece] ** 2), rel_tol=1e-7)
        assert math.isclose(along[0, i], math.fsum(u[piece] * q[piece]), rel_tol=1e-7)
        assert math.isclose(squared[0, i], math.fsum(q[piece] ** 2), rel_tol=1e-12)
        assert (stack.extremes()[0][0, i], stack.extremes()[1][0, i]) == (
            u[piece].min(),
            u[piece].max(),
        )


def test_the_sums_of_the_largest_blocks_fit():
    """The most that a block can hold, in one coordinate of u."""
    d = hadamard.BLOCK
    x = (1 - 2.0**-24) * torch.from_numpy(sign_of(4, d).astype(np.float32))
    stack = hadamard.Stack(x[None], [4])
    assert stack.u[0, 0] > 0.9999 * d and not stack.u[0, 1:].any()
    along, squared = stack.products(
        np.array([-3.9, 3.9], np.float32), (stack.u > 0).to(torch.uint8)
    )
    assert np.allclose(
        [stack.squares(), along, squared],
        np.array([d * d, 3.9 * d, 3.9**2 * d])[:, None, None],
        rtol=1e-5,
    )
    stack.u = torch.full((1, d), d**0.5)  # now evenly in all: ⟨u, q⟩ is largest
    along, _ = stack.products(
        np.array([-3.9, 3.9], np.float32), torch.ones(1, d, dtype=torch.uint8)
    )
    assert math.isclose(along[0, 0], 3.9 * d**1.5, rel_tol=1e-5)


def test_rounding_is_right_in_the_mean():
    x = normal(1, 64).expand(4000, 64)
    stack = hadamard.Stack(x, [5] * 4000)
    stack.seeds = list(range(4000))  # the same u for words of other seeds
    step = np.full((4000, 1), 0.7)
    off = (
        0.7 * stack.rounded(np.full((4000, 1), -8.0), step, 32767, np.int16).double()
        - 8.0
        - stack.u.double()
    )
    assert off.abs().max() < 0.7 and float(off.mean(0).abs().max()) < 5 * 0.35 / 4000**0.5
