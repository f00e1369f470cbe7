"""The memory `diana`: its shift, its step size, and the error of the server's estimate."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits
from torch import Tensor

from fedcomp import available_codecs, codec, memory
from fedcomp.codecs import Context, LayerWise
from fedcomp.codecs.frame import Section
from fedcomp.codecs.identity import Identity
from fedcomp.errors import ConfigError

NUMEL = 401
LAYOUT = layout_of(NUMEL)
UNBIASED = [
    spec
    for name in available_codecs()
    for spec in (name, f"{name}@layer")
    if codec(spec).variance(NUMEL) is not None
]


@dataclass(frozen=True)
class Coin(Identity):
    """An unbiased codec that doubles or drops each coordinate at random. It declares a larger variance for longer vectors."""

    name: ClassVar[str] = "coin"

    def contraction(self, numel: int) -> None:
        return None

    def variance(self, numel: int) -> float:
        return 1.0 + numel / 1000

    def _encode_row(self, x: Tensor, seed: int, context: Context) -> Section:
        heads = torch.rand(x.numel(), generator=torch.Generator().manual_seed(seed % 2**63)) < 0.5
        return super()._encode_row(2 * x * heads, seed, context)

    def __str__(self) -> str:
        return "coin"


def update(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "c",
    [*map(codec, [*UNBIASED, "randomk:density=1/10,scaled=true@layer"]), Coin(), LayerWise(Coin())],
    ids=str,
)
def test_the_shift_changes_by_alpha_times_the_sent_difference(c):
    m, h = memory("diana", c, NUMEL, LAYOUT), torch.zeros(NUMEL)
    for seed in range(4):
        x = update(seed)
        assert m.propose(x, seed=seed) == c.encode(x - h, seed=seed, layout=LAYOUT)
        c.accumulate(m.pending, h, m.step, layout=LAYOUT)
        m.commit()
        assert same_bits(m.shift, h)


def test_the_default_step_is_the_largest_that_the_codec_allows():
    assert memory("diana", Coin(), NUMEL).step == 1 / 2.401
    assert memory("diana", LayerWise(Coin()), NUMEL, LAYOUT).step == 1 / (
        2 + max(e.numel for e in LAYOUT) / 1000
    )
    assert memory("diana", codec("identity"), NUMEL).step == 1
    assert memory("diana:alpha=1/10", Coin(), NUMEL).step == 0.1
    layerwise = memory("diana", LayerWise(Coin()), NUMEL, LAYOUT)
    assert layerwise.counterpart(layerwise).step == layerwise.step


@for_each("alpha", ["0.42", "1", "0", "-1"])
def test_a_step_that_is_too_large_for_the_codec_is_refused(alpha):
    with pytest.raises(
        ConfigError,
        match=r"alpha is .*; with coin it must be above 0 and at most 0\.416493",
    ):
        memory(f"diana:alpha={alpha}", Coin(), NUMEL)


@for_each("spec", ["stc", "topk@layer", "fp16"])
def test_a_biased_codec_is_refused(spec):
    with pytest.raises(
        ConfigError,
        match="diana needs an unbiased codec, and .* is biased; use --uplink qsgd, or --memory ef21",
    ):
        memory("diana", codec(spec), NUMEL, LAYOUT)


def mean_estimate(c, x: Tensor, rounds: int, runs: int) -> tuple[Tensor, float]:
    """Return the mean of the server's estimates of x after several rounds, and their mean squared error."""
    total, error = torch.zeros(NUMEL), 0.0
    for run in range(runs):
        m = memory("diana", c, NUMEL, LAYOUT)
        server = m.counterpart(m)
        for round in range(rounds):
            sent = c.open(m.propose(x, seed=1000 * run + round), NUMEL, LAYOUT)
            estimate = server.estimate(0, sent, round == 0).dense()
            m.commit()
            server.settle([(0, sent, round == 0)], 0.0)
        total += estimate / runs
        error += float((estimate - x).square().sum()) / runs
    return total, error


@pytest.mark.slow
@pytest.mark.parametrize("c", [Coin(), codec("randomk:density=1/2,scaled=true@layer")], ids=str)
def test_estimates_are_unbiased_and_their_error_vanishes(c):
    x = update(1)
    for rounds in (1, 3):
        mean, error = mean_estimate(c, x, rounds, runs=10)
        assert float((mean - x).square().sum()) <= 2 * error / 10 + 1e-9
    early, late = mean_estimate(c, x, 1, runs=2)[1], mean_estimate(c, x, 30, runs=1)[1]
    assert late < 0.01 * early
