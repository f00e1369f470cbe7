"""Sketches too small to contract are noticed in the first rounds, by measuring, with the size that would do; larger ones are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import for_each
from small_runs import TINY, out
from test_memories import Sentences

from fedcomp import RunConfig, codec
from fedcomp.layout import Layout
from fedcomp.sim import simulate
from fedcomp.sim.contraction import Contraction, enough, error, written

SMALL = "sketch:rows=5,columns=2000,density=1/200"
LARGE = "sketch:rows=5,columns=8000,density=1/200"


def power_law(seed: int, numel: int = 200_000) -> torch.Tensor:
    """x_i = ±i^-0.5, in any order."""
    draw = np.random.default_rng(seed)
    return torch.from_numpy(
        (
            draw.choice([-1.0, 1.0], numel) * draw.permutation(np.arange(1, numel + 1)) ** -0.5
        ).astype(np.float32)
    )


def noticed(
    spec: str, updates: list[torch.Tensor], rounds: int = 4, layout: Layout | None = None, **told
) -> list[str]:
    sentences: list[str] = []
    contraction = Contraction(sentences.append, **told)
    for round in range(1, rounds + 1):
        for update in updates:
            contraction.look(round, codec(spec), 7 + round, layout, update)
    return sentences


@pytest.mark.parametrize("seed", [0])
def test_the_error_is_what_is_known_of_a_power_law(seed):
    x = power_law(seed)
    assert 1.23 < error(x, codec(SMALL), seed, None) < 1.31
    assert 0.78 < error(x, codec(LARGE), seed, None) < 0.84


def test_the_error_is_that_of_the_decoded_frame():
    x = power_law(0, 3000) * 1e30
    for spec, rel in (
        ("sketch:columns=100", 1e-4),
        ("sketch:columns=100,cells=int8", 2e-2),
        ("sketch:columns=100,density=1", 1e-4),
    ):
        read = codec(spec).decode(codec(spec).encode(x, seed=3), numel=3000).double()
        assert error(x, codec(spec), 3, None) == pytest.approx(
            ((x - read).norm() / x.double().norm()).item(), rel=rel
        )


def test_a_small_sketch_is_noticed_once_with_the_smallest_doubling_that_contracts():
    x = power_law(0)
    (sentence,) = noticed(SMALL, [x[None]], rounds=6)
    assert sentence.startswith("a sketch 5 × 2000 does not contract, use")
    wide, found = enough(x, codec(SMALL), 10, None)
    assert found < 0.95 <= error(x, replace(wide, columns=wide.columns // 2), 10, None)
    assert (
        f", use --uplink {written(wide)} ({found:.2f}): in 3 rounds up to 3 it read the mean update 1.2"
        in sentence
    )
    assert "\n" not in sentence
    assert codec(written(wide)) == wide and wide.columns in (4000, 8000)


def test_it_says_what_will_become_of_it():
    x = [power_law(0, 20_000)[None]]
    small, nearly = "sketch:rows=5,columns=200", "sketch:rows=5,columns=560"
    assert "fed back, and this size will diverge" in noticed(small, x, feeds_back=True)[0]
    assert "error feedback by subtraction will diverge" in noticed(small, x)[0]
    assert "fed back, and this size may diverge" in noticed(nearly, x, feeds_back=True)[0]


@for_each("spec", [LARGE, "topk", "stc@layer", "identity"])
def test_what_contracts_is_not_looked_at_again(spec):
    layout = Layout.from_shapes({"a": (200_000,)})
    contraction = Contraction(pytest.fail)
    for round in range(1, 6):
        contraction.look(round, codec(spec), 1, layout, power_law(0)[None])
    assert contraction.over and len(contraction.errors) <= 1


def test_it_is_the_mean_of_the_whole_cohort_that_counts():
    x, opposite = power_law(0, 20_000), power_law(1, 20_000)
    spec = "sketch:rows=5,columns=4000"
    assert not noticed(spec, [x[None]])
    noise = [torch.randn(1, 20_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    assert noticed(spec, [x[None], *noise, opposite[None]])
    assert not noticed(spec, [x[None], *noise, -torch.cat(noise)])


def test_rounds_in_which_nothing_can_be_measured_do_not_count():
    x = power_law(0, 20_000)[None]
    silent, bad = torch.zeros_like(x), torch.full_like(x, float("nan"))
    sentences: list[str] = []
    contraction = Contraction(sentences.append)
    for round, update in enumerate(
        [silent, x, bad, torch.empty(0, 20_000), x * 3e38, x, torch.cat([x, bad]), x], 1
    ):
        contraction.look(round, codec("sketch:rows=5,columns=200"), 1, None, update)
    assert len(sentences) == 1 and len(contraction.errors) == 3


@for_each(
    "spec, fix, rest",
    [
        (
            "sketch:rows=3,ratio=64,cells=int8,density=5%",
            "sketch:rows=3,ratio=",
            ",cells=int8,density=0.05",
        ),
        ("sketch:rows=3,columns=10@layer", "sketch:rows=3,columns=", "@layer"),
    ],
)
def test_the_fix_has_the_options_that_were_given(spec, fix, rest):
    layout = Layout.from_shapes({"a": (10_000,), "b": (100, 100)})
    (sentence,) = noticed(spec, [power_law(0, 20_000)[None]], layout=layout)
    advised = sentence.partition("use --uplink ")[2].partition(" ")[0]
    assert advised.startswith(fix) and advised.endswith(rest)
    assert type(codec(advised)) is type(codec(spec))


def test_where_no_sketch_helps_another_codec_is_named():
    two, least, sentences = torch.ones(2), codec("sketch:rows=1,columns=1,density=1"), []
    seed = next(
        seed
        for seed in range(100)
        if error(two, replace(least, columns=2), seed, None) >= 1 <= error(two, least, seed, None)
    )
    contraction = Contraction(sentences.append)
    for round in range(1, 5):
        contraction.look(round, least, seed, None, two[None])
    assert enough(two, least, seed, None)[0] is None and "use --uplink topk" in sentences[0]


# In runs.


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "fetchsgd:density=20%,error=subtract", "downlink": RunConfig.downlink},
        {"strategy": "fetchsgd:density=20%"},
        {},
    ],
    ids=["subtract", "zero", "average"],
)
def test_a_run_warns_once_of_a_small_sketch_and_not_of_a_large_one(tmp_path, options):
    for columns, warnings in ((3, 1), (400, 0)):
        watched = Sentences()
        mine = {
            "memory": "none",
            "downlink": "identity",
            "uplink": f"sketch:rows=3,columns={columns}",
        } | options
        summary = simulate(replace(TINY, **mine, out=out(tmp_path, str(columns))), watched)
        assert len(watched.warnings) == warnings and list(summary.warnings) == watched.warnings
        assert all(
            f"a sketch 3 × {columns} does not contract" in w and "use --uplink sketch:rows=3" in w
            for w in watched.warnings
        )


def test_values_that_are_asked_for_exactly_need_no_sketch_that_contracts(tmp_path):
    watched = Sentences()
    exact = {
        "strategy": "sketched-sgd:density=20%",
        "memory": "sketched:momentum=0",
        "uplink": "sketch:rows=3,columns=3",
    }
    simulate(replace(TINY, **exact, out=out(tmp_path, "exact")), watched)
    assert not watched.warnings


def test_a_warning_of_before_an_interruption_is_in_the_summary(tmp_path):
    config = replace(
        TINY,
        memory="none",
        downlink="identity",
        uplink="sketch:rows=3,columns=3",
        out=out(tmp_path, "run"),
    )
    watched = Sentences()
    simulate(replace(config, rounds=5), watched)
    summary = simulate(replace(config, resume=True))
    assert watched.warnings and list(summary.warnings) == watched.warnings


@pytest.mark.slow
def test_the_size_that_is_warned_of_diverges_and_the_advised_one_does_not(tmp_path):
    watched = Sentences()
    config = replace(
        TINY,
        strategy="fetchsgd:density=20%,momentum=0,error=subtract",
        partition="iid",
        rounds=50,
        eval_every=50,
    )
    small = simulate(
        replace(config, uplink="sketch:rows=3,columns=3", out=out(tmp_path, "small")), watched
    )
    advised = watched.warnings[0].partition("use --uplink ")[2].partition(" ")[0]
    large = simulate(replace(config, uplink=advised, out=out(tmp_path, "large")))
    assert small.loss is None or small.loss > 10
    assert large.accuracy > 0.85 and large.loss < 1


def test_what_was_said_before_an_interruption_is_not_said_again(tmp_path):
    config = replace(
        TINY,
        memory="none",
        downlink="identity",
        uplink="sketch:rows=3,columns=3",
        out=out(tmp_path, "run"),
    )
    simulate(replace(config, rounds=5))
    watched = Sentences()
    summary = simulate(replace(config, rounds=12, resume=True), watched)
    assert not watched.warnings and len(summary.warnings) == 1
