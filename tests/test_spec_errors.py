"""Errors about spec strings name the flag and the text. In Python they name the text only."""

from pathlib import Path

import pytest
from cases import for_each
from typer.testing import CliRunner

import fedcomp
from fedcomp.cli.main import app
from fedcomp.errors import SpecError

TASK = f"{Path(__file__).with_name('tiny_task.py')}:task"
MISTAKES = {
    "--uplink stc:density=0": "density must be in (0, 1]; try density=1%",
    "--downlink topk:density=2@layer": "density must be in (0, 1]; try density=1%",
    "--uplink sct": "unknown codec 'sct'; did you mean 'stc'?",
    "--uplink topk+": "'topk+' is incomplete; write name or name:option=value",
    "--memory dgc:momentum=2": "momentum is 2; give at least 0 and less than 1, such as 0.9",
    "--downlink-memory residul": "unknown memory 'residul'; did you mean 'residual'?",
    "--strategy krum:f=-1": "f is -1; give at least 0",
    "--strategy median@layer": "a strategy has no scope (@…) and no second part (+…); leave out '@' and '+', and name one strategy",
    "--server-optimizer adam:tau=0": "tau is 0; give 1e-18 to 1e+18",
    "--attack gaussian:2,sigma=-1": "sigma is -1; give at least 0",
    "--partition dirichlet:alpha=x": "alpha cannot be 'x'; give a number such as 0.01, 1% or 1/100",
    "--network mobile:spread=-1": "spread ",
    "--lr-schedule step:every=0": "every is 0; give at least 1",
    "--density-schedule 2,1%@3": "the value in '2' is 2; give at most 1",
}


@for_each("given, says", MISTAKES.items())
def test_an_error_names_the_flag_and_its_text(given, says):
    words = [*given.split(" "), "--task", TASK, "--plain"]
    result = CliRunner().invoke(app, ["sim", *words], prog_name="fedcomp")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"fedcomp: {given}: {says}") and result.stderr.count("\n") == 1


def test_errors_about_a_memory_and_codec_name_the_flags_of_uplink_or_downlink():
    for link, memory in (("--uplink", "--memory"), ("--downlink", "--downlink-memory")):
        words = [link, "qsgd", memory, "residual", "--task", TASK, "--plain"]
        result = CliRunner().invoke(app, ["sim", *words], prog_name="fedcomp")
        assert f"use {memory} none, or {link} " in result.stderr


def test_in_python_an_error_names_only_the_text():
    with pytest.raises(SpecError) as caught:
        fedcomp.codec("stc:density=0")
    assert str(caught.value) == "stc:density=0: density must be in (0, 1]; try density=1%"
    assert (caught.value.spec, caught.value.flag) == ("stc:density=0", "")
