"""The codec `threshold`, and Strom's algorithm: this codec with the memory `residual`."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import normal, reseal, same_bits, vectors

from fedcomp import FrameError, codec, memory
from fedcomp.codecs import at_density
from fedcomp.codecs.frame import SECTIONS
from fedcomp.errors import ConfigError, SpecError

NUMEL = 401


def test_a_value_equal_to_the_threshold_is_sent():
    x = torch.tensor([0.5, -0.5, 0.49999997, 0.7, -0.0, -3.0])
    for values, sent in {
        "tau": [0.5, -0.5, 0, 0.5, 0, -0.5],
        "fp32": [0.5, -0.5, 0, x[3].item(), 0, -3.0],
    }.items():
        c = codec(f"threshold:tau=0.5,values={values}")
        assert c.decode(c.encode(x), numel=6).tolist() == sent


def test_a_threshold_is_rounded_to_float32():
    tau = np.float32(0.1)
    x = torch.tensor([float(tau), float(np.nextafter(tau, np.float32(0)))])
    c = codec("threshold:tau=0.1")
    assert c.decode(c.encode(x), numel=2).tolist() == [float(tau), 0]


@for_each("values", ["tau", "fp32", "fp16"])
def test_a_frame_is_only_a_header_if_no_value_reaches_the_threshold(values):
    c = codec(f"threshold:tau=3.5,values={values}")
    for x in (torch.zeros(NUMEL), torch.full((NUMEL,), 3.4), torch.empty(0)):
        frame = c.encode(x)
        assert len(frame) == SECTIONS + 1 and c.open(frame, x.numel()).nonzeros == 0


@pytest.mark.parametrize("values", ["tau", "fp32", "fp16"])
def test_the_error_of_each_coordinate_is_not_larger_than_its_value(values):
    for tau in ("1e-44", "1e-30", "0.3", "1", "3e38"):
        c = codec(f"threshold:tau={tau},values={values}")
        assert c.contraction(NUMEL) == 0.0 and c.variance(NUMEL) is None
        for name, x in vectors(NUMEL).items():
            rest = x.double() - c.decode(c.encode(x), numel=NUMEL)
            assert (rest.abs() <= x.double().abs()).all(), (tau, name)


def test_a_coordinate_takes_the_bits_of_its_sign_and_position():
    x = normal(1_000_000)
    frame = codec("threshold:tau=2.5758").encode(x)  # 1 % of the values reach this threshold
    count = int((x.abs() >= 2.5758).sum())
    assert 8 * len(frame) / count < 1 + 8.11 + 0.1


def test_threshold_with_a_residual_is_the_algorithm_of_strom():
    """r ← r + g for a gradient g; +τ is sent where r ≥ τ and −τ where r ≤ −τ; the sent values are subtracted from the residual r."""
    keeper, tau, r = (
        memory("residual", codec("threshold:tau=0.25"), NUMEL),
        np.float32(0.25),
        np.zeros(NUMEL, np.float32),
    )
    for step in range(50):
        g = 0.1 * normal(NUMEL, seed=step)
        r = r + g.numpy()
        sent = np.where(r >= tau, tau, np.where(r <= -tau, -tau, np.float32(0)))
        frame = keeper.propose(g, seed=step)
        assert same_bits(keeper.codec.decode(frame, numel=NUMEL), sent)
        keeper.commit()
        r = r - sent
        assert np.array_equal(keeper.residual.numpy(), r)


@pytest.mark.parametrize(
    "spec", ["threshold:tau=1e-3", "threshold:tau=3,values=fp32", "threshold:tau=2.6,values=fp16"]
)
def test_a_large_update_is_added_to_the_residual_and_encoded(spec):
    c, e, x = codec(spec), normal(200_000, seed=1), normal(200_000, seed=2)
    total = e + x
    (frame,) = c.encode_batch([x], [0], onto=[e])
    assert same_bits(e, total) and c.encode_batch(total[None], [0]) == [frame]


def test_threshold_has_no_density():
    for spec in ("threshold", "threshold@layer", "threshold+fp16"):
        with pytest.raises(
            ConfigError, match="threshold:tau=0.01,values=tau has no option density"
        ):
            at_density(codec(spec), 0.1)


@for_each("tau", ["0", "-0.1", "1e-46", "3.5e38", "1e300"])
def test_a_threshold_must_be_a_positive_float32(tau):
    with pytest.raises(
        SpecError,
        match="tau is .*; give a number above 0 in the range of float32, such as 0.01",
    ):
        codec(f"threshold:tau={tau}")


@for_each("tau", [0.0, -0.25, np.nan, np.inf])
def test_a_frame_with_another_threshold_is_refused(tau):
    c = codec("threshold:tau=0.25")
    frame, start = c.encode(torch.tensor([1.0, 0.0, -1.0])), SECTIONS + 2
    assert c.decode(frame, numel=3).tolist() == [0.25, 0, -0.25]
    with pytest.raises(FrameError, match="threshold"):
        c.decode(
            reseal(frame[:start] + np.array(tau, "<f4").tobytes() + frame[start + 4 :], 3), numel=3
        )


def test_unknown_flags_are_rejected():
    c = codec("threshold:tau=0.25")
    frame = bytearray(c.encode(torch.tensor([1.0, 0.0, -1.0])))
    frame[SECTIONS + 1] |= 0xC0
    with pytest.raises(FrameError, match="unknown format"):
        c.decode(reseal(bytes(frame), 3), numel=3)
