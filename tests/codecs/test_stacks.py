"""A large batch is encoded in several groups, which give the same frames."""

import pytest
import torch

from fedcomp import NonFiniteError, codec
from fedcomp.codecs import base
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout

SPECS = ("stc:density=10%", "qsgd:levels=4", "topk:density=5%@layer", "terngrad", "identity")
LAYOUT = Layout.from_shapes({"weight": (7, 9), "bias": (7,)})


@pytest.mark.parametrize("spec", SPECS)
def test_slices_of_a_stack_give_the_frames_of_the_whole_stack(monkeypatch, spec):
    x, seeds = torch.randn(11, LAYOUT.numel), list(range(11))
    x[4, 3] = torch.nan
    c = codec(spec)
    expected = c.encode_batch(x, seeds, layout=LAYOUT)
    monkeypatch.setattr(base, "SLICE_ELEMENTS", 3 * LAYOUT.numel)
    found = c.encode_batch(x, seeds, layout=LAYOUT)
    assert isinstance(found[4], NonFiniteError)
    assert found[:4] + found[5:] == expected[:4] + expected[5:]


@pytest.mark.parametrize("spec", SPECS)
def test_separate_tensors_are_encoded_like_a_stack(spec):
    x, onto, seeds = torch.randn(3, LAYOUT.numel), torch.randn(3, LAYOUT.numel), [4, 5, 6]
    c, before, apart = codec(spec), x.clone(), [total.clone() for total in onto]
    assert c.encode_batch(list(x), seeds, layout=LAYOUT) == c.encode_batch(x, seeds, layout=LAYOUT)
    added = c.encode_batch(x, seeds, onto=apart, layout=LAYOUT)
    assert added == c.encode_batch(onto + x, seeds, layout=LAYOUT) and torch.equal(x, before)
    assert torch.equal(torch.stack(apart), onto + x)


def test_vectors_of_a_stack_must_have_one_size_and_precision():
    for other in (torch.ones(8), torch.ones(7, dtype=torch.float16)):
        with pytest.raises(ConfigError, match="vectors of one size, dtype and device"):
            codec("stc").encode_batch([torch.ones(7), other], [0, 0])


def test_empty_stacks_are_encoded():
    assert codec("identity").encode_batch(torch.randn(0, 5), []) == []
    assert len(codec("identity").encode_batch(torch.randn(3, 0), [0, 1, 2])) == 3
