"""The memory `ecq`: its recursion, and the options with which it diverges."""

import re

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits

from fedcomp import codec, memory
from fedcomp.errors import ConfigError
from fedcomp.memories.ecq import ECQ

NUMEL = 300
LAYOUT = layout_of(NUMEL)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


@for_each("spec", ["stc:density=1/10", "topk:density=1/10,values=fp16", "sbc@layer", "natural"])
@for_each("alpha, beta", [(0.95, 0.95), (0.5, 0.9), (1.0, 1.0), (0.2, 0.0)])
def test_state_and_frames_equal_the_recursion_of_the_paper(spec, alpha, beta):
    c = codec(spec)
    m, h = memory(f"ecq:alpha={alpha},beta={beta}", c, NUMEL, LAYOUT), torch.zeros(NUMEL)
    for round, taken in enumerate([True, True, False, True, False, False, True]):
        x = update(round)
        y = x + h * alpha
        assert m.propose(x, seed=round) == c.encode(y, seed=round, layout=LAYOUT)
        h = h * beta + x
        if taken:
            h -= c.decode(m.pending, numel=NUMEL, layout=LAYOUT)
        (m.commit if taken else m.rollback)()
        assert same_bits(m.residual, h)


def test_returned_values_are_added_to_the_residual():
    c = codec("topk:density=1/10")
    m = memory("ecq", c, NUMEL)
    y = c.decode(m.propose(update(1)), numel=NUMEL)
    dropped = y.where(torch.arange(NUMEL) < 150, 0)
    m.commit(returned=c.encode(dropped))
    assert torch.equal(m.residual, update(1) - y + dropped)


def test_with_weight_and_decay_1_ecq_is_error_feedback():
    ecq, residual = (
        memory(name, codec("stc:density=1/10"), NUMEL)
        for name in ("ecq:alpha=1,beta=1", "residual")
    )
    for seed in range(5):
        assert ecq.propose(update(seed)) == residual.propose(update(seed))
        for m in (ecq, residual):
            (m.rollback if seed == 2 else m.commit)()
        assert same_bits(ecq.residual, residual.residual)


@for_each("numel", [1, 300, 10**6])
@for_each(
    "spec",
    [
        "stc",
        "stc:density=1/100",
        "topk@layer",
        "identity",
        "fp16",
        "efsign",
        "natural",
        "qsgd:damped=true",
    ],
)
def test_the_default_pair_is_stable_with_every_codec_that_contracts(spec, numel):
    memory("ecq", codec(spec), numel, layout_of(numel))


@for_each("spec", ["stc", "identity", "qsgd:levels=1", "qsgd:levels=16", "natural"])
@for_each("pair", ["alpha=1,beta=-1", "alpha=3,beta=3.5", "alpha=0,beta=1.5", "alpha=1e200,beta=0"])
def test_the_error_for_a_pair_that_diverges_names_a_stable_one(spec, pair):
    if spec == "identity" and pair == "alpha=3,beta=3.5":
        memory(f"ecq:{pair}", codec(spec), NUMEL)  # nothing is lost
        return
    with pytest.raises(ConfigError, match="diverges with .* below 1; use --memory ecq:") as refused:
        memory(f"ecq:{pair}", codec(spec), NUMEL)
    assert "\n" not in str(refused.value)
    memory(re.search(r"use --memory (ecq:\S+)", str(refused.value))[1], codec(spec), NUMEL)


class Unchecked(ECQ):
    def _check_codec(self) -> None: ...


def longest(m: ECQ, rounds: int = 60) -> float:
    lengths = []
    for round in range(rounds):
        m.propose(update(round), seed=round)
        m.commit()
        lengths.append(m.residual.norm().item())
    return max(lengths)


def test_the_suggested_pair_is_stable_and_the_refused_one_diverges():
    c = codec("qsgd:levels=1")  # ω = √n
    with pytest.raises(ConfigError) as refused:
        memory("ecq", c, NUMEL)
    named = memory(re.search(r"use --memory (ecq:\S+)", str(refused.value))[1], c, NUMEL)
    assert longest(named) < 20 * NUMEL**0.5
    assert longest(Unchecked(c, NUMEL)) > 1e4 * NUMEL**0.5


def test_a_beta_above_1_is_refused_with_biased_codecs():
    with pytest.raises(ConfigError, match="give a beta of at most 1"):
        memory("ecq:alpha=-0.7,beta=-1.3", codec("topk:density=10%"), NUMEL)
    with pytest.raises(
        ConfigError,
        match=r"--memory ecq:alpha=0.7,beta=1.3 diverges with topk.*give a beta of at most 1",
    ):
        memory("ecq:alpha=0.7,beta=1.3", codec("topk:density=10%"), NUMEL)
    unchecked = Unchecked(codec("topk:density=10%"), NUMEL, options=ECQ.Options(0.7, 1.3))
    unchecked.propose(update(0))
    unchecked.commit()
    for _ in range(60):
        unchecked.propose(torch.zeros(NUMEL))
        unchecked.commit()
    assert unchecked.residual.norm() > 100 * update(0).norm()


def test_a_codec_without_a_bound_is_refused():
    with pytest.raises(ConfigError, match="error of sign has no bound; use --uplink stc"):
        memory("ecq", codec("sign"), NUMEL)


def test_a_density_under_which_a_pair_diverges_is_refused():
    m = memory("ecq:alpha=1,beta=0.9", codec("topk:density=1/10"), NUMEL)
    with pytest.raises(ConfigError, match="use --memory ecq"):
        m.set_density(1 / 300)
    m.set_density(1 / 50)
