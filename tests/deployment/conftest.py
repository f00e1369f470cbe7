from collections.abc import Iterator

import pytest
from networked import Network
from networked import network as started


@pytest.fixture(scope="session")
def network(tmp_path_factory) -> Iterator[Network]:
    """A SuperLink and its guard, for all tests of this process that run federations on them."""
    with started(tmp_path_factory.mktemp("network")) as made:
        yield made
