"""The codec `vlc`: the length of frames, the error, and invalid frames."""

import math

import numpy as np
import pytest
from cases import for_each
from every_codec import normal, reseal, vectors

from fedcomp import FrameError, codec
from fedcomp.codecs.frame import SECTIONS
from fedcomp.errors import SpecError
from fedcomp.kernels import hadamard

STEPS = ("0.125", "0.5", "1.41421356", "3", "8")


def entropy_bytes(symbols: np.ndarray) -> float:
    counts = np.bincount(symbols)
    shares = counts[counts > 0] / symbols.size
    return float(-(shares * np.log2(shares)).sum()) * symbols.size / 8


@for_each("step", STEPS)
@for_each("numel", [10, 1000, 60_000])
def test_the_length_of_a_frame_is_near_the_entropy_and_the_scales(step, numel):
    c, scales = codec(f"vlc:step={step}"), 4 * (hadamard.edges(numel).size - 1)
    for x in (normal(numel), normal(numel) ** 7, vectors(numel)["one spike"]):
        frame = c.encode(x, seed=1)
        multiples = c.open(frame, numel).codes(0, int(hadamard.edges(numel)[-1]))
        symbols = (multiples - multiples.min()).astype(np.int64)
        assert len(frame) <= 1.01 * entropy_bytes(symbols) + scales + 100


def test_the_step_of_the_paper_takes_less_than_two_bits_per_value_for_any_size():
    for numel in (5000, 60_000, 200_000):
        frame = codec("vlc").encode(normal(numel), seed=1)
        assert 1.7 < 8 * len(frame) / numel < 1.9


def test_half_the_step_takes_one_bit_more_and_has_a_quarter_of_the_error():
    x = normal(60_000)
    bits, errors = [], []
    for step in (1.0, 0.5, 0.25):
        frame = codec(f"vlc:step={step}").encode(x, seed=1)
        bits.append(8 * len(frame) / x.numel())
        errors.append(
            float((codec("vlc").decode(frame, numel=x.numel()) - x).double().square().mean())
        )
    assert np.allclose(np.diff(bits), 1, atol=0.1) and np.allclose(
        np.divide(errors[:-1], errors[1:]), 4, rtol=0.05
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_error_is_below_the_declared_variance_for_any_vector(step):
    c = codec(f"vlc:step={step}")
    assert (
        c.variance(1001) == pytest.approx(min(float(step) ** 2 / 4, float(step)), rel=1e-4)
        and c.contraction(1001) is None
    )
    for name, x in vectors(1001).items():
        frames = c.encode_batch(x.expand(8, -1), range(8))
        lost = [
            float((c.decode(frame, numel=1001).double() - x).square().sum()) for frame in frames
        ]
        assert np.mean(lost) <= 1.1 * c.variance(1001) * float(x.double().square().sum()), name


def test_the_mean_over_seeds_is_the_vector():
    c, x = codec("vlc"), normal(128)
    rows = np.stack(
        [
            c.decode(frame, numel=128).double().numpy()
            for frame in c.encode_batch(x.expand(200, -1), range(200))
        ]
    )
    one = float(((rows - x.double().numpy()) ** 2).sum(1).mean())
    assert (
        0.6 * one / 200 < float(((rows.mean(0) - x.double().numpy()) ** 2).sum()) < 1.4 * one / 200
    )


def test_the_smallest_and_the_largest_multiple_must_occur():
    frame = codec("vlc").encode(normal(1001), seed=1)
    # After the seed, the count, the first byte and the scale of one block.
    start = SECTIONS + 8 + 2 + 1 + 4
    smallest, size = frame[start], frame[start + 1]
    assert smallest & 1 and size < 20
    for other in [(smallest, size + 1), (smallest, size - 1), (smallest, 0), (smallest, 1)]:
        with pytest.raises(FrameError):
            codec("vlc").decode(
                reseal(frame[:start] + bytes(other) + frame[start + 2 :], 1001), numel=1001
            )


@for_each("step", ["0", "-1", "0.12", "8.1"])
def test_an_invalid_step_is_refused(step):
    with pytest.raises(SpecError, match="step is .*; give 0.125 to 8"):
        codec(f"vlc:step={step}")


def test_the_default_step_is_that_of_the_paper():
    assert codec("vlc").step == math.sqrt(2) and codec(str(codec("vlc"))) == codec("vlc")
