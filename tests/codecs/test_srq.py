"""The codec `srq`: its mean, the length of frames, and its error with and without a rotation."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import normal

from fedcomp import codec
from fedcomp.errors import SpecError
from fedcomp.kernels import hadamard

NUMEL = 4096


def spikes() -> torch.Tensor:
    """Return a few large values among small ones, the worst case for quantization between minimum and maximum."""
    x = 0.01 * normal(NUMEL)
    x[:: NUMEL // 8] = 10 * normal(8, seed=1)
    return x


def nmse(x: torch.Tensor, rows: np.ndarray) -> float:
    v = x.double().numpy()
    return float(((rows - v) ** 2).sum(1).mean() / (v**2).sum())


def rotated(x: torch.Tensor, levels: int, seeds: int) -> np.ndarray:
    c = codec(f"srq:levels={levels}")
    return np.stack(
        [
            c.decode(frame, numel=x.numel()).double().numpy()
            for frame in c.encode_batch(x.expand(seeds, -1), range(seeds))
        ]
    )


def unrotated(x: torch.Tensor, levels: int, seeds: int) -> np.ndarray:
    """Return the result of the paper's quantizer π_sk without rotation, in plain numpy."""
    v = x.double().numpy()
    step = (v.max() - v.min()) / (levels - 1)
    t = (v - v.min()) / step
    up = np.random.default_rng(0).random((seeds, v.size)) < t % 1
    return v.min() + step * (np.floor(t) + up)


@for_each("levels", [2, 4, 16])
def test_rotation_helps_on_spikes(levels):
    x = spikes()
    with_, without = nmse(x, rotated(x, levels, 10)), nmse(x, unrotated(x, levels, 10))
    assert with_ < without / 5
    assert with_ < codec(f"srq:levels={levels}").variance(NUMEL)


def test_without_spikes_rotation_does_not_increase_the_error():
    x = torch.sign(normal(NUMEL))  # the best case for the quantizer
    assert nmse(x, unrotated(x, 16, 4)) < 1e-3
    assert nmse(normal(NUMEL), rotated(normal(NUMEL), 16, 10)) < 1.1 * nmse(
        normal(NUMEL), unrotated(normal(NUMEL), 16, 10)
    )


@pytest.mark.parametrize("levels", [2, 3, 16, 200])
def test_the_mean_over_seeds_is_the_vector(levels):
    x = 3 * normal(300)
    rows = rotated(x, levels, 400)
    off = float(((rows.mean(0) - x.double().numpy()) ** 2).sum())
    one = float(((rows - x.double().numpy()) ** 2).sum(1).mean())
    assert 0.7 * one / 400 < off < 1.3 * one / 400


def test_levels_are_evenly_spaced_between_the_ends_of_a_block():
    """If the decoded vector is rotated, it has k evenly spaced levels from the smallest to the largest value of the rotated input."""
    x, seed = normal(NUMEL), 6
    y = codec("srq:levels=5").decode(codec("srq:levels=5").encode(x, seed=seed), numel=NUMEL)
    exact, coded = (hadamard.RotatedBlocks(v, seed, 0) for v in (x, y))
    u, v = (t.u.astype(np.float64) * 2.0 ** t.exponents[0] for t in (exact, coded))
    levels = np.unique(np.round(v, 3))
    assert levels.size == 5 and np.allclose(np.diff(levels), (u.max() - u.min()) / 4, rtol=1e-3)
    assert np.allclose(levels[[0, -1]], [u.min(), u.max()], rtol=1e-4)
    assert abs(u - v).max() < np.diff(levels)[0] * 1.001


@for_each("levels, bits", [(2, 1), (3, 2), (4, 2), (16, 4), (17, 5), (256, 8)])
@for_each("numel", [1, 1000, 20_000])
def test_frames_have_the_expected_length(levels, bits, numel):
    marks = hadamard.edges(numel)
    frame = codec(f"srq:levels={levels}").encode(normal(numel))
    count = 1 if numel < 128 else 2 if numel < 1 << 14 else 3
    assert len(frame) == 17 + count + 1 + 8 * (marks.size - 1) + bits * int(marks[-1]) // 8


def test_the_declared_variance_is_the_bound_of_the_paper():
    for levels in (2, 16, 256):
        c = codec(f"srq:levels={levels}")
        for numel, bound in [
            (8, 4),
            (1000, 2 * np.log(2048) + 2),
            (10**6, 2 * np.log(2 * 16384) + 2),
        ]:
            assert c.variance(numel) == pytest.approx(bound / (levels - 1) ** 2, rel=1e-4)
    assert codec("srq").contraction(100) is None


@for_each("levels", [-1, 0, 1, 257])
def test_an_invalid_number_of_levels_is_refused(levels):
    with pytest.raises(SpecError, match="levels is .*; give 2 to 256"):
        codec(f"srq:levels={levels}")
