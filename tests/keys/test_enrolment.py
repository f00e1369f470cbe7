"""An enrolment file is read whole or refused with one sentence that names the file and the line or field."""

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

from fedcomp.errors import KeysError
from fedcomp.keys.enrolment import (
    LARGEST_ID,
    Enrolment,
    iso,
    moment,
    openssh,
    pem,
    public_key,
    utc_now,
)

ENDS = datetime(2027, 11, 21, 16, 33, 8, tzinfo=UTC)


def private_text(key) -> str:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
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
    return Enrolment(
        3,
        public_text(key),
        private_text(key),
        Authority().pem.decode(),
        ENDS,
        "server.example:8080",
    )


def refused(path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(KeysError) as raised:
        Enrolment.read(path)
    assert str(raised.value).isprintable()
    assert str(raised.value).endswith("; copy it anew from the folder of keys on the server")
    return str(raised.value).removeprefix(str(path)).partition(";")[0]


@pytest.mark.parametrize("server", ["server.example:8080", None])
def test_what_is_written_is_read(server, enrolment, tmp_path):
    path = tmp_path / "3.toml"
    path.write_text(replace(enrolment, server=server).text())
    assert Enrolment.read(path) == Enrolment.read(str(path)) == replace(enrolment, server=server)


def test_its_keys_are_a_pair_for_flower(enrolment, key, tmp_path):
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    private, public = enrolment.pair
    assert private.private_numbers() == key.private_numbers()
    assert pem(public) == public_key_to_bytes(public)


def test_a_comment_and_an_offset_do_not_matter(enrolment, tmp_path):
    path = tmp_path / "3.toml"
    path.write_text(
        enrolment.text()
        .replace(enrolment.public_key, f"{enrolment.public_key} laptop")
        .replace("16:33:08Z", "17:33:08+01:00")
    )
    assert Enrolment.read(path) == enrolment
    path.write_text(
        enrolment.text().replace('"2027-11-21T16:33:08Z"', "2027-11-21T16:33:08Z")
    )  # TOML's own kind of date
    assert Enrolment.read(path) == enrolment


def test_private_parts_are_not_shown(enrolment):
    assert "PRIVATE" not in repr(enrolment)


@pytest.mark.parametrize("field", ["id", "not_after", "public_key", "private_key", "ca"])
def test_a_missing_field_is_named(field, enrolment, tmp_path):
    values = tomllib.loads(enrolment.text())
    del values[field]
    assert refused(tmp_path / "x.toml", tomli_w.dumps(values)) == f": '{field}' is missing"


def bad_keys():
    yield "public_key", public_text(ec.generate_private_key(ec.SECP256R1()))
    yield "public_key", public_text(ed25519.Ed25519PrivateKey.generate())
    yield "private_key", private_text(ec.generate_private_key(ec.SECP256R1()))
    yield "private_key", private_text(ed25519.Ed25519PrivateKey.generate())
    locked = ec.generate_private_key(ec.SECP384R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    yield "private_key", locked.decode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", -1),
        ("id", "3"),
        ("id", True),
        ("id", 1.0),
        ("id", LARGEST_ID + 1),
        ("id", [3]),
        ("not_after", "soon"),
        ("not_after", 3),
        ("not_after", "2027-11-21T16:33:08"),
        ("not_after", "2027-11-21"),
        ("not_after", "0001-01-01T00:00:00+23:59"),
        ("public_key", "ssh"),
        ("public_key", ""),
        ("public_key", "ü"),
        ("public_key", 7),
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
def test_a_field_that_is_not_what_it_should_be_is_named(field, value, enrolment, tmp_path):
    said = refused(
        tmp_path / "x.toml", tomli_w.dumps(tomllib.loads(enrolment.text()) | {field: value})
    )
    assert said.startswith(f": '{field}' is not a")


def test_two_keys_that_are_no_pair(enrolment, tmp_path):
    other = public_text(ec.generate_private_key(ec.SECP384R1()))
    assert (
        refused(tmp_path / "x.toml", replace(enrolment, public_key=other).text())
        == ": 'private_key' and 'public_key' are not a pair"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id = 3\nid = 4\n", r" is not TOML: .*\(at line 2, column 7\)"),
        ("id = 3\nnonsense\n", r" is not TOML: .*\(at line 2, column 9\)"),
        ("", ": 'id' is missing"),
        ("[" * 100_000, " is not TOML: .*"),
    ],
)
def test_a_file_that_is_not_toml_names_the_line(text, said, tmp_path):
    assert re.fullmatch(said, refused(tmp_path / "x.toml", text))


def test_bytes_that_are_no_text_and_a_file_that_is_none(tmp_path):
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    for what in (path, tmp_path, tmp_path / "absent.toml"):
        with pytest.raises(
            KeysError, match=f"^{re.escape(str(what))} (is not TOML|cannot be read)"
        ):
            Enrolment.read(what)


def test_cut_short_anywhere_it_is_refused(enrolment, tmp_path):
    path, text = tmp_path / "x.toml", enrolment.text()
    whole = len(text.rstrip())
    for length in range(0, whole, 37):
        path.write_text(text[:length])
        with pytest.raises(KeysError):
            Enrolment.read(path)


def test_an_expired_key_is_told_with_the_clock(enrolment):
    enrolment.refuse_expired(ENDS - timedelta(seconds=1))
    with pytest.raises(KeysError) as raised:
        enrolment.refuse_expired(ENDS)
    assert str(raised.value) == (
        "the key of client 3 ended on 2027-11-21T16:33:08Z, and it is 2027-11-21T16:33:08Z by this machine's "
        "clock; correct the clock if it is wrong, else on the server: fedcomp keys renew 3"
    )


@pytest.mark.slow
def test_files_for_flower_supernode(enrolment, tmp_path):
    from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication

    ca, key = enrolment.unpack(tmp_path)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and ca.read_text() == enrolment.ca

    class Args:
        auth_supernode_private_key, auth_supernode_public_key = str(key), None

    _, public = _try_setup_client_authentication(Args)
    assert openssh(public) == enrolment.public_key
    with pytest.raises(FileExistsError):
        enrolment.unpack(tmp_path)


def test_one_key_in_any_form_is_one_line(key):
    armoured = pem(key.public_key())
    forms = [
        public_text(key),
        public_text(key) + " a comment\n",
        armoured,
        b"\n" + armoured.replace(b"\n", b"\r\n"),
    ]
    compressed = key.public_key().public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    forms.append(pem(ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), compressed)))
    assert {openssh(public_key(form)) for form in forms} == {public_text(key)}


@for_each(
    "data",
    [
        b"",
        b"\x00",
        "ü",
        b"ecdsa-sha2-nistp384 AAAA",
        b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
    ],
)
def test_what_is_no_key_is_a_value_error(data):
    with pytest.raises(ValueError):
        public_key(data)


def test_dates_are_utc():
    now = utc_now()
    assert iso(now).endswith("Z") and moment(iso(now)) == now.replace(microsecond=0)
