"""Call fedcomp's command line in this process."""

from typing import Any

from click.testing import Result
from typer.testing import CliRunner

from fedcomp.cli.main import app


def fedcomp(*words: Any, **variables: str | None) -> Result:
    """Call `fedcomp` with these words and environment variables."""
    return CliRunner().invoke(app, [*map(str, words)], prog_name="fedcomp", env=variables)


def error_message(result: Any, status: int = 2) -> str:
    """Return the message of a failed command, which is one line on standard error. Standard output must be empty."""
    returned = result.exit_code if isinstance(result, Result) else result.returncode
    assert (returned, result.stdout) == (status, ""), result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("fedcomp: ")
    return line.removeprefix("fedcomp: ")
