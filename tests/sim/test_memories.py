"""Runs with memories whose state is on clients only are the same after interruptions and with real instead of virtual clients."""

from dataclasses import replace

import pytest
from federation import Federation
from small_runs import TINY, StopsAt, assert_refused, assert_the_same_when_stopped, out, rounds_of

from fedcomp.callbacks import Callback
from fedcomp.sim import simulate
from fedcomp.strategies import StrategyConfig
from fedcomp.strategies.gtopk import GTopK
from fedcomp.training.local_sgd import LocalSGD

VARIANTS = {
    "ecq": {"memory": "ecq"},
    "dgc": {"memory": "dgc:clip=1,nodes=4", "uplink": "topk:density=10%"},
    "adacomp": {"memory": "adacomp:bin=10", "uplink": "stc@layer"},
    "variance": {"memory": "variance:alpha=1.5", "uplink": "topk"},
    "momentum masking": {
        "momentum": 0.9,
        "keep_momentum": True,
        "uplink": "sbc:density=10%",
        "lr": 0.02,
    },
    "gtopk": {"strategy": "gtopk", "uplink": "topk:density=10%"},
    "gtopk, dgc": {
        "strategy": "gtopk",
        "uplink": "topk:density=10%",
        "memory": "dgc:momentum=0",
        "keep_momentum": True,
        "momentum": 0.5,
    },
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


class Sentences(Callback):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, sentence: str) -> None:
        self.warnings.append(sentence)


@every_variant
def test_stops_and_real_clients_do_not_change_a_run(tmp_path, variant):
    config = replace(TINY, partition="iid", seed=5, rounds=5, engine="serial", **variant)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(3, 2))
    rules = StrategyConfig(
        participation=0.5,
        uplink=config.uplink,
        downlink=config.downlink,
        memory=config.memory,
        seed=5,
    )
    federation = Federation(
        rules, clients=8, **({"strategy": GTopK} if config.strategy == "gtopk" else {})
    )
    federation.use_partition()
    for member in federation.members:
        member.sgd = LocalSGD.from_config(config)
    list(federation.loop.rounds(range(1, 6)))
    federation.assert_same_model(tmp_path / "whole")


@pytest.mark.parametrize("variant", ["variance", "momentum masking"])
def test_traces_of_a_stack_are_restored_between_checkpoints(tmp_path, variant):
    config = replace(TINY, **VARIANTS[variant], engine="batched", checkpoint_every=2)
    assert_the_same_when_stopped(tmp_path, config, StopsAt(5))


@every_variant
def test_the_task_is_learned(tmp_path, variant):
    watched = Sentences()
    summary = simulate(
        replace(TINY, **variant, rounds=20, eval_every=20, out=out(tmp_path, "run")), watched
    )
    assert summary.accuracy > 0.85 and not watched.warnings
    assert summary.uplink_bytes < summary.dense_uplink_bytes


def test_returned_frames_count_as_downlink_bytes(tmp_path):
    for strategy in ("average", "gtopk"):
        simulate(
            replace(
                TINY,
                strategy=strategy,
                participation=1.0,
                downlink="identity",
                rounds=4,
                out=out(tmp_path, strategy),
            )
        )
    average, gtopk = (
        [line["downlink_bytes"] for line in rounds_of(out(tmp_path, name))]
        for name in ("average", "gtopk")
    )
    assert average[0] == gtopk[0] and all(
        more > fewer for more, fewer in zip(gtopk[1:], average[1:], strict=True)
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"memory": "adacomp", "uplink": "identity"}, "use --uplink topk or stc"),
        ({"memory": "ecq:alpha=1,beta=-1"}, "use --memory ecq:alpha=0.9,beta=0.9"),
        ({"memory": "dgc:momentum=1"}, "less than 1"),
        ({"memory": "dgc", "momentum": 0.9}, "give --memory dgc:momentum=0"),
        ({"memory": "signum:momentum=0.5", "momentum": 0.9}, "leave --momentum out"),
        ({"strategy": "gtopk", "uplink": "identity"}, "leave --uplink out, or give topk"),
        ({"strategy": "gtopk", "memory": "none"}, "use --memory residual"),
        ({"keep_momentum": True}, "give --momentum 0.9 as well"),
    ],
)
def test_errors_in_options_are_raised_before_anything_is_written(tmp_path, change, says):
    assert_refused(tmp_path, replace(TINY, **change), says)
