"""The codec `powersgd`: one step of power iteration from a random or an announced initial factor."""

import numpy as np
import pytest
import torch
from cases import for_each

from fedcomp import Layout, codec
from fedcomp.codecs import Context
from fedcomp.codecs.matrices import LowRankUpdate
from fedcomp.codecs.powersgd import FactorLayout, PowerSGD, factors_are_smaller, normal, orthonormal
from fedcomp.errors import ConfigError, SpecError

ROWS, COLUMNS = 12, 17
LAYOUT = Layout.from_shapes({"w": (ROWS, COLUMNS)})


def matrix(rank: int = ROWS, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((ROWS, rank)) @ rng.standard_normal((rank, COLUMNS))).astype(
        np.float32
    )


def sent(m: np.ndarray, rank: int, seed: int = 0, start: np.ndarray | None = None) -> np.ndarray:
    announced = {} if start is None else {"right/0": start.astype("<f4").tobytes()}
    c, x = PowerSGD(rank), torch.from_numpy(m.ravel())
    frame = c.encode(x, seed=seed, layout=LAYOUT, context=Context(announced=announced))
    return c.decode(frame, numel=m.size, layout=LAYOUT).numpy().reshape(m.shape).astype(np.float64)


@for_each("rank", [1, 2, 5])
def test_a_frame_holds_the_factors_of_the_paper(rank):
    m, start = (
        matrix().astype(np.float64),
        np.random.default_rng(1).standard_normal((COLUMNS, rank)).astype(np.float32),
    )
    basis = np.linalg.qr(m @ start).Q
    np.testing.assert_allclose(
        sent(m.astype(np.float32), rank, start=start), basis @ (basis.T @ m), atol=1e-5
    )


def test_a_matrix_of_the_given_rank_is_exact():
    for rank in (1, 2, 4):
        np.testing.assert_allclose(sent(matrix(rank), rank), matrix(rank), atol=1e-5)
        np.testing.assert_allclose(sent(matrix(1), rank), matrix(1), atol=1e-5)


def test_the_error_is_not_larger_than_the_matrix_for_any_start():
    m = matrix()
    starts = [
        np.zeros((COLUMNS, 2)),
        np.ones((COLUMNS, 2)),
        np.eye(COLUMNS, 2),
        np.full((COLUMNS, 2), 3e38),
        np.full((COLUMNS, 2), 1e-45),
    ]
    null = (
        np.linalg.svd(np.vstack([m[:8], np.zeros((1, COLUMNS))])).Vh[-2:].T
    )  # vectors that the first rows map to zero
    for start in [*starts, null]:
        for values in (m, m * (np.arange(ROWS) < 8)[:, None]):
            lost = values - sent(values.astype(np.float32), 2, start=start)
            assert np.square(lost).sum() <= np.square(values, dtype=np.float64).sum() * (1 + 1e-7)


@for_each("rank", [1, 2, 4])
def test_the_mean_contraction_over_seeds_is_as_declared(rank):
    """An orthogonal matrix is the worst case: a projection to `rank` dimensions keeps only the fraction rank/12 of its square."""
    layout, flat = (
        Layout.from_shapes({"w": (ROWS, ROWS)}),
        np.linalg.qr(matrix()[:, :ROWS]).Q.astype(np.float32),
    )
    c, x = PowerSGD(rank), torch.from_numpy(flat.ravel())
    kept = [
        1
        - float(
            (x - c.decode(c.encode(x, seed=s, layout=layout), numel=144, layout=layout))
            .square()
            .sum()
        )
        / 12
        for s in range(20)
    ]
    assert np.mean(kept) == pytest.approx(rank / 12, rel=1e-4) and c.contraction(144) <= rank / 12
    assert c.contraction(144) == rank * (rank + 1) / 144


def test_seeds_and_tensors_have_different_starts():
    layout = Layout.from_shapes({"a": (ROWS, COLUMNS), "b": (ROWS, COLUMNS)})
    x = torch.from_numpy(np.tile(matrix().ravel(), 2))
    frames = [PowerSGD(1).encode(x, seed=seed, layout=layout) for seed in (0, 0, 1)]
    assert frames[0] == frames[1] != frames[2]
    a, b = PowerSGD(1).decode(frames[0], numel=x.numel(), layout=layout).view(2, -1)
    assert not torch.allclose(a, b, atol=1e-3)


