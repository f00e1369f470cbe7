"""Decay frames, which multiply the weights by a factor before they add an update."""

import math

import pytest
import torch
from cases import for_each

from fedcomp import FrameError, codec
from fedcomp.codecs.frame import DECAY, FACTOR, MODEL, Section, seal, unwrap_decay, wrap_decay

NUMEL = 30
STEP = codec("topk:density=10%").encode(torch.arange(NUMEL).float())


@for_each("factor", [0.0, 0.5, 1 - 2.0**-24])
def test_the_factor_and_the_step_are_decoded_unchanged(factor):
    assert unwrap_decay(wrap_decay(factor, STEP, NUMEL), NUMEL) == (factor, STEP)


def test_a_step_without_decay_is_sent_unchanged():
    assert wrap_decay(1.0, STEP, NUMEL) == STEP and unwrap_decay(STEP, NUMEL) == (1.0, STEP)


@for_each("factor", [-0.5, 1.0, 1.5, math.inf, math.nan])
def test_an_invalid_decay_factor_is_rejected(factor):
    body = FACTOR.pack(factor) + STEP
    with pytest.raises(FrameError, match="factor"):
        unwrap_decay(seal(DECAY, MODEL, NUMEL, [Section(NUMEL, body)]), NUMEL)


def test_a_truncated_frame_and_a_frame_of_another_model_are_rejected():
    with pytest.raises(FrameError, match="the weight decay factor is incomplete"):
        unwrap_decay(seal(DECAY, MODEL, NUMEL, [Section(NUMEL, b"abc")]), NUMEL)
    part = seal(DECAY, MODEL, NUMEL, [Section(NUMEL - 1, FACTOR.pack(0.5) + STEP)])
    with pytest.raises(FrameError, match="the broadcast is for a model of 29 weights"):
        unwrap_decay(part, NUMEL)
