"""`contact` reports a server that cannot be used within the time limit, in one sentence with the cause and the fix."""

import functools
import re
import socket
import ssl
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cases import for_each
from tls_servers import SETTINGS, Authority, free_port, grpc_serving, serving

from fedcomp.errors import ConfigError, KeysError, UnreachableError
from fedcomp.keys import certificates, connection
from fedcomp.keys import key_folder as keys
from fedcomp.keys.connection import address, contact
from fedcomp.keys.enrolment import Enrolment, parse_time, utc_now

TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def ca() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def mine(ca) -> Enrolment:
    return ca.enrolment()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("grpc") / "keys"
    keys.make(folder, 1)
    return folder


def refused(host, port, trust, timeout_s=TIMEOUT_S) -> UnreachableError:
    """Return the error of `contact`. Check that it comes in time and has one line."""
    begun = time.monotonic()
    with pytest.raises(UnreachableError) as raised:
        contact(host, port, trust, timeout_s)
    assert time.monotonic() - begun < timeout_s + 1
    assert str(raised.value).isprintable() and "; " in str(raised.value)
    return raised.value


# A gRPC server.


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_grpc_server_with_the_right_certificate(host, folder):
    mine = Enrolment.read(folder / "clients" / "0.toml")
    with grpc_serving(folder) as port:
        for trust in (mine, mine.ca):
            met = contact(host, port, trust, TIMEOUT_S)
            assert met.certificate == keys.check_server_files(folder) and met.seconds < TIMEOUT_S


def test_a_grpc_server_that_refuses_the_client(folder):
    ours = (folder / "ca.crt").read_bytes()
    with grpc_serving(folder) as port:
        error = refused("localhost", port, Authority().enrolment(3, ca=ours))
    assert (error.cause, str(error)) == (
        "refused",
        f"localhost:{port} refuses the certificate of client 3 (it closes the connection); check the clocks of both "
        "machines, and if they are right, run on the server: fedcomp keys renew 3",
    )


def test_a_grpc_server_with_and_without_tls(folder, mine):
    with grpc_serving(None) as port:
        assert contact("127.0.0.1", port, None, TIMEOUT_S).certificate is None
        error = refused("127.0.0.1", port, mine)
    assert (error.cause, str(error)) == (
        "no tls",
        f"127.0.0.1:{port} answers without TLS; start the server with --keys, or correct --server",
    )
    with grpc_serving(folder) as port:
        error = refused("localhost", port, None)
    assert (error.cause, str(error)) == (
        "tls",
        f"localhost:{port} requires TLS; leave --insecure out and give the enrolment file",
    )


def test_an_ipv6_address(ca, mine, tmp_path):
    try:
        with serving(SETTINGS, ca.context(tmp_path, ["::1"]), socket.AF_INET6) as port:
            contact("::1", port, mine, TIMEOUT_S)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


# Faults of the client's certificate.


@pytest.mark.parametrize(
    ("begins", "ends", "verb"),
    [(-90, -2, "expired"), (2, 90, "begins")],
    ids=["expired", "not begun"],
)
def test_the_error_for_an_expired_client_certificate_names_times(begins, ends, verb, ca, tmp_path):
    with serving(SETTINGS, ca.context(tmp_path)) as port:
        error = refused("localhost", port, ca.enrolment(3, begins, ends))
    assert error.cause == "refused"
    assert re.fullmatch(
        rf"the certificate of client 3 {verb} on \S+Z, and it is \S+Z by this machine's clock; correct the clock if it is "
        "wrong, else run on the server: fedcomp keys renew 3",
        str(error),
    )


def test_the_error_repeats_the_reason_that_a_server_gives_for_refusing_a_client(ca, tmp_path):
    with serving(SETTINGS, ca.context(tmp_path)) as port:
        error = refused("localhost", port, Authority().enrolment(3, ca=ca.pem))
    assert re.match(rf"localhost:{port} refuses the certificate of client 3 \(.+\); ", str(error))


