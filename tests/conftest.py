"""Settings of all tests: no network access (set before flwr is imported), hypothesis without deadlines, and the folder of real data."""

import os
import sys
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import cases
import pytest
from hypothesis import settings

TESTS = Path(__file__).resolve().parent
TRACED: set[str] = set()  # tests of which a case has been traced for coverage
MARKED = {"slow", "deploy"}  # tests that --quick leaves out
FLWR_HOME = tempfile.TemporaryDirectory(prefix="flwr-")

os.environ |= {
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_HOME": FLWR_HOME.name,
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# `make coverage` traces the test workers, but not the processes that tests start, which would import torch more slowly.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("COVERAGE_PROCESS_CONFIG", None)
if os.environ.get("FEDCOMP_DATA"):
    os.environ["FEDCOMP_DATA"] = os.path.abspath(
        os.environ["FEDCOMP_DATA"]
    )  # tests run commands in other folders

settings.register_profile("fedcomp", deadline=None, max_examples=40, derandomize="CI" in os.environ)
settings.load_profile("fedcomp")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return twice the number of cores, because tests that start processes wait for them most of the time."""
    if hasattr(os, "sched_getaffinity"):
        return 2 * len(os.sched_getaffinity(0))
    return 2 * (os.cpu_count() or 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out slow and deploy tests, and run only the first parameters of tests that are not exhaustive",
    )


def pytest_configure(config: pytest.Config) -> None:
    cases.QUICK = config.getoption("quick")
    if "PYTEST_XDIST_WORKER" in os.environ and [Path(arg).resolve() for arg in config.args] == [
        TESTS
    ]:
        _collect_elsewhere_first(config)


def _collect_elsewhere_first(config: pytest.Config) -> None:
    """Have each worker start collecting at another file. Pytest compiles test files, and each file is then compiled by only one worker."""
    files = sorted(map(str, TESTS.rglob("test_*.py")))
    worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    first = len(files) * worker // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    config.args[:] = files[first:] + files[:first]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, remove tests and cases. Give each worker a share of the files whose tests start processes, before its other tests."""
    if config.getoption("quick"):
        items[:] = [
            item for item in items if not MARKED & {mark.name for mark in item.iter_markers()}
        ]
        first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}
        items[:] = [
            item
            for item in items
            if item is first[item.nodeid.partition("[")[0]] or item.get_closest_marker("exhaustive")
        ]
    items.sort(key=lambda item: str(item.path))
    shares, others = _shares_by_file(items), [i for i in items if not _starts_processes(i)]
    count, items[:] = len(items), []
    for number, share in enumerate(shares):  # pytest-xdist cuts the list into near-equal pieces
        filled = max(0, (count - len(items)) // (len(shares) - number) - len(share))
        items += share + others[:filled]
        del others[:filled]
    items += others


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """With `make coverage`, trace only the first case of each test, and no slow tests.

    Tracing slows Python down by half. The other cases and the slow tests run few lines that no traced case runs.
    """
    name, tracers = item.nodeid.partition("[")[0], (sys.gettrace(), threading.gettrace())
    if name in TRACED or item.get_closest_marker("slow"):
        sys.settrace(None)
        threading.settrace(None)
    TRACED.add(name)
    try:
        return (yield)
    finally:
        sys.settrace(tracers[0])
        threading.settrace(tracers[1])


def _starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("deploy") is not None


def _shares_by_file(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Divide the files whose tests start processes among the workers. One worker has all tests with Ray, which starts slowly."""
    shares = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))]
    deployed = [item for item in items if _starts_processes(item)]
    with_ray = {item.path for item in deployed if item.get_closest_marker("ray")}
    shares[0] += [item for item in deployed if item.path in with_ray]
    others = dict.fromkeys(item.path for item in deployed if item.path not in with_ray)
    for number, path in enumerate(others):
        shares[-1 - number % max(1, len(shares) - 1)] += [i for i in deployed if i.path == path]
    return shares


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """Return the folder with mnist/, cifar10/ and shakespeare/. Skips the test if FEDCOMP_DATA is not set."""
    folder = os.environ.get("FEDCOMP_DATA")
    if not folder:
        pytest.skip("FEDCOMP_DATA is not set; it names the folder of the real data sets")
    return Path(folder)
