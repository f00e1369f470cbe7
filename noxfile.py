"""Test what runs on Flower with the lowest and the newest version of flwr: `pipx run nox`."""

import nox

LOWEST = "1.29.*"  # of the range in pyproject.toml
TESTS = (
    "tests/transports/flower",
    "tests/test_flower_app.py",
    "tests/deployment/test_flower.py",
)


@nox.session
@nox.parametrize("flwr", [f"=={LOWEST}", ""], ids=["lowest", "newest"])
def flower(session: nox.Session, flwr: str) -> None:
    """Run the tests of the transport, of Flower Apps and of `--transport flower`."""
    session.install(
        ".[sim]",
        f"flwr[simulation]{flwr}",
        "hatchling",  # a test builds the wheel of fedcomp
        "hypothesis>=6.130",
        "pytest>=8.4",
        "pytest-timeout>=2.4",
    )
    session.run("python", "-m", "pytest", *TESTS, *session.posargs, env={"OMP_NUM_THREADS": "1"})
