"""The defaults that a strategy sets for unset options."""

import pytest
from cases import for_each
from federation import Federation

from fedcomp import RunConfig, codec, memory
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.memories import with_memories
from fedcomp.server.results import make_strategy
from fedcomp.strategies import Average, StrategyConfig, resolved, strategy


@for_each(
    "name, given",
    [("gtopk", {"uplink": "topk:density=10%"}), ("powersgd:rank=1", {}), ("shared-scale", {})],
)
def test_the_default_downlink_sends_an_already_compressed_update_without_loss(name, given):
    c = resolved(RunConfig(strategy=name, **given))
    rules = StrategyConfig(1.0, c.uplink, c.downlink, c.downlink_memory, memory=c.memory)
    f = Federation(rules, strategy=lambda *args: strategy(name, *args))
    sizes = [len(o.broadcast.frame) for o in f.loop.rounds(range(1, 4))]
    residual = f.loop.broadcasts.memory.residual
    assert residual is None or not residual.any()
    if name == "gtopk":
        assert max(sizes) <= 10 + 5 * 4  # four of 42 coordinates, with a value and a position each
    given = RunConfig(strategy=name, downlink="stc:density=1%")
    assert resolved(given).downlink == "stc:density=1%"


def test_dgc_sends_the_largest_coordinates_with_their_values():
    assert resolved(RunConfig(memory="dgc:clip=1")).uplink == "topk:density=1/100"
    assert resolved(RunConfig(memory="dgc", uplink="sbc")).uplink == "sbc"
    assert resolved(RunConfig(memory="dgc", strategy="vote")).uplink == "sign"


@for_each(
    "uplink, loses",
    [
        ("stc:density=10%", True),
        ("sign", True),
        ("qsgd@layer", True),
        ("topk+eden:bits=2", True),
        ("topk@layer", False),
        ("topk+fp16", False),
        ("identity", False),
    ],
)
def test_a_run_warns_about_a_codec_whose_error_dgc_would_lose(uplink, loses):
    heard = []
    f = Federation(StrategyConfig(uplink=uplink, memory="dgc"))
    Average(f.strategy.config, f.layout, warn=heard.append)
    assert ["quantizes; use --uplink topk" in sentence for sentence in heard] == [True] * loses


@for_each(
    "text, chosen",
    [("stc", "residual"), ("topk@layer", "residual"), ("qsgd:levels=4", "none"), ("sign", "none")],
)
def test_the_memory_auto_is_a_residual_for_codecs_that_contract(text, chosen):
    assert memory("auto", codec(text), 100).name == chosen
    run = with_memories(resolved(RunConfig(uplink=text, downlink=text)), 100)
    assert run.memory == run.downlink_memory == chosen


def made(**options):
    return make_strategy(resolved(RunConfig(**options)), Layout.from_shapes({"weight": (20, 10)}))


@for_each("name", ["dgc", "signum"])
@for_each("local", [{"momentum": 0.9}, {"optimizer": "sgd:momentum=0.9"}])
def test_momentum_is_not_applied_twice(name, local):
    with pytest.raises(ConfigError, match="both apply momentum to an update"):
        made(memory=name, **local)
    assert made(memory=f"{name}:momentum=0", **local)
    assert made(memory=name)


@for_each("strategy", ["vote", "election:f=1"])
@for_each("optimizer", ["sgd:weight_decay=0.1", "adamw:weight_decay=0.1"])
def test_weight_decay_before_a_vote_is_refused(strategy, optimizer):
    cohort = {"clients": 3, "participation": 1.0}
    with pytest.raises(ConfigError, match="and give --weight-decay 0.1"):
        made(strategy=strategy, optimizer=optimizer, **cohort)
    assert made(strategy=strategy, weight_decay=0.1, **cohort)
    assert made(optimizer=optimizer)
