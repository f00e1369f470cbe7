"""Frames and models stay the same, bit for bit, from version to version: see recorded_runs.py."""

import json

import pytest
from recorded_runs import CONFIGURATIONS, GOLDEN, recorded

KEPT = json.loads(GOLDEN.read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_makes_the_frames_and_the_model_that_were_recorded(name):
    assert recorded(name) == KEPT[name]


def test_every_configuration_is_recorded():
    assert KEPT.keys() == CONFIGURATIONS.keys()
