"""Schedules on the command line: an invalid schedule is refused in one sentence, and no run starts."""

import pytest
from command_line import fedcomp


@pytest.mark.parametrize(
    "command", [("sim",), ("server", "start", "--insecure", "--port", "0")], ids=" ".join
)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--lr-schedule cosin",
            "--lr-schedule cosin: unknown schedule 'cosin'; did you mean 'cosine'? known: cosine, geometric, linear, poly, step",
        ),
        (
            "--local-steps-schedule 1,8",
            "--local-steps-schedule 1,8: '8' in '1,8' does not say from which round on it applies; write 8@ROUND",
        ),
        (
            "--batch-size-schedule 0@3",
            "--batch-size-schedule 0@3: the value in '0@3' is 0; give at least 1",
        ),
        (
            "--density-schedule 200%",
            "--density-schedule 200%: the value in '200%' is 2; give at most 1",
        ),
        (
            "--local-steps-schedule linear",
            "--local-steps-schedule 'linear' reaches 0 in round 50, but values must be at least 1; give another 'to'",
        ),
        (
            "--lr-schedule cosine --horizon 9",
            "--lr-schedule 'cosine' reaches 0 in round 50, but values must be more than 0; give --horizon 50, or another 'to'",
        ),
        (
            "--local-steps-schedule 8@2 --local-epochs 1",
            "--local-steps-schedule and --local-epochs both set how long clients train; give one of them",
        ),
    ],
)
def test_an_invalid_schedule_is_refused(tmp_path, command, options, message):
    out = tmp_path / "run"
    result = fedcomp(*command, "--task", "digits", *options.split(), "--out", out)
    assert result.exit_code == 2 and not out.exists()
    assert " ".join(result.stderr.split()).endswith(message)
    assert "Traceback" not in result.output


def test_help_names_the_forms_of_schedules():
    result = fedcomp("sim", "--help", COLUMNS="300")
    for word in (
        "--lr-schedule",
        "--local-steps-schedule",
        "--batch-size-schedule",
        "--density-schedule",
        "--horizon",
        "cosine",
        "1,8@21",
    ):
        assert word in result.output
