"""The memory `lowrank`: no part of an update is lost, with one or two frames per proposal."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import Layout, NonFiniteError, codec, memory
from fedcomp.codecs import Context
from fedcomp.codecs.powersgd import FactorLayout, orthonormal
from fedcomp.errors import ConfigError, ProtocolError
from fedcomp.memories.lowrank import LEFT, NUMBERS, RIGHT, LowRank

LAYOUT = Layout.from_shapes({"b": (5,), "w": (8, 10), "k": (6, 2, 2, 2), "one": ()})
NUMEL, SPLIT = LAYOUT.numel, FactorLayout(LAYOUT, 2)
START = np.random.default_rng(0).standard_normal(2 * (10 + 8)).astype("<f4")


def make() -> LowRank:
    return memory("lowrank", codec("powersgd:rank=2"), NUMEL, LAYOUT)


def update(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def residual(m: LowRank) -> torch.Tensor:
    return m.state_dict()["residual"]


def left(m: LowRank, x: torch.Tensor) -> bytes:
    """Return the frame of the first phase."""
    return m.propose(x, context=Context(phase=LEFT, announced={RIGHT: START.tobytes()}))


def basis_of(frame: bytes) -> bytes:
    """Return the basis that a server would announce to a single client."""
    flat = NUMBERS.open(frame, 2 * (8 + 6)).values
    parts = [flat[:16].reshape(8, 2), flat[16:].reshape(6, 2)]
    return b"".join(
        orthonormal(torch.from_numpy(p.copy())).numpy().astype("<f4").tobytes() for p in parts
    )


def right(m: LowRank, basis: bytes) -> bytes:
    """Return the frame of the second phase."""
    return m.proceed(context=Context(phase=RIGHT, announced={LEFT: basis}))


def own_part(m: LowRank, frame: bytes, basis: bytes) -> torch.Tensor:
    return SPLIT.update(basis, NUMBERS.open(frame, 2 * (10 + 8) + 6).values).dense()


def test_the_frames_of_both_phases_equal_those_of_the_paper():
    m, x = make(), update(1)
    numbers = NUMBERS.decode(left(m, x), numel=28)
    w, k = x[5:85].view(8, 10).double(), x[85:133].view(6, 8).double()
    q, r = (
        torch.from_numpy(part).double()
        for part in (START[:20].reshape(10, 2), START[20:].reshape(8, 2))
    )
    torch.testing.assert_close(numbers, torch.cat([(w @ q).ravel(), (k @ r).ravel()]).float())
    basis = basis_of(m.pending)
    p = torch.from_numpy(np.frombuffer(basis, "<f4")[:16].reshape(8, 2).astype(np.float64))
    numbers = NUMBERS.decode(right(m, basis), numel=42)
    torch.testing.assert_close(numbers[:20], (w.T @ p).ravel().float())
    assert torch.equal(numbers[-6:], x[[0, 1, 2, 3, 4, 133]])
    m.commit()
    e = residual(m)
    torch.testing.assert_close(e[5:85].view(8, 10), (w - p @ (p.T @ w)).float())
    assert not e[[0, 1, 2, 3, 4, 133]].any()


moments = st.sampled_from(
    ["one frame", "one frame, lost", "left, lost", "right, lost", "right", "not finite"]
)


@pytest.mark.slow
@given(st.lists(st.tuples(moments, st.sampled_from([1e-30, 1.0, 1.0, 1e6])), max_size=10))
def test_accepted_updates_and_residual_add_up_to_the_updates(rounds):
    m, inputs, accepted, moved = make(), np.zeros(NUMEL), np.zeros(NUMEL), np.zeros(NUMEL)
    for seed, (end, scale) in enumerate(rounds):
        x = update(seed, scale)
        if end == "not finite":
            before = residual(m)
            with pytest.raises(NonFiniteError, match="the update is nan in tensor 'w', element 12"):
                left(m, x.where(torch.arange(NUMEL) != 17, torch.nan))
            assert m.pending is None and same_bits(residual(m), before)
            continue
        if end.startswith("one frame"):
            frame = m.propose(x, seed=seed)
            y = m.codec.decode(frame, numel=NUMEL, layout=LAYOUT)
        else:
            basis = basis_of(left(m, x))
            y = own_part(m, right(m, basis), basis) if end.startswith("right") else None
        inputs += x.double().numpy()
        moved += abs(residual(m).double().numpy())
        if end.endswith("lost"):
            held = residual(m)
            m.rollback()
            assert same_bits(residual(m), held)
        else:
            m.commit()
            accepted += y.double().numpy()
        assert m.pending is None
    assert (
        abs(accepted + residual(m).double().numpy() - inputs) <= 1e-6 * (moved + abs(inputs).max())
    ).all()


def test_committing_only_the_first_frame_keeps_the_whole_update():
    m = make()
    left(m, update(1))
    m.commit()
    assert same_bits(residual(m), update(1))


def test_the_next_iteration_starts_from_the_last_accepted_factors():
    m, x = make(), update(1)
    drawn = codec("powersgd:rank=2").encode(x, seed=3, layout=LAYOUT)
    assert m.propose(x, seed=3) == drawn
    m.rollback()
    assert m.propose(x, seed=3) == codec("powersgd:rank=2").encode(x + x, seed=3, layout=LAYOUT)
    parts = dict(enumerate(part for _, part in m.codec.open(m.pending, NUMEL, LAYOUT).parts))
    m.commit()
    announced = {f"right/{i}": parts[i].right.tobytes() for i in (1, 2)}
    e = residual(m) + x
    assert m.propose(x, seed=4) == m.codec.encode(
        e, seed=9, layout=LAYOUT, context=Context(announced=announced)
    )


def test_a_constant_update_is_eventually_sent_completely():
    m, total, x = make(), torch.zeros(NUMEL), update(1)
    for seed in range(60):
        m.codec.accumulate(m.propose(x, seed=seed), total, layout=LAYOUT)
        m.commit()
    assert float((total / 60 - x).norm() / x.norm()) < 0.1


@for_each("phase", [LEFT, RIGHT])
@for_each("settle", ["commit", "rollback"])
def test_a_state_loaded_between_the_phases_continues_with_the_same_bits(phase, settle):
    stayed = make()
    stayed.propose(update(1))
    stayed.commit()
    basis = basis_of(left(stayed, update(2)))
    if phase == RIGHT:
        right(stayed, basis)
    moved = make()
    moved.load_state_dict(stayed.state_dict())
    assert moved.sent_positions is None and stayed.sent_positions is None
    if phase == LEFT:
        assert right(moved, basis) == right(stayed, basis)
    for m in (moved, stayed):
        getattr(m, settle)()
        assert set(m.state_dict()) == {"residual", "right/1", "right/2"}
    assert same_bits(residual(moved), residual(stayed))
    assert moved.propose(update(3), seed=3) == stayed.propose(update(3), seed=3)


@for_each(
    "announced, error, sentence",
    [
        (
            {},
            ProtocolError,
            "the server did not announce 'right', which the phase 'left' needs; server and client need the same strategy",
        ),
        ({RIGHT: START.tobytes()[:-4]}, ProtocolError, "cannot hold 36 float32 values"),
        ({RIGHT: (START * np.float32("inf")).tobytes()}, ProtocolError, "NaN or infinity"),
    ],
)
def test_an_invalid_announcement_in_the_first_phase_does_not_change_the_state(
    announced, error, sentence
):
    m = make()
    m.propose(update(1))
    m.commit()
    before = residual(m)
    with pytest.raises(error, match=sentence):
        m.propose(update(2), context=Context(phase=LEFT, announced=announced))
    assert m.pending is None and same_bits(residual(m), before)


@for_each(
    "announced, error",
    [({}, ProtocolError), ({LEFT: b""}, ProtocolError), ({LEFT: bytes(4)}, ProtocolError)],
)
def test_an_invalid_announcement_in_the_second_phase_keeps_the_first_frame_pending(
    announced, error
):
    m = make()
    frame = left(m, update(1))
    with pytest.raises(error):
        m.proceed(context=Context(phase=RIGHT, announced=announced))
    assert m.pending == frame and right(m, basis_of(frame)) == m.pending != frame
    m.rollback()
    assert same_bits(residual(m), update(1))


def test_a_phase_in_the_wrong_order_is_refused():
    m = make()
    with pytest.raises(ConfigError, match="no proposal is pending"):
        right(m, b"")
    basis = basis_of(left(m, update(1)))
    with pytest.raises(ConfigError, match="cannot make a frame for the phase 'train'"):
        m.proceed()
    right(m, basis)
    with pytest.raises(ConfigError, match="cannot make a frame for the phase 'right'"):
        right(m, basis)
    alone = make()
    alone.propose(update(1))
    with pytest.raises(ConfigError, match="cannot make a frame for the phase 'right'"):
        right(alone, basis)


def test_memories_with_one_frame_refuse_a_second_phase():
    m = memory("residual", codec("powersgd"), NUMEL, LAYOUT)
    frame = m.propose(update(1))
    with pytest.raises(
        ConfigError,
        match="memory 'residual' cannot make a frame for the phase 'right'; use the --memory that the strategy requires",
    ):
        right(m, b"")
    assert m.pending == frame


@for_each("spec", ["stc", "identity", "powersgd@layer"])
def test_other_codecs_are_refused(spec):
    with pytest.raises(
        ConfigError,
        match="--memory lowrank needs --uplink powersgd, not .*; give --uplink powersgd, or --memory residual",
    ):
        memory("lowrank", codec(spec), NUMEL, LAYOUT)


def test_numbers_near_the_largest_float32_stay_finite():
    m = make()
    basis = basis_of(left(m, torch.full((NUMEL,), 3.4e38)))
    right(m, basis)
    m.commit()
    assert residual(m).isfinite().all()
    with pytest.raises(NonFiniteError, match="the sum of residual and update is inf"):
        for _ in range(3):
            left(m, torch.full((NUMEL,), 3.4e38))
            m.rollback()
