"""Properties of every codec, in every variant and on vectors that are hard to encode."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import (
    DENSITIES,
    LAYERED,
    ONE_EACH,
    ORACLES,
    PRODUCTS,
    SPECS,
    WHOLE,
    expected,
    layout_of,
    normal,
    same_bits,
    vectors,
    with_large_chunks,
)
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, NonFiniteError, available_codecs, codec
from fedcomp.codecs import Context, LayerWise, add_all, longest_frame
from fedcomp.codecs.frame import unseal, varint
from fedcomp.errors import ConfigError

MILLION = 10**6
every_spec = for_each("spec", SPECS)
each_codec = for_each("spec", ONE_EACH)


def difficult_vectors(*sizes: int) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yield (size, name, vector) for vectors that are hard to encode."""
    for numel in sizes:
        for name, x in list(vectors(numel).items())[: None if numel else 1]:
            yield numel, name, x


@cache
def million_coordinates() -> torch.Tensor:
    """Return a million coordinates with thousands of ties and zeros."""
    x = torch.round(2000 * normal(MILLION))
    x[::7] = 0
    return x


# The decoded vectors.


@for_each("spec", [s for s in SPECS if codec(s).name in ORACLES])
def test_a_frame_decodes_to_the_result_of_the_paper(spec):
    c = codec(spec)
    for numel, name, x in difficult_vectors(0, 1, 7, 101):
        layout = layout_of(numel)
        y = c.decode(c.encode(x, layout=layout), numel=numel, layout=layout)
        assert y.device.type == "cpu" and same_bits(y, expected(c, x, layout)), (numel, name)


@pytest.mark.parametrize(
    "spec",
    [with_large_chunks(s) for s in ONE_EACH if codec(s).name in ORACLES and "2bit" not in s]
    + ["topk:density=1,values=fp16"],
)
def test_a_frame_of_a_million_coordinates_decodes_to_the_result_of_the_paper(spec):
    c, layout, x = codec(spec), layout_of(MILLION), million_coordinates()
    y = c.decode(c.encode(x, layout=layout), numel=MILLION, layout=layout)
    assert same_bits(y, expected(c, x, layout))


@for_each("spec", [s for s in WHOLE if codec(s).name in ("topk", "stc", "sbc")])
def test_at_most_k_coordinates_are_sent_and_no_zeros(spec):
    c = codec(spec)
    for numel, name, x in difficult_vectors(401):
        k = max(1, int(np.floor(c.density * numel + 0.5)))
        sent = c.open(c.encode(x), numel).positions
        assert len(sent) <= k and x[sent].all(), (numel, name)
        assert c.name == "sbc" or len(sent) == min(k, x.count_nonzero()), (numel, name)


@for_each(
    "density, numel, k",
    [
        ("1/400", 199, 1),
        ("1/400", 599, 1),
        ("1/400", 600, 2),
        ("1/400", 999, 2),
        ("1/400", 1000, 3),
        ("1%", 149, 1),
        ("1%", 150, 2),
        ("1e-9", 1000, 1),
        ("35%", 10, 4),
        ("1", 1000, 1000),
        ("99.99%", 1000, 1000),
        ("1/2", 1, 1),
        ("1/2", 3, 2),
    ],
)
def test_k_is_the_density_rounded_half_up_and_at_least_one(density, numel, k):
    for name in ("topk", "stc", "sbc"):
        c = codec(f"{name}:density={density}")
        assert len(c.open(c.encode(torch.ones(numel)), numel).positions) == k


def test_the_side_with_the_larger_mean_is_sent():
    c = codec("sbc:density=2/10")
    x = torch.tensor([3.0, -4.0, 0.5, -1.5, 1.0, 0.0, -0.5, 2.0, 0.25, -0.125])
    # The means are (3 + 2)/2 and (4 + 1.5)/2.
    assert c.decode(c.encode(x), numel=10).tolist() == [0, -2.75, 0, -2.75, 0, 0, 0, 0, 0, 0]
    x[3] = -1.0  # Both means are now equal, and the positive side is sent.
    assert c.decode(c.encode(x), numel=10).tolist() == [2.5, 0, 0, 0, 0, 0, 0, 2.5, 0, 0]


@pytest.mark.slow
def test_a_frame_decodes_with_any_options_of_its_codec():
    layout, x, groups = layout_of(100), vectors(100)["normal"], defaultdict(list)
    for spec in SPECS:
        groups[codec(spec).name, codec(spec).chunk].append(spec)
    for specs in groups.values():
        for spec, following in zip(specs, specs[1:] + specs[:1]):
            frame = codec(spec).encode(x, layout=layout)
            y = codec(spec).decode(frame, numel=100, layout=layout)
            for other in {specs[0], specs[-1], following}:
                assert same_bits(codec(other).decode(frame, numel=100, layout=layout), y), (
                    spec,
                    other,
                )


