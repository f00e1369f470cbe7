"""Properties of every memory: a proposal is followed by one commit or rollback, and errors do not change the state."""

import pytest
import torch
from cases import for_each
from every_codec import layout_of, same_bits

from fedcomp import NonFiniteError, available_memories, codec, memory
from fedcomp.codecs import Context
from fedcomp.errors import ConfigError, SpecError
from fedcomp.memories import Memory
from fedcomp.memories.sketched import CANDIDATES, MARKS, SKETCH, VALUES

NUMEL = 401
# Codecs that send every coordinate
DENSE = ("identity", "qsgd:levels=16@layer", "powersgd:rank=1")
CODECS = (*DENSE, "topk:density=1/10", "stc:density=1/10@layer", "sketch:cells=int8")
# Memories whose proposals have several frames, with the context of each phase
IN_PHASES = {
    "sketched": {
        SKETCH: Context(phase=SKETCH),
        VALUES: Context(
            phase=VALUES,
            announced={CANDIDATES: MARKS.encode((torch.arange(NUMEL) % 10 == 0).float())},
        ),
    }
}


def make(name: str, spec: str) -> Memory:
    return memory(name, codec(spec), NUMEL, layout_of(NUMEL))


def accepts(name: str, spec: str) -> bool:
    try:
        return bool(make(name, spec))
    except ConfigError:
        return False


PAIRS = [(name, spec) for name in available_memories() for spec in CODECS if accepts(name, spec)]
every_memory = for_each("name", available_memories())
every_pair = for_each("name, spec", PAIRS)
# Each memory with the first and the last codec in CODECS that it accepts: a dense and a sparse codec, if it accepts both.
two_each = for_each(
    "name, spec",
    dict.fromkeys(
        [
            *{pair[0]: pair for pair in PAIRS[::-1]}.values(),
            *{pair[0]: pair for pair in PAIRS}.values(),
        ]
    ),
)
# Each memory with the last codec that it accepts, for properties that do not depend on the codec.
one_each = for_each("name, spec", [*{pair[0]: pair for pair in PAIRS}.values()])


