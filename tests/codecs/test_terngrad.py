"""The codec `terngrad`: its rounding, clipping, announced scales, and the sum of frames."""

import math

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, vectors

from fedcomp import Layout, codec
from fedcomp.codecs import Context, frame
from fedcomp.codecs.levels import MAX_MULTIPLE
from fedcomp.errors import FrameError, ProtocolError, SpecError
from fedcomp.kernels import philox


def announced(*scales: float) -> Context:
    return Context(announced={"scale": np.array(scales, "<f4").tobytes()})


def decoded(spec: str, x: torch.Tensor, seed: int) -> np.ndarray:
    c = codec(spec)
    return c.decode(c.encode(x, seed=seed), numel=x.numel()).double().numpy()


def test_a_frame_decodes_to_the_result_of_the_paper():
    x = normal(1001)
    v, u = x.double().numpy(), philox.words(7, 1001) / 2.0**32
    for clip in (0, 1, 2.5):
        bound = clip * math.sqrt(np.square(v).mean()) if clip else math.inf
        clipped = v.clip(-bound, bound)
        s = np.abs(clipped).max()
        expected = s * np.sign(v) * (u + np.abs(clipped) / s >= 1)
        assert np.abs(decoded(f"terngrad:clip={clip}", x, 7) - expected).max() <= 1e-6 * s


@pytest.mark.parametrize("clip", [0, 2.5])
def test_rounding_is_unbiased_after_clipping(clip):
    x, seeds = normal(401), 150
    drawn = np.stack([decoded(f"terngrad:clip={clip}", x, seed) for seed in range(seeds)])
    s = codec(f"terngrad:clip={clip}").scale(x)
    v = x.double().numpy().clip(-s, s)
    variance = np.abs(v) * (s - np.abs(v))
    off, error = np.abs(drawn.mean(0) - v), np.sqrt(variance / seeds)
    assert (off <= 5 * error + 1e-9).all() and abs(
        np.square(off[error > 0] / error[error > 0]).sum() - 401
    ) < 6 * math.sqrt(2 * 401)


def test_the_variance_without_clipping_is_declared_and_attained():
    """The worst case is one coordinate of 1 among n − 1 coordinates of 1/(1 + √n)."""
    c, n = codec("terngrad:clip=0"), 100
    x = torch.full((n,), 1 / (1 + math.sqrt(n)))
    x[0] = 1
    lost = np.mean(
        [
            np.square(decoded("terngrad:clip=0", x, seed) - x.double().numpy()).sum()
            for seed in range(120)
        ]
    )
    assert lost == pytest.approx(c.variance(n) * float(x.double().square().sum()), rel=0.1)
    assert (
        codec("terngrad").variance(n) is None
        and codec("terngrad").contraction(n) is c.contraction(n) is None
    )


def test_equal_values_are_not_clipped():
    x = torch.full((1000,), -3.0)
    assert decoded("terngrad", x, 0).tolist() == [-3.0] * 1000


def test_layer_by_layer_each_tensor_has_its_scale():
    layout = Layout.from_shapes({"a": (300,), "b": (200,)})
    x = torch.cat([normal(300), 100 * normal(200)])
    y = codec("terngrad@layer").decode(
        codec("terngrad@layer").encode(x, layout=layout), numel=500, layout=layout
    )
    for part, v in ((slice(0, 300), x[:300]), (slice(300, 500), x[300:])):
        assert set(y[part].abs().tolist()) == {0.0, codec("terngrad").scale(v)}


@for_each("kind", vectors(7))
def test_any_vector_decodes_to_three_values(kind):
    for numel in (1, 7, 401):
        x = vectors(numel)[kind]
        y = decoded("terngrad", x, 1)
        assert (
            set(np.abs(y)) <= {0.0, codec("terngrad").scale(x)}
            and (np.sign(y) * np.sign(x.numpy()) >= 0).all()
        )


def test_a_negative_clip_is_refused():
    with pytest.raises(SpecError, match="clip is -1; give at least 0"):
        codec("terngrad:clip=-1")


# Scales that the server announces.


def test_an_announced_scale_is_used_and_larger_values_are_clipped():
    c, x = codec("terngrad"), torch.tensor([0.5, -0.25, 2.0, -8.0] * 50)
    drawn = np.stack(
        [
            c.decode(c.encode(x, seed=seed, context=announced(1.0)), numel=200).numpy()
            for seed in range(200)
        ]
    )
    assert set(np.abs(drawn).ravel()) == {0.0, 1.0}
    assert (np.abs(drawn.mean(0) - x.numpy().clip(-1, 1)) <= 5 * 0.5 / math.sqrt(200)).all()
    assert (drawn[:, 2::4] == 1).all() and (drawn[:, 3::4] == -1).all()