# Faults of the server's certificate.


def test_another_host_name(ca, mine, tmp_path):
    with serving(SETTINGS, ca.context(tmp_path, ["server.example", "10.0.0.5"])) as port:
        error = refused("localhost", port, mine)
        by_number = refused("127.0.0.1", port, mine)
    assert error.cause == by_number.cause == "host name"
    assert str(error) == (
        f"the certificate of localhost:{port} is for server.example, 10.0.0.5 and not for localhost; correct --server, "
        "or run on the server: fedcomp keys renew server --host localhost"
    )


@for_each(
    "host, ends, remedy",
    [("relay.example", 90, "renew relay-ID --host localhost"), ("localhost", -2, "renew relay-ID")],
)
def test_an_error_about_a_relays_certificate_names_the_command_for_relays(
    host, ends, remedy, ca, mine, tmp_path
):
    context = ca.context(
        tmp_path, [host], -90, ends, functools.partial(certificates.server_certificate, relay=True)
    )
    with serving(SETTINGS, context) as port:
        assert str(refused("localhost", port, mine)).endswith(
            f"on the server: fedcomp keys {remedy}"
        )


def test_another_ca_of_the_same_name(mine, tmp_path):
    with serving(SETTINGS, Authority().context(tmp_path)) as port:
        error = refused("localhost", port, mine)
    assert error.cause == "ca"
    assert str(error).startswith(
        f"the certificate of localhost:{port} is not signed by the CA that this client trusts; give the enrolment"
    )


@pytest.mark.parametrize(
    ("begins", "ends", "cause", "verb"),
    [(-90, -2, "expired", "expired"), (2, 90, "not yet valid", "begins")],
)
def test_the_error_for_an_expired_server_certificate_names_date_and_clock(
    begins, ends, cause, verb, ca, mine, tmp_path
):
    with serving(SETTINGS, ca.context(tmp_path, begins_days=begins, ends_days=ends)) as port:
        error = refused("localhost", port, mine)
    assert error.cause == cause
    there, here = re.search(
        rf"{verb} on (\S+), and it is (\S+) by this machine's clock; correct the clock", str(error)
    ).groups()
    day = utc_now() + timedelta(days=ends if verb == "expired" else begins)
    assert abs(day - parse_time(there)) < timedelta(hours=2)
    assert abs(utc_now() - parse_time(here)) < timedelta(minutes=1)


def test_a_ca_that_has_ended(tmp_path):
    old = Authority(-900, -3)
    with serving(SETTINGS, old.context(tmp_path)) as port:
        error = refused("localhost", port, old.enrolment())
    assert error.cause == "expired"
    assert re.fullmatch(
        rf"the CA of localhost:{port} expired on \S+Z, and it is \S+ by this machine's clock; correct the clock if it is wrong, "
        "else run on the server: fedcomp keys init",
        str(error),
    )


def test_a_ca_that_cannot_be_parsed_is_an_error():
    with pytest.raises(KeysError, match="certificate of the CA cannot be read; copy it again"):
        contact("localhost", 1, "-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")


# Other servers.


