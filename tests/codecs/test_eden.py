"""The codecs `eden` and `drive`: their levels, their errors and the bounds of these errors."""

import math

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal

from fedcomp import codec, memory
from fedcomp.codecs import eden
from fedcomp.kernels import hadamard

NUMEL = 4096
# Bits → relative squared error of one client.
LIMITS = {1: math.pi / 2 - 1, 2: 0.13312, 3: 0.035784, 4: 0.0095921}
BITS = tuple(LIMITS)
CERTIFICATES = {
    2: (0.2055, 0.0574, 0.02036),
    3: (0.0626, 0.0076, 0.01293),
    4: (0.02224, -0.0084, 0.008631),
}  # bits → A, B and C in the docstring of test_the_contraction_is_proven


def lloyd_max(count: int) -> np.ndarray:
    """Return the optimal magnitudes for a normal variable. Each is the mean of the values to which it is nearest."""
    density, tail = (
        np.vectorize(lambda t: math.exp(-t * t / 2) / math.sqrt(2 * math.pi)),
        np.vectorize(lambda t: math.erfc(t / 2**0.5) / 2),
    )
    magnitudes = np.linspace(0.3, 2.5, count)
    for _ in range(3000):
        edges = np.concatenate([[0], (magnitudes[1:] + magnitudes[:-1]) / 2, [40]])
        magnitudes = -np.diff(density(edges)) / -np.diff(tail(edges))
    return magnitudes


def clients(spec: str, x: torch.Tensor) -> torch.Tensor:
    """Encode and decode each row with its own seed. Return the rows in float64."""
    c = codec(spec)
    return torch.stack(
        [c.decode(frame, numel=x.shape[1]) for frame in c.encode_batch(x, range(len(x)))]
    ).double()


@pytest.mark.parametrize("bits", BITS)
def test_the_tables_are_lloyd_max_quantizers(bits):
    exact = lloyd_max(2 ** (bits - 1))
    assert np.array_equal(np.array(eden.MAGNITUDES[bits], np.float32), eden.MAGNITUDES[bits])
    assert np.allclose(eden.MAGNITUDES[bits], exact, rtol=0, atol=2e-7)
    assert np.allclose(eden.thresholds(bits), (exact[1:] + exact[:-1]) / 2, rtol=0, atol=2e-7)
    assert eden.values_of(bits).tolist() == [s * v for v in eden.MAGNITUDES[bits] for s in (-1, 1)]


@for_each("bits", BITS)
def test_a_code_is_the_nearest_value(bits):
    """If the decoded vector is rotated, it is S·q, where u is the rotated x, q are the levels nearest to u/‖x‖, and S = ‖x‖²/⟨u, q⟩."""
    x, seed = normal(NUMEL) ** 3, 3
    c = codec(f"eden:bits={bits}")
    y = c.decode(c.encode(x, seed=seed), numel=NUMEL)
    exact, coded = (hadamard.RotatedBlocks(v, seed, 0) for v in (x, y))
    u, v = (t.u.astype(np.float64) * 2.0 ** t.exponents[0] for t in (exact, coded))
    z, table = u / x.double().norm().item(), eden.values_of(bits).astype(np.float64)
    q = table[abs(z[:, None] - table).argmin(1)]
    assert np.allclose(v, q * (u @ u) / (u @ q), rtol=0, atol=1e-5 * abs(v).max())


@for_each("spec", ["drive", "eden:bits=1", "eden:bits=2", "eden:bits=3", "eden:bits=4"])
@for_each("kind", ["normal", "one half zero"])
def test_the_error_of_the_mean_over_clients(spec, kind):
    """With m clients, the relative error is LIMITS/m, whether their vectors are equal or different."""
    m, x = 40, normal(40, NUMEL)
    x = {"normal": x, "lognormal": x.exp(), "one half zero": x * (x > 0)}[kind]
    limit = LIMITS[codec(spec).bits]
    for rows in (x, x[:1].expand(m, -1)):
        squares = rows.double().square().sum(1)
        y = clients(spec, rows)
        one = float((y - rows).square().sum(1).mean() / squares.mean())
        mean = float((y.mean(0) - rows.double().mean(0)).square().sum() / squares.mean())
        assert abs(one / limit - 1) < 0.03
        assert abs(mean * m / limit - 1) < 0.12


