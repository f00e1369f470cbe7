import pytest
from networked import Network


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Network:
    """Federations whose clients keep their state in a folder of the session."""
    return Network(tmp_path_factory.mktemp("network"))
