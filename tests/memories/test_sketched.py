"""The memory `sketched`: a proposal has two frames, and only accepted values leave the residual."""

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import same_bits
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import FrameError, Layout, NonFiniteError, codec, memory
from fedcomp.clients.state import ClientState
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, ProtocolError, SpecError
from fedcomp.memories.sketched import CANDIDATES, MARKS, NUMBERS, SKETCH, VALUES, Sketched

LAYOUT = Layout.from_shapes({"b": (5,), "w": (8, 10), "one": ()})
NUMEL = LAYOUT.numel
BEGIN = Context(phase=SKETCH)
CODECS = ["sketch", "sketch:cells=bf16", "sketch:cells=int8", "sketch:rows=3,columns=7@layer"]


def make(options: str = "momentum=0", spec: str = "sketch:columns=9") -> Sketched:
    return memory(f"sketched:{options}", codec(spec), NUMEL, LAYOUT)


def update(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def vector(m: Sketched, name: str = "residual") -> torch.Tensor:
    return m.state_dict()[name]


def marks(positions, numel: int = NUMEL) -> bytes:
    marked = torch.zeros(numel)
    marked[torch.as_tensor(positions, dtype=torch.int64)] = 1
    return MARKS.encode(marked)


def values(m: Sketched, positions) -> bytes:
    """Return the frame of the second phase."""
    return m.proceed(context=Context(phase=VALUES, announced={CANDIDATES: marks(positions)}))


def commit(m: Sketched, candidates, kept) -> None:
    left = [i for i, position in enumerate(candidates) if position not in kept]
    m.commit(returned=marks(left, len(candidates)) if left else None)


@for_each("spec", CODECS)
def test_the_first_frame_is_a_sketch_of_v_and_the_second_its_exact_values(spec):
    m, x = make("momentum=0.5", spec), update(1)
    frame = m.propose(x, seed=7, context=BEGIN)
    assert (
        frame == m.pending == m.codec.encode(x, seed=7, layout=LAYOUT)
        and m.sent_positions.size == 0
    )
    m.rollback()
    v = x + (x * 0.5 + update(2))
    assert m.propose(update(2), seed=8, context=BEGIN) == m.codec.encode(v, seed=8, layout=LAYOUT)
    at = [0, 3, 20, NUMEL - 1]
    frame = values(m, at)
    assert (
        frame == m.pending
        and same_bits(NUMBERS.decode(frame, numel=4), v[at])
        and m.sent_positions.tolist() == at
    )


def test_u_and_v_become_zero_only_at_accepted_candidates():
    m = make("momentum=0.9")
    m.propose(update(1), context=BEGIN)
    m.residual[20] = 0  # the value of this candidate does not show whether it was accepted
    u, v = vector(m, "velocity"), vector(m)
    candidates, kept = [2, 9, 20, 21, 80], [9, 80]
    values(m, candidates)
    commit(m, candidates, kept)
    u[kept] = v[kept] = 0
    assert u[20] and same_bits(vector(m, "velocity"), u) and same_bits(vector(m), v)
    assert (
        m.pending is None
        and m.sent_positions.size == 0
        and set(m.state_dict()) == {"residual", "velocity"}
    )


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["sketch", "values", "kept", "some kept", "none kept", "not finite"]),
            st.sampled_from([1e-30, 1.0, 1.0, 1e6]),
        ),
        max_size=10,
    )
)
def test_accepted_values_and_v_add_up_to_the_updates(rounds):
    m, inputs, accepted, moved = make(), np.zeros(NUMEL), np.zeros(NUMEL), np.zeros(NUMEL)
    for seed, (end, scale) in enumerate(rounds):
        x = update(seed, scale)
        if end == "not finite":
            before = vector(m)
            with pytest.raises(NonFiniteError, match="the update is nan in tensor 'w', element 12"):
                m.propose(x.where(torch.arange(NUMEL) != 17, torch.nan), context=BEGIN)
            assert m.pending is None and same_bits(vector(m), before)
            continue
        m.propose(x, seed=seed, context=BEGIN)
        inputs += x.double().numpy()
        moved += abs(vector(m).double().numpy())
        held, candidates = vector(m), np.random.default_rng(seed).permutation(NUMEL)[:12]
        candidates.sort()
        kept = {"kept": candidates, "some kept": candidates[::3]}.get(end, candidates[:0])
        if end != "sketch":
            sent = NUMBERS.decode(values(m, candidates), numel=12).double().numpy()
        if end in ("sketch", "values"):
            m.rollback()
            assert same_bits(vector(m), held)
        else:
            commit(m, candidates, kept)
            accepted[kept] += sent[np.isin(candidates, kept)]
            assert not vector(m)[kept].any()
        assert m.pending is None
    assert (
        abs(accepted + vector(m).double().numpy() - inputs) <= 1e-6 * (moved + abs(inputs).max())
    ).all()


def test_committing_only_the_sketch_keeps_the_whole_update():
    m = make()
    m.propose(update(1), context=BEGIN)
    m.commit()
    assert same_bits(vector(m), update(1))


