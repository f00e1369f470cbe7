import pytest
from networked import Network


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Network:
    """Return a Network whose files are in a temporary folder of the test session."""
    return Network(tmp_path_factory.mktemp("network"))