# Encoding.


@each_codec
def test_encoding_is_pure(spec):
    c = codec(spec)
    for numel, name, x in difficult_vectors(401):
        layout, before = layout_of(numel), x.clone()
        frame = c.encode(x, seed=7, layout=layout)
        assert isinstance(frame, bytes) and frame == codec(spec).encode(
            x.clone(), seed=7, layout=layout
        ), name
        assert same_bits(x, before), name


@each_codec
def test_half_precision_is_read_as_its_float32_values(spec):
    c, layout = codec(spec), layout_of(401)
    for x in (normal(401).to(torch.float16), normal(401).to(torch.bfloat16)):
        frame = c.encode(x.float(), layout=layout)
        assert c.encode(x, layout=layout) == frame
        assert c.encode_batch(x[None], [0], layout=layout) == [frame]


@each_codec
def test_strided_vectors_and_vectors_with_a_gradient_are_encoded_like_copies(spec):
    c, layout = codec(spec), layout_of(401)
    grid = normal(401, 3)
    frame = c.encode(grid[:, 1].clone(), layout=layout)
    assert c.encode(grid[:, 1], layout=layout) == frame
    assert c.encode(grid[:, 1].clone().requires_grad_(), layout=layout) == frame
    assert c.encode_batch(grid.T, [0, 0, 0], layout=layout)[1] == frame


@for_each("spec", ["identity", "stc", "stc@layer"])
def test_only_vectors_of_floats_are_encoded(spec):
    c, layout = codec(spec), layout_of(40)
    for x in (
        torch.ones(()),
        torch.ones(4, 10),
        torch.ones(40, dtype=torch.int64),
        torch.full((40,), 1e300, dtype=torch.float64),
    ):
        with pytest.raises(ConfigError, match="a codec encodes"):
            c.encode(x, layout=layout)
        with pytest.raises(ConfigError, match="a codec encodes|a stack"):
            c.encode_batch(x[None], [0], layout=layout)


@for_each("spec", ["identity", "stc", "stc@layer"])
def test_a_layout_of_another_model_is_refused(spec):
    c, layout = codec(spec), layout_of(41)
    for encode in (
        lambda: c.encode(torch.ones(40), layout=layout),
        lambda: c.encode_batch(torch.ones(2, 40), [0, 0], layout=layout),
        lambda: c.encode_batch([torch.ones(40)], [0], onto=[torch.ones(40)], layout=layout),
    ):
        with pytest.raises(ConfigError, match="layout has 41 elements, but the vector has 40"):
            encode()


@for_each("spec", LAYERED[:3])
def test_a_layerwise_codec_needs_a_layout(spec):
    c, x = codec(spec), torch.ones(4)
    for encode in (
        lambda: c.encode(x),
        lambda: c.encode_batch(x[None], [0]),
    ):
        with pytest.raises(ConfigError, match="leave out @layer"):
            encode()


@each_codec
def test_errors_about_nan_and_infinity_name_the_tensor(spec):
    c, layout, x, total = codec(spec), layout_of(401), normal(401), normal(401, seed=1)
    before = total.clone()
    for value in (float("nan"), float("inf"), -float("inf")):
        x[[266, 399]] = value  # in the tensors b and rest
        with pytest.raises(NonFiniteError) as encoded:
            c.encode(x, layout=layout)
        (added,) = c.encode_batch([x], [0], onto=[total], layout=layout)
        (batched,) = c.encode_batch(x[None], [0], layout=layout)
        assert isinstance(batched, NonFiniteError) and same_bits(total, before)
        for error in (encoded.value, added, batched):
            assert (
                str(error)
                == f"the update is {value} in tensor 'b', element 0; lower the learning rate (--lr) or clip gradients (--clip)"
            )
            assert error.position == 266


@for_each("spec", available_codecs())
def test_without_a_layout_the_position_is_named(spec):
    x = normal(40)
    x[39] = float("nan")
    with pytest.raises(NonFiniteError, match="^the update is nan in element 39; "):
        codec(spec).encode(x)


@every_spec
def test_no_frame_exceeds_the_declared_size(spec):
    c = codec(spec)
    for numel, name, x in difficult_vectors(*((1, 50) if spec in ONE_EACH else (50,))):
        layout = layout_of(numel)
        longest = longest_frame(c, layout)
        assert longest is None or len(c.encode(x, layout=layout)) <= longest, (numel, name)


