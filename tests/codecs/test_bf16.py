"""The codec `bf16`: its rounding, extreme values and invalid frames."""

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, codec
from fedcomp.codecs.frame import Section
from fedcomp.layout import Layout

BF16 = codec("bf16")
LARGEST = float(torch.finfo(torch.bfloat16).max)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def decoded(x: torch.Tensor) -> torch.Tensor:
    return BF16.decode(BF16.encode(x), numel=x.numel())


def test_rounding_is_that_of_torch():
    bits = torch.randint(
        0x00800000,
        0x70000000,
        (5000,),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.int32,
    )
    ties = bits & -0x10000 | 0x8000
    for x in (
        bits.view(torch.float32),
        -bits.view(torch.float32),
        ties.view(torch.float32),
        torch.randn(5000),
    ):
        assert same_bits(decoded(x), x.to(torch.bfloat16).float())


@given(st.lists(finite, min_size=1, max_size=40))
def test_each_value_is_within_a_256th_of_itself_or_far_below_the_largest(values):
    x = torch.tensor(values, dtype=torch.float32)
    off = (decoded(x).double() - x.double()).abs()
    assert (
        off <= torch.maximum(2.0**-8 * x.double().abs(), 2.0**-230 * x.double().abs().max())
    ).all()


def test_huge_values_stay_finite():
    x = torch.tensor([3.4028234e38, -3.4028234e38, LARGEST, 3.39e38, 2.0**-126])
    assert decoded(x).tolist() == [LARGEST, -LARGEST, LARGEST, LARGEST, 2.0**-126]


@for_each("value", [2.0**-149, 3 * 2.0**-149, 255 * 2.0**-149, 2.0**-130, 2.0**-126])
def test_subnormals_do_not_become_zero(value):
    x = torch.tensor([value, -value, 0.0, -0.0])
    assert same_bits(decoded(x), x)


def test_a_body_has_two_bytes_per_coordinate_and_one_byte_for_the_range():
    assert len(BF16.encode(torch.randn(100))) == 9 + 1 + 1 + 200


def test_a_long_vector_and_float16_inputs_are_rounded_in_the_same_way():
    long = torch.randn(2**21 + 3, generator=torch.Generator().manual_seed(1))
    assert same_bits(decoded(long), long.to(torch.bfloat16).float())
    assert BF16.encode(long.to(torch.float16)) == BF16.encode(long.to(torch.float16).float())


def test_layerwise_each_tensor_has_its_own_range():
    layout = layout_of(400)
    x = torch.cat([torch.full((266,), 3e38), torch.full((134,), 2.0**-149)])
    y = codec("bf16@layer").decode(
        codec("bf16@layer").encode(x, layout=layout), numel=400, layout=layout
    )
    assert y[300] == 2.0**-149 and not decoded(x)[300]


@for_each(
    "body, sentence",
    [
        ([23, 0, 0x7F, 0x80, 0x7F], "NaN or infinity"),
        ([23, 0, 0x40, 0xC0, 0xFF], "NaN or infinity"),
        ([24, 0, 0x40, 0, 0], "invalid exponent shift"),
        ([22, 0, 0x40, 0, 0], "invalid exponent shift"),
        ([23, 0, 0x40, 0], "wrong length"),
        ([], "wrong length"),
    ],
)
def test_invalid_bodies_are_rejected(body, sentence):
    with pytest.raises(FrameError, match=sentence):
        BF16._decode_row(Section(2, bytes(body)), Layout.flat(2), 0)
    assert BF16._decode_row(
        Section(2, bytes([22, 0, 0x7F, 0x80, 0x3F])), Layout.flat(2), 0
    ).values.tolist() == [2.0**105, 2.0**-22]
