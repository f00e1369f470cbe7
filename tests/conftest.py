"""Quiet and offline, before anything imports flwr; the folder of real data; hypothesis without a clock."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

FLWR_HOME = tempfile.TemporaryDirectory(prefix="flwr-")

os.environ |= {
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_HOME": FLWR_HOME.name,
    "FLWR_TELEMETRY_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
if os.environ.get("FEDCOMP_DATA"):
    os.environ["FEDCOMP_DATA"] = os.path.abspath(os.environ["FEDCOMP_DATA"])  # tests run commands in other folders

settings.register_profile("fedcomp", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("fedcomp")


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder with mnist/, cifar10/ and shakespeare/. Skips the test where FEDCOMP_DATA names none."""
    folder = os.environ.get("FEDCOMP_DATA")
    if not folder:
        pytest.skip("FEDCOMP_DATA is not set; it names the folder of the real data sets")
    return Path(folder)
