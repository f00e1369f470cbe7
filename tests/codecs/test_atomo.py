"""The codec `atomo`: the probabilities of drawing atoms, the mean and the variance of decoded vectors, and the number of sent atoms."""

import numpy as np
import pytest
import torch
from cases import for_each
from hypothesis import given
from hypothesis import strategies as st

from fedcomp import Layout, codec
from fedcomp.codecs.atomo import ONE, Atomo, draw, probabilities
from fedcomp.errors import SpecError

LAYOUT = Layout.from_shapes({"w": (15, 20), "b": (5,)})


def update(seed: int = 0) -> torch.Tensor:
    """Return a matrix with decreasing singular values, followed by 5 normal values."""
    rng = np.random.default_rng(seed)
    u, v = (
        np.linalg.qr(rng.standard_normal((15, 15))).Q,
        np.linalg.qr(rng.standard_normal((20, 15))).Q,
    )
    m = (u * 0.7 ** np.arange(15)) @ v.T
    return torch.from_numpy(np.concatenate([m.ravel(), rng.standard_normal(5)]).astype(np.float32))


def probabilities_of_the_paper(sizes: np.ndarray, s: float) -> np.ndarray:
    """Algorithm 1 of the paper: large atoms have probability 1, and the other atoms divide the remaining budget."""
    order, p = np.argsort(-sizes, kind="stable"), np.zeros(len(sizes))
    for i in range(len(sizes)):
        rest = sizes[order[i:]].sum()
        if rest == 0 or s <= 0:
            break
        if sizes[order[i]] * s <= rest:
            p[order[i:]] = sizes[order[i:]] * s / rest
            break
        p[order[i]], s = 1.0, s - 1
    return p


sizes_of = st.lists(
    st.sampled_from([0.0, 1e-20, 0.01, 1.0, 1.5, 7.0, 1e10]) | st.floats(0, 100, width=32),
    min_size=1,
    max_size=30,
)


@given(sizes_of, st.floats(1, 40))
def test_the_probabilities_are_those_of_the_paper(sizes, budget):
    sizes = np.array(sizes)
    p = probabilities(sizes, budget) / ONE
    np.testing.assert_allclose(
        p, probabilities_of_the_paper(sizes, budget), rtol=1e-6, atol=2 / ONE
    )
    assert ((p > 0) == (sizes > 0)).all() and (p <= 1).all()
    assert p.sum() == pytest.approx(min(budget, np.count_nonzero(sizes)), abs=1e-6)


@given(sizes_of, st.floats(1, 10), st.integers(0, 2**32))
def test_the_probabilities_minimize_the_variance(sizes, budget, seed):
    sizes = np.array(sizes)[np.array(sizes) > 1e-3]
    if not len(sizes) > budget:
        return
    p = probabilities(sizes, budget) / ONE
    other = np.random.default_rng(seed).dirichlet(np.ones(len(sizes))) * budget * 0.5 + 0.5 * p
    other = np.minimum(other, 1.0)  # another distribution within the budget
    assert np.sum(sizes**2 / p) <= np.sum(sizes**2 / other) * (1 + 1e-6)


