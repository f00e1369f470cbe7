"""A malformed enrolment file is refused with one sentence that names the file and the line or field."""

import hashlib
import re
import stat
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import tomli_w
from cases import for_each
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from tls_servers import Authority

from fedcomp.errors import ConfigError, KeysError
from fedcomp.keys import certificates
from fedcomp.keys.enrolment import (
    MAX_ID,
    Enrolment,
    default_enrolment,
    format_time,
    key_hash,
    openssh,
    parse_public_key,
    parse_time,
    utc_now,
)

ENDS = datetime(2027, 11, 21, 16, 33, 8, tzinfo=UTC)
CA = Authority(ends_days=9000)


def client(key, ends: datetime = ENDS) -> Enrolment:
    made = certificates.client_certificate(
        key.public_key(), CA.key, ends - timedelta(days=365), ends
    )
    return Enrolment(
        3,
        certificates.certificate_pem(made).decode(),
        private_text(key),
        CA.pem.decode(),
        "server.example:8080",
    )


NOT_LOCKED = serialization.NoEncryption()


def private_text(key, encryption=NOT_LOCKED) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    ).decode()


def public_text(key) -> str:
    return (
        key.public_key()
        .public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        .decode()
    )


@pytest.fixture(scope="module")
def key():
    return ec.generate_private_key(ec.SECP384R1())


@pytest.fixture(scope="module")
def enrolment(key) -> Enrolment:
    return client(key)


def refused(path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(KeysError) as raised:
        Enrolment.read(path)
    assert str(raised.value).isprintable()
    assert str(raised.value).endswith("; copy it again from the folder of keys on the server")
    return str(raised.value).removeprefix(str(path)).partition(";")[0]


@pytest.mark.parametrize("server", ["server.example:8080", None])
def test_a_written_enrolment_is_read_back(server, enrolment, tmp_path):
    path = tmp_path / "3.toml"
    path.write_text(replace(enrolment, server=server).text())
    assert Enrolment.read(path) == Enrolment.read(str(path)) == replace(enrolment, server=server)


def test_an_enrolment_ends_when_its_certificate_ends(enrolment):
    assert enrolment.not_after == ENDS and f"valid until {format_time(ENDS)}" in enrolment.text()


def test_the_identity_is_the_hash_of_the_public_key_as_der(enrolment, key):
    der = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert enrolment.key_hash == key_hash(key.public_key()) == hashlib.sha256(der).digest()


def test_the_private_key_is_not_in_the_repr(enrolment):
    assert "PRIVATE" not in repr(enrolment)


@pytest.mark.parametrize("field", ["id", "certificate", "private_key", "ca"])
def test_a_missing_field_is_named(field, enrolment, tmp_path):
    values = tomllib.loads(enrolment.text())
    del values[field]
    assert refused(tmp_path / "x.toml", tomli_w.dumps(values)) == f": '{field}' is missing"


def bad_keys():
    yield "private_key", private_text(ec.generate_private_key(ec.SECP256R1()))
    yield "private_key", private_text(ed25519.Ed25519PrivateKey.generate())
    locked = serialization.BestAvailableEncryption(b"secret")
    yield "private_key", private_text(ec.generate_private_key(ec.SECP384R1()), locked)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", -1),
        ("id", "3"),
        ("id", True),
        ("id", 1.0),
        ("id", MAX_ID + 1),
        ("id", [3]),
        ("certificate", "no"),
        ("certificate", ""),
        ("certificate", "ü"),
        ("certificate", 7),
        ("certificate", CA.pem.decode() + CA.pem.decode()),
        ("private_key", "no"),
        ("private_key", ""),
        ("ca", "no"),
        ("ca", {"a": 1}),
        ("server", 8080),
        ("server", "ü"),
        *bad_keys(),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_error_for_an_invalid_value_names_its_field(field, value, enrolment, tmp_path):
    output = refused(
        tmp_path / "x.toml", tomli_w.dumps(tomllib.loads(enrolment.text()) | {field: value})
    )
    assert output.startswith(f": '{field}' is not a")


def test_a_private_key_of_another_certificate(enrolment, tmp_path):
    other = private_text(ec.generate_private_key(ec.SECP384R1()))
    output = refused(tmp_path / "x.toml", replace(enrolment, private_key=other).text())
    assert output == ": 'private_key' is not the key of 'certificate'"


def test_a_certificate_of_another_ca(enrolment, tmp_path):
    output = refused(tmp_path / "x.toml", replace(enrolment, ca=Authority().pem.decode()).text())
    assert output == ": 'certificate' is not signed by 'ca'"


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("id = 3\nid = 4\n", r" is not TOML: .*\(at line 2, column 7\)"),
        ("id = 3\nnonsense\n", r" is not TOML: .*\(at line 2, column 9\)"),
        ("", ": 'id' is missing"),
        ("[" * 100_000, " is not TOML: .*"),
    ],
)
def test_a_file_that_is_not_toml_names_the_line(text, output, tmp_path):
    assert re.fullmatch(output, refused(tmp_path / "x.toml", text))


