"""A server that cannot be used is one sentence that says why and what to do, within the time that is given."""

import re
import socket
import threading
import time
from datetime import timedelta

import pytest
from cases import for_each
from tls_servers import HEALTHY, Authority, dated, free_port, serving

from fedcomp.errors import ConfigError, KeysError, UnreachableError
from fedcomp.keys import connection
from fedcomp.keys.connection import address, check_server, contact
from fedcomp.keys.enrolment import moment, utc_now

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority()


def refused(host, port, ca_pem, timeout_s=TIMEOUT_S) -> UnreachableError:
    """Why a server is not reached; it is told in time, in one line."""
    begun = time.monotonic()
    with pytest.raises(UnreachableError) as raised:
        check_server(host, port, ca_pem, timeout_s)
    assert time.monotonic() - begun < timeout_s + 1
    assert str(raised.value).isprintable() and "; " in str(raised.value)
    return raised.value


# Servers as they should be.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_server_with_the_right_certificate(host, ca, tmp_path):
    with serving(HEALTHY, ca.context(tmp_path)) as port:
        assert check_server(host, port, ca.pem, TIMEOUT_S) is None
        assert check_server(host, port, ca.pem.decode(), TIMEOUT_S) is None


def test_an_ipv6_address(ca, tmp_path):
    try:
        with serving(HEALTHY, ca.context(tmp_path, ["::1"]), socket.AF_INET6) as port:
            check_server("::1", port, ca.pem, TIMEOUT_S)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_what_is_learned_on_the_way(ca, tmp_path):
    then = utc_now().replace(microsecond=0) - timedelta(hours=3)
    with serving(dated(then), ca.context(tmp_path, ends_days=17)) as port:
        met = contact("localhost", port, ca.pem, TIMEOUT_S)
    assert met.date == then and abs(met.asked - utc_now()) < timedelta(seconds=30)
    assert timedelta(days=16) < met.certificate.not_valid_after_utc - utc_now() < timedelta(days=17)


def test_without_tls_where_none_is_expected():
    with serving() as port:
        assert contact("127.0.0.1", port, None, TIMEOUT_S).certificate is None


# What can be wrong with a certificate.


def test_another_host_name(ca, tmp_path):
    with serving(HEALTHY, ca.context(tmp_path, ["server.example", "10.0.0.5"])) as port:
        error = refused("localhost", port, ca.pem)
        by_number = refused("127.0.0.1", port, ca.pem)
    assert error.cause == by_number.cause == "host name"
    assert str(error) == (
        f"the certificate of localhost:{port} is for server.example, 10.0.0.5 and not for localhost; correct --server, "
        "or on the server: fedcomp keys renew server --host localhost"
    )


def test_another_ca_of_the_same_name(ca, tmp_path):
    with serving(HEALTHY, Authority().context(tmp_path)) as port:
        error = refused("localhost", port, ca.pem)
    assert error.cause == "ca"
    assert str(error).startswith(
        f"the certificate of localhost:{port} is not signed by the CA that this client trusts; give the enrolment"
    )


@pytest.mark.parametrize(
    ("begins", "ends", "cause", "verb"),
    [(-90, -2, "expired", "ended"), (2, 90, "not yet valid", "begins")],
)
def test_a_certificate_whose_time_is_not_now_says_when_and_what_the_clock_says(
    begins, ends, cause, verb, ca, tmp_path
):
    with serving(HEALTHY, ca.context(tmp_path, begins_days=begins, ends_days=ends)) as port:
        error = refused("localhost", port, ca.pem)
    assert error.cause == cause
    there, here = re.search(
        rf"{verb} on (\S+), and it is (\S+) by this machine's clock; correct the clock", str(error)
    ).groups()
    day = utc_now() + timedelta(days=ends if verb == "ended" else begins)
    assert abs(day - moment(there)) < timedelta(hours=2) and abs(
        utc_now() - moment(here)
    ) < timedelta(minutes=1)


def test_a_ca_that_has_ended(tmp_path):
    old = Authority(-900, -3)
    with serving(HEALTHY, old.context(tmp_path)) as port:
        error = refused("localhost", port, old.pem)
    assert error.cause == "expired"
    there, rest = re.match(
        rf"the CA of localhost:{port} ended on (\S+), and it is \S+ by this machine's clock; (.*)",
        str(error),
    ).groups()
    assert abs(utc_now() - timedelta(days=3) - moment(there)) < timedelta(minutes=1)
    assert rest == "correct the clock if it is wrong, else on the server: fedcomp keys init"


