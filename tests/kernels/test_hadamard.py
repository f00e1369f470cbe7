"""Randomized Hadamard rotations: orthogonal, at every scale of float32, with little padding."""

import math

import numpy as np
import torch
from cases import for_each
from every_codec import vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp.kernels import hadamard, philox

SIZES = (1, 7, 8, 33, 401, 1001, 16384, 40_000)


def turned(x: torch.Tensor, seed: int) -> hadamard.RotatedBlocks:
    """Return the rotation of a vector that is one chunk."""
    (whole,) = parts(x, seed)
    return whole


def parts(x: torch.Tensor, seed: int) -> list[hadamard.RotatedBlocks]:
    """Return the rotated chunks of a vector."""
    found: list[hadamard.RotatedBlocks] = []
    hadamard.rotate(x, seed, found.append)
    return sorted(found, key=lambda part: part.span.start)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def sign_of(seed: int, count: int) -> np.ndarray:
    words = philox.words(seed, -(-count // 32), stream=hadamard.SIGNS)
    return np.array([-1.0 if words[i // 32] >> i % 32 & 1 else 1.0 for i in range(count)])


def matrix(d: int) -> np.ndarray:
    """Return the Hadamard matrix W by its recursion."""
    w = np.ones((1, 1))
    while len(w) < d:
        w = np.block([[w, w], [w, -w]])
    return w


def back(u: np.ndarray, exponents: np.ndarray, seed: int, numel: int) -> np.ndarray:
    """Return the vector whose rotation is u [N]."""
    scale = np.ldexp(1.0 / np.diff(hadamard.edges(numel)), exponents.astype(np.int32))
    return hadamard.rotate_back(u.copy(), seed, numel, 0, scale, np.zeros_like(scale))


# Blocks.


@given(st.integers(0, 10**6))
def test_blocks_are_powers_of_two_with_little_padding(numel):
    marks = hadamard.edges(numel)
    sizes = np.diff(marks)
    assert (
        marks[0] == 0
        and numel <= marks[-1] <= numel + hadamard.MAX_PADDING
        and (marks % 8 == 0).all()
    )
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
def test_a_vector_is_divided_into_the_expected_blocks(numel, sizes):
    assert np.diff(hadamard.edges(numel)).tolist() == sizes


# The rotation.


@for_each("numel", [1, 7, 33, 401, 1001])
def test_the_rotation_is_the_matrix_of_the_definition(numel):
    x, seed = normal(numel), 5
    found, marks = turned(x, seed), hadamard.edges(numel)
    signed = np.pad(x.numpy().astype(np.float64), (0, int(marks[-1]) - numel)) * sign_of(
        seed, int(marks[-1])
    )
    for i, (start, stop) in enumerate(zip(marks, marks[1:])):
        exact = matrix(stop - start) @ signed[start:stop] * 2.0 ** -float(found.exponents[i])
        largest = abs(signed[start:stop]).max() * 2.0 ** -float(found.exponents[i])
        assert 0.5 <= largest < 1
        assert np.allclose(found.u[start:stop], exact, rtol=0, atol=1e-6 * np.linalg.norm(exact))


@for_each("numel", SIZES[:-1])
def test_rotating_back_gives_the_vector_up_to_rounding(numel):
    for name, x in vectors(numel).items():
        found = turned(x, 3)
        y = back(found.u, found.exponents, 3, numel).astype(np.float64)
        v, marks = x.double().numpy(), hadamard.edges(numel)
        for start, stop in zip(
            marks, marks[1:]
        ):  # errors are relative to the norm of the block, plus the rounding of float32
            off, length = np.linalg.norm((y - v)[start:stop]), np.linalg.norm(v[start:stop])
            assert off <= 1e-6 * length + 2.0**-150 * math.sqrt(stop - start), name
        assert np.isfinite(y).all() and not np.signbit(y[y == 0]).any()


def test_chunks_and_strided_vectors_are_rotated_like_whole_vectors():
    numel = 3 * hadamard.CHUNK + 1001
    x, marks = normal(numel), hadamard.edges(numel)
    for part in parts(x, 7):
        first = part.indices.start
        for i in (0, part.sizes.size - 1):
            start, stop = (part.edges[i : i + 2] + part.span.start).tolist()
            assert (start, stop) == tuple(marks[first + i : first + i + 2])
            signed = np.pad(x.numpy()[start:stop].astype(np.float64), (0, max(stop - numel, 0)))
            signed *= sign_of(7, stop)[start:] * 2.0 ** -float(part.exponents[i])
            u = part.u[start - part.span.start : stop - part.span.start]
            assert math.isclose(u[0], signed.sum(), rel_tol=1e-4, abs_tol=1e-3)
            assert math.isclose(u @ u, (stop - start) * signed @ signed, rel_tol=1e-4)
    grid = normal(1001, 3)
    assert np.array_equal(turned(grid.T[1], 1).u, turned(grid[:, 1].clone(), 1).u)


def test_a_spike_is_spread_only_over_its_block():
    x = torch.zeros(1001)
    x[300] = -3.0
    u = turned(torch.nn.functional.pad(x, (0, 1000)), 1).u
    assert np.diff(hadamard.edges(2001))[:2].tolist() == [1024, 512]
    assert (abs(u[:1024]) == 0.75).all() and not u[1024:].any() and 400 < int((u > 0).sum()) < 624


def test_signs_depend_only_on_the_seed_and_the_coordinate():
    whole = hadamard._sign_bytes(5, 0, 4096)
    for start, stop in [(0, 8), (8, 40), (1000, 1000), (24, 4096), (4088, 4096)]:
        assert np.array_equal(hadamard._sign_bytes(5, start, stop), whole[start // 8 : stop // 8])
    assert np.array_equal(np.unpackbits(whole, bitorder="little"), sign_of(5, 4096) < 0)
    other = np.unpackbits(hadamard._sign_bytes(6, 0, 4096) ^ whole)
    assert abs(other.mean() - 0.5) < 0.04 and abs(np.unpackbits(whole).mean() - 0.5) < 0.04


# Operations for quantizers.


def test_bins_products_squares_and_extremes_match_their_definitions():
    found = turned(normal(3000), 2)
    marks, u = hadamard.edges(3000), found.u.astype(np.float64)
    thresholds = np.full((found.sizes.size, 2), [0.5, 3.0], np.float32)
    codes, table = found.bins(thresholds), np.array([-1, 1, -2, 2, -3, 3], np.float32)
    assert np.array_equal(codes, (u > 0) + 2 * ((abs(u) > 0.5) + 0 + (abs(u) > 3)))
    along, squared = found.products(table, codes)
    q = table[codes].astype(np.float64)
    for i, (start, stop) in enumerate(zip(marks, marks[1:])):
        piece = slice(start, stop)
        assert math.isclose(found.squares()[i], math.fsum(u[piece] ** 2), rel_tol=1e-7)
        assert math.isclose(along[i], math.fsum(u[piece] * q[piece]), rel_tol=1e-7)
        assert math.isclose(squared[i], math.fsum(q[piece] ** 2), rel_tol=1e-12)
        assert (found.extremes()[0][i], found.extremes()[1][i]) == (u[piece].min(), u[piece].max())


def test_sums_of_the_largest_values_do_not_overflow():
    """One coordinate of u has the largest value that is possible in a block."""
    d = hadamard.BLOCK
    found = turned((1 - 2.0**-24) * torch.from_numpy(sign_of(4, d).astype(np.float32)), 4)
    assert found.u[0] > 0.9999 * d and not found.u[1:].any()
    table = np.array([-3.9, 3.9], np.float32)
    along, squared = found.products(table, (found.u > 0).astype(np.uint8))
    expected = np.array([d * d, 3.9 * d, 3.9**2 * d])[:, None]
    assert np.allclose([found.squares(), along, squared], expected, rtol=1e-5)
    found.u[:] = d**0.5  # equal values, for which ⟨u, q⟩ is largest
    along, _ = found.products(table, np.ones(d, np.uint8))
    assert math.isclose(along[0], 3.9 * d**1.5, rel_tol=1e-5)


def test_rounding_is_unbiased():
    found, off = turned(normal(64), 5), []
    step, low = np.array([0.7]), np.array([-8.0])
    for seed in range(4000):
        found.seed = seed  # the same u with random words of other seeds
        off.append(0.7 * found.rounded(low, step, 32767, np.int16) - 8.0 - found.u)
    assert abs(np.array(off)).max() < 0.7 and abs(np.mean(off, 0)).max() < 5 * 0.35 / 4000**0.5