def test_binary_files_folders_and_absent_files_are_refused(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    for what in (path, tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(
            KeysError, match=f"^{re.escape(str(what))} (is not TOML|cannot be read)"
        ):
            Enrolment.read(what)


def test_a_truncated_enrolment_is_refused(enrolment, tmp_path):
    path, text = tmp_path / "x.toml", enrolment.text()
    whole = len(text.rstrip())
    for length in range(0, whole, 37):
        path.write_text(text[:length])
        with pytest.raises(KeysError):
            Enrolment.read(path)


def test_the_error_for_an_expired_certificate_names_the_clock(enrolment, key, tmp_path):
    enrolment.refuse_expired(ENDS - timedelta(seconds=1))
    begins = enrolment.x509_certificate.not_valid_before_utc
    for now, when in (
        (ENDS, "expired on 2027-11-21T16:33:08Z"),
        (begins - timedelta(days=1), f"begins on {format_time(begins)}"),
    ):
        with pytest.raises(KeysError) as raised:
            enrolment.refuse_expired(now)
        assert str(raised.value) == (
            f"the certificate of client 3 {when}, and it is {format_time(now)} by this machine's clock; correct the clock if it is "
            "wrong, else run on the server: fedcomp keys renew 3"
        )
    ended = client(key, utc_now() - timedelta(days=1))
    (tmp_path / "3.toml").write_text(ended.text())
    with pytest.raises(KeysError, match="of client 3 expired on "):
        Enrolment.read(tmp_path / "3.toml").refuse_expired()


def test_the_default_path_of_the_enrolment_file(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    for value, expected in (
        (None, "/somewhere/.config/fedcomp/enrolment.toml"),
        ("", "/somewhere/.config/fedcomp/enrolment.toml"),
        ("/etc/fedcomp/3.toml", "/etc/fedcomp/3.toml"),
        ("~/3.toml", "/somewhere/3.toml"),
    ):
        monkeypatch.delenv("FEDCOMP_ENROLMENT", raising=False)
        if value is not None:
            monkeypatch.setenv("FEDCOMP_ENROLMENT", value)
        assert str(default_enrolment()) == expected
    monkeypatch.setenv("FEDCOMP_ENROLMENT", "~nosuch/3.toml")
    with pytest.raises(
        ConfigError, match="^FEDCOMP_ENROLMENT ~nosuch/3.toml: ~ names a user that does not exist"
    ):
        default_enrolment()


@pytest.mark.slow
def test_files_for_flower_supernode(enrolment, tmp_path):
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    ca, key = enrolment.unpack(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and ca.read_text() == enrolment.ca

    class Args:
        auth_supernode_private_key, auth_supernode_public_key = str(key), None

    _, public = _try_setup_client_authentication(Args)
    assert public == enrolment.key_pair[1]
    with pytest.raises(FileExistsError):
        enrolment.unpack(tmp_path)


def test_the_comment_of_an_openssh_key_is_ignored(key):
    for text in (public_text(key), public_text(key) + " a comment\n"):
        assert openssh(parse_public_key(text)) == public_text(key)


@for_each("text", ["", "\x00", "ü", "ecdsa-sha2-nistp384 AAAA", "-----BEGIN PUBLIC KEY-----"])
def test_malformed_public_keys_raise_value_error(text):
    with pytest.raises(ValueError):
        parse_public_key(text)


def test_dates_are_utc():
    now = utc_now()
    assert format_time(now).endswith("Z") and parse_time(format_time(now)) == now.replace(
        microsecond=0
    )
