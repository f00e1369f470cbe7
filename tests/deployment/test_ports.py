"""Addresses and file descriptors that a public port needs."""

import resource
import socket

import pytest
from cases import for_each

from fedcomp.deployment import ports
from fedcomp.errors import ConfigError


@pytest.mark.parametrize(
    "soft, hard, asked_for, good_for",
    [
        (1024, 1024, 4096, 448),
        (1024, 20_000, 4096, 4096),
        (1024, 4096, 4096, 1984),
        (20_000, 20_000, 4096, 4096),
        (100, 100, 4096, 1),
        (1024, resource.RLIM_INFINITY, 4096, 4096),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 4096, 4096),
    ],
)
def test_connections_are_no_more_than_there_are_files_for(
    monkeypatch, soft, hard, asked_for, good_for
):
    now = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(now))
    monkeypatch.setattr(
        resource, "setrlimit", lambda which, limits: now.__setitem__(slice(None), limits)
    )
    assert min(asked_for, ports.files_for(asked_for)) == good_for
    assert now[1] == hard and (now[0] >= soft or now[0] == resource.RLIM_INFINITY)


def test_a_name_is_its_ipv4_address_when_it_has_one():
    with (
        ports.listen("localhost", 0) as listener,
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=5),
    ):
        pass


@pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="this machine has no IPv6 beside its IPv4"
)
def test_two_colons_are_every_address():
    with ports.listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1]), timeout=5).close()


@for_each("port", [-1, 65536, 70_000])
def test_a_port_that_does_not_exist_is_named(port):
    with pytest.raises(ConfigError, match=f"port {port} "):
        ports.listen("127.0.0.1", port)


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="no-such-host.invalid"):
        ports.listen("no-such-host.invalid", 0)
