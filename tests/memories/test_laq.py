"""The memory `laq`: the rounds in which a client sends nothing."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of

from fedcomp import codec, memory
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, ProtocolError, SpecError
from fedcomp.memories.laq import NUMBER, THRESHOLD

NUMEL = 401
LAYOUT = layout_of(NUMEL)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def announced(threshold: float, rate: float = 1.0) -> Context:
    return Context(announced={THRESHOLD: NUMBER.pack(threshold)}, rate=rate)


class Oracle:
    """The paper's rule for skipping a round, in float64."""

    def __init__(self, spec: str, errors: float, patience: int):
        self.codec, self.errors, self.patience = codec(spec), errors, patience
        self.last, self.clock, self.lost, self.sent = np.zeros(NUMEL), 0, 0.0, False

    def decide(self, x: torch.Tensor, threshold: float) -> bool:
        """Return whether to send, and update the state as if the frame were accepted."""
        difference = (x - torch.from_numpy(self.last.astype(np.float32))).double()
        quantized = self.codec.decode(
            self.codec.encode(difference.float(), layout=LAYOUT), numel=NUMEL, layout=LAYOUT
        ).double()
        lost = float((difference - quantized).square().sum())
        least = threshold + self.errors * (lost + self.lost)
        if self.sent and self.clock < self.patience and float(quantized.square().sum()) <= least:
            self.clock += 1
            return False
        self.last, self.clock, self.lost, self.sent = (
            (self.last + quantized.numpy()).astype(np.float32),
            0,
            lost,
            True,
        )
        return True


@for_each(
    "spec, errors, patience",
    [
        ("identity", 3.0, 4),
        ("fp16", 3.0, 100),
        ("natural", 0.5, 100),
        ("topk:density=1/2@layer", 0.0, 3),
        ("stc:density=1/10", 0.0, 0),
    ],
)
def test_decisions_equal_those_of_the_paper(spec, errors, patience):
    m, oracle = (
        memory(f"laq:errors={errors},patience={patience}", codec(spec), NUMEL, LAYOUT),
        Oracle(spec, errors, patience),
    )
    drawn, sent = np.random.default_rng(1), []
    x = update(0)
    for round in range(30):
        x = x + float(drawn.choice([0.01, 0.3])) * update(round + 1)
        threshold = float(drawn.choice([0.0, 5.0, 30.0]))
        frame = m.propose(x, context=announced(threshold))
        assert (frame is not None) == oracle.decide(x, threshold)
        sent.append(frame is not None)
        if frame is not None:
            m.commit()
            assert np.array_equal(m.shift.numpy(), oracle.last.astype(np.float32))
        else:
            assert m.pending is None
    assert sent[0] and (any(sent[1:]) and not all(sent) or not patience)


def test_a_learning_rate_schedule_does_not_change_decisions():
    """Updates grow with the learning rate, and thresholds with its square. Rates are powers of two, so all numbers are exact."""
    constant, scheduled = (memory("laq:errors=4", codec("natural"), NUMEL) for _ in range(2))
    drawn, sent = np.random.default_rng(1), []
    x = update(0)
    for round in range(30):
        x = x + float(drawn.choice([0.01, 0.3])) * update(round + 1)
        threshold, rate = float(drawn.choice([0.0, 5.0, 30.0])), 2.0 ** -(round // 3)
        frame = constant.propose(x, seed=round, context=announced(threshold))
        other = scheduled.propose(
            rate * x, seed=round, context=announced(threshold * rate**2, rate)
        )
        assert (frame is None) == (other is None)
        sent.append(frame is not None)
        if frame is not None:
            constant.commit()
            scheduled.commit()
            assert torch.equal(constant.shift, scheduled.shift)
    assert any(sent[3:]) and not all(sent)


def test_the_first_proposal_is_sent_until_it_is_accepted():
    m = memory("laq", codec("identity"), NUMEL)
    for _ in range(3):
        assert m.propose(update(1), context=announced(float("inf"))) is not None
        m.rollback()
    m.propose(update(1), context=announced(float("inf")))
    m.commit()
    assert m.propose(update(2), context=announced(float("inf"))) is None


@for_each("patience", [0, 1, 5])
def test_no_client_skips_more_rounds_in_a_row_than_patience_allows(patience):
    m, sent = memory(f"laq:patience={patience}", codec("fp16"), NUMEL), []
    for round in range(20):
        if m.propose(update(round), context=announced(1e30)) is not None:
            sent.append(round)
            m.commit()
    assert {b - a for a, b in pairwise(sent)} == {patience + 1}


def test_a_round_with_a_rejected_frame_counts_as_a_skipped_one():
    m = memory("laq:patience=2", codec("identity"), NUMEL)
    m.propose(update(0))
    m.commit()
    for round in (1, 2):
        assert m.propose(update(round), context=announced(0.0)) is not None
        m.rollback()
    assert m.propose(update(3), context=announced(1e30)) is not None


def test_without_an_announced_threshold_no_round_is_skipped():
    m = memory("laq", codec("fp16"), NUMEL)
    for _ in range(3):
        assert m.propose(update(1)) is not None
        m.commit()


def test_the_state_includes_the_number_of_skipped_rounds():
    m, moved = (
        memory("laq:patience=3", codec("fp16"), NUMEL),
        memory("laq:patience=3", codec("fp16"), NUMEL),
    )
    m.propose(update(0))
    m.commit()
    m.propose(update(1), context=announced(1e30))
    moved.load_state_dict(m.state_dict())
    for round in range(2, 8):
        frame = m.propose(update(round), context=announced(1e30))
        assert moved.propose(update(round), context=announced(1e30)) == frame
        if frame is not None:
            m.commit(), moved.commit()
        assert m.state_dict()["clock"] == moved.state_dict()["clock"]


def test_the_threshold_is_the_weighted_sum_of_the_last_steps():
    m = memory("laq:window=3,weight=0.6", codec("identity"), NUMEL)
    server = m.counterpart(m)
    assert NUMBER.unpack(server.announce()[THRESHOLD]) == (0.0,)
    for moved in (100.0, 1.0, 2.0, 4.0):
        server.settle([], moved)
    assert NUMBER.unpack(server.announce()[THRESHOLD]) == (pytest.approx(0.2 * 7),)


def test_a_threshold_of_another_length_is_refused():
    m = memory("laq", codec("identity"), NUMEL)
    with pytest.raises(ProtocolError, match="announced a 'threshold' of 3 bytes, not 8"):
        m.propose(update(1), context=Context(announced={THRESHOLD: b"abc"}))
    assert m.pending is None


@for_each("spec", ["stc:density=1/10", "topk:density=0.74", "sbc"])
def test_a_codec_with_which_every_round_would_be_skipped_is_refused(spec):
    with pytest.raises(
        ConfigError,
        match="--memory laq would skip as many rounds as it may with .*; use --uplink fp16, or --memory laq:errors=0",
    ):
        memory("laq", codec(spec), NUMEL)
    assert memory("laq:errors=0", codec(spec), NUMEL).propose(update(1))


def test_a_codec_that_does_not_contract_is_refused():
    with pytest.raises(ConfigError, match="--memory laq does not converge with sign"):
        memory("laq:errors=0", codec("sign"), NUMEL)


@for_each("text", ["window=0", "weight=-1", "errors=-0.5", "patience=-1", "window=100000"])
def test_options_out_of_range_are_refused(text):
    with pytest.raises(SpecError, match=f"{text.split('=')[0]} is .*; give "):
        memory(f"laq:{text}", codec("identity"), NUMEL)
