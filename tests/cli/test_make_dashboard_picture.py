"""The script that draws the picture of the dashboard in docs/ from a run folder."""

import html
import importlib.util
import re
from pathlib import Path

import pytest

from fedcomp.config import RunConfig
from fedcomp.sim import simulate

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_dashboard_picture.py"


@pytest.mark.slow
def test_the_script_draws_the_dashboard_of_a_real_run(tmp_path):
    spec = importlib.util.spec_from_file_location("make_dashboard_picture", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    summary = simulate(RunConfig(clients=10, rounds=2, out=str(tmp_path / "run")))
    script.main(tmp_path / "run", tmp_path / "picture.svg")
    text = html.unescape(
        re.sub(r"<[^>]*>", "", (tmp_path / "picture.svg").read_text(encoding="utf-8"))
    ).replace("\xa0", " ")
    for output in (
        "digits, 9,610 parameters",
        "10, 2 a round, iid",
        "round 2/2",
        "2 rounds done",
        f"{100 * summary.accuracy:.2f} %",
    ):
        assert output in text
