"""gRPC options of servers and clients. gRPC ignores options that its installed version does not know."""

import os
import resource

from ...errors import ConfigError
from .wire import MAX_GRPC_BYTES

# gRPC reads these environment variables when it is first imported. The only cipher suite for TLS 1.2 that they allow requires RSA keys.
# fedcomp's certificates have EC keys, so all connections use TLS 1.3. GRPC_VERBOSITY keeps failed handshakes out of the log.
os.environ.setdefault("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES256-GCM-SHA384")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

KEEPALIVE_S = 100  # time without received data after which a keepalive ping is sent
ANSWER_S = 20  # time to answer a keepalive ping before the connection is closed
# A connection is half open until it has a gRPC stream, for example during the TLS handshake. Each takes about 30 kB of memory.
MIN_HALF_OPEN = 300  # half-open connections that every server allows
SPARE_CONNECTIONS = 300  # further connections that are allowed, so that clients can connect before half-open connections are cut
SPARE_FILES = 256  # file descriptors that the process needs in addition to its connections

_BOTH = {
    "grpc.max_receive_message_length": MAX_GRPC_BYTES,
    "grpc.max_send_message_length": MAX_GRPC_BYTES,
    "grpc.keepalive_time_ms": KEEPALIVE_S * 1000,
    "grpc.keepalive_timeout_ms": ANSWER_S * 1000,
    "grpc.http2.ping_timeout_ms": ANSWER_S * 1000,
    "grpc.http2.max_pings_without_data": 0,  # no limit on keepalive pings while no messages are sent
    "grpc.http2.bdp_probe": 0,  # no bandwidth probes, which cost about 90 bytes per exchange of messages
    "grpc.compression_enabled_algorithms_bitset": 1,  # uncompressed messages only
    "grpc.enable_retries": 0,
}
_SERVER = {
    # Flow-control window: how many bytes gRPC buffers per connection before the server reads them. A small window limits the memory that
    # clients can make the server use, but also their upload speed: to 1.9 MB/s at a round-trip time of 0.2 s, as measured.
    "grpc.http2.lookahead_bytes": 1 << 18,
    "grpc.http2.min_ping_interval_without_data_ms": 10_000,
    "grpc.max_concurrent_streams": 1,
    "grpc.max_connection_idle_ms": 30_000,  # time until a connection without a stream is closed
    "grpc.server_handshake_timeout_ms": 20_000,
    "grpc.so_reuseport": 0,  # prevents a second server from listening on the same port
    "grpc.max_metadata_size": 4096,
    "grpc.absolute_max_metadata_size": 8192,
}
_CLIENT = {
    # Flow-control window for downloads. It is larger than the server's, because clients trust the server.
    "grpc.http2.lookahead_bytes": 1 << 20,
    "grpc.keepalive_permit_without_calls": 1,
    "grpc.use_local_subchannel_pool": 1,  # gives each client of a process its own connection
    "grpc.enable_http_proxy": 0,
    "grpc.service_config_disable_resolution": 1,
}


def server_options(clients: int) -> list[tuple[str, int]]:
    """Return the gRPC options of a server for `clients` clients. Raises ConfigError if the system allows too few open files."""
    connections = _allow_connections(clients + max_half_open(clients) + SPARE_CONNECTIONS)
    return [*(_BOTH | _SERVER | {"grpc.max_allowed_incoming_connections": connections}).items()]


def max_half_open(clients: int) -> int:
    """Return how many half-open connections a server for `clients` clients allows. All clients may connect at the same time."""
    return max(MIN_HALF_OPEN, clients)


def client_options() -> list[tuple[str, int]]:
    return [*(_BOTH | _CLIENT).items()]


def _allow_connections(wanted: int) -> int:
    """Raise this process's limit of open files to suffice for `wanted` connections. Return how many connections are possible.

    The number is smaller than `wanted` if the system does not allow a sufficient limit. Raises ConfigError if the limit stays too low for
    any client.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = wanted + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= files:
        return wanted
    soft = files if hard == resource.RLIM_INFINITY else min(hard, files)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft <= 2 * SPARE_FILES:
        raise ConfigError(
            f"this process may open only {soft} files, too few for the connections of clients; raise the limit with: ulimit -n {files}"
        )
    return min(wanted, soft - SPARE_FILES)
