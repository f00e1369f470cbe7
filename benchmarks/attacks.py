"""Memory and rounds of a server whose port is attacked, with TLS and enrolled keys, on this machine. Linux only: the script reads /proc.

    python benchmarks/attacks.py [--connections 20] [--seconds 3]           every attack, one after the other
    python benchmarks/attacks.py --attacks ping-flood rapid-reset           some attacks
    python benchmarks/attacks.py --attacks half-open-tls --half-open 2000   half-open connections, and a client that joins meanwhile

A server and its clients run rounds of the task `digits`, with a pause in each training step. Each attack uses several connections at the
same time, from other processes. An attacker opens a new connection if the server closes its connection, or if it can neither send nor
receive for `--stall` seconds. An attack with enrolled keys has KEYS keys of its own, because the server limits how often a key joins.

A row of the table shows the key of the attackers, the server's memory before the attack (with what earlier attacks left), its peak until
the memory has settled, the peak relative to the peak without attacks, the rounds that the run completed during the attack, and the bytes
that the server's kernel received from the attackers. After the table, one more client joins, first undisturbed and then while TLS
connections are half open; `--half-open 0` skips this.

The exit status is 0 if the server and the clients ended normally, and 1 if one failed or no round was completed for STUCK_S seconds.
"""

import argparse
import multiprocessing
import resource
import secrets
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from deployed import ENVIRONMENT, FEDCOMP, free_port

from fedcomp.codecs.frame import varint
from fedcomp.keys import certificates
from fedcomp.keys.enrolment import Enrolment, utc_now
from fedcomp.messages import Presence
from fedcomp.transports.grpc import wire

KEYS = 4  # enrolled keys of an attack
PROCESSES = 2  # processes of an attack
REST_S = 15.0  # longest pause after an attack
SETTLED = 1.02  # memory that ends the pause earlier, relative to the memory without attacks
WARM_UP_S = 5.0  # rounds before the memory without attacks is measured
SAMPLE_S = 0.004  # time between two readings of the server's memory
FORK = multiprocessing.get_context("fork")
STUCK_S = 120.0  # longest time to wait for a round
MAX_ROUNDS_PER_S = 10  # upper bound, because of the pause in each training step
# Training pauses while the file `slow` exists. The last rounds of the run are fast.
TASK = """\
import dataclasses
import pathlib
import time

from torch import nn

from fedcomp.tasks.digits import digits


def loss(outputs, targets):
    time.sleep(0.05 * pathlib.Path("slow").exists())
    return nn.functional.cross_entropy(outputs, targets)


task = dataclasses.replace(digits(), loss=loss)
"""

# HTTP/2 frames (RFC 9113), header fields (RFC 7541) and gRPC messages.

DATA, HEADERS, PRIORITY, RESET, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
HEADER_TABLE_SIZE, INITIAL_WINDOW_SIZE = 1, 4
FRAME_BYTES = 16384  # largest frame that every HTTP/2 server accepts
MAX_WINDOW = (1 << 31) - 1
ESTABLISHED = 1  # state in the kernel's struct tcp_info


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def setting(name: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, struct.pack(">HI", name, value))


def length(value: int) -> bytes:
    """Return the length of a text in a header field."""
    return bytes([value]) if value < 127 else b"\x7f" + varint(value - 127)


def field(name: bytes, value: bytes, first: bytes = b"\0") -> bytes:
    """Return a header field. With `first` = b"@", the server adds the field to the dynamic table."""
    return first + length(len(name)) + name + length(len(value)) + value


def request(*fields: bytes, path: bytes = wire.METHOD.encode()) -> bytes:
    """Return the header fields of a gRPC request."""
    return (
        b"\x83\x87\x04" + length(len(path)) + path  # :method POST, :scheme https, :path
        + b"\x01\x01x"  # :authority
        + field(b"content-type", b"application/grpc") + field(b"te", b"trailers") + b"".join(fields)
    )  # fmt: skip


def message(data: bytes, announced: int | None = None, compressed: bool = False) -> bytes:
    """Return the frames of a gRPC message on stream 1. `announced`: the length in its prefix, if not the true one."""
    announced = len(data) if announced is None else announced
    data = bytes([compressed]) + announced.to_bytes(4, "big") + data
    starts = range(0, len(data), FRAME_BYTES)
    return b"".join(frame(DATA, 0, 1, data[start : start + FRAME_BYTES]) for start in starts)