def test_clipping_also_applies_with_an_announced_scale():
    c, x = codec("terngrad:clip=1"), normal(400)
    own, frames = (
        c.scale(x),
        [c.encode(x, seed=seed, context=announced(10.0)) for seed in range(100)],
    )
    mean = np.mean([c.decode(frame, numel=400).numpy() for frame in frames], axis=0)
    assert np.abs(mean - x.numpy().clip(-own, own)).max() < 5 * math.sqrt(own * 10 / 100)
    assert own == pytest.approx(float(x.square().mean().sqrt()))


def test_each_section_has_its_announced_scale_and_frames_stand_alone():
    layout = layout_of(401)
    x, c = normal(401), codec("terngrad@layer")
    y = codec("terngrad:clip=0").decode(
        c.encode(x, layout=layout, context=announced(4, 5, 6, 7)), numel=401, layout=layout
    )
    for scale, entry in zip((4, 5, 6, 7), layout, strict=True):
        assert set(y[entry.span].abs().tolist()) <= {0.0, scale} and (
            scale in y[entry.span].abs() or entry.numel < 2
        )


@for_each(
    "data",
    [
        b"",
        b"\0\0\0",
        np.array([math.nan], "<f4").tobytes(),
        np.array([math.inf], "<f4").tobytes(),
        np.array([-1], "<f4").tobytes(),
        np.array([1, 1], "<f4").tobytes()[:6],
    ],
)
def test_an_invalid_announced_scale_is_refused(data):
    with pytest.raises(ProtocolError, match="scales? that the server announced"):
        codec("terngrad").encode(normal(40), context=Context(announced={"scale": data}))


def test_announced_scales_for_too_few_sections_are_refused():
    with pytest.raises(ProtocolError, match="do not include a scale for tensor or chunk 2"):
        codec("terngrad@layer").encode(normal(40), layout=layout_of(40), context=announced(1.0))


def test_an_announced_zero_sends_nothing():
    assert (
        not codec("terngrad")
        .decode(codec("terngrad").encode(normal(40), context=announced(0.0)), numel=40)
        .any()
    )


# Sums.


@pytest.mark.parametrize("clients", [2, 130])
def test_frames_with_one_scale_are_added_as_integers(clients):
    c, x = codec("terngrad"), torch.tensor([1.0, -1.0, 0.3, 0.0])
    frames = [c.encode(x, seed=seed, context=announced(1.0)) for seed in range(clients)]
    merged = c.merge(frames)
    total = sum(c.decode(frame, numel=4) for frame in frames)
    assert c.decode(merged, numel=4).tolist() == total.tolist() and total[0] == -total[1] == clients
    assert c.merge([c.merge(frames[:1]), c.merge(frames[1:])]) == merged == c.merge(frames[::-1])


def test_frames_of_zeros_can_be_added_to_any_scale():
    c, x = codec("terngrad"), torch.ones(10)
    zeros, up, down = (c.encode(v) for v in (0 * x, 2 * x, -2 * x))
    assert c.merge([zeros, up, zeros]) == up and c.merge([up, down]) == zeros == c.merge([zeros])


def test_frames_of_different_scales_are_not_added():
    c = codec("terngrad")
    with pytest.raises(
        FrameError, match="different scales cannot be merged; use --strategy shared-scale"
    ):
        c.merge([c.encode(torch.ones(10)), c.encode(2 * torch.ones(10))])


def test_sums_that_are_too_large_are_refused():
    c = codec("terngrad")
    frame = c.encode(torch.ones(3))
    while len(frame) < 100:
        doubled = None
        try:
            doubled = c.merge([frame, frame])
        except FrameError as error:
            assert "exceeds the range of float32" in str(error)
            break
        frame = doubled
    assert c.decode(frame, numel=3).tolist() == [(MAX_MULTIPLE + 1) / 2] * 3


def test_merging_untrusted_frames_needs_memory_of_the_expected_size():
    c, numel = codec("terngrad"), 2**40
    huge = frame.seal(c.id, 0, numel, [frame.Section(numel, b"\x01\x00\x00\x80\x3f" + bytes(40))])
    with pytest.raises(FrameError, match="expected 401"):
        c.merge([huge, huge], numel=401)
