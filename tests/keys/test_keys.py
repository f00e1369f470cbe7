"""A folder of keys is complete or absent, each key belongs to one id, and each refusal has a reason."""

import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from cases import for_each
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from dying import die_at_call
from forks import FORKS
from tls_servers import grpc_serving

from fedcomp.errors import KeysError, UnreachableError
from fedcomp.keys import certificates
from fedcomp.keys import key_folder as keys
from fedcomp.keys.connection import contact
from fedcomp.keys.enrolment import Enrolment, format_time, openssh, utc_now
from fedcomp.keys.key_folder import read_registry
from fedcomp.keys.registry import read_file

WHOLE = {"ca.crt", "ca.key", "server.crt", "server.key", "registry.toml", "clients"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    keys.make(tmp_path / "keys", 3, ["server.example", "10.0.0.5"], port=9000)
    return tmp_path / "keys"


def enrolment(folder: Path, id: int) -> Enrolment:
    return Enrolment.read(folder / "clients" / f"{id}.toml")


def hash_of(folder: Path, id: int) -> bytes:
    """Return the hash of a client's public key."""
    return enrolment(folder, id).key_hash


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(act) -> str:
    with pytest.raises(KeysError) as raised:
        act()
    assert str(raised.value).isprintable()
    return str(raised.value)


# A new folder.


def test_the_content_of_a_new_folder(folder):
    assert set(snapshot(folder)) == {
        "ca.crt",
        "ca.key",
        "server.crt",
        "server.key",
        "registry.toml",
        "clients/0.toml",
        "clients/1.toml",
        "clients/2.toml",
    }
    ca = (folder / "ca.crt").read_text()
    for id in range(3):
        mine = enrolment(folder, id)
        assert (mine.id, mine.ca, mine.server) == (id, ca, "server.example:9000")
        assert timedelta(days=364) < mine.not_after - utc_now() <= timedelta(days=365)
        assert read_registry(folder).entries[id].not_after == mine.not_after
    assert len({enrolment(folder, id).key_hash for id in range(3)}) == 3
    assert os.listdir(folder.parent) == ["keys"]


def test_only_the_owner_can_read_private_files_with_any_umask(tmp_path):
    before = os.umask(0)
    try:
        keys.make(tmp_path / "keys", 1)
        keys.add(tmp_path / "keys")
        keys.renew(tmp_path / "keys", 0)
        keys.renew_server(tmp_path / "keys")
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode)
        for path in tmp_path.rglob("*")
    }
    assert modes == {
        "keys": 0o700,
        "keys/clients": 0o700,
        "keys/ca.key": 0o600,
        "keys/server.key": 0o600,
        "keys/clients/0.toml": 0o600,
        "keys/clients/1.toml": 0o600,
        "keys/ca.crt": 0o644,
        "keys/server.crt": 0o644,
        "keys/registry.toml": 0o644,
    }


def test_private_files_have_no_other_permissions_for_a_moment(tmp_path, monkeypatch):
    """Every file is opened with its final permissions, so that there is no moment before a chmod."""
    opened = {}
    real = os.open

    def watched(path, flags, mode=0o777, **kwargs):
        if flags & os.O_CREAT:
            opened[Path(path).name.removeprefix(".").removesuffix(".new")] = (
                mode,
                bool(flags & os.O_EXCL),
            )
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "chmod", None)
    keys.make(tmp_path / "keys", 1)
    assert {name: opened[name] for name in ("ca.key", "server.key", "0.toml")} == dict.fromkeys(
        ("ca.key", "server.key", "0.toml"), (0o600, True)
    )