@every_spec
def test_a_batch_is_encoded_like_its_rows_with_errors_for_invalid_rows(spec):
    c, layout = codec(spec), layout_of(101)
    for m in (1, 6):
        x, seeds = normal(m, 101), list(range(10, 10 + m))
        x[0] = torch.round(x[0])
        if m > 1:
            x[2, 5], x[4, 100], x[5] = float("inf"), float("nan"), 0
        before = x.clone()
        frames = c.encode_batch(x, seeds, layout=layout)
        assert (
            same_bits(x, before)
            and [i for i, f in enumerate(frames) if isinstance(f, NonFiniteError)]
            == [2, 4][: m - 1]
        )
        for row, seed, frame in zip(x, seeds, frames, strict=True):
            if isinstance(frame, bytes):
                assert frame == c.encode(row, seed=seed, layout=layout)
            else:
                with pytest.raises(NonFiniteError) as caught:
                    c.encode(row, seed=seed, layout=layout)
                assert str(caught.value) == str(frame)


@each_codec
def test_a_batch_may_be_empty(spec):
    c = codec(spec)
    for m, n in [(0, 40), (2, 0), (0, 0), (2, 1)]:
        layout = layout_of(n)
        assert (
            c.encode_batch(torch.zeros(m, n), [0] * m, layout=layout)
            == [c.encode(torch.zeros(n), layout=layout)] * m
        )


@each_codec
def test_all_vectors_of_a_batch_may_be_invalid(spec):
    frames = codec(spec).encode_batch(
        torch.full((2, 40), float("nan")), [0, 0], layout=layout_of(40)
    )
    assert [type(f) for f in frames] == [NonFiniteError] * 2


def test_a_batch_has_a_seed_for_each_row():
    for x, seeds in [
        (torch.ones(2, 4), [0]),
        (torch.ones(4), [0, 0, 0, 0]),
        (torch.ones(0, 4), [0]),
    ]:
        with pytest.raises(ConfigError, match="m seeds"):
            codec("stc").encode_batch(x, seeds)


@each_codec
def test_encoding_onto_a_total_encodes_the_sum(spec):
    c = codec(spec)
    half = normal(401).to(torch.bfloat16)
    for numel, name, update in (*difficult_vectors(0, 401), (401, "bfloat16", half)):
        layout, total, before = layout_of(numel), 0.3 * normal(numel, seed=1), update.clone()
        added = total + update
        (frame,) = c.encode_batch([update], [3], onto=[total], layout=layout)
        assert frame == c.encode(added, seed=3, layout=layout), (numel, name)
        assert same_bits(total, added) and torch.equal(update, before), (numel, name)


@each_codec
def test_a_sum_that_overflows_does_not_change_the_total(spec):
    c = codec(spec)
    for numel in (40, 200_000):
        total, x = normal(numel), normal(numel, seed=1)
        total[[33, 35]], x[[33, 35]] = 3e38, 3e38
        before = total.clone()
        layout = Layout.from_shapes({"w": (2, 15), "b": (numel - 30,)})
        (error,) = c.encode_batch([x], [0], onto=[total], layout=layout)
        assert str(error).startswith(
            "the sum of residual and update is inf in tensor 'b', element 3; "
        )
        assert error.position == 33 and same_bits(total, before)


