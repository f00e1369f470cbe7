"""Frames and models stay bit-identical from version to version; see recorded_runs.py."""

import json

import pytest
from recorded_runs import CONFIGURATIONS, GOLDEN, recorded

KEPT = json.loads(GOLDEN.read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_has_the_recorded_frames_and_model(name):
    assert recorded(name) == KEPT[name]


def test_every_configuration_is_recorded():
    assert KEPT.keys() == CONFIGURATIONS.keys()
