"""The codec `qsgd`: its rounding, its variance, error feedback and the length of frames."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, vectors

from fedcomp import codec
from fedcomp.codecs.qsgd import _unit
from fedcomp.errors import SpecError
from fedcomp.kernels import philox

LARGEST = float(np.finfo(np.float32).max)


def decoded(spec: str, x: torch.Tensor, seed: int) -> np.ndarray:
    c, layout = codec(spec), layout_of(x.numel())
    return (
        c.decode(c.encode(x, seed=seed, layout=layout), numel=x.numel(), layout=layout)
        .double()
        .numpy()
    )


@for_each("s", [1, 4, 16, 63, 64, 1000])
def test_a_frame_decodes_to_the_result_of_the_paper(s):
    x, c = normal(1001), codec(f"qsgd:levels={s}")
    v, u = x.double().numpy(), philox.words(7, 1001) / 2.0**32
    unit = float(np.sqrt(np.square(v).sum())) / s
    expected = unit * np.sign(v) * np.floor(np.abs(v) / unit + u)
    y = c.decode(c.encode(x, seed=7), numel=1001).numpy()
    assert np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("s", [1, 16, 200])
def test_rounding_is_unbiased_with_the_expected_variance(s):
    x, seeds = normal(401), 100
    v, unit = x.double().numpy(), _unit(math.sqrt(x.double().square().sum()), s)
    drawn = np.stack([decoded(f"qsgd:levels={s}", x, seed) for seed in range(seeds)])
    share = np.abs(v) / unit % 1
    variance = unit**2 * share * (1 - share)
    z = (drawn.mean(0) - v) / np.sqrt(variance / seeds)
    assert np.abs(z).max() < 5 and abs(np.square(z).sum() - 401) < 6 * math.sqrt(2 * 401)
    assert np.square(drawn - v).sum(1).mean() == pytest.approx(variance.sum(), rel=0.1)
    assert variance.sum() <= codec(f"qsgd:levels={s}").variance(401) * np.square(v).sum()


@for_each("kind", ["huge", "denormal", "constant", "one spike", "spike over noise"])
@for_each("s", [1, 3, 16, 1000])
def test_levels_do_not_overflow_and_are_fine_enough_for_the_norm(kind, s):
    for numel in (1, 7, 40):
        x = vectors(numel)[kind]
        norm = (
            math.sqrt(sum(Fraction(v) ** 2 for v in x.tolist()))
            if kind != "huge"
            else float(np.linalg.norm(x.double().numpy()))
        )
        unit = _unit(norm, s)
        assert np.float32(unit) == unit and (unit <= norm / s or unit == 2.0**-149)
        for seed in range(5):
            y = decoded(f"qsgd:levels={s}", x, seed)
            assert (
                np.abs(y).max() <= LARGEST
                and (np.abs(y - x.double().numpy()) <= unit * (1 + 1e-6)).all()
            )


@pytest.mark.slow
def test_levels_at_the_end_of_the_range_are_unbiased():
    """If a level would be above the largest float32, the unit is smaller, so that the highest level is the largest float32."""
    x = torch.tensor([3.3e38, -3.3e38, 1e38, 2e38] * 10)
    drawn = np.concatenate(
        [decoded("qsgd:levels=2", x, seed).reshape(10, 4) for seed in range(100)]
    )
    v = x[:4].double().numpy()
    error = drawn.std(0) / math.sqrt(1000)
    assert (np.abs(drawn.mean(0) - v) <= 5 * error + 1e-6 * np.abs(v)).all() and error.max() > 0


def test_a_spike_is_sent_exactly():
    for s in (1, 7, 16):
        x = torch.zeros(1000)
        x[3] = -0.7
        assert decoded(f"qsgd:levels={s}", x, 1) == pytest.approx(x.tolist(), rel=1e-6)


def test_short_vectors_are_packed():
    """Ten levels from −4 to 4 take 32 bits."""
    frame = codec("qsgd:levels=4").encode(
        torch.tensor([1.0, -1.0, 2.0, 0.5, 3.0, 4.0, -4.0, 1.0, 2.0, 1.0])
    )
    assert len(frame) <= 9 + 1 + 1 + 4 + 4


def test_clients_round_differently():
    x, frames = normal(2000), 50
    mean = np.mean([decoded("qsgd:levels=4", x, seed) for seed in range(frames)], axis=0)
    one, all_ = (
        np.square(y - x.double().numpy()).sum() for y in (decoded("qsgd:levels=4", x, 0), mean)
    )
    assert all_ == pytest.approx(one / frames, rel=0.2)


# Error feedback.


@pytest.mark.parametrize(("damped", "bounded"), [("true", True), ("false", False)])
def test_a_residual_stays_bounded_only_if_damped(damped, bounded):
    c, x, e = codec(f"qsgd:levels=4,damped={damped}"), normal(2000), torch.zeros(2000)
    for seed in range(60):
        e += x
        e -= c.decode(c.encode(e, seed=seed), numel=2000)
    omega = codec("qsgd:levels=4").variance(2000)
    assert (float(e.norm()) <= 2 * (1 + omega) * float(x.norm())) == bounded


def test_damped_values_are_divided_by_1_plus_omega():
    x = normal(401)
    plain, damped = (decoded(f"qsgd:damped={way}", x, 3) for way in ("false", "true"))
    c = codec("qsgd")
    assert damped == pytest.approx(plain / (1 + c.variance(401)), rel=1e-6)
    assert (
        codec("qsgd:damped=true").contraction(401) == 1 / (1 + c.variance(401))
        and c.contraction(401) is None
    )
    assert codec("qsgd:damped=true").variance(401) is None


@for_each(
    "n, s, omega", [(100, 16, 100 / 256), (10**6, 16, 1000 / 16), (256, 16, 1.0), (0, 4, 0.0)]
)
def test_the_variance_omega_has_the_value_of_the_paper(n, s, omega):
    assert codec(f"qsgd:levels={s}").variance(n) == omega


@for_each("levels", [0, -1, 1001])
def test_a_number_of_levels_out_of_range_is_refused(levels):
    with pytest.raises(SpecError, match=f"levels is {levels}; give 1 to 1000"):
        codec(f"qsgd:levels={levels}")


@for_each("s", [3, 16, 1000])
def test_the_largest_float32_is_a_level(s):
    """A value that is always rounded down would be biased."""
    x = torch.tensor([LARGEST, -LARGEST, 0.0])
    np.testing.assert_allclose(decoded(f"qsgd:levels={s}", x, 1), x.double(), rtol=1e-6)


@for_each("s", [1, 7, 127, 1000])
def test_nearest_rounding_is_the_uniform_quantizer_and_contracts(s):
    spec = f"qsgd:levels={s},norm=max,rounding=nearest"
    for kind in ("normal", "huge", "denormal", "constant", "one spike", "spike over noise"):
        for numel in (1, 2, 40, 1001):
            x = normal(numel) if kind == "normal" else vectors(numel)[kind]
            v, y = x.double().numpy(), decoded(spec, x, 0)
            unit = _unit(np.abs(v).max(), s)
            assert (np.abs(y - v) <= unit / 2 * (1 + 1e-5)).all()
            left = (1 - codec(spec).contraction(numel)) * np.square(v).sum()
            assert np.square(y - v).sum() <= left * (1 + 1e-5)
            assert (y == decoded(spec, x, 1)).all()


def test_levels_of_nearest_rounding_by_hand():
    x = torch.tensor([7.0, -3.4, 0.6, -0.4, 0.0])
    y = decoded("qsgd:levels=7,norm=max,rounding=nearest", x, 0)
    assert y.tolist() == [7, -3, 1, 0, 0]


@for_each("options", ["rounding=nearest", "norm=max,rounding=nearest,damped=true"])
def test_nearest_rounding_with_options_that_it_excludes_is_refused(options):
    with pytest.raises(SpecError, match="give norm=max,rounding=nearest"):
        codec(f"qsgd:{options}")
