"""Frames and models stay the same, bit for bit, from version to version: see recorded_runs.py."""

import json

import pytest
from recorded_runs import CONFIGURATIONS, GOLDEN, recorded

from fedcomp import available_codecs, available_memories, available_strategies
from fedcomp.config import RunConfig
from fedcomp.strategies import resolved

KEPT = json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_makes_the_frames_and_the_model_that_were_recorded(name):
    assert recorded(name) == KEPT[name]


def test_every_strategy_codec_and_memory_is_recorded():
    used = {"strategy": set(), "codec": set(), "memory": set()}
    for options in CONFIGURATIONS.values():
        run = resolved(RunConfig(**options))
        used["strategy"].add(run.strategy.partition(":")[0])
        used["memory"] |= {text.partition(":")[0] for text in (run.memory, run.downlink_memory)}
        used["codec"] |= {
            part.partition("@")[0].partition(":")[0]
            for text in (run.uplink, run.downlink)
            for part in text.split("+")
        }
    assert used["strategy"] >= available_strategies().keys()
    assert used["codec"] >= available_codecs().keys()
    assert used["memory"] >= available_memories().keys()
    assert KEPT.keys() == CONFIGURATIONS.keys()
