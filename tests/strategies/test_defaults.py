"""The options that a strategy chooses where they are left at their defaults."""

from cases import for_each
from federation import Federation

from fedcomp import RunConfig
from fedcomp.strategies import Average, StrategyConfig, resolved, strategy


@for_each(
    "name, given",
    [("gtopk", {"uplink": "topk:density=10%"}), ("powersgd:rank=1", {}), ("shared-scale", {})],
)
def test_an_update_that_is_compressed_already_is_broadcast_without_loss(name, given):
    c = resolved(RunConfig(strategy=name, **given))
    rules = StrategyConfig(1.0, c.uplink, c.downlink, c.downlink_memory, memory=c.memory)
    f = Federation(rules, strategy=lambda *args: strategy(name, *args))
    sizes = [len(o.broadcast.frame) for o in f.loop.rounds(range(1, 4))]
    residual = f.loop.broadcasts.memory.residual
    assert residual is None or not residual.any()
    if name == "gtopk":
        assert max(sizes) <= 10 + 5 * 4  # of 42 coordinates four, a value and a position each
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
def test_a_run_warns_of_a_codec_whose_error_dgc_would_lose(uplink, loses):
    heard = []
    f = Federation(StrategyConfig(uplink=uplink, memory="dgc"))
    Average(f.strategy.config, f.layout, warn=heard.append)
    assert ["is lost; use --uplink topk" in sentence for sentence in heard] == [True] * loses
