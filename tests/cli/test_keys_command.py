"""`fedcomp keys`: the files that it makes, its output, and errors of one sentence."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from command_line import error_message, fedcomp

from fedcomp.cli.keys import days_left
from fedcomp.keys import certificates
from fedcomp.keys import key_folder as keys
from fedcomp.keys.enrolment import Enrolment, utc_now
from fedcomp.keys.key_folder import read_registry

ROOT = Path(__file__).resolve().parents[2]


def done(*words: object) -> str:
    result = fedcomp(*words)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def refused(*words: object) -> str:
    return error_message(fedcomp(*words))


@pytest.fixture
def folder(tmp_path) -> Path:
    done(
        "keys",
        "init",
        "--out",
        tmp_path / "keys",
        "--clients",
        3,
        "--host",
        "server.example",
        "--host",
        "10.0.0.5",
    )
    return tmp_path / "keys"


def table(folder: Path) -> dict[str, dict[str, str]]:
    head, *rows = [line.split("\t") for line in done("keys", "list", "--keys", folder).splitlines()]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def test_init_prints_what_it_made_and_the_next_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made, blank, *rest = done(
        "keys", "init", "--clients", 2, "--host", "server.example", "--port", 9000
    ).splitlines()
    assert (made, blank) == (
        "keys is written: a CA, a server certificate (for server.example, localhost, 127.0.0.1) and 2 enrolment files.",
        "",
    )
    assert rest == [
        "On the server: fedcomp server start --keys keys --port 9000",
        "On each device: copy the device's keys/clients/N.toml to ~/.config/fedcomp/enrolment.toml (or set FEDCOMP_ENROLMENT), then: "
        "fedcomp client --server server.example:9000",
        "Anyone who has a client's file can act as that client: copy the file over a secure channel. Move keys/ca.key "
        "to a safe place: only fedcomp keys add and fedcomp keys renew need this file.",
    ]
    for line in rest[:2]:  # the options in the printed commands exist
        words = shlex.split(line.rpartition(": fedcomp ")[2])
        shown = fedcomp(*[word for word in words[:2] if word not in ("--server",)], "--help").stdout
        assert all(word in shown for word in words if word.startswith("--"))
    rest = done("keys", "init", "--clients", 1, "--out", "others").splitlines()[2:]
    assert len(rest) == 4
    assert (
        rest[-1]
        == "Without --host, the server's certificate is valid only for clients on this machine."
    )
    assert (tmp_path / "others" / "clients" / "0.toml").is_file()


def test_days_and_port_are_in_the_certificates_and_enrolments(tmp_path):
    done("keys", "init", "--out", tmp_path / "k", "--clients", 1, "--days", 30, "--port", 9000)
    mine = Enrolment.read(tmp_path / "k" / "clients" / "0.toml")
    assert mine.server == "localhost:9000" and days_left(mine.not_after, utc_now()) == 30
    assert days_left(keys.check_server_files(tmp_path / "k").not_valid_after_utc, utc_now()) == 30


def test_the_list_without_a_terminal_has_tab_separated_lines(folder):
    rows = table(folder)
    assert list(rows) == ["CA", "server", "0", "1", "2"]
    assert [row["state"] for row in rows.values()] == [
        "valid",
        "valid",
        "enrolled",
        "enrolled",
        "enrolled",
    ]
    assert rows["0"]["days"] == rows["server"]["days"] == "365" and rows["CA"]["days"] == "3650"
    assert rows["1"]["file"] == str(folder / "clients" / "1.toml")
    (folder / "clients" / "1.toml").unlink()
    keys.revoke(folder, 2)
    (folder / "server.crt").write_text("no")
    rows = table(folder)
    assert (rows["1"]["file"], rows["2"]["state"], rows["server"]["state"]) == (
        "–",
        "revoked",
        "unreadable",
    )


def test_the_fingerprint_is_that_of_ssh_keygen(folder, tmp_path):
    (tmp_path / "0.pub").write_text(read_registry(folder).enrolled()[0])
    try:
        shown = subprocess.run(
            ["ssh-keygen", "-l", "-f", tmp_path / "0.pub"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except FileNotFoundError:
        pytest.skip("no ssh-keygen here")
    assert table(folder)["0"]["fingerprint"] == shown.split()[1]


def test_the_list_on_a_terminal_is_a_table(folder):
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "fedcomp", "keys", "list", "--keys", folder]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"}
    subprocess.run(command, env=environment, stdout=follower, stderr=follower, check=True)
    os.close(follower)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(leader, 1 << 16).decode())
    os.close(leader)
    assert "\t" not in shown and re.search(
        r"^ *holder  state +until +days  fingerprint", shown.replace("\r", "")
    )
    assert re.search(r"^ +2  enrolled", shown.replace("\r", ""), re.MULTILINE)


def test_add_enrols_clients(folder):
    assert (
        done("keys", "add", "--keys", folder) == f"Client 3 is enrolled: {folder}/clients/3.toml\n"
    )
    output = done("keys", "add", "--keys", folder, "--count", 10)
    assert output.startswith("Clients 4 to 13 are enrolled: ") and output.endswith(
        f"{folder}/clients/11.toml and 2 more\n"
    )
    assert sorted(read_registry(folder).enrolled()) == list(range(14))


def test_revoke_refuses_clients(folder):
    assert (
        done("keys", "revoke", 0, 2, "--keys", folder)
        == "Revoked: clients 0, 2; a running server disconnects them\n"
    )
    assert sorted(read_registry(folder).enrolled()) == [1]
    assert refused("keys", "revoke", 1, 9, "--keys", folder).startswith(
        f"client 9 is not in {folder}/registry.toml"
    )
    assert sorted(read_registry(folder).enrolled()) == [1]


def test_renew_gives_a_client_a_new_key(folder):
    before = Enrolment.read(folder / "clients" / "1.toml")
    output = done("keys", "renew", 1, "--keys", folder, "--days", 10)
    until = (utc_now() + timedelta(days=10)).strftime("%Y-%m-%d")
    assert (
        output
        == f"Client 1 has a new key, valid until {until}; copy {folder}/clients/1.toml to the machine of client 1. "
        "The old key is no longer accepted.\n"
    )
    assert read_registry(folder).find(before.key_hash).client is None


def test_renew_the_server_adds_a_host(folder):
    output = done("keys", "renew", "server", "--keys", folder, "--host", "new.example")
    assert re.match(
        r"The server's certificate is for .*new\.example.* until \d{4}-\d\d-\d\d; restart the server",
        output,
    )
    assert "new.example" in certificates.hosts_of(keys.check_server_files(folder))


def test_renew_without_a_name_renews_certificates_that_end_soon(folder):
    assert done("keys", "renew", "--keys", folder).startswith(
        "No certificate expires within 30 days; to renew one anyway, give a client's id, a relay such as relay-0"
    )
    keys.renew(folder, 1, days=3)
    keys.renew_server(folder, days=3)
    lines = done("keys", "renew", "--keys", folder).splitlines()
    assert [line.partition(" has ")[0].partition(" is ")[0] for line in lines] == [
        "The server's certificate",
        "Client 1",
    ]
    assert keys.expiring(folder, 30) == []


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (["init"], "missing option '--clients'; see fedcomp keys init --help"),
        (
            ["init", "--clients", "0"],
            "invalid value for '--clients': 0 is not in the range 1<=x<=100000; see fedcomp keys init --help",
        ),
        (
            ["init", "--clients", "1", "--days", "0"],
            "invalid value for '--days': 0 is not in the range 1<=x<=36500",
        ),
        (
            ["init", "--clients", "1", "--host", "a:1"],
            "--host 'a:1' is not a host; give a name such as server.example or an address such as",
        ),
        (
            ["init", "--clients", "1", "--out", "~nosuch/k"],
            "--out ~nosuch/k: ~ names a user that does not exist; give a path without ~",
        ),
        (
            ["add", "--keys", "absent"],
            "--keys absent is not a folder of keys: it has no registry.toml; give another folder, or make one with: fedcomp",
        ),
        (["list", "--keys", "absent"], "--keys absent is not a folder of keys"),
        (
            ["renew", "me"],
            "'me' is neither a client's id nor 'server' nor 'relay-0'; give one of them, for example: fedcomp keys renew 3",
        ),
        (
            ["renew", "3", "--host", "a"],
            "--host is only for the certificate of the server or of a relay; leave it out, or renew one of these: "
            "fedcomp keys renew server --host a",
        ),
        (["revoke"], "missing argument 'ID...'; see fedcomp keys revoke --help"),
        (["revok"], "no such command 'revok'; did you mean revoke?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_sentence_and_writes_nothing(given, output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused("keys", *given).startswith(output)
    assert os.listdir(tmp_path) == []


def test_init_does_not_overwrite_a_folder(folder):
    assert refused("keys", "init", "--out", folder, "--clients", 1).startswith(
        f"--out {folder} exists and is not overwritten; "
    )


def test_every_command_refuses_a_malformed_registry_in_one_refused(folder):
    text = (folder / "registry.toml").read_text()
    (folder / "registry.toml").write_text(text.replace("id = 1", "id = 0"))
    for given in (["list"], ["add"], ["revoke", 0], ["renew", 0], ["renew", "server"], ["renew"]):
        assert refused("keys", *given, "--keys", folder).startswith(
            f"{folder}/registry.toml: client 0 has two keys; remove one of"
        )


def test_keys_without_a_command_shows_its_help():
    assert re.findall(r"│ (\w+)  ", done("keys")) == ["init", "add", "revoke", "renew", "list"]


@pytest.mark.deploy
@pytest.mark.parametrize(
    "given", [["--help"], ["init", "--help"], ["list"], ["init", "--clients", "1"]], ids=" ".join
)
def test_keys_commands_do_not_import_torch_or_flower(given, tmp_path):
    code = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('imported:', sorted({'torch', 'numpy', 'numba', 'flwr'} & set(sys.modules))))\n"
        "from fedcomp.cli.main import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "keys", *given],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines()[-1] == "imported: []", ran.stderr
    assert ran.returncode == (2 if given == ["list"] else 0)


@pytest.mark.deploy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_init_leaves_no_files(number, tmp_path):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from fedcomp.cli.main import main; main()"
    command = [sys.executable, "-c", code, "keys", "init", "--clients", "20000"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not list(tmp_path.glob(".keys.*.new/clients/5.toml")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.stderr.read() == "fedcomp: interrupted; no keys were made\n"
    assert process.returncode == 128 + number and os.listdir(tmp_path) == []


# Relays.


@pytest.fixture
def with_relay(folder) -> Path:
    done("keys", "add", "--relay", "--host", "relay.example", "--keys", folder)
    return folder


def relay(folder: Path, id: int = 0) -> Enrolment:
    return Enrolment.read(folder / "relays" / f"{id}.toml")


def test_add_enrols_a_relay(folder):
    output = done(
        *("keys", "add", "--relay", "--keys", folder, "--days", 20),
        *("--host", "relay.example", "--host", "10.0.0.7"),
    )
    assert output.splitlines() == [
        f"Relay 0 is enrolled for relay.example, 10.0.0.7, localhost, 127.0.0.1: {folder}/relays/0.toml. "
        "Copy the file to the relay, and run there:",
        "fedcomp relay --server HOST:PORT --enrolment 0.toml",
    ]
    shown = fedcomp("relay", "--help").stdout
    assert "--server" in shown and "--enrolment" in shown
    mine = relay(folder)
    assert mine.relay and mine.id == 0 and days_left(mine.not_after, utc_now()) == 20
    assert mine.server == "server.example:8080"
    assert set(certificates.hosts_of(mine.x509_certificate)) == {
        "relay.example",
        "10.0.0.7",
        "localhost",
        "127.0.0.1",
    }
    assert (folder / "relays").stat().st_mode & 0o777 == 0o700
    assert (folder / "relays" / "0.toml").stat().st_mode & 0o777 == 0o600

    # Ids of relays and of clients are separate, and the key of a relay is not accepted as a client's, or the reverse.
    assert done("keys", "add", "--relay", "--host", "b", "--keys", folder).startswith("Relay 1 is")
    assert done("keys", "add", "--keys", folder).startswith("Client 3 is enrolled")
    assert not Enrolment.read(folder / "clients" / "3.toml").relay
    registry = read_registry(folder)
    assert registry.find(mine.key_hash).relay == 0 and registry.find(mine.key_hash).client is None
    client = Enrolment.read(folder / "clients" / "1.toml")
    assert registry.find(client.key_hash).relay is None
    assert registry.ids_by_hash()[client.key_hash] == 1
    assert sorted(registry.ids_by_hash().values()) == sorted(registry.enrolled()) == [0, 1, 2, 3]


def test_the_list_shows_relays(with_relay):
    rows = table(with_relay)
    assert list(rows) == ["CA", "server", "relay-0", "0", "1", "2"]
    row = rows["relay-0"]
    assert (row["state"], row["days"]) == ("enrolled", "365")
    assert row["file"] == str(with_relay / "relays" / "0.toml")
    assert row["fingerprint"] not in {rows[client]["fingerprint"] for client in "012"}


def test_revoke_refuses_a_relay(with_relay):
    mine, registry = relay(with_relay), read_registry(with_relay)
    assert (
        done("keys", "revoke", "relay-0", "--keys", with_relay)
        == "Revoked: relay 0; a running server disconnects it\n"
    )
    assert read_registry(with_relay).find(mine.key_hash).relay is None
    assert read_registry(with_relay).find(mine.key_hash).reason == (
        f"relay 0 is revoked; to accept it again: fedcomp keys renew relay-0 --keys {with_relay}"
    )
    assert table(with_relay)["relay-0"]["state"] == "revoked"
    assert sorted(registry.enrolled()) == [0, 1, 2]  # client 0 is not revoked


def test_clients_and_a_relay_can_be_revoked_together(with_relay):
    assert (
        done("keys", "revoke", "2", "relay-0", "1", "--keys", with_relay)
        == "Revoked: clients 1, 2, relay 0; a running server disconnects them\n"
    )
    assert sorted(read_registry(with_relay).enrolled()) == [0]


def test_a_holder_that_is_named_twice_is_revoked_once(with_relay):
    assert (
        done("keys", "revoke", "0", "relay-0", "0", "--keys", with_relay)
        == "Revoked: client 0, relay 0; a running server disconnects them\n"
    )


def test_renew_a_relay_keeps_its_hosts_and_refuses_its_old_key(with_relay):
    before = relay(with_relay)
    output = done("keys", "renew", "relay-0", "--keys", with_relay, "--host", "b.example")
    assert re.fullmatch(
        r"Relay 0 has a new key, valid until \d{4}-\d\d-\d\d; copy \S+/relays/0\.toml to the machine of relay 0\. "
        r"The old key is no longer accepted\.\n",
        output,
    )
    after = relay(with_relay)
    hosts = {"relay.example", "localhost", "127.0.0.1", "b.example"}
    assert set(certificates.hosts_of(after.x509_certificate)) == hosts
    registry = read_registry(with_relay)
    assert registry.find(after.key_hash).relay == 0
    assert registry.find(before.key_hash).relay is None
    assert registry.find(before.key_hash).reason == (
        "this key was replaced when relay 0 was renewed; give relay 0 the new relays/0.toml"
    )
    done("keys", "revoke", "relay-0", "--keys", with_relay)
    done("keys", "renew", "relay-0", "--keys", with_relay)
    assert read_registry(with_relay).find(relay(with_relay).key_hash).relay == 0
    assert set(certificates.hosts_of(relay(with_relay).x509_certificate)) == hosts


def test_a_relay_without_its_file_is_renewed_for_the_given_hosts(with_relay):
    (with_relay / "relays" / "0.toml").unlink()
    assert refused("keys", "renew", "relay-0", "--keys", with_relay) == (
        f"{with_relay}/relays/0.toml with the hosts of relay 0 is missing; restore this file, or give the hosts with --host HOST"
    )
    done("keys", "renew", "relay-0", "--keys", with_relay, "--host", "c.example")
    assert certificates.hosts_of(relay(with_relay).x509_certificate)[0] == "c.example"


def test_a_relays_key_that_ends_soon_is_renewed_with_the_others(with_relay):
    keys.renew(with_relay, "relay-0", days=3)
    keys.renew(with_relay, 2, days=3)
    assert keys.expiring(with_relay, 30) == [2, "relay-0"]
    lines = done("keys", "renew", "--keys", with_relay).splitlines()
    assert [line.partition(" has ")[0] for line in lines] == ["Client 2", "Relay 0"]
    assert keys.expiring(with_relay, 30) == []
    assert "relay.example" in certificates.hosts_of(relay(with_relay).x509_certificate)
    keys.renew(with_relay, "relay-0", days=3)
    keys.revoke(with_relay, "relay-0")
    assert keys.expiring(with_relay, 30) == []


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (
            ["add", "--relay"],
            "--relay needs the address of the relay; give --host HOST",
        ),
        (
            ["add", "--relay", "--host", "a", "--count", "2"],
            "--relay enrols one relay at a time; leave --count out",
        ),
        (
            ["add", "--host", "a"],
            "--host is only for relays; add --relay, or leave --host out",
        ),
        (["add", "--relay", "--host", "a:1"], "--host 'a:1' is not a host; give a name such as"),
        (["revoke", "relay-7"], "relay-7 is not in "),
        (["revoke", "0", "relay-7"], "relay-7 is not in "),
        (["renew", "relay-7"], "relay-7 is not in "),
        (["revoke", "relay-"], "'relay-' is neither a client's id nor 'relay-0'; give one of them"),
        (["revoke", "server"], "'server' is neither a client's id nor 'relay-0'; give one of them"),
        (["renew", "relay-x"], "'relay-x' is neither a client's id nor 'server' nor 'relay-0'"),
        (
            ["renew", "--host", "a"],
            "--host is only for the certificate of the server or of a relay",
        ),
        (
            ["renew", "1", "--host", "a"],
            "--host is only for the certificate of the server or of a relay",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_with_relays_is_one_message_and_changes_nothing(given, output, with_relay):
    before = {path: path.read_bytes() for path in with_relay.rglob("*.*") if path.is_file()}
    assert refused("keys", *given, "--keys", with_relay).startswith(output)
    assert {path: path.read_bytes() for path in with_relay.rglob("*.*") if path.is_file()} == before


def test_the_error_for_an_unknown_relay_names_the_known_ones(folder, with_relay):
    assert refused("keys", "renew", "relay-7", "--keys", folder) == (
        f"relay-7 is not in {folder}/registry.toml, which has relay-0; give one of these, or add one "
        f"with: fedcomp keys add --relay --host HOST --keys {folder}"
    )


def test_revoking_a_relay_in_a_folder_without_relays_is_refused(folder):
    assert refused("keys", "revoke", "relay-0", "--keys", folder) == (
        f"relay-0 is not in {folder}/registry.toml, which has no relays yet; add one with: "
        f"fedcomp keys add --relay --host HOST --keys {folder}"
    )


def test_a_client_refuses_the_enrolment_of_a_relay(with_relay):
    file = with_relay / "relays" / "0.toml"
    assert refused("client", "--task", "spirals", "--server", "h:1", "--enrolment", file) == (
        f"{file} is the enrolment of relay 0; give the enrolment of a client, or run a relay with: fedcomp relay"
    )