@for_each("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_port_without_tls(answer, mine):
    with serving(answer) as port:
        error = refused("localhost", port, mine)
        without = refused("localhost", port, None)
    if answer:
        assert error.cause == "other tls" and " does not speak TLS 1.3 (" in str(error)
    else:  # like a server that is stopping, or has too many connections
        assert error.cause == "starting" in UnreachableError.transient
    assert (without.cause, str(without)) == (
        "not fedcomp",
        f"localhost:{port} is not a fedcomp server: it does not speak HTTP/2; correct --server",
    )


def test_a_server_without_tls_that_waits_for_a_full_http2_preface_is_recognised(mine):
    with serving(SETTINGS, until=b"SM\r\n\r\n") as port:
        assert refused("127.0.0.1", port, mine, 1.5).cause == "no tls"


def test_a_server_with_tls_that_does_not_speak_http2(ca, mine, tmp_path):
    context = ca.context(tmp_path)
    context.set_alpn_protocols(["http/1.1"])
    with serving(SETTINGS, context) as port:
        error = refused("localhost", port, mine)
    assert (error.cause, str(error)) == (
        "not fedcomp",
        f"localhost:{port} is not a fedcomp server: it does not speak HTTP/2; correct --server",
    )


def test_a_server_with_an_older_tls(ca, mine, tmp_path):
    context = ca.context(tmp_path)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(SETTINGS, context) as port:
        assert "does not speak TLS 1.3 (" in str(refused("localhost", port, mine))


@pytest.mark.parametrize("secure", [True, False])
def test_a_server_that_ends_during_or_after_the_handshake_is_a_transient_error(
    secure, ca, mine, tmp_path
):
    context = ca.context(tmp_path)

    def end() -> None:
        plain, _ = listener.accept()
        with context.wrap_socket(plain, server_side=True) if secure else plain:
            listener.close()

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    thread = threading.Thread(target=end)
    thread.start()
    error = refused("127.0.0.1", port, mine)
    thread.join()
    assert error.cause in UnreachableError.transient, error


# Hosts and ports without a server.


def test_a_closed_port(mine):
    port = free_port()
    error = refused("127.0.0.1", port, mine)
    assert error.cause == "closed" in UnreachableError.transient
    assert str(error) == (
        f"nothing listens on 127.0.0.1:{port}; start the server or relay there (fedcomp server start or fedcomp relay, "
        f"with --port {port}), or correct --server"
    )


@for_each("host", ["a..b", "a b", "x" * 300, 70 * "ß"])
def test_an_invalid_host_name_is_an_unknown_host(host, mine):
    assert refused(host, 8080, mine).cause == "unknown host"


def test_an_unknown_host(mine):
    error = refused("nobody.invalid", 8080, mine)
    assert error.cause in (
        "unknown host",
        "silent",
    )  # "silent" if this machine's DNS resolver cannot be reached
    assert "nobody.invalid" in str(error)


def test_a_slow_dns_resolver_is_reported_within_the_time_limit(mine, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(connection.socket, "getaddrinfo", lambda *_, **__: over.wait(20) and [])
    error = refused("localhost", 8080, mine, 0.3)
    over.set()
    assert error.cause == "silent" and "the host name is not resolved" in str(error)


@pytest.mark.parametrize("secure", [True, False])
def test_a_server_that_never_answers(secure, mine):
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        error = refused("127.0.0.1", frozen.getsockname()[1], mine if secure else None, 0.8)
    what = "no answer to the TLS handshake" if secure else "no HTTP/2 frame arrives"
    assert error.cause == "silent"
    assert f"within 0.8 s ({what}); check that the server runs" in str(error)


def test_a_server_that_does_not_answer_after_the_tls_handshake(ca, mine, tmp_path):
    with serving(None, ca.context(tmp_path)) as port:
        error = refused("127.0.0.1", port, mine, 0.8)
    assert error.cause == "silent" and "no HTTP/2 frame arrives" in str(error)


def test_dropped_packets_are_reported_within_the_time_limit(mine):
    """A listening socket whose queue is full drops further connections, as a firewall does."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        queued = [socket.socket() for _ in range(3)]
        for one in queued:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        error = refused("127.0.0.1", full.getsockname()[1], mine, 0.8)
        for one in queued:
            one.close()
    assert error.cause == "silent" and "no connection is made" in str(error)


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
def test_malformed_addresses_are_refused(text):
    with pytest.raises(ConfigError, match=r"(?s)^--server cannot be '.*'; give ") as error:
        address(text)
    assert "host:port" in str(error.value) or "a port from 1 to 65535" in str(error.value)