def update(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def propose(m: Memory, x: torch.Tensor, seed: int = 0) -> bytes:
    """Return the first frame of a proposal."""
    return m.propose(x, seed=seed, context=first_context(m.name))


def propose_batch(memories: list[Memory], x: torch.Tensor, seeds: list[int]) -> list:
    return type(memories[0]).propose_batch(memories, x, seeds, first_context(memories[0].name))


def first_context(name: str) -> Context:
    return next(iter(IN_PHASES.get(name, {"train": Context()}).values()))


def same_state(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        same_bits(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a
    )


def after_proposals(name: str, spec: str) -> Memory:
    """Return a memory after three proposals."""
    m = make(name, spec)
    for seed, settle in enumerate((m.commit, m.rollback, m.commit)):
        propose(m, update(seed), seed)
        for context in list(IN_PHASES.get(name, {}).values())[1:]:
            m.proceed(seed=seed, context=context)
        settle()
    return m


@every_pair
def test_a_proposal_is_a_frame_of_the_codec_and_does_not_modify_the_update(name, spec):
    m, layout = make(name, spec), layout_of(NUMEL)
    for seed in range(3):
        x = update(seed)
        before = x.clone()
        frame = propose(m, x, seed)
        assert isinstance(frame, bytes) and same_bits(x, before)
        assert m.pending == (b"" if (name, spec) == ("none", "identity") else frame)
        assert m.codec.decode(frame, numel=NUMEL, layout=layout).isfinite().all()
        m.commit()


def test_the_memory_none_stores_no_copy_of_a_lossless_frame():
    m = memory("none", codec("identity"), 10_000)
    m.propose(torch.ones(10_000))
    assert m.state_dict() == {"pending": b""} and m.sent_positions is None
    m.commit()
    assert m.state_dict() == {}


@one_each
def test_a_second_proposal_is_refused_while_one_is_pending(name, spec):
    m = after_proposals(name, spec)
    propose(m, update(8))
    before = m.state_dict()
    with pytest.raises(ConfigError, match="a proposal is pending"):
        propose(m, update(9))
    with pytest.raises(ConfigError, match="a proposal is pending"):
        propose_batch([m], update(9)[None], [0])
    assert same_state(m.state_dict(), before)


@one_each
def test_settling_without_a_proposal_is_refused(name, spec):
    for m in (make(name, spec), after_proposals(name, spec)):
        before = m.state_dict()
        for settle in (m.commit, m.rollback):
            with pytest.raises(ConfigError, match="no proposal is pending"):
                settle()
        assert m.pending is None and same_state(m.state_dict(), before)


@one_each
def test_a_nonfinite_update_does_not_change_the_memory(name, spec):
    for m in (make(name, spec), after_proposals(name, spec)):
        x, before = update(8), m.state_dict()
        x[266] = float("nan")
        with pytest.raises(NonFiniteError, match="nan in tensor 'b', element 0"):
            propose(m, x)
        assert m.pending is None and same_state(m.state_dict(), before)
        (error,) = propose_batch([m], x[None].clone(), [0])
        assert isinstance(error, NonFiniteError) and "tensor 'b', element 0" in str(error)
        assert m.pending is None and same_state(m.state_dict(), before)


@one_each
def test_an_update_of_another_model_is_refused(name, spec):
    m = after_proposals(name, spec)
    before = m.state_dict()
    for x in (torch.ones(1), torch.ones(NUMEL + 1), torch.ones(1, NUMEL)):
        with pytest.raises(ConfigError, match=f"the memory needs vectors of {NUMEL} elements"):
            propose(m, x)
        with pytest.raises(ConfigError, match=f"the memory needs vectors of {NUMEL} elements"):
            propose_batch([m], x[None], [0])
    assert m.pending is None and same_state(m.state_dict(), before)


@every_pair
def test_sent_positions_are_those_of_the_pending_frame(name, spec):
    m, layout = after_proposals(name, spec), layout_of(NUMEL)
    assert m.sent_positions.size == 0
    y = m.codec.decode(propose(m, update(8)), numel=NUMEL, layout=layout)
    read = (
        [] if name in IN_PHASES else y.nonzero().flatten().tolist()
    )  # the first frame alone sends no values
    assert m.sent_positions is None if spec in DENSE else m.sent_positions.tolist() == read
    m.rollback()
    assert m.sent_positions.size == 0


@one_each
@for_each("settle", ["commit", "rollback"])
def test_a_state_loaded_during_a_proposal_continues_with_the_same_bits(name, spec, settle):
    stayed = after_proposals(name, spec)
    propose(stayed, update(8), 8)
    state = stayed.state_dict()
    assert all(
        isinstance(v, bytes) or (v.dtype == torch.float32 and v.shape == (NUMEL,))
        for v in state.values()
    )
    moved = make(name, spec)
    moved.load_state_dict(state)
    assert moved.pending == stayed.pending
    getattr(stayed, settle)()
    getattr(moved, settle)()
    for seed in (9, 10):
        assert propose(moved, update(seed), seed) == propose(stayed, update(seed), seed)
        assert same_state(moved.state_dict(), stayed.state_dict())
        stayed.commit()
        moved.commit()
    assert same_state(moved.state_dict(), stayed.state_dict())


@one_each
def test_the_state_of_a_settled_memory_has_no_proposal(name, spec):
    m = after_proposals(name, spec)
    assert "pending" not in m.state_dict()
    propose(m, update(8))
    m.load_state_dict(after_proposals(name, spec).state_dict())
    assert m.pending is None


@two_each
def test_memories_of_a_stack_behave_like_single_ones(name, spec):
    dtype = torch.bfloat16 if "@layer" in spec else torch.float32
    each, stacked = (
        [
            make(name, spec),
            after_proposals(name, spec),
            make(name, spec),
            after_proposals(name, spec),
        ]
        for _ in range(2)
    )
    for round in range(3):
        x = torch.stack([update(10 * round + i) for i in range(4)]).to(dtype)
        x[:, ::9] = -0.0
        if round == 1:
            x[2, 399] = float("inf")
        seeds = [100 * round + i for i in range(4)]
        frames = propose_batch(stacked, x.clone(), seeds)
        for i, (m, other) in enumerate(zip(each, stacked, strict=True)):
            try:
                assert propose(m, x[i], seeds[i]) == frames[i]
            except NonFiniteError as error:
                assert str(error) == str(frames[i]) and i == 2 and round == 1
            assert m.pending == other.pending and same_state(m.state_dict(), other.state_dict())
        for memory_ in (each[round], stacked[round]):
            if memory_.pending is not None:
                memory_.rollback()
        for m in each:
            if m.pending is not None:
                m.commit()
        type(stacked[0]).commit_batch([m for m in stacked if m.pending is not None])
        for m, other in zip(each, stacked, strict=True):
            assert same_state(m.state_dict(), other.state_dict())
            own = [v for v in other.state_dict(copy=False).values() if isinstance(v, torch.Tensor)]
            assert all(v.untyped_storage().nbytes() == 4 * NUMEL for v in own), (
                "the state must not share the storage of the stack"
            )


@every_memory
def test_every_memory_is_tested_with_at_least_one_codec(name):
    assert any(name == paired for paired, _ in PAIRS)


@one_each
def test_memories_loaded_from_one_state_share_nothing(name, spec):
    first, second, third = after_proposals(name, spec), make(name, spec), make(name, spec)
    state = first.state_dict()
    before = first.state_dict()
    second.load_state_dict(state)
    third.load_state_dict(state)
    for m in (first, second):
        propose(m, update(8))
        m.commit()
    assert same_state(state, before) and same_state(third.state_dict(), before)


@every_memory
def test_an_empty_stack_returns_no_frames(name):
    assert available_memories()[name].propose_batch([], torch.empty(0, NUMEL), []) == []


@every_memory
def test_a_layout_of_another_model_is_refused(name):
    with pytest.raises(ConfigError, match="layout has 400 elements, but numel is 401"):
        memory(name, codec("stc"), 401, layout_of(400))


@every_memory
def test_an_empty_vector_can_be_proposed(name):
    m = memory(name, codec(next(spec for paired, spec in PAIRS if paired == name)), 0, layout_of(0))
    propose(m, torch.empty(0))
    m.commit()
    propose(m, torch.empty(0))
    m.rollback()


@for_each(
    "text, sentence",
    [
        ("residaul", "unknown memory 'residaul'; did you mean 'residual'"),
        ("nothing", "unknown memory 'nothing'"),
        ("", "incomplete"),
        ("none:beta=1", "memory 'none' has no option 'beta'; it takes no options"),
        ("residual:decay=1.1", "decay is 1.1; give 0 to 1"),
        ("residual@layer", "a memory has no scope"),
        (
            "none+residual",
            "a memory has no scope (@…) and no second part (+…); leave out '@' and '+', and name one memory",
        ),
    ],
)
def test_errors_in_specs_say_how_to_fix_them(text, sentence):
    with pytest.raises(SpecError) as caught:
        memory(text, codec("stc"), NUMEL)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_available_memories_returns_a_copy():
    available_memories().clear()
    assert {name: cls.name for name, cls in available_memories().items()} == {
        name: name for name in available_memories()
    }
    assert {"none", "residual"} <= available_memories().keys()


@for_each(
    "name, spec",
    [
        ("residual", "drive:damped=true"),
        ("residual", "eden:bits=1,damped=true"),
        ("residual", "topk:density=1/2+drive:damped=true"),
        ("ecq:alpha=0.5,beta=0.6", "drive:damped=true"),
        ("ef21", "drive:damped=true"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_state_stays_finite_for_updates_near_the_largest_float32(name, spec):
    m = memory(name, codec(spec), NUMEL, layout_of(NUMEL))
    x = 3.4e38 * torch.sin(torch.arange(NUMEL) + 1.0)
    for seed in range(4):
        m.propose(x if seed == 0 else 0 * x, seed=seed)
        m.commit()
        assert all(
            v.isfinite().all() for v in m.state_dict().values() if isinstance(v, torch.Tensor)
        )