def continuation(fields: bytes, stream: int = 1) -> bytes:
    return frame(CONTINUATION, 0, stream, fields)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0)
OPEN = PREFACE + frame(HEADERS, END_HEADERS, 1, request())
UNFINISHED = PREFACE + frame(HEADERS, 0, 1, request())  # the headers do not end
HELLO = wire.encode_hello(wire.Hello(-1, "1.2.3"))


class Connection:
    """A connection of an attacker. Its methods raise OSError if the connection ends or stalls, or at the time `end`."""

    def __init__(self, port: int, context: ssl.SSLContext | None, end: float, stall_s: float):
        self.end, self.stall_s = end, stall_s
        self.socket = socket.socket()
        # If the attacker does not read, the server can send only a few kilobytes.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            self._set_timeout()
            self.socket.connect(("127.0.0.1", port))
            if context is not None:  # the first call of `send` or `receive` makes the handshake
                self.socket = context.wrap_socket(self.socket, do_handshake_on_connect=False)
        except OSError:
            self.socket.close()
            raise

    def send(self, data: bytes) -> None:
        self._set_timeout()
        self.socket.sendall(data)

    def flood(self, start: bytes, data: bytes) -> None:
        """Send `start` once and then `data` again and again, and read no answers."""
        self.send(start)
        while True:
            self.send(data)

    def once(self, data: bytes) -> None:
        """Send `data`, and do nothing until the server closes the connection."""
        self.send(data)
        while self.is_open():
            time.sleep(0.02)

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._set_timeout()
            if not (more := self.socket.recv(size - len(data))):
                raise ConnectionError
            data += more
        return data

    def join(self) -> None:
        """Join the run, as a client does."""
        self.send(OPEN + message(HELLO))
        kind, body = -1, b""
        while kind != DATA or body[5:6] != bytes([wire.Kind.INVITATION]):
            head = self.receive(9)
            kind, body = head[3], self.receive(int.from_bytes(head[:3], "big"))
        invitation = wire.decode(wire.Kind.INVITATION, wire.Reader(body[6:]))
        presence = Presence(invitation.run, invitation.client, invitation.version, "")
        self.send(message(b"".join(wire.encode(wire.Kind.PRESENCE, presence, invitation))))

    def is_open(self) -> bool:
        self._set_timeout()
        return self._tcp_info()[0] == ESTABLISHED

    def close(self) -> int:
        """Close the connection. Return the number of bytes that the server's kernel has received."""
        (acknowledged,) = struct.unpack_from("=Q", self._tcp_info(), 120)
        self.socket.close()
        return acknowledged

    def _set_timeout(self) -> None:
        left_s = self.end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.socket.settimeout(min(left_s, self.stall_s))

    def _tcp_info(self) -> bytes:
        return self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)


# Attacks.


def each_stream(c: Connection, frames: Callable[[int], bytes]) -> None:
    """Open streams with the frames that `frames(stream)` returns."""
    c.send(PREFACE)
    for stream in range(1, 1 << 30, 2):
        c.send(frames(stream))


def half_open(c: Connection) -> None:
    """Send the first message of the TLS handshake, or nothing on a connection without TLS."""
    if isinstance(c.socket, ssl.SSLSocket):
        c.socket.settimeout(0)
        with suppress(ssl.SSLWantReadError):
            c.socket.do_handshake()
    while c.is_open():
        time.sleep(0.02)


def ping_and_read(c: Connection) -> None:
    c.send(PREFACE)
    while True:
        c.send(PINGS)
        c.socket.settimeout(0)
        with suppress(ssl.SSLWantReadError):
            while c.socket.recv(FRAME_BYTES):
                pass


def join_and_flood(c: Connection, start: bytes, data: bytes) -> None:
    c.join()
    c.flood(start, data)


def unread_assignments(c: Connection) -> None:
    c.join()
    c.once(setting(INITIAL_WINDOW_SIZE, 0))


def random_method(stream: int) -> bytes:
    path = f"/{secrets.token_hex(16)}/{secrets.token_hex(16)}".encode()
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, request(path=path))