@for_each("phase", [SKETCH, VALUES])
@for_each("end", ["commit", "rollback"])
def test_a_state_loaded_between_the_phases_continues_with_the_same_bits(phase, end):
    stayed, moved, at = make("momentum=0.9"), make("momentum=0.9"), [1, 5, 40]
    stayed.propose(update(1), context=BEGIN)
    values(stayed, [2, 3])
    stayed.commit()
    stayed.propose(update(2), context=BEGIN)
    if phase == VALUES:
        values(stayed, at)
    moved.load_state_dict(stayed.state_dict())
    assert (
        moved.pending == stayed.pending
        and moved.sent_positions.tolist() == stayed.sent_positions.tolist()
    )
    if phase == SKETCH:
        assert values(moved, at) == values(stayed, at)
    for m in (moved, stayed):
        commit(m, at, [5]) if end == "commit" else m.rollback()
        assert set(m.state_dict()) == {"residual", "velocity"}
    assert same_bits(vector(moved), vector(stayed)) and same_bits(
        vector(moved, "velocity"), vector(stayed, "velocity")
    )
    assert bool(vector(moved)[5]) == (end == "rollback") and vector(moved)[1]
    assert moved.propose(update(3), seed=3, context=BEGIN) == stayed.propose(
        update(3), seed=3, context=BEGIN
    )


@for_each(
    "announced, error, sentence",
    [
        (
            {},
            ProtocolError,
            "the server did not announce 'candidates', which the phase 'values' needs; server and client need the same strategy",
        ),
        ({CANDIDATES: b""}, FrameError, None),
        ({CANDIDATES: marks([1])[:-1]}, FrameError, None),
        ({CANDIDATES: marks([1], NUMEL - 1)}, FrameError, None),
    ],
)
def test_an_invalid_announcement_keeps_the_sketch_pending(announced, error, sentence):
    m = make()
    frame = m.propose(update(1), context=BEGIN)
    with pytest.raises(error, match=sentence):
        m.proceed(context=Context(phase=VALUES, announced=announced))
    assert m.pending == frame and m.sent_positions.size == 0
    assert values(m, [1, 2]) == m.pending != frame


def test_a_repeated_second_phase_is_answered_again():
    m = make()
    m.propose(update(1), context=BEGIN)
    assert values(m, [1, 2]) == values(m, [1, 2])
    m.commit()
    assert vector(m).count_nonzero() == NUMEL - 2


def test_a_round_without_candidates_sends_no_values():
    m = make()
    m.propose(torch.zeros(NUMEL), context=BEGIN)
    assert NUMBERS.decode(values(m, []), numel=0).numel() == 0 and m.sent_positions.size == 0
    m.commit()
    assert m.pending is None


@for_each("returned", [b"", marks([0], 2)[:-1], marks([0], 3), NUMBERS.encode(torch.ones(2))])
def test_damaged_returned_marks_keep_the_proposal_pending(returned):
    m = make()
    m.propose(update(1), context=BEGIN)
    frame, held = values(m, [1, 2]), vector(m)
    with pytest.raises(FrameError):
        m.commit(returned=returned)
    assert m.pending == frame and same_bits(vector(m), held)
    commit(m, [1, 2], [2])
    assert vector(m)[1] and not vector(m)[2]


def test_the_momentum_of_local_sgd_is_masked_at_accepted_candidates():
    m, momentum = make(), torch.ones(NUMEL)
    m.propose(update(1), context=BEGIN)
    values(m, [1, 2, 3])
    ClientState(m, "", ticket="t", momentum=momentum).settle("t", marks([1], 3))
    assert momentum.nonzero().flatten().tolist() == [i for i in range(NUMEL) if i not in (1, 3)]


def test_a_phase_in_the_wrong_order_is_refused():
    m = make()
    with pytest.raises(ConfigError, match="no proposal is pending"):
        values(m, [1])
    for phase in ("train", VALUES):
        with pytest.raises(
            ConfigError,
            match=f"cannot make a frame for the phase '{phase}'; give --strategy sketched-sgd, or --memory none",
        ):
            m.propose(update(1), context=Context(phase=phase))
        assert m.pending is None and not vector(m).any()
    m.propose(update(1), context=BEGIN)
    with pytest.raises(ConfigError, match="cannot make a frame for the phase 'right'"):
        m.proceed(context=Context(phase="right"))


@for_each("spec", ["stc", "identity", "topk@layer", "topk+fp16"])
def test_other_codecs_are_refused(spec):
    sentence = "--memory sketched needs --strategy sketched-sgd and --uplink sketch, not .*; give both, or --memory dgc"
    with pytest.raises(ConfigError, match=sentence):
        memory("sketched", codec(spec), NUMEL, LAYOUT)


@for_each("momentum", ["1", "-0.1"])
def test_an_invalid_momentum_is_refused(momentum):
    with pytest.raises(SpecError, match="momentum is"):
        make(f"momentum={momentum}")


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_numbers_near_the_largest_float32_stay_finite():
    m = make("momentum=0.9")
    m.propose(torch.full((NUMEL,), 3.4e38), context=BEGIN)
    assert m.codec.decode(m.pending, numel=NUMEL, layout=LAYOUT).isfinite().all()
    assert NUMBERS.decode(values(m, range(NUMEL)), numel=NUMEL).eq(torch.tensor(3.4e38)).all()
    m.rollback()
    with pytest.raises(NonFiniteError, match="sum of residual and update is inf"):
        m.propose(torch.full((NUMEL,), 3.4e38), context=BEGIN)
    assert m.pending is None and vector(m).isfinite().all()
