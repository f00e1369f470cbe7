"""How much of the public port one host, one request and all of them together may take."""

import dataclasses
import ipaddress
from dataclasses import dataclass

from ..errors import ConfigError

ADDRESSES = 4096  # whose rates are remembered; the one heard of longest ago is forgotten first


@dataclass(frozen=True)
class Limits:
    """What is over a limit is refused with the status named, and its connection closed. Raises ConfigError when made."""

    body_bytes: int = 256 << 20  # a body that is longer: 413, before any of it is read
    header_bytes: int = (
        16 << 10
    )  # request line and headers; more: 431. A SuperNode sends about 1 kB
    in_hand_bytes: int = (
        4 << 30
    )  # of all bodies on their way, since the SuperLink keeps each whole; more: 503
    connections: int = 2048  # open at once; one more: 503
    connections_per_address: int = 1024  # one more: 503
    requests_per_s: float = (
        1000.0  # of an address, connections counted too; faster ones wait their turn
    )
    burst: int = 2000  # requests that an address may make at once, after a rest
    patience_s: float = 2.0  # a request that would wait longer for its turn: 429
    header_s: float = 10.0  # for the TLS handshake, and for a whole head once it has begun: 408
    idle_s: float = (
        30.0  # without a byte of a body: 408; of an answer that the client does not take: closed
    )
    keep_alive_s: float = 75.0  # between requests; closed. httpx lets go of a connection after 5 s, so it is never cut off. One of
    # which the SuperLink has believed no request yet gets no more than header_s
    slowest_bytes_s: float = (
        1000.0  # a body may take idle_s and its length at this speed; longer: 408
    )
    upstream_s: float = 60.0  # for the SuperLink to begin its answer: 504

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 0 or value == 0 and field.name != "patience_s":
                raise ConfigError(
                    f"the guard's limit {field.name} is {value}; give a number above 0"
                )


class Buckets:
    """A token bucket per address, that may be in debt for as long as a request may wait."""

    def __init__(self, limits: Limits):
        self.rate = limits.requests_per_s
        self.burst = limits.burst
        self.patience_s = limits.patience_s
        self._tokens: dict[str, tuple[float, float]] = {}  # and when they were counted, in s

    def take(self, address: str, now_s: float) -> float | None:
        """The seconds to wait before going on; None, and nothing taken, when that would be too long."""
        tokens, then_s = self._tokens.pop(address, (float(self.burst), now_s))
        tokens = min(float(self.burst), tokens + (now_s - then_s) * self.rate)
        wait_s = max(0.0, (1.0 - tokens) / self.rate)
        refused = wait_s > self.patience_s
        self._tokens[address] = (tokens if refused else tokens - 1.0, now_s)
        if len(self._tokens) > ADDRESSES:
            del self._tokens[next(iter(self._tokens))]
        return None if refused else wait_s


def address_of(host: str) -> str:
    """Who a peer is to the limits: its IPv4 address, or the /64 network of its IPv6 address, all of which one host may own."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
