"""Addresses and ports of a server."""

import socket

import pytest
from cases import for_each

from fedcomp.deployment import ports
from fedcomp.errors import ConfigError


def test_a_host_name_with_an_ipv4_address_listens_on_it():
    with (
        ports.listen("localhost", 0) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5),
    ):
        pass


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="this machine has no IPv6 beside its IPv4"
)
def test_two_colons_listen_on_all_addresses():
    with ports.listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()


@for_each("port", [-1, 65536, 70_000])
def test_a_port_that_does_not_exist_is_refused(port):
    with pytest.raises(ConfigError, match=f"port {port} "):
        ports.listen("127.0.0.1", port)


@for_each("host", ["no-such-host.invalid", "a..b", 70 * "a"])
def test_a_host_that_does_not_exist_is_refused(host):
    with pytest.raises(ConfigError, match=f"port 0 of {host} cannot be opened"):
        ports.listen(host, 0)
