"""Test fedcomp with other versions of Python and of the dependencies. Run `pipx run nox`, or `pipx run nox -s lowest` for one session."""

import os
import re
import tomllib
from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13")  # Python versions that are not installed are skipped
PYTEST = ("hypothesis>=6.130", "pytest>=8.4", "pytest-timeout>=2.4")
LOWEST_FLWR = "1.29.*"  # lowest version of flwr that pyproject.toml allows
FLOWER = ("tests/transports/flower", "tests/test_flower_app.py", "tests/deployment/test_flower.py")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """Run the quick tests with the newest dependencies that pip finds, ignoring constraints.txt."""
    session.install(".[dev]")
    session.run("python", "-m", "pytest", "--quick", *session.posargs, env=ONE_THREAD)


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """Run some quick tests with the lowest version of each dependency that pyproject.toml and the other dependencies allow.

    Set LOWEST_TORCH, for example to 2.13.0, if the package index has no build of the lowest torch version (2.4) for this machine.
    """
    session.install("uv")
    resolve = ("--resolution", "lowest-direct", "--no-annotate", "--no-header", "--extra", "sim")
    found = session.run("uv", "pip", "compile", "--quiet", *resolve, "pyproject.toml", silent=True)
    direct = {re.split("[^a-z0-9-]", line)[0] for line in dependencies("sim")}
    pins = [line for line in str(found).splitlines() if line.partition("==")[0] in direct]
    if torch := os.environ.get("LOWEST_TORCH"):
        pins = [f"torch=={torch}" if pin.startswith("torch==") else pin for pin in pins]
    session.install(*pins, *PYTEST)
    session.install("--no-deps", ".")
    tests = session.posargs or ("tests/codecs", "tests/memories", "tests/strategies", "tests/sim")
    session.run("python", "-m", "pytest", "--quick", *tests, env=ONE_THREAD)


@nox.session
@nox.parametrize("flwr", [f"=={LOWEST_FLWR}", ""], ids=["lowest", "newest"])
def flower(session: nox.Session, flwr: str) -> None:
    """Run the tests of the Flower integration with the lowest and the newest version of flwr."""
    # A test builds the wheel of fedcomp, which needs hatchling.
    session.install(".[sim]", f"flwr[simulation]{flwr}", "hatchling", *PYTEST)
    session.run("python", "-m", "pytest", *FLOWER, *session.posargs, env=ONE_THREAD)


def dependencies(*extras: str) -> list[str]:
    """Return the requirements of fedcomp in pyproject.toml, including those of the given extras."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"] + [
        one for extra in extras for one in project["optional-dependencies"][extra]
    ]
