"""The codec `natural`: its rounding to powers of two, extreme values and the length of frames."""

import math

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import normal, vectors

from fedcomp import FrameError, codec
from fedcomp.codecs.frame import Section
from fedcomp.kernels import philox
from fedcomp.layout import Layout

LARGEST = float(np.finfo(np.float32).max)
NATURAL = codec("natural")


def decoded(x: torch.Tensor, seed: int) -> np.ndarray:
    return NATURAL.decode(NATURAL.encode(x, seed=seed), numel=x.numel()).double().numpy()


def test_a_frame_decodes_to_the_result_of_the_paper():
    for kind in ("normal", "heavy tails", "denormal", "tiny"):
        v, u = vectors(1001)[kind].double().numpy(), philox.words(7, 1001) / 2.0**32
        v = v[v != 0]
        low = np.sign(v) * 2.0 ** np.floor(np.log2(np.abs(v)))
        expected = low * (1 + (u[: v.size] + (v - low) / low >= 1))
        assert np.array_equal(decoded(torch.from_numpy(v.astype(np.float32)), 7), expected)


@for_each("kind", vectors(7))
def test_values_are_rounded_to_an_adjacent_power_of_two(kind):
    for numel in (1, 7, 401):
        x = vectors(numel)[kind]
        v, y = np.abs(x.double().numpy()), decoded(x, 3)
        assert (np.sign(y) == np.sign(x.numpy())).all() or v.max() > 2.0**104
        found = np.abs(y)[v > v.max() * 2.0**-200]
        v = v[v > v.max() * 2.0**-200]
        assert ((v / 2 < found) & (found < 2 * v)).all()
        assert (np.frexp(found)[0][found < LARGEST] % 0.5 == 0).all()


def test_rounding_is_unbiased_with_the_variance_of_the_paper():
    x, seeds = normal(401), 150
    v = np.abs(x.double().numpy())
    low = 2.0 ** np.floor(np.log2(v))
    variance = (v - low) * (2 * low - v)
    drawn = np.stack([decoded(x, seed) for seed in range(seeds)])
    z = (drawn.mean(0) - x.double().numpy()) / np.sqrt(variance / seeds)
    assert np.abs(z).max() < 5 and abs(np.square(z).sum() - 401) < 6 * math.sqrt(2 * 401)
    assert np.square(drawn - x.double().numpy()).sum(1).mean() == pytest.approx(
        variance.sum(), rel=0.1
    )


def test_the_variance_of_one_eighth_is_attained_at_four_thirds_of_a_power():
    x = torch.full((4000,), 4 / 3)
    lost = np.mean([np.square(decoded(x, seed) - 4 / 3).mean() for seed in range(20)])
    assert lost == pytest.approx((4 / 3) ** 2 / 8, rel=0.02)
    assert NATURAL.variance(4000) == 1 / 8 and NATURAL.contraction(4000) == 7 / 8


@for_each("exponent", [-149, -148, -127, -126, 0, 104, 105, 126, 127])
def test_powers_of_two_are_exact(exponent):
    x = torch.tensor([1.0, -1.0]).double().mul(2.0**exponent).float()
    for seed in range(5):
        assert decoded(x, seed).tolist() == [2.0**exponent, -(2.0**exponent)]


def test_the_largest_float32_replaces_the_power_above_it():
    x = torch.tensor([LARGEST, -LARGEST, 2.0**127, 1.5 * 2.0**127] * 100)
    drawn = np.concatenate([decoded(x, seed).reshape(-1, 4) for seed in range(20)])
    assert np.abs(drawn).max() == LARGEST and (drawn[:, 2] == 2.0**127).all()
    assert drawn[:, 3].mean() == pytest.approx(
        1.5 * 2.0**127, rel=5 * 0.25 / math.sqrt(2000) / 0.75
    )
    assert (drawn[:, :2] == [LARGEST, -LARGEST]).all()


def test_small_magnitudes_are_rounded_to_the_smallest_power_or_zero():
    x = torch.full((3000,), 2.0**-130)
    x[0] = 2.0**127
    drawn = decoded(x, 1)[1:]
    assert set(drawn) == {0.0, 2.0**-126} and drawn.mean() == pytest.approx(2.0**-130, rel=0.4)


@for_each("numel", [1, 7, 400, 20_000])
def test_a_frame_has_at_most_nine_bits_per_coordinate(numel):
    """Random bits have equally likely signs and exponents, which entropy coding cannot shorten."""
    spread = np.random.default_rng(1).integers(0, 2**32, numel, np.uint32).view(np.float32)
    for v in (np.where(np.isfinite(spread), spread, 1), normal(numel).numpy()):
        frame = NATURAL.encode(torch.from_numpy(v.astype(np.float32)))
        assert len(frame) <= 9 + 3 + 1 + math.ceil(numel / 8) + numel
    assert numel < 400 or len(frame) < numel  # normal values have few different exponents


def refused(body: bytes, numel: int, sentence: str) -> bool:
    with pytest.raises(FrameError, match=sentence):
        NATURAL._decode_row(Section(numel, body), Layout.flat(numel), 0)
    return True


def test_invalid_bodies_are_rejected():
    assert NATURAL._decode_row(
        Section(3, bytes([23, 0x40, 100, 101, 0])), Layout.flat(3), 0
    ).values.tolist() == [2.0**-50, -(2.0**-49), 0.0]
    assert refused(bytes([24, 0x40, 100, 101, 0]), 3, "invalid exponent shift")
    assert refused(bytes([22, 0x40, 100, 101, 0]), 3, "invalid exponent shift")
    assert refused(bytes([22, 0x40, 100, 253, 0]), 3, "invalid exponent shift")
    assert NATURAL._decode_row(
        Section(3, bytes([22, 0x40, 100, 254, 0])), Layout.flat(3), 0
    ).values[1] == -(2.0**105)
    assert refused(bytes([23, 0x41, 100, 101, 0]), 3, "padding bits after 3 bits are not zero")
    assert refused(bytes([23, 0x20, 100, 101, 0]), 3, "a zero has a negative sign")
    assert refused(bytes([23, 0x40, 100, 101]), 3, "damaged")
    assert refused(bytes([23]), 3, "ends too early")
    assert refused(b"", 3, "ends too early")