def test_each_atom_is_drawn_with_its_probability():
    sizes = np.array([5.0, 0.0, 3.0, 1.0, 1.0, 0.5, 0.01])
    shares, counts = probabilities(sizes, 2.5), np.zeros(7)
    for seed in range(1500):
        drawn = draw(shares, seed)
        assert len(drawn) in (2, 3) and (np.diff(drawn) > 0).all()
        counts[drawn] += 1
    p = shares / ONE
    assert (abs(counts - 1500 * p) <= 5 * np.sqrt(1500 * p * (1 - p)) + 1e-9).all()
    assert (draw(shares, 3) == draw(shares, 3)).all() and any(
        len(draw(shares, 0)) != len(draw(shares, i, 1)) for i in range(20)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        "atomo:budget=2",
        "atomo:budget=20%",
        "atomo:budget=25,atoms=entries",
        "atomo:budget=10%,atoms=entries",
    ],
)
def test_the_mean_over_seeds_is_the_update_with_the_least_variance(spec):
    c, x = codec(spec), update()
    draws = torch.stack(
        [
            c.decode(c.encode(x, seed=seed, layout=LAYOUT), numel=305, layout=LAYOUT)
            for seed in range(150)
        ]
    ).double()
    lost = draws - x
    entries = c.atoms == "entries"
    sizes = (
        abs(x.double().numpy())
        if entries
        else np.linalg.svd(x[:300].double().numpy().reshape(15, 20), compute_uv=False)
    )
    budget = c.budget if c.budget >= 1 else c.budget * len(sizes)
    p = probabilities_of_the_paper(sizes, budget)
    least = np.sum(sizes**2 / p) - np.sum(sizes**2)
    assert float(lost.square().sum(1).mean()) == pytest.approx(least, rel=0.2)
    assert float(lost.mean(0).square().sum()) <= 3 * least / 150
    assert least <= c.variance(305) * float(x.double().square().sum())
    if not entries:
        # Values outside of matrices are sent exactly.
        assert torch.equal(draws[0, 300:], x[300:].double())


@for_each(
    "budget, sent",
    [
        ("1", {1}),
        ("7", {7}),
        ("7.5", {7, 8}),
        ("1%", {3, 4}),
        ("10%", {30, 31}),
        ("304", {304}),
        ("999", {305}),
    ],
)
def test_the_budget_determines_the_number_of_entries(budget, sent):
    c, x = codec(f"atomo:budget={budget},atoms=entries"), update()
    assert {c.open(c.encode(x, seed=seed), 305).nonzeros for seed in range(30)} == sent


def test_a_budget_for_all_atoms_sends_the_update_without_loss():
    x = update()
    for spec in ("atomo:budget=305,atoms=entries", "atomo:budget=15", "atomo:budget=99.9%"):
        assert torch.equal(
            codec(spec).decode(codec(spec).encode(x, layout=LAYOUT), numel=305, layout=LAYOUT), x
        ), spec
    assert (
        codec("atomo:budget=305,atoms=entries").variance(305)
        == codec("atomo:budget=20").variance(305)
        == 0
    )


def test_a_small_budget_gives_short_frames():
    x = update()
    lengths = [
        len(codec(f"atomo:budget={budget}").encode(x, layout=LAYOUT)) for budget in (1, 2, 3)
    ]
    assert np.diff(lengths).tolist() == [4 * 35, 4 * 35]


def test_a_matrix_of_rank_one_is_sent_as_one_triplet():
    m = torch.outer(torch.arange(1.0, 16), torch.arange(-5.0, 15)).ravel()
    layout = Layout.from_shapes({"w": (15, 20)})
    frame = Atomo(budget=3).encode(m, layout=layout)
    assert len(frame) == len(codec("powersgd:rank=1").encode(m, layout=layout)) + 1
    torch.testing.assert_close(Atomo().decode(frame, numel=300, layout=layout), m)


@pytest.mark.parametrize("largest", [3.4028235e38, 2.0**-149])
def test_entries_stay_in_the_range_of_float32(largest):
    x = torch.linspace(-1, 1, 200) * largest
    c = codec("atomo:atoms=entries")
    draws = torch.stack([c.decode(c.encode(x, seed=seed), numel=200) for seed in range(100)])
    assert draws.isfinite().all() and (draws.sign() * x.sign() >= 0).all()
    if largest > 1:  # all atoms are certain
        assert (draws.double().mean(0) - x).abs().max() < 0.09 * largest


@for_each("budget", ["0", "-1"])
def test_an_invalid_budget_is_rejected(budget):
    with pytest.raises(
        SpecError, match="give a number of atoms, or a fraction below 1, such as 1%"
    ):
        codec(f"atomo:budget={budget}")
