"""The memory `variance`: the coordinates that it sends, and its sums of gradients."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits

from fedcomp import NonFiniteError, codec, memory
from fedcomp.codecs import Context, at_density
from fedcomp.errors import ConfigError, SpecError

NUMEL, STEPS = 300, 6
LAYOUT = layout_of(NUMEL)


def gradients(seed: int) -> torch.Tensor:
    """Return the gradients of six steps [6, n]: noise around a mean that grows with the position."""
    noise = torch.randn(STEPS, NUMEL, generator=torch.Generator().manual_seed(seed))
    return noise + torch.linspace(0, 2, NUMEL)


def moments(g: torch.Tensor) -> Context:
    return Context(moments=(g.sum(0), (g * g).sum(0)))


@for_each("spec", ["topk", "stc", "topk@layer", "sbc"])
@for_each("alpha, zeta", [(1.0, 0.999), (2.0, 0.9), (4.0, 1.0)])
def test_frames_and_state_equal_the_algorithm_of_the_paper(spec, alpha, zeta):
    c = codec(spec)
    m = memory(f"variance:alpha={alpha},zeta={zeta}", c, NUMEL, LAYOUT)
    e, r, v = np.zeros((3, NUMEL), np.float32)
    for round, taken in enumerate([True, True, False, True, False, True]):
        g = gradients(round)
        x = -0.1 * g.sum(0)
        e, r, v = e + x.numpy(), r + g.sum(0).numpy(), v + (g * g).sum(0).numpy()
        clear = r * r > np.float32(alpha) * v
        v = v * np.float32(zeta)
        y = at_density(c, 1.0).encode(torch.from_numpy(np.where(clear, e, 0)), layout=LAYOUT)
        assert m.propose(x, context=moments(g)) == y
        if taken:
            sent = c.decode(y, numel=NUMEL, layout=LAYOUT).numpy()
            e = e - sent
            r[sent != 0] = v[sent != 0] = 0
        (m.commit if taken else m.rollback)()
        assert same_bits(m.residual, e) and same_bits(m.gradients, r) and same_bits(m.squares, v)


def test_an_unambiguous_coordinate_is_sent_and_a_noisy_one_is_not():
    g = torch.zeros(STEPS, NUMEL)
    g[:, 0], g[::2, 1], g[1::2, 1] = 1.0, 5.0, -5.0
    m = memory("variance", codec("topk"), NUMEL)
    m.propose(-g.sum(0), context=moments(g))
    assert m.sent_positions.tolist() == [0]


def test_weak_evidence_adds_up_over_rounds():
    m, x = memory("variance:alpha=2,zeta=1", codec("topk"), NUMEL), torch.full((NUMEL,), -0.1)
    g = torch.ones(1, NUMEL)
    sent = []
    for _ in range(4):
        m.propose(x, context=moments(g))
        sent.append(m.sent_positions.size)
        m.commit()
    assert sent == [0, 0, NUMEL, 0]  # r² = t², v = t: above 2v from the third step on
    assert torch.allclose(m.residual, x)


def test_without_moments_an_update_counts_as_one_step():
    one, other = (memory("variance:alpha=1", codec("topk"), NUMEL) for _ in range(2))
    for seed in range(4):
        x = gradients(seed)[0]
        assert one.propose(x) == other.propose(x, context=moments(x[None]))
        one.commit(), other.commit()
        assert same_bits(one.squares, other.squares)


def test_a_stack_has_a_row_of_moments_for_each_client():
    alone, stacked = (
        [memory("variance:alpha=1.5", codec("stc"), NUMEL) for _ in range(3)] for _ in range(2)
    )
    for round in range(3):
        gs = [gradients(10 * round + i) for i in range(3)]
        x, rows = torch.stack([-g.sum(0) for g in gs]), [moments(g) for g in gs]
        together = Context(
            moments=tuple(torch.stack([row.moments[i] for row in rows]) for i in range(2))
        )
        frames = type(stacked[0]).propose_batch(stacked, x.clone(), [0, 1, 2], together)
        assert frames == [
            m.propose(row, seed=i, context=c)
            for i, (m, row, c) in enumerate(zip(alone, x, rows, strict=True))
        ]
        for one, other in zip(alone, stacked, strict=True):
            one.commit(), other.commit()
            assert all(
                same_bits(one.state_dict()[key], other.state_dict()[key])
                for key in one.state_dict()
            )


def test_returned_coordinates_keep_their_statistics():
    c, g = codec("topk"), gradients(1)
    m = memory("variance:alpha=1", c, NUMEL)
    y = c.decode(m.propose(g.sum(0), context=moments(g)), numel=NUMEL)
    known = m.gradients.clone()
    back = (torch.arange(NUMEL) < 200) & (y != 0)
    m.commit(returned=at_density(c, 1.0).encode(y.where(back, 0)))
    arrived = (y != 0) & ~back
    assert arrived.any() and back.any()
    assert torch.equal(m.gradients, known.where(~arrived, 0)) and torch.equal(
        m.residual, g.sum(0).where(~arrived, 0)
    )


def test_moments_that_overflow_do_not_change_the_memory():
    m = memory("variance", codec("topk"), NUMEL, LAYOUT)
    with pytest.raises(
        NonFiniteError, match="sum of residual and update is inf in tensor 'w', element 3"
    ):
        m.propose(
            torch.ones(NUMEL),
            context=moments(torch.ones(2, NUMEL).index_fill(1, torch.tensor([3]), 1e30)),
        )
    assert m.pending is None and m.residual is None and m.squares is None


@for_each("spec", ["identity", "natural@layer", "randomk"])
def test_codecs_that_cannot_send_a_given_selection_are_refused(spec):
    with pytest.raises(ConfigError, match="--memory variance itself selects the coordinates"):
        memory("variance", codec(spec), NUMEL, LAYOUT)


@for_each("options", ["alpha=0", "alpha=-1", "zeta=0", "zeta=1.1"])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(SpecError, match="give alpha above 0, and zeta above 0 and at most 1"):
        memory(f"variance:{options}", codec("topk"), NUMEL)
