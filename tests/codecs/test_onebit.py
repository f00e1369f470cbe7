"""The codec `onebit`: the means of columns in matrices, convolutions and vectors."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, normal, reseal, same_bits, vectors
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, codec
from fedcomp.codecs import longest_frame
from fedcomp.codecs.frame import SECTIONS, varint

ONEBIT = codec("onebit")
NORMAL, LEAST = 2.0**-126, 2.0**-149
MODEL = Layout.from_shapes(
    {
        "conv": (6, 3, 2, 2),
        "bias": (6,),
        "none": (0, 4),
        "linear": (5, 24),
        "scale": (),
        "last": (1, 3),
    }
)


def through(x: torch.Tensor, layout: Layout | None = None) -> torch.Tensor:
    return ONEBIT.decode(ONEBIT.encode(x, layout=layout), numel=x.numel(), layout=layout)


def expected(x: torch.Tensor, layout: Layout) -> np.ndarray:
    """Return the result of the paper's formula, column by column, computed in float64."""
    y = x.double().numpy()
    for entry in (e for e in layout if e.numel):
        rows = entry.shape[0] if len(entry.shape) > 1 else entry.numel
        for column in y[entry.span].reshape(rows, -1).T:  # a view
            for side in (column >= 0, column < 0):
                column[side] = math.fsum(column[side]) / max(side.sum(), 1)
    return y.astype(np.float32)


@for_each("scope", ["", "@layer"])
def test_a_coordinate_is_the_mean_of_the_values_of_its_sign_in_its_column(scope):
    c = codec("onebit" + scope)
    for seed in range(5):
        x = (
            torch.round(3 * normal(MODEL.numel, seed=seed))
            if seed % 2
            else normal(MODEL.numel, seed=seed)
        )
        y = c.decode(c.encode(x, layout=MODEL), numel=x.numel(), layout=MODEL)
        np.testing.assert_array_max_ulp(y.numpy(), expected(x, MODEL), maxulp=1)


def test_hard_vectors_decode_to_the_result_of_the_paper():
    for numel in (1, 7, 400, 1001):
        # Of a vector whose means are subnormal, only the largest coordinate is sent.
        for name in vectors(numel).keys() - {"denormal", "subnormal"}:
            x, layout = vectors(numel)[name], layout_of(numel)
            np.testing.assert_array_max_ulp(
                through(x, layout).numpy(), expected(x, layout), maxulp=1
            )
            np.testing.assert_array_max_ulp(
                through(x).numpy(), expected(x, Layout.flat(numel)), maxulp=1
            )


def test_an_example_matches_the_values_computed_by_hand():
    x = torch.tensor([[1.0, -2.0, 0.0], [3.0, -4.0, -5.0]]).flatten()
    assert through(x, Layout.from_shapes({"w": (2, 3)})).tolist() == [2, -3, 0, 2, -3, -5]
    assert through(x).tolist() == [
        pytest.approx(v) for v in (4 / 3, -11 / 3, 4 / 3, 4 / 3, -11 / 3, -11 / 3)
    ]
    assert through(x, Layout.from_shapes({"w": (2, 3, 1, 1)})).tolist() == [2, -3, 0, 2, -3, -5]
    assert torch.equal(through(x, Layout.from_shapes({"w": (6, 1)})), through(x))


def test_a_frame_has_one_bit_per_coordinate_and_two_means_per_column():
    frame = ONEBIT.encode(normal(MODEL.numel), layout=MODEL)
    columns = {"conv": 12, "bias": 1, "none": 0, "linear": 24, "scale": 1, "last": 3}
    body = sum((e.numel + 7) // 8 + 8 * columns[e.name] for e in MODEL)
    assert len(frame) == SECTIONS + len(varint(MODEL.numel)) + body <= longest_frame(ONEBIT, MODEL)
    assert len(ONEBIT.encode(normal(10**6))) < 10**6 / 8 + 30


def test_large_matrices_and_vectors_decode_to_the_result_of_the_paper():
    numel = 200_000
    layout = Layout.from_shapes({"w": (400, 500)})
    x = torch.round(2 * normal(numel)) ** 3
    np.testing.assert_array_max_ulp(through(x, layout).numpy(), expected(x, layout), maxulp=1)
    np.testing.assert_array_max_ulp(through(x).numpy(), expected(x, Layout.flat(numel)), maxulp=1)


@for_each("numel", [0, 1, 400])
def test_a_vector_of_zeros_is_sent_exactly(numel):
    for layout in (None, layout_of(numel)):
        frame = ONEBIT.encode(-torch.zeros(numel), layout=layout)
        assert len(frame) == SECTIONS + 1 and same_bits(
            through(torch.zeros(numel), layout), np.zeros(numel, np.float32)
        )


SMALL = st.sampled_from([0.0, LEAST, -LEAST, 5 * LEAST, NORMAL, -NORMAL, 1.0])


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False) | SMALL, min_size=1, max_size=24
    )
)
def test_every_vector_is_contracted_in_exact_arithmetic(values):
    x = torch.tensor(values)
    for layout in (None, Layout.from_shapes({"w": (len(values) // 2, 2), "b": (len(values) % 2,)})):
        y = through(x, layout)
        lost = sum(
            ((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(values, y.tolist())), Fraction()
        )
        assert lost <= (1 - Fraction(ONEBIT.contraction(x.numel()))) * sum(
            Fraction(v) ** 2 for v in x.tolist()
        )


def test_subnormal_means_are_replaced_by_the_largest_coordinate():
    x = torch.tensor([0.0, LEAST, -3 * LEAST, 2 * LEAST, 0.0, 0.0])
    for layout in (None, Layout.from_shapes({"w": (3, 2)})):
        assert through(x, layout).tolist() == [0, 0, -3 * LEAST, 0, 0, 0]
    assert through(torch.tensor([LEAST])).tolist() == [LEAST]
    x[0] = 3 * NORMAL
    assert through(x, Layout.from_shapes({"w": (3, 2)}))[0] == 3 * NORMAL / 2


def refused(data: bytes, layout: Layout) -> bool:
    try:
        ONEBIT.decode(reseal(data, layout.numel), numel=layout.numel, layout=layout)
    except FrameError:
        return True
    return False


def test_invalid_means_are_rejected():
    """The first column of the matrix has both signs, the second no negative value, and the third only negative values."""
    layout = Layout.from_shapes({"w": (3, 3)})
    frame = ONEBIT.encode(
        torch.tensor([[1.0, 0.0, -1.0], [-2.0, 2.0, -2.0], [0.0, 4.0, -3.0]]).flatten(),
        layout=layout,
    )
    start = SECTIONS + 1 + 2
    assert np.frombuffer(frame[start:], "<f4").tolist() == [0.5, 2, 0, -2, 0, -2]
    never = {
        0: (-0.0, -1.0),
        1: (-0.0, -1.0),
        2: (1.0, -0.0),
        3: (0.0, -0.0, 1.0),
        4: (-0.0, -1.0, 1.0),
        5: (0.0, 2.0),
    }
    for mean, values in never.items():
        at = start + 4 * mean
        assert not refused(frame[:at] + frame[at:], layout)
        for value in (*values, math.nan, math.inf, -math.inf):
            assert refused(
                frame[:at] + np.array(value, "<f4").tobytes() + frame[at + 4 :], layout
            ), (mean, value)
    for changed in (frame[:-1], frame + b"\0", frame[: start - 1] + b"\x01" + frame[start:]):
        assert refused(changed, layout)
    assert refused(frame, Layout.flat(9)) and refused(frame, Layout.from_shapes({"w": (9, 1)}))