@for_each("spec", ["identity", "stc", "stc@layer"])
def test_a_total_must_be_float32_with_the_shape_of_the_vector(spec):
    for total in (torch.ones(41), torch.ones(1), torch.ones(40, dtype=torch.float64)):
        before = total.clone()
        with pytest.raises(ConfigError, match="give float32 tensors"):
            codec(spec).encode_batch([torch.ones(40)], [0], onto=[total], layout=layout_of(40))
        assert torch.equal(total, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a CPU with a CUDA device")
def test_portable_codecs_give_the_same_bytes_on_every_device():
    for c, numel in itertools.product(
        [codec(spec) for spec in SPECS if codec(spec).portable], [401, MILLION]
    ):
        layout, x = layout_of(numel), torch.round(1000 * normal(3, numel))
        frames = [c.encode(row, seed=1, layout=layout) for row in x]
        assert [c.encode(row, seed=1, layout=layout) for row in x.cuda()] == frames
        assert c.encode_batch(x.cuda(), [1, 1, 1], layout=layout) == frames
        onto = [x[:1].cuda(), x[:1].clone()]
        made = [c.encode_batch(x[1:2].to(e.device), [1], onto=e, layout=layout) for e in onto]
        assert made[0] == made[1]
        y = c.decode(frames[0], numel=numel, device="cuda", layout=layout)
        assert y.is_cuda and same_bits(y.cpu(), c.decode(frames[0], numel=numel, layout=layout))


# Decoding.


@each_codec
def test_accumulate_adds_the_weighted_vector(spec):
    for numel in (0, 401, 200_000):
        c = codec(with_large_chunks(spec) if numel > 401 else spec)
        layout, before = layout_of(numel), normal(numel, seed=1)
        frame = c.encode(normal(numel), layout=layout)
        y = c.decode(frame, numel=numel, layout=layout)
        for weight in (1.0, -1.0, 0.1, 0) if numel == 401 else (0.1,):
            into = before.clone()
            c.accumulate(frame, into, weight, layout=layout)
            assert torch.equal(into, before + np.float32(weight) * y)


@each_codec
def test_decoding_returns_a_new_vector(spec):
    c, layout, x = codec(spec), layout_of(401), normal(401)
    frame = c.encode(x, layout=layout)
    first, kept = c.decode(frame, numel=401, layout=layout), bytes(bytearray(frame))
    y = first.clone()
    first.fill_(9.0)
    assert frame == kept and same_bits(c.decode(frame, numel=401, layout=layout), y)
    assert same_bits(c.decode(bytearray(frame), numel=401, device="cpu", layout=layout), y)


@each_codec
def test_blocks_and_positions_of_an_update_match_the_decoded_vector(spec):
    c, layout = codec(spec), layout_of(101)
    for x in (normal(101), torch.zeros(101)):
        frame = c.encode(x, layout=layout)
        y, update = c.decode(frame, numel=101, layout=layout).numpy(), c.open(frame, 101, layout)
        assert update.numel == 101
        for edges in (
            [0, 101],
            [0, 33, 34, 66, 68, 101],
            list(range(0, 102)),
            [5, 5],
            [101, 101],
        ):
            for start, stop in zip(edges, edges[1:]):
                assert same_bits(np.ascontiguousarray(update.block(start, stop)), y[start:stop])
        if update.positions is not None:
            assert update.positions.dtype == np.int64 and (np.diff(update.positions) > 0).all()
            assert set(np.flatnonzero(y)) <= set(update.positions)


@for_each("spec", [*available_codecs(), PRODUCTS[0]])
def test_a_layerwise_frame_has_the_section_of_each_tensor(spec):
    c, layout, x = codec(spec), layout_of(401), normal(401)
    layerwise = LayerWise(c)
    seed, sections = unseal(
        layerwise.encode(x, seed=20, layout=layout), c.id, 401, layout, c.seeded
    )
    assert seed == 20 * c.seeded and [entry for entry, _ in sections] == list(layout)
    for i, (entry, section) in enumerate(sections):
        alone = c.encode(x[entry.span], seed=20 + i, layout=entry.as_layout())
        ((_, part),) = unseal(alone, c.id, entry.numel, None, c.seeded)[1]
        assert (section.count, bytes(section.body)) == (part.count, bytes(part.body))


# Declared properties of codecs.


LINEAR = [s for s in SPECS if codec(s).linear]


@for_each("spec", LINEAR)
def test_frames_of_linear_codecs_can_be_merged(spec):
    c = codec(spec)
    for numel in (0, 1, 101):
        layout = layout_of(numel)
        xs = [normal(numel, seed=i) for i in range(3)]
        # Frames of `terngrad` can only be added if they have the same scale.
        scales = np.full(max(len(layout), numel), 3, "<f4").tobytes()
        shared = Context(announced={"scale": scales})
        frames = [c.encode(x, seed=6, layout=layout, context=shared) for x in xs]
        merged = c.merge(frames)
        y, total = c.decode(merged, numel=numel, layout=layout), torch.zeros(numel)
        add_all([c.open(frame, numel, layout) for frame in frames], [1.0] * 3, total)
        assert torch.allclose(y, total, atol=1e-6)  # up to the rounding of sums that cancel
        assert c.shares_seed or torch.allclose(
            total, sum(c.decode(frame, numel=numel, layout=layout) for frame in frames)
        )
        assert (
            c.merge([merged])
            == merged
            == c.merge([c.encode(x.clone(), seed=6, layout=layout, context=shared) for x in xs])
        )


@for_each("spec", LINEAR)
def test_incompatible_frames_are_not_merged(spec):
    c, layout = codec(spec), layout_of(40)
    frame = c.encode(normal(40), layout=layout)
    changed = bytearray(frame)
    changed[-1] ^= 1
    other_scope = (c.inner if spec.endswith("@layer") else LayerWise(c)).encode(
        normal(40), layout=layout
    )
    other_size = c.encode(normal(41), layout=layout_of(41))
    other_codec = codec("stc").encode(normal(40))
    endless = varint(10) + varint(2**63 - 1)  # a section with a huge claimed length
    for other in (
        b"",
        frame[:-1],
        frame + b"\0",
        bytes(changed),
        other_scope,
        other_size,
        other_codec,
        frame[:9],
        frame[:9] + 5 * endless,
    ):
        for frames in ([frame, other], [other, frame], [other]):
            if frames != [other_scope] and frames != [other_size]:
                with pytest.raises(FrameError):
                    c.merge(frames)
    with pytest.raises(ConfigError, match="at least one frame"):
        c.merge([])


@for_each("spec", LINEAR)
def test_a_merged_sum_that_overflows_is_rejected(spec):
    c, layout = codec(spec), layout_of(40)
    with pytest.raises(FrameError, match="not finite|exceeds the range of float32"):
        c.merge([c.encode(torch.full((40,), 3e38), layout=layout)] * 2)


@for_each("spec", [s for s in ONE_EACH if not codec(s).linear])
def test_frames_of_other_codecs_cannot_be_merged(spec):
    c, layout = codec(spec), layout_of(40)
    with pytest.raises(ConfigError, match="cannot be merged; use a linear codec"):
        c.merge([c.encode(normal(40), layout=layout)] * 2)


DRAWS = 20  # number of seeds of a random codec


def losses(c, x, layout, seeds):
    """Return x − C(x) in float64, one row for each seed."""
    frames = c.encode_batch(x.expand(seeds, -1), range(seeds), layout=layout)
    return torch.stack(
        [x.double() - update.dense() for update in c.open_batch(frames, x.numel(), layout)]
    )


def assert_contracts(c, x, layout):
    square = float(x.double().square().sum())
    bound = (1 + 1e-7 - c.contraction(x.numel())) * square
    lost = losses(c, x, layout, 2).square().sum(1)
    if lost[0] != lost[1] or lost[0] > bound:  # a random codec, whose mean over all seeds contracts
        lost = losses(c, x, layout, DRAWS).square().sum(1)
        bound += 0.05 * square  # a rare large loss may not occur with these seeds
    assert float(lost.mean() - lost.std() / 2) <= bound


@pytest.mark.parametrize("spec", [s for s in ONE_EACH if codec(s).contraction(9) is not None])
def test_the_declared_contraction_holds(spec):
    c = codec(spec)
    for numel, _, x in difficult_vectors(7, 401):
        assert 0 <= c.contraction(numel) <= 1
        assert_contracts(c, x, layout_of(numel))


@given(
    spec=st.sampled_from([s for s in SPECS if codec(s).contraction(9) is not None]),
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=50
    ),
)
def test_the_declared_contraction_holds_for_any_vector(spec, values):
    assert_contracts(codec(spec), torch.tensor(values), layout_of(len(values)))


