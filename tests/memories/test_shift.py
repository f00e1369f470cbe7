"""Memories with a shift: client and server have the same shift, whether proposals are committed or rolled back."""

import json

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import NonFiniteError, available_codecs, codec, memory
from fedcomp.errors import ConfigError
from fedcomp.memories import Memory
from fedcomp.memories.base import Counterpart
from fedcomp.memories.shift import CLIENTS

NUMEL = 60
LAYOUT = layout_of(NUMEL)
NAMES = ("ef21", "diana", "laq:patience=1", "laq:errors=0,patience=2")


def accepts(name: str, spec: str) -> bool:
    try:
        return bool(memory(name, codec(spec), NUMEL, LAYOUT))
    except ConfigError:
        return False


PAIRS = [
    (name, spec)
    for name in NAMES
    for spec in (*available_codecs(), "stc@layer", "natural@layer")
    if accepts(name, spec)
]


def client_and_server(name: str, spec: str) -> tuple[Memory, Counterpart]:
    m = memory(name, codec(spec), NUMEL, LAYOUT)
    return m, m.counterpart(m)


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def or_zeros(vector: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(NUMEL) if vector is None else vector


def opened(m: Memory, frame: bytes | None):
    return frame and m.codec.open(frame, NUMEL, LAYOUT)


outcomes = st.sampled_from(["commit", "commit", "rollback", "not finite", "reset"])


@given(st.sampled_from(PAIRS), st.lists(outcomes, max_size=12))
def test_both_sides_have_the_same_shift_after_any_outcome(pair_, rounds):
    m, server = client_and_server(*pair_)
    fresh = True
    for seed, outcome in enumerate(rounds):
        if outcome == "reset":
            m.reset()
            fresh = True
            continue
        if outcome == "not finite":
            with pytest.raises(NonFiniteError):
                m.propose(update(seed).where(torch.arange(NUMEL) != 17, torch.nan))
            continue
        frame = m.propose(update(seed), seed=seed)
        sent = opened(m, frame)
        if frame is None:
            server.settle([(5, None, fresh)], 1.0)
        elif outcome == "commit":
            base = or_zeros(None if fresh else server.shift_of(5)).clone()
            estimate = server.estimate(5, sent, fresh)
            torch.testing.assert_close(estimate.dense(), base + sent.dense())
            m.commit()
            server.settle([(5, sent, fresh)], 1.0)
            fresh = False
        else:
            m.rollback()
        assert same_bits(or_zeros(m.shift), or_zeros(None if fresh else server.shift_of(5)))


@for_each("name, spec", PAIRS)
def test_all_methods_of_an_estimate_agree(name, spec):
    m, server = client_and_server(name, spec)
    server.settle([(0, opened(m, m.propose(update(1), seed=1)), True)], 0.0)
    m.commit()
    sent = opened(m, m.propose(update(2), seed=2))
    for estimate in (server.estimate(0, sent, False), server.estimate(0, None, False)):
        before, total = or_zeros(server.shift_of(0)).clone(), torch.ones(NUMEL)
        estimate.add_to(total, 2.0)
        torch.testing.assert_close(total, 1 + 2 * estimate.dense())
        assert same_bits(torch.from_numpy(estimate.block(7, 40).copy()), estimate.dense()[7:40])
        assert estimate.numel == estimate.nonzeros == NUMEL and estimate.positions is None
        assert same_bits(server.shift_of(0), before)
    assert (
        server.estimate(0, sent, True) is sent
        and server.estimate(1, sent, False) is sent
        and server.estimate(1, None, False) is None
    )


@for_each("name", NAMES)
def test_a_checkpoint_restores_the_shifts(name):
    m, server = client_and_server(name, "identity")
    written: dict[str, torch.Tensor | bytes | None] = {}

    def write() -> set[str]:
        vectors, values = server.take_changes()
        written.update({key: vector.clone() for key, vector in vectors.items()} | values)
        return set(vectors)

    sent = [
        codec("identity").open(codec("identity").encode(update(seed)), NUMEL) for seed in range(4)
    ]
    server.settle([(3, sent[0], True), (11, sent[1], True), (2**63, sent[2], True)], 1.5)
    assert write() == {"3", "11", str(2**63)} and json.loads(written[CLIENTS]) == [3, 11, 2**63]
    server.settle([(11, sent[3], False), (3, None, False)], 2.5)
    written.pop(CLIENTS)
    assert write() == {"11"} and CLIENTS not in written
    server.settle([(3, None, True)], 0.5)  # starts without state, and has no frame
    assert write() == set() and json.loads(written[CLIENTS]) == [11, 2**63]
    _, restored = client_and_server(name, "identity")
    restored.restore(written.get, written.get)
    assert restored.announce() == server.announce() and restored.take_changes()[0] == {}
    assert [client for client, _ in restored.absent(())] == [
        client for client, _ in server.absent(())
    ]
    for client in (3, 11, 2**63):
        assert same_bits(or_zeros(restored.shift_of(client)), or_zeros(server.shift_of(client)))
    assert restored.shift_of(3) is None


@for_each("name", NAMES)
def test_a_damaged_checkpoint_raises_an_error(name):
    for damaged in (b"[1", b'{"1": 2', b'["x"]'):
        with pytest.raises((ValueError, TypeError)):
            client_and_server(name, "identity")[1].restore(
                lambda key: None, lambda key, data=damaged: data
            )


@for_each("name", NAMES)
def test_a_reset_memory_behaves_like_a_new_one(name):
    m, new = memory(name, codec("identity"), NUMEL), memory(name, codec("identity"), NUMEL)
    m.propose(update(1))
    m.commit()
    m.propose(update(2))
    m.reset()
    assert m.pending is None and m.state_dict() == new.state_dict()
    assert m.propose(update(3)) == new.propose(update(3))


@for_each("name", ["ef21", "diana", "laq:errors=0"])
def test_a_returned_part_of_a_frame_is_refused(name):
    m = memory(name, codec("identity"), NUMEL)
    frame = m.propose(update(1))
    with pytest.raises(
        ConfigError,
        match="uses whole frames, but the server used only a part of this frame; use --memory residual",
    ):
        m.commit(returned=codec("identity").encode(update(1)))
    assert m.pending == frame and m.shift is None


@for_each("name", ["ef21", "diana", "laq"])
def test_a_difference_out_of_range_does_not_change_the_memory(name):
    m = memory(name, codec("identity"), NUMEL)
    m.propose(torch.full((NUMEL,), 3e38))
    m.commit()
    with pytest.raises(NonFiniteError):
        m.propose(torch.full((NUMEL,), -3e38))
    (error,) = type(m).propose_batch([m], torch.full((1, NUMEL), -3e38), [0])
    assert isinstance(error, NonFiniteError) and m.pending is None and bool((m.shift == 3e38).all())


def test_memories_with_state_only_on_clients_have_no_counterpart():
    assert memory("residual", codec("stc"), NUMEL).counterpart is None
    assert memory("none", codec("sign"), NUMEL).counterpart is None


def test_a_late_update_is_scaled_by_the_rate_with_which_it_was_computed():
    """A round with the rate 0.1 accepts an update that a client computed with the rate 0.5."""
    _, server = client_and_server("ef21", "identity")
    taken = codec("identity").open(codec("identity").encode(update(1)), NUMEL)
    server.set_rates(0.1, {3: 0.5})
    server.settle([(3, taken, True)], 0.0)
    server.set_rates(1.0, {})
    torch.testing.assert_close(server.estimate(3, None, False).dense(), update(1) / 0.5)
