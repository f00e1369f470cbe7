"""The codec `adaptive`: its levels, its rounding and its frames."""

import math

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp import FrameError, codec
from fedcomp.codecs.frame import Section
from fedcomp.errors import SpecError
from fedcomp.layout import Layout

NUMEL = 20_000
ADAPTIVE = codec("adaptive")


def distributions() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(1)
    normal = draw.standard_normal(NUMEL)
    return {
        "normal": normal,
        "laplace": draw.laplace(size=NUMEL),
        "heavy tails": draw.standard_t(2, NUMEL),
        "positive": draw.exponential(size=NUMEL),
        "two heaps": np.where(draw.random(NUMEL) < 0.3, 5 + 0.1 * normal, -1 + 0.2 * normal),
        "far from zero": 100 + normal,
        "half zeros": normal * (draw.random(NUMEL) < 0.5),
        "layers": normal * np.repeat([1.0, 1e-2, 1e-4, 3.0], NUMEL // 4),
        "seventh powers": normal**7,
    }


def decoded(spec: str, x: torch.Tensor, seed: int = 0) -> np.ndarray:
    c = codec(spec)
    return c.decode(c.encode(x, seed=seed), numel=x.numel()).double().numpy()


def loss(v: np.ndarray, levels: np.ndarray, stochastic: bool) -> float:
    """Return the squared error of rounding values to ascending float64 levels. `stochastic`: the expected squared error."""
    if not stochastic:
        return float(
            np.square(v - levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, v)]).sum()
        )
    cell = np.searchsorted(levels[1:-1], v, side="right")
    return float(((v - levels[cell]) * (levels[cell + 1] - v)).sum())


def even_loss(v: np.ndarray, size: int, stochastic: bool) -> float:
    """Return the squared error with `size` levels that are evenly spaced from the smallest to the largest value."""
    return loss(v, np.linspace(v.min(), v.max(), size), stochastic)


@for_each("name", distributions())
@for_each("size, placement", [(4, "lloyd"), (16, "quantiles"), (100, "lloyd")])
def test_adaptive_levels_have_less_squared_error_than_even_levels(name, size, placement):
    x = torch.from_numpy(distributions()[name].astype(np.float32))
    v = x.double().numpy()
    for rounding in (
        ("nearest", "stochastic") if size > 4 else ("nearest",)
    ):  # three of four stochastic levels are fixed: both ends and 0
        lost = np.square(
            decoded(f"adaptive:levels={size},rounding={rounding},placement={placement}", x) - v
        ).sum()
        assert lost < 0.65 * even_loss(v, size, rounding == "stochastic"), rounding


@for_each("rounding", ["nearest", "stochastic"])
@for_each("size", [5, 60])
def test_lloyd_has_a_smaller_expected_error_than_quantiles(rounding, size):
    for name, v in distributions().items():
        x, lost = torch.from_numpy(v.astype(np.float32)), []
        for placement in ("lloyd", "quantiles"):
            levels = (
                codec(f"adaptive:rounding={rounding},levels={size},placement={placement}")
                .quantization_levels(x)
                .astype(np.float64)
            )
            lost.append(loss(x.double().numpy(), levels, rounding == "stochastic"))
        assert lost[0] < lost[1], name


@for_each("size, distortion", [(2, 0.3634), (4, 0.1175), (8, 0.03454), (16, 0.009497)])
def test_the_squared_error_of_a_normal_distribution_is_that_of_max(size, distortion):
    """Max 1960, table I. The values are quantiles of the distribution, not random draws."""
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    x = (math.sqrt(2) * torch.erfinv(2 * u - 1)).float()
    assert np.square(
        decoded(f"adaptive:levels={size}", x) - x.double().numpy()
    ).mean() == pytest.approx(distortion, rel=0.02)


def test_every_value_is_rounded_to_the_nearest_level():
    for name, v in distributions().items():
        x = torch.from_numpy(v.astype(np.float32))
        y = decoded("adaptive:levels=13", x)
        found = np.unique(y)
        nearest = np.abs(x.double().numpy()[:, None] - found).min(1)
        assert np.array_equal(np.abs(x.double().numpy() - y), nearest), name


