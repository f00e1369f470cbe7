"""The memory `residual`: no part of an update is lost, whether proposals are committed or rolled back."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import ONE_EACH, layout_of, same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, NonFiniteError, codec, memory
from fedcomp.codecs import LayerWise
from fedcomp.codecs.topk import TopK
from fedcomp.errors import ConfigError, SpecError
from fedcomp.memories import Memory

NUMEL = 60
LAYOUT = layout_of(NUMEL)
CONTRACTING = [spec for spec in ONE_EACH if codec(spec).contraction(NUMEL) is not None]


def make(spec: str) -> Memory:
    return memory("residual", codec(spec), NUMEL, LAYOUT)


def update(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def residual(m: Memory) -> torch.Tensor:
    return m.state_dict()["residual"]


outcomes = st.sampled_from(["commit", "rollback", "not finite", "part returned"])
scales = st.sampled_from([1e-30, 1e-3, 1.0, 1.0, 1.0, 1e6])


@given(st.sampled_from(CONTRACTING), st.lists(st.tuples(outcomes, scales), max_size=12))
def test_accepted_updates_and_residual_add_up_to_the_updates(spec, rounds):
    m, inputs, accepted, moved = make(spec), np.zeros(NUMEL), np.zeros(NUMEL), np.zeros(NUMEL)
    for seed, (outcome, scale) in enumerate(rounds):
        x = update(seed, scale)
        if outcome == "not finite":
            with pytest.raises(NonFiniteError):
                m.propose(x.where(torch.arange(NUMEL) != 17, torch.nan))
            continue
        before = residual(m)
        inputs += x.double().numpy()
        frame = m.propose(x, seed=seed)
        y = m.codec.decode(frame, numel=NUMEL, layout=LAYOUT)
        moved += abs(y.double().numpy()) + abs(x.double().numpy())
        if outcome == "rollback":
            m.rollback()
            assert same_bits(residual(m), before + x)
        elif outcome == "commit":
            m.commit()
            assert torch.equal(residual(m), (before + x) - y)
            accepted += y.double().numpy()
        else:
            dropped = y.where(torch.arange(NUMEL) % 3 == 0, 0)
            returned = m.codec.encode(dropped, seed=seed, layout=LAYOUT)
            m.commit(returned=returned)
            back = m.codec.decode(returned, numel=NUMEL, layout=LAYOUT)
            assert torch.equal(residual(m), ((before + x) - y) + back)
            accepted += (y.double() - back.double()).numpy()
            moved += abs(back.double().numpy())
    assert (abs(accepted + residual(m).double().numpy() - inputs) <= 1e-6 * moved).all()


@for_each("spec", CONTRACTING)
def test_while_a_proposal_is_pending_the_residual_contains_all_of_it(spec):
    m = make(spec)
    assert same_bits(residual(m), torch.zeros(NUMEL))
    m.propose(update(1))
    m.commit()
    e = residual(m)
    m.propose(update(2))
    assert same_bits(residual(m), e + update(2))
    m.rollback()
    assert same_bits(residual(m), e + update(2))


@for_each("spec", CONTRACTING)
def test_a_rolled_back_update_is_sent_with_the_next_one(spec):
    m = make(spec)
    assert m.propose(update(1), seed=3) == codec(spec).encode(update(1), seed=3, layout=LAYOUT)
    m.rollback()
    assert m.propose(update(2), seed=4) == codec(spec).encode(
        update(1) + update(2), seed=4, layout=LAYOUT
    )


@for_each("spec", ["topk:density=1/10@chunk=16", "topk:density=1/4,values=2bit@chunk=16", "efsign"])
def test_with_a_decay_unsent_values_fade(spec):
    m = memory("residual:decay=0.5", codec(spec), NUMEL, LAYOUT)
    assert m.propose(update(1)) == codec(spec).encode(update(1), layout=LAYOUT)
    m.commit()
    e = residual(m)
    assert m.propose(update(2)) == codec(spec).encode(0.5 * e + update(2), layout=LAYOUT)
    m.rollback()
    assert same_bits(residual(m), 0.5 * e + update(2))
    with pytest.raises(NonFiniteError):
        m.propose(torch.full((NUMEL,), torch.nan))
    assert same_bits(residual(m), 0.5 * e + update(2))


def test_a_lossless_codec_leaves_no_residual():
    m = make("identity")
    for seed in range(3):
        m.propose(update(seed))
        m.commit()
        assert torch.equal(residual(m), torch.zeros(NUMEL))


def test_with_a_constant_update_every_coordinate_is_sent_eventually():
    m, total = make("topk:density=1/10"), torch.zeros(NUMEL)
    x = torch.linspace(1, 2, NUMEL)
    for _ in range(200):
        m.codec.accumulate(m.propose(x), total)
        m.commit()
    assert torch.allclose(total / 200, x, rtol=0.2)


def test_residuals_of_bfloat16_updates_are_float32():
    m = make("stc:density=1/10")
    x = update(1).to(torch.bfloat16)
    m.propose(x)
    m.rollback()
    assert same_bits(residual(m), x.float())
    m.propose(x)
    m.rollback()
    assert same_bits(residual(m), x.float() + x.float())


def test_the_residual_of_an_update_that_requires_grad_does_not():
    m = make("stc:density=1/10")
    m.propose(update(1).requires_grad_())
    m.commit()
    assert not residual(m).requires_grad


@for_each("spec", CONTRACTING)
def test_a_sum_that_overflows_does_not_change_the_memory(spec):
    m = make(spec)
    m.propose(torch.full((NUMEL,), 3e38))
    m.rollback()
    with pytest.raises(NonFiniteError, match="the sum of residual and update is inf"):
        m.propose(torch.full((NUMEL,), 3e38))
    assert m.pending is None and same_bits(residual(m), torch.full((NUMEL,), 3e38))


def test_a_damaged_returned_frame_keeps_the_proposal_pending():
    m = make("topk:density=1/10")
    frame = m.propose(update(1))
    for returned in (
        b"",
        frame[:-1],
        codec("stc").encode(update(1)),
        codec("topk").encode(torch.ones(NUMEL + 1)),
    ):
        with pytest.raises(FrameError):
            m.commit(returned=returned)
    assert m.pending == frame and same_bits(residual(m), update(1))
    m.commit()
    assert torch.equal(residual(m), update(1) - m.codec.decode(frame, numel=NUMEL))


@dataclass(frozen=True)
class Unscaled(TopK):
    """A codec that multiplies k sent coordinates by n/k, so that it does not contract."""

    def contraction(self, numel: int) -> None:
        return None


@for_each("layerwise", ["", "@layer"])
def test_a_codec_that_does_not_contract_is_refused(layerwise):
    c = LayerWise(Unscaled()) if layerwise else Unscaled()
    with pytest.raises(
        ConfigError,
        match="diverges with topk:.*, which is not contractive; use --memory none, or --uplink stc",
    ):
        memory("residual", c, NUMEL, LAYOUT)
    assert memory("none", c, NUMEL, LAYOUT).propose(update(1))


def test_the_memory_none_has_no_state():
    m = memory("none", codec("stc:density=1/10"), NUMEL)
    for settle in (m.commit, m.rollback):
        frame = m.propose(update(1))
        assert frame == m.codec.encode(update(1))
        settle()
        assert m.state_dict() == {}


def test_the_memory_none_ignores_returned_values():
    m = memory("none", codec("stc:density=1/10"), NUMEL)
    m.commit(returned=m.propose(update(1)))
    assert m.state_dict() == {} and m.propose(update(2)) == m.codec.encode(update(2))


def test_a_state_of_another_size_or_without_its_residual_is_refused():
    keeper = memory("residual", codec("stc"), numel=10)
    for state in (
        {"residual": torch.zeros(11)},
        {"residual": torch.zeros(10, dtype=torch.float64)},
        {"pending": b"frame"},
    ):
        with pytest.raises(ConfigError):
            keeper.load_state_dict(state)


@for_each("dtype", [torch.float64, torch.int64, torch.complex64])
@for_each("name", ["residual", "none"])
def test_an_update_of_another_dtype_is_refused(name, dtype):
    keeper = memory(name, codec("stc"), numel=10)
    with pytest.raises(ConfigError, match="float32, float16 or bfloat16"):
        keeper.propose(torch.ones(10, dtype=dtype))
    with pytest.raises(ConfigError, match="float32, float16 or bfloat16"):
        type(keeper).propose_batch([keeper], torch.ones(1, 10, dtype=dtype), [0])
    assert keeper.pending is None


@for_each(
    "x",
    [
        [1.0] * 10,
        np.ones(10, np.float32),
        torch.ones(10).to_sparse(),
        torch.empty(10, device="meta"),
    ],
)
@for_each("name", ["residual", "none"])
def test_updates_that_are_no_dense_tensors_are_refused(name, x):
    keeper = memory(name, codec("identity"), numel=10)
    with pytest.raises(ConfigError, match="dense torch tensor"):
        keeper.propose(x)
    assert codec("identity").decode(keeper.propose(torch.ones(10)), numel=10).tolist() == [1.0] * 10


def test_the_state_is_float32_for_any_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        keeper = memory("residual", codec("stc"), numel=10)
        assert keeper.state_dict()["residual"].dtype == torch.float32
        keeper.propose(torch.ones(10, dtype=torch.bfloat16))
        assert keeper.state_dict()["residual"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@for_each("name, given", [("residual", "stc"), ("none", None), (3, codec("stc"))])
def test_memory_refuses_arguments_of_other_types(name, given):
    with pytest.raises(SpecError, match=r"memory\(\) needs a spec string and a codec"):
        memory(name, given, 10)


@for_each("spec", [spec for spec in ONE_EACH if codec(spec).contraction(NUMEL) is None])
def test_the_codec_that_an_error_suggests_is_accepted(spec):
    with pytest.raises(
        ConfigError, match="which is not contractive; use --memory none, or --uplink "
    ) as refused:
        make(spec)
    make(str(refused.value).partition("--uplink ")[2].partition(",")[0])


def test_the_residual_keeps_its_storage():
    keepers = [make("topk:density=20%") for _ in range(3)]
    for round in range(2):
        x = torch.stack([update(10 * round + i) for i in range(3)])
        type(keepers[0]).propose_batch(keepers, x, [1, 2, 3])
        if round == 0:
            places = [keeper.residual.data_ptr() for keeper in keepers]
        type(keepers[0]).commit_batch(keepers)
    assert [keeper.residual.data_ptr() for keeper in keepers] == places
