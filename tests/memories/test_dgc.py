"""The memory `dgc`: its recursion, masking, clipping, and a changing density."""

import math

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits

from fedcomp import codec, memory
from fedcomp.codecs import at_density
from fedcomp.errors import SpecError

NUMEL = 300
LAYOUT = layout_of(NUMEL)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@for_each(
    "spec", ["topk:density=1/10", "topk:density=1/10@layer", "stc:density=1/10", "sbc", "fp16"]
)
@for_each("momentum", [0.0, 0.5, 0.9])
def test_state_and_frames_equal_the_recursion_of_the_paper(spec, momentum):
    c = codec(spec)
    m = memory(f"dgc:momentum={momentum}", c, NUMEL, LAYOUT)
    u, v = np.zeros((2, NUMEL), np.float32)
    for round, taken in enumerate([True, True, False, True, False, False, True]):
        x = update(round)
        u = u * np.float32(momentum) + x.numpy()
        v = v + u
        assert m.propose(x, seed=round) == c.encode(torch.from_numpy(v), seed=round, layout=LAYOUT)
        if taken:
            sent = c.decode(m.pending, numel=NUMEL, layout=LAYOUT).numpy() != 0
            u[sent] = v[sent] = 0
        (m.commit if taken else m.rollback)()
        assert same_bits(m.velocity, u) and same_bits(m.residual, v)


@for_each("spec", ["topk:density=1/10", "stc:density=1/10@layer", "identity"])
def test_returned_coordinates_keep_their_sum_and_momentum(spec):
    c = codec(spec)
    m = memory("dgc", c, NUMEL, LAYOUT)
    y = c.decode(m.propose(update(1)), numel=NUMEL, layout=LAYOUT)
    back = (torch.arange(NUMEL) < 150) & (y != 0)
    m.commit(
        returned=at_density(c, 1.0).encode(y.where(back, 0), layout=LAYOUT)
        if spec != "identity"
        else c.encode(y.where(back, 0))
    )
    arrived = (y != 0) & ~back
    assert arrived.any() and back.any()
    for kept in (m.velocity, m.residual):
        assert torch.equal(kept, update(1).where(~arrived, 0))


@for_each("spec", ["stc", "topk:values=2bit", "threshold:tau=0.1,values=tau"])
def test_codecs_that_quantize_cause_a_warning(spec):
    assert "loses the quantization error" in memory("dgc", codec(spec), NUMEL).warning


@for_each(
    "spec", ["topk", "topk:values=fp16@layer", "threshold:tau=0.1,values=fp32", "identity", "fp16"]
)
def test_codecs_that_send_values_cause_no_warning(spec):
    assert memory("dgc", codec(spec), NUMEL).warning == ""


def test_without_momentum_and_with_exact_values_dgc_is_error_feedback():
    dgc, residual = (
        memory(name, codec("topk:density=1/10"), NUMEL) for name in ("dgc:momentum=0", "residual")
    )
    for seed in range(6):
        assert dgc.propose(update(seed)) == residual.propose(update(seed))
        for m in (dgc, residual):
            (m.rollback if seed == 2 else m.commit)()
        assert torch.equal(dgc.residual, residual.residual)


def test_an_unsent_coordinate_accumulates_momentum():
    m = memory("dgc:momentum=0.5", codec("topk:density=1/300"), NUMEL)
    x = torch.full((NUMEL,), 0.5).index_fill(
        0, torch.tensor([7]), 1e3
    )  # coordinate 7 is always sent
    for _ in range(4):
        m.propose(x)
        m.commit()
    assert m.residual[0] == 0.5 * (1 + 1.5 + 1.75 + 1.875) and m.residual[7] == m.velocity[7] == 0


@for_each("nodes", [1, 16])
def test_updates_are_clipped_to_the_limit_of_one_client(nodes):
    m = memory(f"dgc:clip=8,nodes={nodes}", codec("topk:density=1/10"), NUMEL)
    long, short = 100 * update(1), 0.01 * update(2)
    m.propose(long)
    assert m.residual.norm().item() == pytest.approx(8 / math.sqrt(nodes), rel=1e-5)
    assert torch.nn.functional.cosine_similarity(m.residual, long, dim=0) > 0.99999
    m.load_state_dict({})
    m.propose(short)
    assert same_bits(m.residual, short)
    m.load_state_dict({})
    m.propose(torch.zeros(NUMEL))
    assert not m.residual.any()


def test_the_density_of_a_memory_can_change_between_rounds():
    c = codec("topk:density=1/100")
    m = memory("dgc", c, NUMEL)
    for density, count in ((0.25, 75), (0.0625, 19), (0.015625, 5), (0.0, 3)):
        m.set_density(density)
        m.propose(update(count))
        assert m.sent_positions.size == count
        m.set_density(0.0)  # the commit comes in a round with another density
        sent = m.sent_positions
        m.commit()
        assert not m.residual[sent].any() and not m.velocity[sent].any()


@for_each(
    "options, says",
    [
        ("momentum=1", "less than 1"),
        ("momentum=-0.1", "less than 1"),
        ("clip=-1", "at least 0"),
        ("nodes=0", "at least 1"),
    ],
)
def test_options_out_of_range_are_refused(options, says):
    with pytest.raises(SpecError, match=says):
        memory(f"dgc:{options}", codec("topk"), NUMEL)
