"""The checks that a client or relay must pass to join a run. They concern its key, its first messages, and how often it joins."""

import time
from collections import Counter
from collections.abc import Callable

from ... import __version__
from ...messages import Presence
from . import wire
from .settings import PortSettings, peer_key, point_key
from .streams import EndStream, RelayedClient, Stream
from .wire import Hello, Refused

# Limits on how often one client or relay may join: the number of joins in a burst, and the sustained rate.
BURST_JOINS, JOINS_PER_S = 10.0, 0.5
# A client or relay that was disconnected because it flooded the port with bytes may not join for FLOOD_PAUSE_S seconds.
FLOOD_PAUSE_S = 60.0
MAX_WARNED = 4096  # largest number of client ids, and of hosts, about which the operator is warned
OTHER_RUN = "the client answered the invitation of another run"
EXPELLED = "the key of this client or relay is no longer accepted"


class Admission:
    """The checks that clients and relays must pass to join. A failed check raises EndStream with the reason.

    Call `check_key`, `check_hello` and `check_presence` in this order. The attribute `refused` counts the refused streams by cause. `warn`
    is called with warnings for the operator of the server.
    """

    def __init__(self, settings: PortSettings, warn: Callable[[str], None]):
        self.settings, self.warn = settings, warn
        self.refused: Counter[str] = Counter()
        # Token buckets that limit the number of joins, by identity of a client or relay: (number of tokens, `time.monotonic()` of the last
        # update). A join takes one token. For identities, see `Stream.identity` and `Stream.relay_identity`.
        self._tokens: dict[object, tuple[float, float]] = {}
        # Subjects of warnings that were already given: client ids that are not in the run, and hosts that flooded the port over a
        # connection on which no client had joined.
        self._warned: set[int] = set()
        self._flooding: set[str] = set()

    def refusal(self, cause: str, reason: str, retry: bool = True) -> EndStream:
        """Count a refusal and return the exception that ends the stream."""
        self.refused[cause] += 1
        return EndStream(Refused(reason, retry))

    def check_key(self, stream: Stream) -> None:
        """Identify a client or relay by the key of its TLS certificate. Raises EndStream for a key that is not accepted."""
        keys = self.settings.keys
        if self.settings.credentials is None or keys is None:
            return
        stream.key = peer_key(stream.context.auth_context()["x509_pem_cert"][0])
        client, stream.relay_id, reason = keys.find(stream.key.hash)
        if client is not None:
            self._identify(stream, client)
        elif stream.relay_id is None:
            raise self.refusal("key", reason, retry=bool(keys.problem))

    def check_hello(self, stream: Stream, hello: Hello) -> None:
        """Check HELLO, the first message of a client or relay. Raises EndStream if the client or relay is refused."""
        if hello.protocol != wire.PROTOCOL:
            reason = (
                f"this client uses version {hello.protocol} of the protocol (fedcomp {hello.version[:40]}), but the server uses "
                f"version {wire.PROTOCOL} (fedcomp {__version__}); install the same version of fedcomp on both sides"
            )
            raise self.refusal("protocol", reason, retry=False)
        if hello.client == wire.RELAY:
            self._check_relay(stream)
            return
        if stream.relay_id is not None:
            reason = (
                f"the key of this client is the key of relay {stream.relay_id}; start the relay with fedcomp relay, and give each client "
                "its own enrolment"
            )
            raise self.refusal("key", reason, retry=False)
        if stream.key is None and hello.client != -1:
            self._identify(stream, hello.client)

    def check_presence(self, stream: Stream, presence: Presence) -> None:
        """Check PRESENCE, a client's answer to its invitation. Raises EndStream if the client is refused.

        Raises ProtocolError for a malformed key.
        """
        if presence.key:
            point_key(presence.key)
        client = stream.client if stream.client >= 0 else presence.client
        name = f"client {client}" if client >= 0 else "a client"
        if presence.run != self.settings.invitation.run:
            self.warn(f"{name} cannot take part: {OTHER_RUN}")
            raise self.refusal("other run", OTHER_RUN)
        if presence.reason:
            self.warn(f"{name} cannot take part: {presence.reason}")
            self.refused["cannot take part"] += 1
            raise EndStream
        if stream.client < 0:
            self._identify(stream, presence.client)
        elif presence.client != stream.client:
            self.warn(
                f"{name} was refused, because it claims to be client {presence.client}; give each client its own enrolment"
            )
            reason = f"client {stream.client} cannot take part as client {presence.client}; give each client its own enrolment"
            raise self.refusal("other client", reason, retry=False)

    def check_relayed(self, client: RelayedClient) -> None:
        """Check a client that joins through a relay. Raises EndStream if the client is refused."""
        settings, reason = self.settings, ""
        if client.presence.run != settings.invitation.run:
            reason = OTHER_RUN
        elif not 0 <= client.client < settings.clients:
            reason = f"client {client.client} is not part of this run, which has the clients 0 to {settings.clients - 1}"
        elif settings.keys is not None:
            found = settings.keys.find(client.key.hash if client.key else b"")
            if found.client != client.client:
                reason = (
                    found.reason
                    or "this client showed the key of another client; give each client its own enrolment"
                )
        if reason:
            raise self.refusal("key", reason, retry=bool(settings.keys and settings.keys.problem))
        self._take_token(client.identity, f"client {client.client}")

    def key_problem(self, connection: Stream | RelayedClient) -> str:
        """Return why the key of a connection is no longer accepted, or "" if it is accepted, or if the connection has no key."""
        keys, key = self.settings.keys, connection.key
        if keys is None or key is None:
            return ""
        found = keys.find(key.hash)
        if connection.relay_id is not None:
            accepted = found.relay == connection.relay_id
        else:
            accepted = connection.client < 0 or found.client == connection.client
        return "" if accepted else found.reason or EXPELLED

    def refuse_flood(self, host: str, stream: Stream | None, received_bytes: int) -> None:
        """Count a connection from `host` that sends too many bytes, and warn the operator.

        If a client or relay has joined on the connection (`stream`), it may not join again for FLOOD_PAUSE_S seconds.
        """
        self.refused["flood"] += 1
        name = f"a connection from {host} on which no client has joined"
        if stream is not None and (stream.relay or stream.identity is not None):
            identity = stream.relay_identity if stream.relay else stream.identity
            self._tokens[identity] = -FLOOD_PAUSE_S * JOINS_PER_S, time.monotonic()
            name = f"relay {stream.relay_id}" if stream.relay else f"client {stream.client}"
        elif host in self._flooding or len(self._flooding) == MAX_WARNED:
            return
        else:
            self._flooding.add(host)
        self.warn(
            f"{name} sent {received_bytes} bytes, far more than its messages need, and was disconnected"
        )

    def _take_token(self, identity: object, name: str) -> None:
        """Count a join of a client or relay. Raises EndStream if the client or relay has joined too often."""
        now = time.monotonic()
        tokens, then = self._tokens.get(identity, (BURST_JOINS, now))
        tokens = min(BURST_JOINS, tokens + (now - then) * JOINS_PER_S)
        self._tokens[identity] = (tokens - 1 if tokens >= 1 else tokens), now
        if tokens < 1:
            raise self.refusal("too many joins", f"{name} joins too often; try again later")

    def _check_relay(self, stream: Stream) -> None:
        if self.settings.relay_terms is None:
            reason = (
                "relays cannot connect to another relay; give the server's address with --server"
            )
            raise self.refusal("relay", reason, retry=False)
        if stream.key is not None and stream.relay_id is None:
            reason = (
                f"the key of this relay is the key of client {stream.client}; make a key for the relay with: fedcomp keys add --relay "
                "--host HOST"
            )
            raise self.refusal("relay", reason, retry=False)
        self._take_token(stream.relay_identity, "this relay")

    def _identify(self, stream: Stream, client: int) -> None:
        """Set the client id of a stream. Raises EndStream for an id that is not in the run, or a client that joins too often."""
        clients = self.settings.clients
        if not 0 <= client < clients:
            reason = (
                f"client {client} is not part of this run, which has the clients 0 to {clients - 1}"
            )
            if client not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add(client)
                self.warn(
                    f"a client was refused: {reason}; start a new run with --clients {client + 1} to include this client"
                )
            raise self.refusal("no place", reason, retry=False)
        stream.client = client
        self._take_token(stream.identity, f"client {client}")
