"""The memory `signum`: its momentum, whether frames are accepted or not."""

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits

from fedcomp import codec, memory
from fedcomp.errors import SpecError

NUMEL = 300
LAYOUT = layout_of(NUMEL)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@for_each("spec", ["sign", "efsign@layer", "identity", "topk:density=1/10"])
@for_each("beta", [0.9, 0.5, 0.0])
def test_momentum_equals_the_recursion_for_accepted_and_rejected_frames(spec, beta):
    c = codec(spec)
    m, u = memory(f"signum:momentum={beta}", c, NUMEL, LAYOUT), torch.zeros(NUMEL)
    for round, taken in enumerate([True, True, False, True, False]):
        x = update(round)
        u = (u * beta).add(x, alpha=1 - beta)
        assert m.propose(x, seed=round) == c.encode(u, seed=round, layout=LAYOUT)
        (m.commit if taken else m.rollback)()
        assert same_bits(m.state_dict()["velocity"], u)


def test_a_returned_part_of_a_frame_does_not_change_the_momentum():
    c = codec("identity")
    m = memory("signum", c, NUMEL)
    m.propose(update(1))
    before = m.velocity.clone()
    m.commit(returned=c.encode(update(2)))
    assert same_bits(m.velocity, before)


@for_each("momentum", ["1", "-0.1", "2"])
def test_a_momentum_outside_0_to_1_is_refused(momentum):
    with pytest.raises(SpecError, match="such as 0.9"):
        memory(f"signum:momentum={momentum}", codec("sign"), NUMEL)
