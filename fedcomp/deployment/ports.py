"""Listening sockets, which a server or relay opens and closes before a run to check that its port is available."""

import errno
import socket

from ..errors import ConfigError

LOOPBACK = "127.0.0.1"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at the host's first IPv4 address, or at its first IPv6 address if it has no IPv4 address.

    For the host `::`, the socket listens at all IPv6 addresses, and at all IPv4 addresses if the system supports this. Raises ConfigError
    if the port cannot be opened.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"port {port} does not exist; give a port from 1 to 65535, or 0 for any free port"
        )
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(addresses, key=lambda info: info[0] != socket.AF_INET)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, dualstack_ipv6=both)
    except (OSError, UnicodeError) as error:  # UnicodeError if the host name is not valid
        fix = "choose another port with --port, or stop the program that listens there"
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            fix = "give --host an address of this machine, or --port a port that you may use"
        why = getattr(error, "strerror", None) or "not a host name"
        raise ConfigError(f"port {port} of {host} cannot be opened ({why}); {fix}") from error
