"""What a public port needs of the machine: an address, a certificate, file descriptors."""

import errno
import resource
import socket
import ssl
from pathlib import Path

from ..errors import ConfigError

SPARE_FILES = 128  # descriptors of the process, for everything else


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with this certificate chain and its key, both PEM."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS needs a certificate and its key; give both, or neither")
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read ({error.strerror}); `fedcomp keys init` makes a certificate and its key"
            ) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(
            certificate, key, password=lambda: b""
        )  # an encrypted key must not ask on the terminal
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"{certificate} and {key} are no certificate with its unencrypted key, both PEM ({error})"
        ) from error
    return context


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at the first address of the host, IPv4 before IPv6; `::` is every address of both."""
    if not 0 <= port <= 65535:
        raise ConfigError(
            f"port {port} does not exist; give one from 1 to 65535, or 0 for any that is free"
        )
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
        both = host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            address[:2], family=family, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        fix = "choose another with --port, or stop what listens there"
        if error.errno != errno.EADDRINUSE:
            fix = "choose an address of this machine, and a port that you may use"
        raise ConfigError(
            f"port {port} of {host} cannot be opened ({error.strerror}); {fix}"
        ) from error
    listener.setblocking(False)
    return listener


def files_for(connections: int) -> int:
    """How many clients the process's file descriptors are enough for, raised first if they may be: two for each."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, (soft - SPARE_FILES) // 2)