@for_each("spec", ["adaptive", "adaptive:placement=quantiles", "adaptive:rounding=stochastic"])
def test_vectors_with_few_distinct_values_are_exact(spec):
    for values in (
        [0.3],
        [0.0],
        [-0.0, 0.0],
        [1.5, -2.25],
        [2.0**-149, 0.0, -3 * 2.0**-149],
        [3.4e38, -3.4e38],
        [1.0, 2.0, 3.0, -4.0],
    ):
        x = torch.tensor(values * 11)
        assert np.array_equal(decoded(spec, x), x.double().numpy()), values


@pytest.mark.parametrize(
    "spec",
    ["adaptive:rounding=stochastic", "adaptive:rounding=stochastic,placement=quantiles,levels=3"],
)
@pytest.mark.parametrize("name", ["normal", "two heaps", "half zeros"])
def test_stochastic_rounding_is_unbiased(spec, name):
    v, seeds = distributions()[name][:400].astype(np.float32).astype(np.float64), 60
    x = torch.from_numpy(v.astype(np.float32))
    levels = codec(spec).quantization_levels(x).astype(np.float64)
    assert levels[0] == v.min() and levels[-1] == v.max() and np.clip(0, v.min(), v.max()) in levels
    cell = np.searchsorted(levels[1:-1], v, side="right")
    variance = (v - levels[cell]) * (levels[cell + 1] - v)
    off = np.mean([decoded(spec, x, seed) for seed in range(seeds)], axis=0) - v
    drawing = variance > 0
    z = off[drawing] / np.sqrt(variance[drawing] / seeds)
    assert (np.abs(off[~drawing]) < 1e-6).all() and abs(
        np.square(z).sum() - z.size
    ) < 8 * math.sqrt(2 * z.size)
    assert variance.sum() <= codec(spec).variance(400) * np.square(v).sum()


def test_stochastic_levels_minimize_the_variance():
    """A level that is neither an end nor 0 cannot be moved by 3 % to reduce the variance."""
    v = np.sort(distributions()["laplace"].astype(np.float32)).astype(np.float64)
    levels = (
        codec("adaptive:rounding=stochastic,levels=8")
        .quantization_levels(torch.from_numpy(v.astype(np.float32)))
        .astype(np.float64)
    )

    least = loss(v, levels, True)
    for j in set(range(1, levels.size - 1)) - set(np.flatnonzero(levels == 0)):
        for factor in (0.97, 1.03):
            moved = levels.copy()
            moved[j] *= factor
            assert loss(v, moved, True) > 0.9999 * least


@for_each(
    "spec, least",
    [
        ("adaptive:levels=1", 2),
        ("adaptive:levels=257", 2),
        ("adaptive:levels=2,rounding=stochastic", 3),
    ],
)
def test_a_number_of_levels_out_of_range_is_refused(spec, least):
    with pytest.raises(
        SpecError,
        match=f"levels is [0-9]+; give {least} to 256",
    ):
        codec(spec)


@for_each(
    "levels, codes",
    [
        ([1.0, 0.5], [0, 1, 0]),
        ([0.5, 0.5], [0, 1, 0]),
        ([0.5, math.inf], [0, 1, 0]),
        ([math.nan], []),
        ([0.5], [0]),
        ([0.5, 1.0], []),
    ],
)
def test_invalid_bodies_are_rejected(levels, codes):
    packed = sum(code * len(levels) ** i for i, code in enumerate(codes))
    body = (
        bytes([len(levels) - 1])
        + np.array(levels, "<f4").tobytes()
        + bytes([packed] if codes else [])
    )
    with pytest.raises(FrameError):
        ADAPTIVE._decode_row(Section(3, body), Layout.flat(3), 0)
    good = bytes([1]) + np.array([-1, 2.0], "<f4").tobytes() + bytes([0b010])
    assert ADAPTIVE._decode_row(Section(3, good), Layout.flat(3), 0).values.tolist() == [
        -1.0,
        2.0,
        -1.0,
    ]
