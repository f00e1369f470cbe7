"""The codec `randomk`: the drawn coordinates, their scaled values, and the sum of frames."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import half, layout_of, normal, reseal, same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, codec, memory
from fedcomp.codecs import LayerWise, longest_frame
from fedcomp.codecs.frame import SECTIONS, unseal
from fedcomp.codecs.randomk import drop_threshold
from fedcomp.errors import ConfigError
from fedcomp.kernels import philox
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.schedule import Schedule

NUMEL = 401
LARGEST = float(np.finfo(np.float32).max)


def decoded(
    spec: str, x: torch.Tensor, seed: int = 0, layout: Layout | None = None
) -> torch.Tensor:
    return codec(spec).decode(
        codec(spec).encode(x, seed=seed, layout=layout), numel=x.numel(), layout=layout
    )


# Coordinates drawn uniformly.


@for_each("density", ["1e-9", "1/400", "1/10", "1/2", "93%", "1"])
def test_drawn_coordinates_are_sent_exactly_including_zeros(density):
    c = codec(f"randomk:density={density}")
    for numel in (1, 7, NUMEL):
        for name, x in vectors(numel).items():
            update = c.open(c.encode(x, seed=5), numel)
            at = philox.sample(numel, c.count(numel), 5, 7)
            assert np.array_equal(update.positions, at) and same_bits(update.values, x[at]), (
                numel,
                name,
            )


def test_scaled_values_are_multiplied_by_n_over_k():
    c = codec("randomk:density=1/8,scaled=true")
    for name, x in vectors(NUMEL).items():
        update = c.open(c.encode(x, seed=5), NUMEL)
        exact = x.double().numpy()[update.positions] * (NUMEL / 50)
        assert same_bits(update.values, exact.clip(-LARGEST, LARGEST).astype(np.float32)), name


@for_each("scaled", ["false", "true"])
def test_float16_rounds_the_sent_values(scaled):
    exact, x = codec(f"randomk:density=1/8,scaled={scaled}"), normal(NUMEL)
    sent = exact.open(exact.encode(x, seed=5), NUMEL).values
    rounded = codec(f"randomk:density=1/8,scaled={scaled},values=fp16")
    assert same_bits(rounded.open(rounded.encode(x, seed=5), NUMEL).values, half(rounded, sent))
    assert rounded.variance(NUMEL) is None and not rounded.linear


def test_a_frame_has_values_but_no_positions():
    for numel, k in [(100, 1), (7850, 79), (100_000, 1000)]:
        sizes = [
            len(codec(f"randomk:density=1%{values}").encode(normal(numel)))
            for values in ("", ",values=fp16")
        ]
        assert all(0 < size - width * k <= 26 for size, width in zip(sizes, (4, 2)))


@for_each(
    "spec",
    [
        "randomk:density=1/10",
        "randomk:density=1/10,values=fp16,scaled=true",
        "randomk:density=1/10@layer",
    ],
)
def test_all_frames_have_the_declared_largest_size(spec):
    c = codec(spec)
    for numel in (0, 1, 7, NUMEL, 20_000):
        shorter = longest_frame(c, layout_of(numel)) - len(
            c.encode(vectors(numel)["normal"], layout=layout_of(numel))
        )
        assert (
            0 <= shorter <= 2 * sum(e.numel == 0 for e in layout_of(numel))
        )  # empty sections have only their count


def test_seeds_draw_different_coordinates_with_equal_frequency():
    c, x = codec("randomk:density=1/10"), torch.ones(200)
    seen = sum(c.decode(c.encode(x, seed=seed), numel=200) for seed in range(400))
    assert abs(seen - 40).max() < 5 * 36**0.5
    assert c.encode(x, seed=3) == c.encode(x, seed=3 + 2**64)


@pytest.mark.parametrize(
    "spec", ["randomk:density=1/5,scaled=true", "randomk:density=1/5,scaled=true,by=magnitude"]
)
def test_the_mean_of_scaled_values_over_seeds_is_the_update(spec):
    x = torch.tensor([3.0, -2.0, 0.0, 1.0, -0.5, 0.25, 1e-3, 0.0, 40.0, -1.0])
    sent = torch.stack([decoded(spec, x, seed) for seed in range(200)]).double()
    error = sent.std(0) / 200**0.5
    assert ((sent.mean(0) - x).abs() <= 5 * error + 0.01).all()
    omega = codec(spec).variance(10)
    assert omega == 4 and float((sent - x).square().sum(1).mean()) <= 1.2 * omega * float(
        x.square().sum()
    )


def test_declared_properties_and_memories_that_diverge():
    plain, scaled = codec("randomk:density=1/10"), codec("randomk:density=1/10,scaled=true")
    assert (plain.contraction(100), plain.variance(100)) == (0.1, None)
    assert (scaled.contraction(100), scaled.variance(100)) == (None, 9)
    assert (
        plain.linear
        and scaled.linear
        and plain.seeded
        and plain.portable
        and plain.max_count(100) == 10
    )
    assert codec("randomk:density=1/10,by=magnitude").max_count(100) == 100
    for spec in (
        "randomk:scaled=true",
        "randomk:scaled=true,by=magnitude",
        "randomk:scaled=true@layer",
    ):
        with pytest.raises(
            ConfigError, match="--memory residual diverges with randomk:.*scaled=true"
        ):
            memory("residual", codec(spec), 100, layout_of(100))


@for_each("density", ["1", "35%", "1/10", "1/400"])
def test_the_variance_of_layers_allows_for_the_worst_rounding(density):
    """In the worst case, k is rounded up for the whole vector, but down for the only tensor that is not zero."""
    c = LayerWise(codec(f"randomk:density={density},scaled=true"))
    worst = 0.0
    for numel in range(1, 1500):
        worst = max(worst, c.inner.variance(numel))  # of a tensor in a vector of `numel` elements
        assert worst <= c.variance(numel) + 1e-9


def test_error_feedback_sends_every_coordinate():
    keeper, arrived, x = (
        memory("residual", codec("randomk:density=1/10"), 50),
        torch.zeros(50),
        torch.linspace(1, 2, 50),
    )
    for seed in range(400):
        keeper.codec.accumulate(keeper.propose(x, seed=seed), arrived)
        keeper.commit()
    assert (
        torch.allclose(arrived + keeper.residual, 400 * x, rtol=1e-4)
        and float((arrived / 400 / x - 1).abs().max()) < 0.2
    )


# Sums of frames with one seed.


def test_a_merged_frame_decodes_to_the_sum():
    c, layout = codec("randomk:density=1/8,scaled=true@layer"), layout_of(NUMEL)
    frames = [c.encode(normal(NUMEL, seed=i), seed=2**63 + 9, layout=layout) for i in range(5)]
    total = c.decode(c.merge(frames), numel=NUMEL, layout=layout)
    assert same_bits(
        total, np.sum([c.decode(f, numel=NUMEL, layout=layout).numpy() for f in frames], axis=0)
    )


def test_frames_with_different_seeds_densities_or_kinds_are_not_merged():
    c, x = codec("randomk:density=1/8"), normal(NUMEL)
    frame = c.encode(x, seed=3)
    for other in (
        "randomk:density=1/8",
        "randomk:density=1/9",
        "randomk:density=1/8,values=fp16",
        "randomk:density=1/8,by=magnitude",
    ):
        stranger = codec(other).encode(x, seed=4 if other == "randomk:density=1/8" else 3)
        with pytest.raises(FrameError):
            c.merge([frame, stranger])
        with pytest.raises(FrameError):
            c.merge([stranger, frame])
    for other in ("randomk:values=fp16", "randomk:by=magnitude"):
        with pytest.raises(ConfigError, match="cannot be merged"):
            codec(other).merge([frame])


@given(st.binary(max_size=3), st.integers(5, 60), st.integers(0, 4))
def test_changed_frames_merge_to_finite_numbers_or_are_refused(new, at, drop_small):
    c, x = codec("randomk:density=1/8"), torch.ones(64)
    frame = c.encode(x, seed=3)
    changed = reseal(frame[:at] + new + frame[at + drop_small :], 64)
    for frames in ([frame, changed], [changed, changed], [changed]):
        try:
            total = c.decode(c.merge(frames), numel=64)
        except FrameError:
            continue
        assert total.isfinite().all()


# Coordinates drawn by magnitude.


def shares(x: torch.Tensor, k: int) -> np.ndarray:
    """Return the probabilities min(1, |x_i|/m) whose sum is k. Bisection finds the threshold m."""
    magnitudes = abs(x.double().numpy())
    if (magnitudes > 0).sum() <= k:
        return (magnitudes > 0).astype(float)
    low, high = 0.0, float(magnitudes.sum())
    for _ in range(400):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if np.minimum(1, magnitudes / middle).sum() > k else (low, middle)
        )
    return np.minimum(1, magnitudes / high)


@pytest.mark.parametrize("numel", [1, 7, NUMEL])
def test_the_probabilities_add_up_to_k_and_are_optimal(numel):
    for k in {1, 2, numel // 10, numel // 2, numel} & set(range(1, numel + 1)):
        for name, x in vectors(numel).items():
            m = drop_threshold(x, k)
            assert m > 0 and np.float32(m) == m, (k, name)
            found = np.minimum(1, abs(x.double().numpy()) / m)
            if m < LARGEST and name != "denormal":  # if m is cut off, more are kept
                assert found == pytest.approx(shares(x, k), rel=1e-5, abs=1e-9), (k, name)
            assert found.sum() >= min(k, int(x.count_nonzero())) * (1 - 1e-12), (k, name)


def test_the_drop_threshold_is_the_same_if_computed_in_pieces(monkeypatch):
    x = normal(50_000) ** 7
    whole = drop_threshold(x, 500)
    monkeypatch.setattr("fedcomp.codecs.randomk.CLIP_ELEMENTS", 777)
    assert drop_threshold(x, 500) == pytest.approx(whole, rel=1e-7)


@for_each("scaled", [False, True])
def test_coordinates_above_the_threshold_are_always_kept(scaled):
    c = codec(f"randomk:density=1/10,by=magnitude,scaled={str(scaled).lower()}")
    for name, x in vectors(NUMEL).items():
        m, update = drop_threshold(x, 40), c.open(c.encode(x, seed=5), NUMEL)
        at, v = update.positions, x.numpy()[update.positions]
        assert set(np.flatnonzero(abs(x.numpy()) >= m)) <= set(at) and v.all(), name
        assert same_bits(
            update.values, np.where(abs(v) >= m, v, np.copysign(np.float32(m), v)) if scaled else v
        ), name


def test_the_mean_number_of_kept_coordinates_is_k():
    c, x = codec("randomk:density=1/10,by=magnitude"), normal(NUMEL) ** 3
    drop_small = np.array([c.open(c.encode(x, seed=seed), NUMEL).nonzeros for seed in range(100)])
    assert (
        abs(drop_small.mean() - 40) < 5 * drop_small.std() / 100**0.5 and drop_small.std() < 40**0.5
    )


def test_drawing_by_magnitude_has_less_variance_than_drawing_uniformly():
    x = normal(NUMEL) ** 3
    lost = {
        by: np.mean(
            [
                float(
                    (decoded(f"randomk:density=1/10,scaled=true,by={by}", x, seed) - x)
                    .square()
                    .sum()
                )
                for seed in range(50)
            ]
        )
        for by in ("uniform", "magnitude")
    }
    assert lost["magnitude"] < lost["uniform"] / 3


def test_a_value_with_the_common_magnitude_takes_two_bits_and_its_position():
    x = normal(100_000)
    frame = codec("randomk:density=1%,by=magnitude,scaled=true").encode(x)
    _, ((_, section),) = unseal(frame, codec("randomk").id, 100_000, None, True)
    assert 8 * len(frame) / section.count < 2 + 8.3 + 0.5


# Frames that no encoder makes.


def changed(spec: str, numel: int, offset: int, new: bytes) -> bytes:
    """Return a frame with other bytes at `offset` of its body, and with a correct checksum."""
    frame = codec(spec).encode(normal(numel), seed=3)
    start = SECTIONS + 8 + 1 + offset  # after the seed and a count below 128
    return reseal(frame[:start] + new + frame[start + len(new) :], numel)


@for_each(
    "offset, new",
    [
        (0, b"\xbf"),
        (0, b"\xff"),
        (0, b"\x3e"),
        (0, b"\x00"),  # the form: values by magnitude, or a Rice code
        (1, b"\x00"),
        (1, b"\x07"),
        (1, b"\x09"),
        (1, b"\x88"),  # the number of values
        (2, np.array(np.nan, "<f4").tobytes()),
        (2, np.array(-np.inf, "<f4").tobytes()),
    ],
)
def test_invalid_sections_of_drawn_values_are_refused(offset, new):
    assert (
        codec("randomk")
        .decode(changed("randomk:density=1/8", 64, 0, b"\x3f"), numel=64)
        .isfinite()
        .all()
    )
    with pytest.raises(FrameError):
        codec("randomk").decode(changed("randomk:density=1/8", 64, offset, new), numel=64)
    with pytest.raises(FrameError):
        codec("randomk").merge([changed("randomk:density=1/8", 64, offset, new)])


@for_each("m", [0.0, -1.0, np.nan, np.inf])
def test_a_common_magnitude_must_be_positive_and_finite(m):
    with pytest.raises(FrameError, match="magnitude"):
        codec("randomk").decode(
            changed(
                "randomk:density=1/8,by=magnitude,scaled=true", 64, 1, np.array(m, "<f4").tobytes()
            ),
            numel=64,
        )


def test_at_least_one_value_must_have_the_common_magnitude():
    spec = "randomk:density=1/8,by=magnitude,scaled=true"
    frame = bytearray(codec(spec).encode(normal(NUMEL), seed=3))
    count, start = frame[SECTIONS + 8], SECTIONS + 8 + 2 + 4
    frame[start : start + -(-count // 8)] = np.packbits(np.ones(count, bool)).tobytes()
    with pytest.raises(FrameError):
        codec("randomk").decode(reseal(bytes(frame), NUMEL), numel=NUMEL)


def test_other_codecs_refuse_sections_of_drawn_values():
    x = torch.ones(64)
    frame = codec("topk:density=1").encode(x)
    start = SECTIONS + 1
    with pytest.raises(FrameError):
        codec("topk").decode(reseal(frame[:start] + b"\x3f\x40" + frame[start + 1 :], 64), numel=64)


# A schedule.


def test_a_budget_needs_drawn_coordinates():
    assert (
        Schedule(StrategyConfig(budget_bytes=5000), codec("randomk"), Layout.flat(1000))
        .for_clients(1, [0], {})[0]
        .density
        > 0
    )
    with pytest.raises(ConfigError, match="--budget does not work with --uplink"):
        Schedule(
            StrategyConfig(budget_bytes=5000), codec("randomk:by=magnitude"), Layout.flat(1000)
        )