@for_each("answer", [HEALTHY, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_without_tls(answer, ca):
    with serving(answer) as port:
        error = refused("localhost", port, ca.pem)
    assert error.cause == "no tls"
    assert str(error).startswith(
        f"localhost:{port} " + ("has no certificate" if answer else "speaks no TLS")
    )


def test_a_server_without_tls_that_waits_for_a_whole_question(ca):
    """It does not see the beginning of TLS as one, and both sides would wait."""
    with serving(HEALTHY, until=b"\r\n\r\n") as port:
        assert refused("127.0.0.1", port, ca.pem, 1.5).cause == "no tls"


def test_tls_where_none_is_expected(ca, tmp_path):
    with serving(HEALTHY, ca.context(tmp_path)) as port:
        error = refused("localhost", port, None)
    assert (error.cause, str(error)) == (
        "tls",
        f"localhost:{port} has a certificate; leave --insecure out and give the enrolment file",
    )


def test_a_ca_that_is_none():
    with (
        serving() as port,
        pytest.raises(KeysError, match="certificate of the CA cannot be read; copy it anew"),
    ):
        check_server(
            "localhost", port, b"-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n"
        )


# Nobody there.


def test_a_closed_port(ca):
    port = free_port()
    error = refused("127.0.0.1", port, ca.pem)
    assert error.cause == "closed" in UnreachableError.passing
    assert str(error) == (
        f"nothing listens on 127.0.0.1:{port}; start the server there with fedcomp server start --port {port}, or "
        "correct --server"
    )


@for_each("host", ["a..b", "a b", "x" * 300, 70 * "ß"])
def test_a_host_that_cannot_be(host, ca):
    assert refused(host, 8080, ca.pem).cause == "unknown host"


def test_a_host_that_nobody_knows(ca):
    error = refused("nobody.invalid", 8080, ca.pem)
    assert error.cause in (
        "unknown host",
        "silent",
    )  # silent: a resolver that cannot be reached takes its time
    assert "nobody.invalid" in str(error)


def test_a_resolver_that_takes_its_time(ca, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(connection.socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    error = refused("localhost", 8080, ca.pem, 0.3)
    over.set()
    assert error.cause == "silent" and "its name is not resolved" in str(error)


def test_a_server_that_is_frozen_before_tls(ca):
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        error = refused("127.0.0.1", frozen.getsockname()[1], ca.pem, 0.8)
    assert (
        error.cause == "silent"
        and "within 0.8 s (no TLS is spoken); see that the server is up" in str(error)
    )


@pytest.mark.parametrize("secure", [True, False])
def test_a_server_that_is_frozen_afterwards(secure, ca, tmp_path):
    with serving(None, ca.context(tmp_path) if secure else None) as port:
        error = refused("127.0.0.1", port, ca.pem if secure else None, 0.8)
    assert error.cause == "silent" and "/health is not answered" in str(error)


def test_packets_that_are_dropped(ca):
    """A full queue of connections drops what comes, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queued = [socket.socket() for _ in range(3)]
        for one in queued:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        error = refused("127.0.0.1", full.getsockname()[1], ca.pem, 0.8)
        for one in queued:
            one.close()
    assert error.cause == "silent" and "no connection is made" in str(error)


# Somebody else there.


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\n\r\n" + 200_000 * b"x",
        b"HTTP/1.1 301 Moved\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\n" + 200 * b"a: b\r\n" + b"\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    ],
    ids=["404", "text", "endless", "moved", "ssh", "headers", "short", "continue"],
)
def test_no_fedcomp_server(answer, ca, tmp_path):
    with serving(answer, ca.context(tmp_path)) as port:
        error = refused("localhost", port, ca.pem)
    assert error.cause == "not fedcomp"
    assert str(error).startswith(f"localhost:{port} is no fedcomp server, it answers /health with ")


def test_a_server_that_says_one_byte_at_a_time(ca, tmp_path):
    with (
        serving(None, ca.context(tmp_path)) as port,
        socket.create_server(("127.0.0.1", 0)) as slow,
    ):
        del port

        def drip() -> None:
            connection_, _ = slow.accept()
            with connection_:
                for byte in b"HTTP/1.1 200 OK\r\n" + 1000 * b"a":
                    try:
                        connection_.sendall(bytes([byte]))
                    except OSError:
                        return
                    time.sleep(0.05)

        thread = threading.Thread(target=drip)
        thread.start()
        error = refused("127.0.0.1", slow.getsockname()[1], None, 1.0)
    thread.join()
    assert error.cause == "silent"


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_server_that_is_not_ready_may_be_soon(status, ca, tmp_path):
    with serving(
        b"HTTP/1.1 %d Wait\r\ncontent-length: 4\r\n\r\nwait" % status, ca.context(tmp_path)
    ) as port:
        error = refused("localhost", port, ca.pem)
    assert error.cause == "starting" in UnreachableError.passing and f"status {status}" in str(
        error
    )


# Addresses.


@for_each(
    "text, expected",
    [("host:1", ("host", 1)), ("10.0.0.5:8080", ("10.0.0.5", 8080)), ("[::1]:80", ("::1", 80))],
)
def test_addresses(text, expected):
    assert address(text) == expected


@for_each(
    "text",
    [
        "host",
        ":80",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "host:99999999999999",
        "::1:80",
        "http://h:80",
        "[]:80",
        "host:²",
        "a\nb:80",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match=r"(?s)^--server cannot be '.*'; give ") as error:
        address(text)
    assert "host:port" in str(error.value) or "a port from 1 to 65535" in str(error.value)