def test_the_extensions_of_the_certificates(folder):
    ca, server = (
        x509.load_pem_x509_certificate((folder / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    assert keys.check_server_files(folder) == server
    client = enrolment(folder, 0).x509_certificate
    for certificate in (ca, server, client):
        assert (
            isinstance(certificate.public_key(), ec.EllipticCurvePublicKey)
            and certificate.public_key().curve.name == "secp384r1"
        )
        assert isinstance(certificate.signature_hash_algorithm, hashes.SHA384)
        since = utc_now() - certificate.not_valid_before_utc
        assert timedelta(hours=1) <= since < timedelta(hours=2), "for clocks that are slow"
    assert certificates.hosts_of(server) == ["server.example", "localhost", "10.0.0.5", "127.0.0.1"]
    assert ca.extensions.get_extension_for_class(
        x509.BasicConstraints
    ).value == x509.BasicConstraints(True, 0)
    for certificate, purpose in (
        (server, ExtendedKeyUsageOID.SERVER_AUTH),
        (client, ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        extensions = certificate.extensions
        assert list(extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(x509.ExtensionNotFound):  # the certificate is not that of a CA
        client.extensions.get_extension_for_class(x509.BasicConstraints)
    assert client.subject.rfc4514_string() == "CN=fedcomp client"
    assert ca.public_key() != server.public_key()
    assert (
        timedelta(days=364)
        < server.not_valid_after_utc - utc_now()
        < timedelta(days=365)
        < ca.not_valid_after_utc - utc_now()
    )


def test_the_certificate_passes_the_rules_of_the_public_web(folder):
    from cryptography.x509.verification import PolicyBuilder, Store

    ca = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    verifier = (
        PolicyBuilder().store(Store([ca])).build_server_verifier(x509.DNSName("server.example"))
    )
    assert len(verifier.verify(keys.check_server_files(folder), [])) == 2


def test_a_grpc_server_and_client_with_these_files_accept_each_other(folder):
    mine = enrolment(folder, 1)
    with grpc_serving(folder) as port:
        credentials = grpc.ssl_channel_credentials(
            mine.ca.encode(), mine.private_key.encode(), mine.certificate.encode()
        )
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            grpc.channel_ready_future(channel).result(timeout=10)
        contact("localhost", port, mine, 3)
        with pytest.raises(UnreachableError):
            contact("127.0.0.2", port, mine, 3)
        strict = ssl.create_default_context(cadata=mine.ca)
        strict.verify_flags |= ssl.VERIFY_X509_STRICT
        with strict.wrap_socket(
            socket.create_connection(("127.0.0.1", port)), server_hostname="server.example"
        ) as connection:
            assert connection.version() == "TLSv1.3"


@for_each(
    "given, expected",
    [
        ([], ["localhost", "127.0.0.1"]),
        (
            ["Server.Example.", "10.0.0.5", "localhost"],
            ["server.example", "10.0.0.5", "localhost", "127.0.0.1"],
        ),
        (["[::1]", "fe80::1"], ["::1", "fe80::1", "localhost", "127.0.0.1"]),
        (["bücher.example"], ["xn--bcher-kva.example", "localhost", "127.0.0.1"]),
    ],
)
def test_hosts(given, expected):
    assert certificates.certificate_hosts(given) == expected


@pytest.mark.parametrize(
    "host",
    [
        "",
        "a b",
        "host:8080",
        "http://host",
        "-a.example",
        "a..b",
        "*",
        "1.2.3",
        "999.1.1.1",
        "x" * 64,
        "a\nb",
        ".".join(["abcdefgh"] * 30),
    ],
)
def test_an_invalid_host_is_refused_before_anything_is_written(host, tmp_path):
    output = (
        refused(lambda: keys.make(tmp_path / "keys", 1, [host])) if host.isprintable() else None
    )
    if output:
        assert output.startswith(
            f"--host '{host}' is not a host; give a name such as server.example"
        )
    else:
        pytest.raises(KeysError, keys.make, tmp_path / "keys", 1, [host])
    assert os.listdir(tmp_path) == []


# Existing files, interruptions, and simultaneous commands.


@pytest.mark.parametrize("what", ["folder", "file", "dangling link"])
def test_nothing_is_overwritten(what, tmp_path):
    out = tmp_path / "keys"
    {"folder": out.mkdir, "file": out.touch, "dangling link": lambda: out.symlink_to("nowhere")}[
        what
    ]()
    output = refused(lambda: keys.make(out, 1))
    assert output == (
        f"--out {out} exists and is not overwritten; give another name, or add clients to it with: "
        f"fedcomp keys add --keys {out}"
    )
    assert os.listdir(tmp_path) == ["keys"] and (what != "folder" or os.listdir(out) == [])


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    output = refused(lambda: keys.make(tmp_path / "file" / "keys", 1))
    assert (
        output
        == f"--out {tmp_path}/file/keys cannot be written (File exists); give a folder that can be written"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_error_while_keys_are_made_leaves_no_files(error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(keys, "registry_text", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else KeysError):
        keys.make(tmp_path / "keys", 2)
    assert os.listdir(tmp_path) == []


def killed(act: str, after: int) -> bool:
    """Run `act` in a process that is killed at its `after`-th call that changes files. Return whether the process was killed."""
    process = FORKS.Process(target=die_at_call, args=(act, after))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.deploy
def test_a_command_killed_at_any_point_leaves_a_complete_folder_or_one_that_is_refused(tmp_path):
    for after in range(100):
        place = tmp_path / str(after)
        place.mkdir()
        if not killed(f"make({str(place / 'keys')!r}, 1)", after):
            break
        if (place / "keys").exists():
            assert read_registry(place / "keys").enrolled()
            continue
        for half in place.iterdir():
            assert stat.S_IMODE(half.stat().st_mode) == 0o700
            if {path.name for path in half.iterdir()} < WHOLE:
                assert "is not a folder of keys" in refused(lambda half=half: read_registry(half))
        keys.make(place / "keys", 1)
    assert 8 < after < 60


@pytest.mark.deploy
@pytest.mark.parametrize(
    "act", ["add(F, 2)", "revoke(F, 0, 2)", "renew(F, 1)", "renew_server(F, ['new.example'])"]
)
def test_a_change_killed_at_any_point_is_complete_or_absent_and_can_be_repeated(act, tmp_path):
    keys.make(tmp_path / "first", 3)
    before = read_file(tmp_path / "first" / "registry.toml").clients
    for after in range(100):
        folder = tmp_path / str(after)
        shutil.copytree(tmp_path / "first", folder)
        stopped = killed(act.replace("F", repr(str(folder))), after)
        now = read_file(folder / "registry.toml").clients
        assert [entry.public_key for entry in now[:1]] == [entry.public_key for entry in before[:1]]
        assert (
            now == before
            or act.startswith("renew_server")
            or len(now) == 5
            or any(a != b for a, b in zip(now, before, strict=True))
        )
        if now == before or not stopped:
            if stopped:
                eval(f"keys.{act}", {"keys": keys, "F": folder})
            assert (
                act.startswith("renew_server")
                or read_file(folder / "registry.toml").clients != before
            )
        assert keys.check_server_files(folder)
        for entry in read_file(folder / "registry.toml").clients:
            assert openssh(enrolment(folder, entry.id).key_pair[1]) == entry.public_key
        if not stopped:
            break
    assert 2 < after < 60
    assert not list(folder.rglob(".*.new"))


@pytest.mark.deploy
@pytest.mark.parametrize("act", ["add_relay(F, ['b'])", "renew(F, 'relay-0')"])
def test_a_change_of_a_relay_killed_at_any_point_is_complete_or_absent_and_can_be_repeated(
    act, tmp_path
):
    keys.make(tmp_path / "first", 2)
    keys.add_relay(tmp_path / "first", ["a"])
    before = read_file(tmp_path / "first" / "registry.toml")
    for after in range(100):
        folder = tmp_path / str(after)
        shutil.copytree(tmp_path / "first", folder)
        stopped = killed(act.replace("F", repr(str(folder))), after)
        content = read_file(folder / "registry.toml")
        assert (content.clients, content.server) == (before.clients, before.server)
        if content.relays == before.relays:
            assert stopped
            eval(f"keys.{act}", {"keys": keys, "F": folder})
        changed = read_file(folder / "registry.toml").relays
        assert changed != before.relays and len(changed) == (2 if act.startswith("add") else 1)
        for entry in changed:
            theirs = Enrolment.read(folder / "relays" / f"{entry.id}.toml")
            assert openssh(theirs.key_pair[1]) == entry.public_key
            assert certificates.hosts_of(theirs.x509_certificate)[0] == "ab"[entry.id]
        if not stopped:
            break
    assert 2 < after < 60
    assert not list(folder.rglob(".*.new"))


def test_simultaneous_commands_do_not_overwrite_each_others_changes(folder):
    threads = [threading.Thread(target=keys.add, args=(folder,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_registry(folder).enrolled()) == list(range(11))


def test_a_folder_without_a_registry_is_refused(tmp_path):
    output = refused(lambda: read_registry(tmp_path))
    assert output == (
        f"--keys {tmp_path} is not a folder of keys: it has no registry.toml; give another folder, or make one with: "
        f"fedcomp keys init --out {tmp_path} --clients N"
    )


# Renewed, revoked and new clients. tests/keys/test_registry.py tests the reasons for refusals.


def test_a_revoked_client_is_accepted_with_its_renewed_key_only(folder):
    registry, old = read_registry(folder), hash_of(folder, 1)
    keys.revoke(folder, 1)
    keys.renew(folder, 1)
    assert (registry.find(old).client, registry.find(hash_of(folder, 1)).client) == (None, 1)


def test_new_ids_follow_the_highest_id_also_of_revoked_clients(folder):
    registry = read_registry(folder)
    keys.revoke(folder, 2)
    assert keys.add(folder, 2) == [3, 4]
    assert registry.find(hash_of(folder, 4)).client == 4
    assert enrolment(folder, 4).server == "server.example:9000"


def test_unknown_ids_are_refused_and_change_nothing(folder):
    before = snapshot(folder)
    for act in (lambda: keys.renew(folder, 3), lambda: keys.revoke(folder, 0, 7)):
        add = f"fedcomp keys add --keys {folder}"
        assert re.fullmatch(
            rf"client [37] is not in {folder}/registry.toml, which has 0 to 2; give one of these, or add one with: {add}",
            refused(act),
        )
    assert snapshot(folder) == before


# The server's certificate.


def test_a_renewed_server_certificate_has_the_old_and_new_hosts(folder):
    before = snapshot(folder)
    names, ends = keys.renew_server(folder, ["new.example"], days=10)
    assert (
        set(names)
        == set(certificates.hosts_of(keys.check_server_files(folder)))
        == {"server.example", "10.0.0.5", "new.example", "localhost", "127.0.0.1"}
    )
    assert timedelta(days=9) < ends - utc_now() <= timedelta(days=10)
    changed = {name for name, data in snapshot(folder).items() if data != before[name]}
    assert changed == {"server.crt", "server.key"}  # the files of clients stay as they are


def test_new_certificates_need_the_key_of_the_ca(folder):
    away = (folder / "ca.key").rename(folder.parent / "ca.key")
    before = snapshot(folder)
    acts = (
        lambda: keys.renew_server(folder),
        lambda: keys.add(folder),
        lambda: keys.renew(folder, 0),
    )
    for act in acts:
        assert refused(act) == (
            f"{folder}/ca.key cannot be read (No such file or directory); restore it, "
            "because this command needs it to sign a certificate"
        )
    other = ec.generate_private_key(ec.SECP384R1())
    (folder / "ca.key").write_bytes(certificates.private_key_pem(other))
    for act in acts:
        assert refused(act) == (
            f"{folder}/ca.key is not the key of {folder}/ca.crt; restore the right key"
        )
    (folder / "ca.key").unlink()
    assert snapshot(folder) == before
    keys.revoke(folder, 1)
    away.rename(folder / "ca.key")
    for act in acts:
        act()


def test_no_certificate_is_signed_by_a_ca_that_has_ended_or_lasts_longer_than_it(folder):
    key = certificates.read_private_key(folder / "ca.key")
    now = utc_now()
    for days in (10, -1):
        ca = certificates.ca_certificate(key, now - timedelta(days=99), now + timedelta(days=days))
        (folder / "ca.crt").write_bytes(certificates.certificate_pem(ca))
        if days > 0:
            assert keys.renew(folder, 0) == ca.not_valid_after_utc == enrolment(folder, 0).not_after
            continue
        output = refused(lambda: keys.add(folder))
        assert output.startswith(
            f"the CA certificate of {folder} expired on {format_time(ca.not_valid_after_utc)}; make new keys"
        )


def test_certificates_that_end_soon_are_listed(folder):
    assert keys.expiring(folder, 30) == []
    assert keys.expiring(folder, 366) == ["server", 0, 1, 2]
    keys.renew(folder, 1, days=5)
    keys.revoke(folder, 0)
    assert keys.expiring(folder, 30) == [1]


@pytest.mark.parametrize(("days", "when"), [(-1, "begins"), (366, "expired")])
def test_a_server_does_not_start_with_a_certificate_that_is_not_valid_now(days, when, folder):
    assert keys.serving_files(folder) == (folder / "server.crt", folder / "server.key")
    now = utc_now() + timedelta(days=days)
    output = refused(lambda: keys.serving_files(folder, now))
    assert re.match(
        rf"{folder}/server.crt {when} on \S+Z, and it is {format_time(now)} by this machine's clock; correct the clock",
        output,
    )
    assert output.endswith(f", else run: fedcomp keys renew server --keys {folder}")


@pytest.mark.parametrize(
    ("damage", "output"),
    [
        (
            lambda f: (f / "server.key").write_bytes((f / "ca.key").read_bytes()),
            "server.key is not the key of",
        ),
        (
            lambda f: (f / "server.key").write_text("no"),
            "server.key is not an EC P-384 private key without a password; make a new one: ",
        ),
        (
            lambda f: (f / "server.crt").write_bytes((f / "server.crt").read_bytes()[:99]),
            "server.crt is not a certificate; restore it",
        ),
        (
            lambda f: (f / "ca.crt").unlink(),
            r"ca.crt cannot be read \(No such file or directory\); restore it",
        ),
        (
            lambda f: (
                keys.make(f.parent / "b", 1) and (f.parent / "b" / "ca.crt").replace(f / "ca.crt")
            ),
            "server.crt is not signed by .*/ca.crt",
        ),
    ],
)
def test_damaged_or_mismatched_server_files_are_refused(damage, output, folder):
    damage(folder)
    for check in (keys.check_server_files, keys.serving_files):
        assert re.match(rf"{folder}/{output}", refused(lambda check=check: check(folder)))


@for_each("name", ["server.crt", "server.key", "ca.crt"])
def test_a_pem_file_that_only_tls_refuses_is_named(name, folder):
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace("\n", "\n "))  # indented PEM
    output = refused(lambda: keys.check_server_files(folder))
    (folder / name).write_text(text)
    assert output.startswith("TLS cannot use ") and str(folder / name) in output
    assert "restore them from copies" in output and "fedcomp keys renew server" in output


def test_the_keys_package_imports_no_large_library():
    program = "import fedcomp.keys.key_folder, sys; print([m for m in ('torch', 'numpy', 'numba', 'flwr') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