def test_drive_is_eden_of_one_bit():
    x = normal(3, 401)
    for damped in ("false", "true"):
        assert torch.equal(
            clients(f"drive:damped={damped}", x), clients(f"eden:bits=1,damped={damped}", x)
        )


def test_the_codec_is_biased_for_sparse_vectors():
    """The codec declares no variance, because a Hadamard rotation is not uniformly random."""
    x = torch.zeros(1, 1024)
    x[0, [3, 900]] = torch.tensor([1.0, 0.5])
    y = clients("drive", x.expand(20, -1))
    assert (
        torch.allclose(y[:, 3], torch.tensor(1.25, dtype=torch.float64), rtol=1e-6)
        and y.norm(dim=1).max() < 1.2501
    )
    assert [codec(f"eden:bits={bits}").variance(1024) for bits in BITS] == [None] * 4 and codec(
        "drive"
    ).variance(1024) is None


@for_each("bits", BITS)
def test_damped_has_less_error_and_the_same_direction(bits):
    x = normal(20, NUMEL)
    unbiased, damped = (clients(f"eden:bits={bits},damped={d}", x) for d in ("false", "true"))
    shrunk = (damped * unbiased).sum(1) / unbiased.square().sum(1)
    assert (
        torch.allclose(damped, shrunk[:, None] * unbiased, rtol=0, atol=1e-5) and (shrunk < 1).all()
    )
    limit = LIMITS[bits] / (1 + LIMITS[bits])
    assert abs(float((damped - x).square().sum() / x.double().square().sum()) / limit - 1) < 0.03


@for_each("bits", CERTIFICATES)
def test_the_contraction_is_proven(bits):
    """(z − q)² ≤ A + B·z² + C·z⁴ for all z, where q is the level nearest to z. With E z² = 1 and E z⁴ ≤ 3, this bounds the error.

    The inequality is checked on each interval with one q, at its ends and at the stationary points of the difference.
    """
    a, b, c = CERTIFICATES[bits]
    edges = [0.0, *eden.thresholds(bits), 1e6]
    for q, low, high in zip(eden.MAGNITUDES[bits], edges, edges[1:]):
        difference = np.polynomial.Polynomial([a - q * q, 2 * q, b - 1, 0, c])
        flat = difference.deriv().roots()
        inside = [z.real for z in flat if abs(z.imag) < 1e-9 and low < z.real < high]
        assert min(map(difference, [low, high, *inside])) >= 0 and c > 0
    assert (
        a + b + 3 * c <= 1 - eden.DELTAS[bits]
        and codec(f"eden:bits={bits},damped=true").contraction(9) == eden.DELTAS[bits]
    )


@pytest.mark.parametrize("bits", BITS)
def test_sparse_vectors_are_contracted(bits):
    """For a vector with two equal coordinates and one bit, the squared error is half of the squared norm, which is the bound."""
    c = codec(f"eden:bits={bits},damped=true")
    for count in (1, 2, 3, 4):
        x = (torch.arange(64) < count).float()
        y = torch.stack(
            [c.decode(frame, numel=64) for frame in c.encode_batch(x.expand(100, -1), range(100))]
        ).double()
        lost = float((y - x).square().sum(1).mean()) / count
        assert lost <= 1 - c.contraction(64) + 1e-6
        assert (bits, count) != (1, 2) or lost > 0.49


@pytest.mark.parametrize("spec", ["drive:damped=true", "eden:bits=2,damped=true@layer"])
def test_with_a_residual_memory_all_updates_arrive(spec):
    keeper, layout, x = (
        memory("residual", codec(spec), 401, layout_of(401)),
        layout_of(401),
        normal(401),
    )
    sent = torch.zeros(401)
    for round in range(30):
        keeper.codec.accumulate(keeper.propose(x, seed=round), sent, layout=layout)
        keeper.commit()
    assert float((sent / 30 - x).norm() / x.norm()) < 0.2
    assert torch.allclose(sent + keeper.state_dict()["residual"], 30 * x, atol=1e-3)


@for_each("bits", BITS)
@for_each("numel", [1, 1000, 20_000])
def test_frames_have_the_expected_length(bits, numel):
    marks, count = hadamard.edges(numel), 1 if numel < 128 else 2 if numel < 1 << 14 else 3
    lengths = {
        len(codec(spec).encode(normal(numel)))
        for spec in (f"eden:bits={bits}", f"eden:bits={bits},damped=true")
    }
    assert lengths == {17 + count + 1 + 4 * (marks.size - 1) + bits * int(marks[-1]) // 8}
