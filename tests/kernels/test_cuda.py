"""What Triton does to stacks: on a GPU, or on the CPU by its interpreter. The reference is what numpy does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from every_codec import same_bits

pytestmark = pytest.mark.slow  # kernels for GPUs are interpreted

pytest.importorskip("triton.language")

from fedcomp import NonFiniteError, codec, kernels  # noqa: E402
from fedcomp.kernels import backend, count_sketch, cuda, philox, rounding, select  # noqa: E402

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
N = 70_001  # no multiple of anything; below the size at which a CPU takes compiled loops


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton serves vectors on the CPU here, and nowhere else."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield


@contextmanager
def elsewhere() -> Iterator[None]:
    """Triton serves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "serves", lambda x: False)
        yield


def stack(seed: int = 0) -> torch.Tensor:
    """Rows that are hard: plain, with ties at the cut, sparse, zero, of one value, of all scales, with the large ones side by side."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((7, N)).astype(np.float32)
    x[1] = np.round(2 * x[1])
    x[2] *= draw.random(N) < 0.001
    x[3] = 0
    x[4] = 0.25
    x[5] *= np.float32(10.0) ** np.linspace(-37, 37, N, dtype=np.float32)
    x[6, :500] += 100
    return torch.from_numpy(x).to(DEVICE)


def by_numpy(x: torch.Tensor, k: int, of) -> list[np.ndarray]:
    found = []
    for row in x.float().cpu().numpy():
        keys = of(row)
        first = np.argsort(-keys, kind="stable")[:k]
        found.append(np.sort(first[keys[first] > 0]))
    return found


def rows_of(
    rows: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor, m: int
) -> list[np.ndarray]:
    assert torch.equal(rows.cpu(), torch.arange(m).repeat_interleave(counts.cpu()))
    return np.split(positions.cpu().numpy(), counts.cumsum(0).cpu().numpy()[:-1])


@pytest.mark.parametrize(("k", "dtype"), [(1, torch.bfloat16), (1000, torch.float32)])
def test_the_largest_magnitudes_of_every_row(k, dtype):
    x = stack().to(dtype)
    assert cuda.suits(x, k)
    found = rows_of(*kernels.top_k_rows(x, k), len(x))
    assert all(map(np.array_equal, found, by_numpy(x, k, abs)))


def test_the_side_with_the_larger_mean_of_every_row():
    x, k = stack(), 175
    *found, positive = kernels.top_side_rows(x, k)
    up, down = by_numpy(x, k, lambda row: row.clip(0)), by_numpy(x, k, lambda row: (-row).clip(0))
    for row, got, won, a, b in zip(
        x.cpu().numpy(), rows_of(*found, len(x)), positive.tolist(), up, down, strict=True
    ):
        means = [
            np.cumsum(abs(row[at]), dtype=np.float64)[-1] / at.size if at.size else 0.0
            for at in (a, b)
        ]
        assert won == (means[0] >= means[1])
        assert np.array_equal(got, a if won else b)


@pytest.mark.parametrize("shape", ["spread", "ties"])
def test_a_sum_is_selected_from_and_then_made(shape):
    x, e = stack()[0], stack(1)[1] if shape == "ties" else stack(1)[0]
    total = e + x
    (expected,) = by_numpy(total[None], 175, abs)
    assert np.array_equal(kernels.top_k_added(e, x, 175).cpu().numpy(), expected)
    assert torch.equal(e, total)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning"
)  # of numpy, beneath the interpreter
def test_a_sum_that_is_not_finite_is_named_and_not_made():
    x, e = stack()[0].clone(), stack(1)[0]
    e[[69_999, 70_000]], x[[69_999, 70_000]] = 3e38, 3e38
    before = e.clone()
    with pytest.raises(NonFiniteError) as caught:
        kernels.top_k_added(e, x, 175)
    assert caught.value.position == 69_999 and torch.equal(e, before)
    for value in (float("nan"), float("-inf")):
        x[70_000] = value
        assert cuda.select(
            None,
            stack().index_copy(0, torch.tensor([2], device=DEVICE), x[None]),
            9,
            *select.MAGNITUDES,
        ).finite.tolist() == [True, True, False, True, True, True, True]


def test_rows_where_the_sample_says_too_little_are_missed_and_told():
    x = torch.zeros(2, N, device=DEVICE)
    stretches = cuda.SAMPLED * cuda.STEP
    x[0, 40:4000] = 1.0
    for start in range(0, 30 * stretches, stretches):
        x[0, start : start + 4] = 5.0  # the sample holds all of them and takes them for one in 64
        x[1, start + cuda.SAMPLED : start + stretches] = 1.0  # the sample holds none
    found = cuda.select(None, x, 500, *select.MAGNITUDES)
    assert found.missed.all()
    assert all(map(np.array_equal, rows_of(*kernels.top_k_rows(x, 500), 2), by_numpy(x, 500, abs)))


def test_it_serves_where_it_pays():
    x = torch.zeros(2, N, device=DEVICE)
    assert (
        not cuda.suits(x[:, :1000].contiguous(), 1)
        and not cuda.suits(x, N // 2)
        and not cuda.suits(x.T, 1)
    )
    assert cuda.LONG <= N < backend.LARGE


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 5000])
def test_signs_eight_a_byte(n):
    x = torch.round(
        torch.from_numpy(np.random.default_rng(n).standard_normal((3, n)).astype(np.float32))
    ).to(DEVICE)
    assert np.array_equal(
        cuda.pack_signs(x).cpu().numpy(), np.packbits(x.cpu().numpy() >= 0, axis=1)
    )


@pytest.mark.parametrize("count", [0, 1, 4, 8190, 20_001])
def test_words_are_those_of_the_other_devices(count):
    seeds = [17 | 23 << 32, 2**64 - 1, 0]
    drawn = cuda.words(seeds, count, torch.device(DEVICE), stream=3).cpu().numpy().view(np.uint32)
    assert drawn.shape == (3, count)
    assert all(
        np.array_equal(row, philox.words(seed, count, stream=3))
        for row, seed in zip(drawn, seeds, strict=True)
    )


@pytest.mark.parametrize("n", [0, 5, 4097])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiples_are_those_of_the_other_devices(n, dtype):
    x = torch.from_numpy(np.random.default_rng(n).standard_normal((3, n)).astype(np.float32)).to(
        DEVICE, dtype
    )
    units, limits, seeds = [0.1, 1e-3, 0.25], [2.5, 3.0, 100.0], [5, 2**63 + 1, 0]
    made = cuda.to_multiples(x, units, limits, seeds, torch.int16).cpu().numpy()
    for row, *given, levels in zip(x, units, limits, seeds, made, strict=True):
        with elsewhere():
            assert np.array_equal(rounding.to_multiples(row, *given), levels)
        assert np.array_equal(rounding.to_multiples(row, *given), levels)


@pytest.mark.parametrize("n", [1, 5, 4097])
def test_powers_are_those_of_the_other_devices(n):
    draw = np.random.default_rng(n)
    x = draw.standard_normal((3, n)) * 10.0 ** draw.integers(-44, 30, (3, n))
    x[0, 0] = 0
    x, shifts, seeds = (
        torch.from_numpy(x.astype(np.float32)).to(DEVICE),
        [23, 3, 0],
        [5, 2**63 + 1, 0],
    )
    made = cuda.to_powers(x, shifts, seeds).cpu().numpy()
    for row, shift, seed, codes in zip(x, shifts, seeds, made, strict=True):
        with elsewhere():
            assert np.array_equal(rounding.to_powers(row, shift, seed), codes)
        assert np.array_equal(rounding.to_powers(row, shift, seed), codes)


@pytest.mark.parametrize(
    ("spec", "n"),
    [
        ("topk:density=1/400", N),
        ("sbc:density=1/400", N),
        ("sign", 20_001),
        ("qsgd:levels=4", 4097),
        ("terngrad", 4097),
        ("natural", 4097),
    ],
)
def test_frames_are_those_of_the_other_devices(spec, n):
    c, x = codec(spec), stack()[:2, :n].contiguous()
    frames = c.encode_batch(x, [4, 5])
    assert c.encode(x[0], seed=4) == frames[0]
    with elsewhere():
        assert c.encode_batch(x.cpu(), [4, 5]) == frames


@pytest.mark.parametrize(
    ("n", "rows", "columns"), [(0, 1, 1), (1, 1, 1), (5, 15, 64), (4097, 5, 1000)]
)
def test_a_sketch_of_whole_numbers_is_that_of_the_other_devices(n, rows, columns):
    x, seed = (
        torch.round(
            9 * torch.from_numpy(np.random.default_rng(n).standard_normal(n).astype(np.float32))
        ).to(DEVICE),
        2**63 + n,
    )
    for values in (x, x.to(torch.bfloat16)):
        cells = count_sketch.sketch(values, rows, columns, seed)
        with elsewhere():
            assert np.array_equal(count_sketch.sketch(values, rows, columns, seed), cells)


def test_a_sketch_is_that_of_the_other_devices_to_rounding_and_always_the_same():
    n, placed = 4097, count_sketch.places(np.arange(4097), 3, 500, 17)
    for x in stack()[[0, 1, 5], -n:]:
        cells, exact = count_sketch.sketch(x, 3, 500, 17), np.zeros((3, 500))
        assert np.array_equal(cells, count_sketch.sketch(x, 3, 500, 17))
        v = x.cpu().double().numpy()
        for row, (buckets, negative) in zip(exact, placed, strict=True):
            np.add.at(row, buckets, np.where(negative, -v, v))
        with elsewhere():
            others = count_sketch.sketch(x, 3, 500, 17)
        assert (
            np.abs(cells - exact) <= 2.0**-24 * np.abs(exact) + n * 2.0**-50 * np.abs(v).max()
        ).all()
        assert (np.abs(others - exact) <= n * 2.0**-24 * np.abs(v).max()).all()


def test_what_float32_cannot_hold_is_cut_from_a_sketch():
    x = torch.full((5,), 3.4e38, device=DEVICE)
    cells = count_sketch.sketch(x, 15, 1, 3)
    with elsewhere():
        assert (
            np.array_equal(cells, count_sketch.sketch(x, 15, 1, 3))
            and np.abs(cells).max() == np.finfo(np.float32).max
        )


@pytest.mark.parametrize(("n", "rows"), [(0, 3), (1, 1), (5, 15), (4097, 5)])
def test_estimates_are_those_of_the_other_devices(n, rows):
    cells = np.random.default_rng(n).standard_normal((rows, 100)).astype(np.float32)
    cells[0, :50] = -0.0
    found = count_sketch.estimates_on(DEVICE, cells, 2**64 - 1, n).cpu().numpy()
    with elsewhere():
        assert same_bits(found, count_sketch.estimates(cells, 2**64 - 1, 0, n))


@pytest.mark.parametrize("spec", ["sketch:rows=3", "sketch:rows=3,density=1,cells=int8"])
def test_a_frame_of_a_sketch_is_read_as_on_the_other_devices(spec):
    c, x = codec(spec), stack()[0, :4097].contiguous()
    frame, into = c.encode(x, seed=5), torch.ones(4097, device=DEVICE)
    c.accumulate(frame, into, -0.5)
    with elsewhere():
        expected = torch.ones(4097)
        c.accumulate(frame, expected, -0.5)
    assert same_bits(into.cpu(), expected)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedcomp.kernels import triton_loops as loops

whole = dict(WITH_E="constexpr", BLOCK="constexpr")
rows = dict(e_ptr="*fp32", x_ptr="*fp32", floor_ptr="*i32", found_ptr="*i64", count_ptr="*i32", strange_ptr="*i32")
calls = [(loops.collect, rows | dict(n="i32", room="i32", flip="i32", mask="i32") | whole, dict(WITH_E=added, BLOCK=loops.BLOCK))
         for added in (True, False)]
calls += [(loops.pack_signs, dict(x_ptr=f"*{kind}", out_ptr="*u8", n="i32", width="i32", BLOCK="constexpr"), dict(BLOCK=loops.BLOCK))
          for kind in ("fp32", "bf16")]
words = dict(key_ptr="*i64", out_ptr="*i32", count="i32", STREAM="constexpr", BLOCK="constexpr")
calls += [(loops.fill_words, words, dict(STREAM=1, BLOCK=loops.BLOCK))]
rounded = dict(x_ptr="*fp32", scale_ptr="*fp64", limit_ptr="*fp64", key_ptr="*i64", out_ptr="*i8", n="i32", BLOCK="constexpr")
calls += [(loops.multiples, rounded, dict(BLOCK=loops.BLOCK))]
exponents = dict(x_ptr="*fp32", factor_ptr="*fp32", key_ptr="*i64", out_ptr="*u8", n="i32", BLOCK="constexpr")
calls += [(loops.powers, exponents, dict(BLOCK=loops.BLOCK))]
columns = dict(key_ptr="*i64", n="i32", columns="i32", STREAM="constexpr", BLOCK="constexpr")
calls += [(loops.sketch, dict(x_ptr="*fp32", scale_ptr="*fp64", cells_ptr="*i64") | columns, dict(STREAM=65536, BLOCK=loops.BLOCK))]
medians = dict(cells_ptr="*fp32", out_ptr="*fp32", ROWS="constexpr") | columns
calls += [(loops.estimate, medians, dict(ROWS=5, STREAM=65536, BLOCK=loops.BLOCK))]
for function, signature, constants in calls:
    made = triton.compile(ASTSource(fn=function, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    print(function.__name__, len(made.asm["cubin"]))
"""


def test_they_compile_for_a_gpu_that_is_not_here():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "collect",
        "collect",
        "pack_signs",
        "pack_signs",
        "fill_words",
        "multiples",
        "powers",
        "sketch",
        "estimate",
    ]
