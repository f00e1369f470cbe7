"""The memory `ef21`: the server's estimate of a constant update converges at the rate at which the codec contracts."""

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits, vectors

from fedcomp import available_codecs, codec, memory
from fedcomp.codecs.product import contraction
from fedcomp.errors import ConfigError

NUMEL = 401
LAYOUT = layout_of(NUMEL)
CONTRACTING = [
    spec
    for spec in (*available_codecs(), "stc@layer", "natural@layer")
    if contraction(codec(spec), NUMEL)
]


@for_each("spec", ["identity", "stc:density=1/10", "topk:density=1/10@layer", "natural"])
def test_frames_contain_the_difference_to_the_estimate(spec):
    m, estimate = memory("ef21", codec(spec), NUMEL, LAYOUT), torch.zeros(NUMEL)
    for seed in range(4):
        x = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        assert m.propose(x, seed=seed) == codec(spec).encode(x - estimate, seed=seed, layout=LAYOUT)
        m.codec.accumulate(m.pending, estimate, layout=LAYOUT)
        m.commit()
        assert same_bits(m.shift, estimate)


@for_each("spec", CONTRACTING)
def test_the_estimate_converges_to_a_constant_update_at_the_rate_of_the_codec(spec):
    x, steps, seeds = vectors(NUMEL)["normal"], 3, 6
    delta = contraction(codec(spec), NUMEL)
    left = 0.0
    for first in range(0, steps * seeds, steps):
        m = memory("ef21", codec(spec), NUMEL, LAYOUT)
        for seed in range(first, first + steps):
            m.propose(x, seed=seed)
            m.commit()
        left += float((x - m.shift).square().sum()) / seeds
    assert left <= 1.05 * (1 - delta) ** steps * float(x.square().sum())


def test_after_a_rollback_the_whole_difference_is_sent_again():
    m = memory("ef21", codec("stc:density=1/10"), NUMEL)
    x = torch.ones(NUMEL)
    frame = m.propose(x)
    m.rollback()
    assert m.propose(x) == frame


def test_differences_to_a_bfloat16_update_are_computed_in_float32():
    m = memory("ef21", codec("identity"), NUMEL)
    x = torch.randn(NUMEL).to(torch.bfloat16)
    m.propose(x)
    m.commit()
    assert same_bits(m.shift, x.float())


@for_each("spec", ["sign", "threshold", "qsgd:levels=1@layer"])
def test_a_codec_that_does_not_contract_is_refused(spec):
    with pytest.raises(
        ConfigError,
        match="--memory ef21 does not converge with .*, which is not contractive; use --uplink stc, or --memory none",
    ):
        memory("ef21", codec(spec), NUMEL, LAYOUT)