@for_each("density", DENSITIES)
@for_each("name", ["topk", "stc", "sbc"])
def test_the_contraction_of_layers_allows_for_the_worst_rounding(name, density):
    """In the worst case, k is rounded up for the whole vector, but down for the only tensor that is not zero."""
    c = codec(f"{name}:density={density}@layer")
    numel = round(1.5 / c.inner.density)
    for filled in {max(1, numel - 1), numel}:
        x = torch.zeros(numel)
        x[:filled] = 1
        assert_contracts(c, x, Layout.from_shapes({"w": (filled,), "b": (numel - filled,)}))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [s for s in ONE_EACH if codec(s).variance(9) is not None])
def test_the_declared_variance_holds(spec):
    c, layout = codec(spec), layout_of(40)
    assert c.variance(40) >= 0
    for x in vectors(40).values():
        if c.name.startswith("randomk") and x.abs().max() > 1e37:
            continue  # n/k times such a value exceeds float32
        lost, bound = losses(c, x, layout, DRAWS), c.variance(40) * float(x.double().square().sum())
        squares, spread = lost.square().sum(1), lost.var(0)
        assert float(squares.mean() - squares.std() / 2) <= (1 + 1e-6) * bound
        # about five standard deviations, or more if a few coordinates dominate
        noise = float(spread.sum() + 7 * spread.square().sum().sqrt())
        assert float(lost.mean(0).square().sum()) <= max(4 * bound, noise) / len(lost)


def test_codecs_that_select_coordinates_declare_no_variance():
    assert [codec(name).variance(9) for name in ("fp16", "topk", "stc", "sbc")] == [None] * 4