def new_fields(stream: int) -> bytes:
    """Return a request that replaces the fields in the dynamic table."""
    fields = (field(secrets.token_hex(8).encode(), b"v" * 1000, b"@") for _ in range(3))
    return frame(HEADERS, END_HEADERS | END_STREAM, stream, request(*fields))


def reset(stream: int) -> bytes:
    opened = frame(HEADERS, END_HEADERS, stream, request())
    return opened + frame(RESET, 0, stream, struct.pack(">I", 8))


def nested(depth: int) -> bytes:
    """Return messages in messages, in the encoding of protocol buffers."""
    data = b""
    for _ in range(depth):
        data = b"\x0a" + varint(len(data)) + data
    return data


def compressed_zeros(size: int) -> bytes:
    opened = frame(HEADERS, END_HEADERS, 1, request(field(b"grpc-encoding", b"gzip")))
    gzip = zlib.compressobj(9, wbits=31)
    return PREFACE + opened + message(gzip.compress(bytes(size)) + gzip.flush(), compressed=True)


NO_TLS, NO_KEY, TLS_1_2, FOREIGN, EXPIRED = "no TLS", "none", "TLS 1.2", "foreign CA", "expired"
REVOKED, ENROLLED = "revoked", "enrolled"
PINGS = frame(PING, 0, 0, b"attacker") * 500
PONGS = frame(PING, 1, 0, bytes(8)) * 500  # answers to pings that the server did not send
FIELDS = b"\0\1a\1b" * 3000
SMALL_FIELDS = continuation(FIELDS)
BIG_FIELDS = continuation(field(b"a", b"v" * 4000) * 4)
TABLE_FIELD = continuation(field(b"a", b"v" * 3900, b"@"))
INDICES = continuation(b"\xbe" * FRAME_BYTES)  # of the newest field in the table
GIANT_FIELD, VALUE = continuation(b"\0\1a" + length(1 << 30)), continuation(b"v" * FRAME_BYTES)
PRIORITIES = b"".join(frame(PRIORITY, 0, stream, bytes(5)) for stream in range(3, 2000, 2))
TABLE_SIZES = setting(HEADER_TABLE_SIZE, 4096) * 500
WINDOW_ZERO = setting(INITIAL_WINDOW_SIZE, 0)
WINDOWS = (WINDOW_ZERO + setting(INITIAL_WINDOW_SIZE, MAX_WINDOW)) * 250
WINDOW_UPDATES = frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)) * 500
SECOND_STREAM, SECOND_FIELDS = frame(HEADERS, 0, 3, request()), continuation(FIELDS, 3)
ANNOUNCED = message(bytes(FRAME_BYTES - 5), (1 << 32) - 1)
LARGEST = message(bytes([wire.Kind.HELLO]) + bytes(wire.MAX_GRPC_BYTES - 2), wire.MAX_GRPC_BYTES)
TRUNCATED = message(HELLO[:2]) + frame(DATA, END_STREAM, 1)
COMPRESSED = compressed_zeros(100 << 20)
BEGIN = message(bytes([wire.Kind.BEGIN]) + varint(1 << 40))
# The attacks by name: the key of the attackers (see `Run.contexts`), and a function that attacks through a new connection.
ATTACKS: dict[str, tuple[str, Callable[[Connection], None]]] = {
    "plaintext-http2": (NO_TLS, lambda c: c.flood(OPEN, PINGS)),
    "random-bytes": (NO_TLS, lambda c: c.flood(b"", secrets.token_bytes(FRAME_BYTES))),
    "half-open-tcp": (NO_TLS, half_open),
    "half-open-tls": (NO_KEY, half_open),
    "no-certificate": (NO_KEY, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "tls-1.2": (TLS_1_2, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "foreign-ca": (FOREIGN, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "expired": (EXPIRED, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "revoked-join": (REVOKED, lambda c: c.once(OPEN + message(HELLO))),
    "revoked-headers": (REVOKED, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "small-fields": (ENROLLED, lambda c: c.flood(UNFINISHED, SMALL_FIELDS)),
    "big-fields": (ENROLLED, lambda c: c.flood(UNFINISHED, BIG_FIELDS)),
    "empty-continuation": (ENROLLED, lambda c: c.flood(UNFINISHED, continuation(b"") * 1000)),
    "giant-field": (ENROLLED, lambda c: c.flood(UNFINISHED + GIANT_FIELD, VALUE)),
    "indexed-fields": (ENROLLED, lambda c: c.flood(UNFINISHED + TABLE_FIELD, INDICES)),
    "new-fields": (ENROLLED, lambda c: each_stream(c, new_fields)),
    "ping-flood": (ENROLLED, ping_and_read),
    "ping-unread": (ENROLLED, lambda c: c.flood(PREFACE, PINGS)),
    "ping-joined": (ENROLLED, lambda c: join_and_flood(c, b"", PONGS)),
    "settings-flood": (ENROLLED, lambda c: c.flood(PREFACE, TABLE_SIZES)),
    "priority-flood": (ENROLLED, lambda c: c.flood(PREFACE, PRIORITIES)),
    "rapid-reset": (ENROLLED, lambda c: each_stream(c, reset)),
    "window-changes": (ENROLLED, lambda c: c.flood(OPEN + message(HELLO), WINDOWS)),
    "window-updates": (ENROLLED, lambda c: c.flood(OPEN, WINDOW_UPDATES)),
    "window-zero": (ENROLLED, lambda c: c.once(OPEN + WINDOW_ZERO + message(HELLO))),
    "unread-assignments": (ENROLLED, unread_assignments),
    "empty-data": (ENROLLED, lambda c: c.flood(OPEN, frame(DATA, 0, 1) * 1000)),
    "headers-joined": (ENROLLED, lambda c: join_and_flood(c, SECOND_STREAM, SECOND_FIELDS)),
    "announced-4GB": (ENROLLED, lambda c: c.flood(OPEN, ANNOUNCED)),
    "largest-unfinished": (ENROLLED, lambda c: c.once(OPEN + LARGEST)),
    "truncated": (ENROLLED, lambda c: c.once(OPEN + TRUNCATED)),
    "nested": (ENROLLED, lambda c: c.once(OPEN + message(nested(4000)))),
    "compressed": (ENROLLED, lambda c: c.once(COMPRESSED)),
    "random-message": (ENROLLED, lambda c: c.once(OPEN + message(secrets.token_bytes(200)))),
    "unknown-methods": (ENROLLED, lambda c: each_stream(c, random_method)),
    "joined-huge": (ENROLLED, lambda c: join_and_flood(c, b"", BEGIN)),
    "joining": (ENROLLED, Connection.join),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=20, metavar="N")
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each attack")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=[*ATTACKS], metavar="NAME")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--stall", type=float, default=0.5, metavar="S")
    parser.add_argument("--half-open", type=int, default=2000, metavar="N")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), args)
        try:
            run.start_all()
            attack_all(run, args)
            if args.half_open:
                join_meanwhile(run, args.half_open)
            run.finish()
        finally:
            run.stop()


def attack_all(run: "Run", args: argparse.Namespace) -> None:
    heads = "attack", "key", "before MB", "peak MB", "relative", "rounds", "received B"
    print("{:20} {:10} {:>10} {:>8} {:>9} {:>7} {:>14}".format(*heads), flush=True)
    row = "{:20} {:10} {:10.0f} {:8.0f} {:+9.1%} {:7} {:14,}".format
    run.peak_mb(WARM_UP_S)
    before_mb, rounds = run.server_mb(), run.rounds
    usual_mb = run.peak_mb(args.seconds)
    print(row("undisturbed", "-", before_mb, usual_mb, 0, run.rounds - rounds, 0), flush=True)
    for name in args.attacks:
        key, function = ATTACKS[name]
        contexts, received = run.contexts(name), FORK.Value("q")
        before_mb, rounds, end = run.server_mb(), run.rounds, time.monotonic() + args.seconds
        processes = []
        for first in range(PROCESSES):
            own = [contexts[i % len(contexts)] for i in range(first, args.connections, PROCESSES)]
            work = run.port, args.stall, function, own, end, received
            processes.append(FORK.Process(target=attack, args=work, daemon=True))
            processes[-1].start()
        peak_mb, rounds = run.peak_mb(args.seconds), run.rounds - rounds
        peak_mb, settled = max(peak_mb, run.peak_mb(1.0)), time.monotonic() + REST_S
        while time.monotonic() < settled and run.server_mb() > SETTLED * usual_mb:
            peak_mb = max(peak_mb, run.peak_mb(0.2))
        for process in processes:
            process.join()
        values = peak_mb, peak_mb / usual_mb - 1, rounds, received.value
        print(row(name, key, before_mb, *values), flush=True)


def attack(port: int, stall_s: float, function: Any, contexts: list, end: float, received: Any):
    """Attack with one connection for each of `contexts` until the time `end`. Add the bytes that the server receives to `received`."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def attack_again(context: ssl.SSLContext | None) -> None:
        while time.monotonic() < end:
            try:
                connection = Connection(port, context, end, stall_s)
            except OSError:
                time.sleep(0.01)
                continue
            with suppress(OSError):
                function(connection)
            size = connection.close()
            with received.get_lock():
                received.value += size

    threads = [threading.Thread(target=attack_again, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def join_meanwhile(run: "Run", count: int) -> None:
    """Print how long a client needs to join, first undisturbed and then with `count` half-open TLS connections."""
    undisturbed_s, _ = run.join(0)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with ExitStack() as sockets:
        context = tls_context()
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", run.port), 20)
            tls = context.wrap_socket(connection, do_handshake_on_connect=False)
            sockets.enter_context(tls).settimeout(0)
            with suppress(OSError):  # no answer yet, or the server has closed the connection
                tls.do_handshake()
        joined_s, peak_mb = run.join(1)
    print(
        f"one more client joined in {joined_s:.1f} s while {count:,} TLS connections were half open, and in {undisturbed_s:.1f} s "
        f"undisturbed, including the start of its process; the server's peak memory was {peak_mb:.0f} MB"
    )


def tls_context(certificate: bytes = b"", private_key: bytes = b"") -> ssl.SSLContext:
    """Return the TLS context of an attacker, which accepts every server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if certificate:
        with tempfile.NamedTemporaryFile() as file:
            file.write(private_key + certificate)
            file.flush()
            context.load_cert_chain(file.name)
    return context


class Run:
    """A run under attack, in a folder: the server's process and the processes of clients.

    The clients 0 to `clients` - 1 train. The next two clients join during `join_meanwhile`. Attackers have the keys of the other clients,
    which take part in the first round only, because the first round waits for all clients.
    """

    def __init__(self, folder: Path, args: argparse.Namespace):
        self.folder, self.clients = folder, args.clients
        self.port = free_port()
        enrolled = [name for name in args.attacks if ATTACKS[name][0] == ENROLLED]
        self.first_key = {name: args.clients + 2 + KEYS * i for i, name in enumerate(enrolled)}
        self.total = args.clients + 2 + KEYS * len(enrolled)
        attacks_s = len(args.attacks) * (args.seconds + 1 + REST_S / 3)
        self.n_rounds = int(MAX_ROUNDS_PER_S * (attacks_s + args.seconds + 2 * WARM_UP_S + 60))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_all(self) -> None:
        (self.folder / "slow_digits.py").write_text(TASK)
        for words in f"init --clients {self.total + 1} --host 127.0.0.1", f"revoke {self.total}":
            keys = [*FEDCOMP, "keys", *words.split()]
            subprocess.run(keys, cwd=self.folder, env=ENVIRONMENT, check=True, capture_output=True)
        shape = f"--clients {self.total} --participation {self.clients}/{self.total} --quorum 0.5 --deadline 1 --local-steps 1"
        rest = f"--rounds {self.n_rounds} --eval-every {self.n_rounds} --host 127.0.0.1 --port {self.port} --out run --plain"
        self.start("server", f"server start --task slow_digits.py:task {shape} {rest}")
        for name, first, end in ("clients", 0, self.clients), ("others", self.clients, self.total):
            own = self.folder / name
            own.mkdir()
            for client in range(first, end):
                (own / f"{client}.toml").symlink_to(self.enrolment(client))
            self.start_client(name, name, f"--count {end - first} --partition-id {first}")
        self.wait_for_rounds(3)
        self.terminate("others")
        (self.folder / "slow").touch()

    def finish(self) -> None:
        """Wait for the normal end of the run."""
        (self.folder / "slow").unlink()
        while self.is_running("server"):
            self.wait_for_rounds(1)
        for name in [*self.processes]:
            with suppress(subprocess.TimeoutExpired):
                self.processes[name].wait(STUCK_S)
            if self.processes[name].poll() != 0:
                self.fail(name, "did not end normally")
        print(f"the run ended normally after {self.rounds} rounds: the exit status is 0")

    def stop(self) -> None:
        for name in [*self.processes]:
            self.terminate(name)

    @property
    def rounds(self) -> int:
        path = self.folder / "run" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def server_mb(self) -> float:
        """Return the server's resident memory."""
        path = Path(f"/proc/{self.processes['server'].pid}/statm")
        return int(path.read_text().split()[1]) * resource.getpagesize() / 1e6

    def peak_mb(self, seconds: float) -> float:
        """Return the server's peak memory during the next `seconds` seconds."""
        end, peak_mb = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            for name in self.processes:
                if not self.is_running(name):
                    self.fail(name, "ended too early")
            peak_mb = max(peak_mb, self.server_mb())
            time.sleep(SAMPLE_S)
        return peak_mb

    def contexts(self, attack: str) -> list[ssl.SSLContext | None]:
        """Return the TLS contexts of an attack, one for each key; [None] for an attack without TLS."""
        key, _ = ATTACKS[attack]
        if key == NO_TLS:
            return [None]
        if key in (NO_KEY, TLS_1_2):
            context = tls_context()
            if key == TLS_1_2:
                context.maximum_version = ssl.TLSVersion.TLSv1_2
            return [context]
        if key in (FOREIGN, EXPIRED):
            own, now = ec.generate_private_key(certificates.CURVE()), utc_now()
            ca = certificates.read_private_key(self.folder / "keys" / "ca.key")
            if key == FOREIGN:
                ca = ec.generate_private_key(certificates.CURVE())
            ends = now + timedelta(days=1 if key == FOREIGN else -1)
            begins = ends - timedelta(days=2)
            made = certificates.client_certificate(own.public_key(), ca, begins, ends)
            return [
                tls_context(certificates.certificate_pem(made), certificates.private_key_pem(own))
            ]
        first, count = (self.total, 1) if key == REVOKED else (self.first_key[attack], KEYS)
        read = [Enrolment.read(self.enrolment(client)) for client in range(first, first + count)]
        return [tls_context(one.certificate.encode(), one.private_key.encode()) for one in read]

    def join(self, which: int) -> tuple[float, float]:
        """Start the client `clients` + `which`. Return the seconds until it has joined, and the server's peak memory meanwhile."""
        began, peak_mb, name = time.monotonic(), 0.0, f"joiner-{which}"
        client = self.clients + which
        self.start_client(name, f"keys/clients/{client}.toml", f"--partition-id {client}")
        while "joined the run" not in self.output(name).read_text():
            peak_mb = max(peak_mb, self.peak_mb(0.02))
            if time.monotonic() > began + STUCK_S:
                self.fail(name, "has not joined")
        return time.monotonic() - began, peak_mb

    def wait_for_rounds(self, rounds: int) -> None:
        wanted, deadline = self.rounds + rounds, time.monotonic() + STUCK_S
        while self.rounds < wanted and self.is_running("server"):
            if time.monotonic() > deadline:
                self.fail("server", f"completed no round in {STUCK_S:g} s")
            time.sleep(0.05)

    def enrolment(self, client: int) -> Path:
        return self.folder / "keys" / "clients" / f"{client}.toml"

    def start_client(self, name: str, enrolment: str, rest: str) -> None:
        own = f"--enrolment {enrolment} --state-dir state-{name} {rest}"
        self.start(name, f"client --server 127.0.0.1:{self.port} --task slow_digits.py:task {own}")

    def start(self, name: str, command: str) -> None:
        how = {"cwd": self.folder, "env": ENVIRONMENT, "stderr": subprocess.STDOUT}
        with self.output(name).open("wb") as log:
            self.processes[name] = subprocess.Popen([*FEDCOMP, *command.split()], stdout=log, **how)

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def is_running(self, name: str) -> bool:
        return self.processes[name].poll() is None

    def fail(self, name: str, problem: str) -> None:
        status, text = self.processes[name].poll(), self.output(name).read_text()[-3000:]
        raise SystemExit(f"{name} {problem}, status {status}:\n{text}")

    def terminate(self, name: str) -> None:
        process = self.processes.pop(name)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