def test_warm_starts_converge_to_the_best_factors():
    m, start = matrix(), None
    singular = np.linalg.svd(m, compute_uv=False).astype(np.float64)
    errors = []
    for _ in range(40):
        x = torch.from_numpy(m.ravel())
        announced = {} if start is None else {"right/0": start}
        update = PowerSGD(2).open(
            PowerSGD(2).encode(x, layout=LAYOUT, context=Context(announced=announced)),
            m.size,
            LAYOUT,
        )
        ((_, product),) = update.parts
        assert isinstance(product, LowRankUpdate)
        start = product.right.tobytes()
        errors.append(float((x.double() - update.dense()).square().sum()))
    assert errors[0] > errors[1] > errors[5] and errors[-1] == pytest.approx(
        np.square(singular[2:]).sum(), rel=1e-3
    )


def test_a_start_of_another_size_is_rejected():
    for start in (np.ones((COLUMNS, 1)), np.ones((COLUMNS + 1, 2)), np.ones(0)):
        with pytest.raises(ConfigError, match=r"has [0-9]+ bytes; announce 17·2 float32 numbers"):
            sent(matrix(), 2, start=start)


def test_factors_are_sent_if_they_are_fewer_numbers():
    assert [
        factors_are_smaller(2, rows, columns)
        for rows, columns in [(2, 100), (3, 6), (3, 7), (4, 4), (5, 4), (1, 1)]
    ] == [False, False, True, False, True, False]
    for shape in [(3, 6), (3, 7), (2, 100), (4, 4), (5, 4)]:
        layout = Layout.from_shapes({"w": shape})
        frame = PowerSGD(2).encode(torch.ones(layout.numel), layout=layout)
        assert len(frame) - len(
            PowerSGD(2).encode(torch.zeros(layout.numel), layout=layout)
        ) == 4 * min(2 * sum(shape), layout.numel)


def test_a_basis_is_orthonormal_for_any_matrix():
    for p in (
        matrix()[:, :3],
        np.zeros((ROWS, 3)),
        np.ones((ROWS, 3)),
        1e-40 * matrix()[:, :3],
        3e38 * np.eye(ROWS, 3),
    ):
        q = orthonormal(torch.from_numpy(p))
        np.testing.assert_allclose(q.T @ q, np.eye(3), atol=1e-6)


def test_starts_are_normally_distributed():
    draws = normal(7, 100_000)
    assert abs(draws.mean()) < 0.02 and abs(draws.std() - 1) < 0.01
    assert [np.mean(abs(draws) < s) for s in (1, 2, 3)] == pytest.approx(
        [0.6827, 0.9545, 0.9973], abs=0.006
    )
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
    assert (
        (normal(7, 50) == normal(7, 50)).all()
        and (normal(7, 50) != normal(8, 50)).any()
        and (normal(7, 50) != normal(7, 50, 1)).any()
    )


def test_a_factor_layout_restores_the_update():
    layout = Layout.from_shapes(
        {
            "b": (5,),
            "w": (ROWS, COLUMNS),
            "none": (0, 3),
            "small": (2, 2),
            "k": (6, 2, 2, 3),
            "one": (),
        }
    )
    factors = FactorLayout(layout, 2)
    assert (
        factors.left_shapes == [(12, 2), (6, 2)]
        and factors.right_shapes == [(17, 2), (12, 2)]
        and factors.other_shapes == [(5,), (0,), (4,), (1,)]
    )
    x = torch.arange(layout.numel, dtype=torch.float32)
    left = [
        np.linalg.qr(np.random.default_rng(i).standard_normal(shape)).Q.astype("<f4")
        for i, shape in enumerate(factors.left_shapes)
    ]
    right = [m.numpy().T @ p for m, p in zip(factors.matrices_of(x), left, strict=True)]
    rest = [x[e.span].numpy() for e in factors.others]
    numbers = np.concatenate([part.ravel() for part in (*right, *rest)]).astype(np.float32)
    y = factors.update(b"".join(p.tobytes() for p in left), numbers).dense()
    for e in layout:
        if e.name in ("w", "k"):
            p = left[[f for f, _ in factors.matrices].index(e)].astype(np.float64)
            projected = p @ (p.T @ x[e.span].numpy().reshape(len(p), -1))
            np.testing.assert_allclose(y[e.span], projected.ravel(), rtol=1e-4, atol=1e-3)
        else:
            assert torch.equal(y[e.span], x[e.span])


@for_each("rank", ["0", "-1", "255"])
def test_an_invalid_rank_is_rejected(rank):
    with pytest.raises(SpecError, match=f"rank is {rank}; give 1 to 254"):
        codec(f"powersgd:rank={rank}")
