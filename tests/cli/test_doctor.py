"""`fedcomp doctor`: one line for each check, problems with their fixes, and exit status 0 only if all checks pass."""

import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
from cases import for_each
from command_line import error_message, fedcomp
from packaging.requirements import Requirement
from tls_servers import SETTINGS, Authority, free_port, grpc_serving, serving

from fedcomp.cli import doctor
from fedcomp.keys import certificates
from fedcomp.keys import key_folder as keys
from fedcomp.keys.enrolment import Enrolment, utc_now

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ["python", "flwr", "packages", "torch", "cuda", "threads", "disk"]


def examine(*words: object) -> tuple[int, dict[str, tuple[str, str, str]]]:
    """Return the exit status without the checks of this machine, and the (state, result, fix) of the last check of each subject."""
    result = fedcomp("doctor", "--json", *words)
    assert result.exit_code in (0, 2), result.output
    output = json.loads(result.stdout)
    assert (
        output["ok"]
        == (result.exit_code == 0)
        == all(check["state"] != "failed" for check in output["checks"])
    )
    for check in output["checks"]:
        assert check["state"] != "failed" or check["fix"], f"{check} has no fix"
    failed = [
        check
        for check in output["checks"]
        if check["state"] == "failed" and check["what"] not in MACHINE
    ]
    return 2 if failed else 0, {
        check["what"]: (check["state"], check["found"], check["fix"]) for check in output["checks"]
    }


def found(*words: object) -> dict[str, tuple[str, str, str]]:
    return examine(*words)[1]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FEDCOMP_ENROLMENT", raising=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    keys.make(tmp_path / "keys", 2)
    return tmp_path / "keys"


# The machine.


def test_the_checks_of_this_machine_succeed():
    status, output = examine()
    assert list(output) == [*MACHINE, "client"]
    assert status == 0 and {output[name][0] for name in MACHINE[:4]} == {"ok"}
    import flwr
    import torch

    assert (
        output["flwr"][1].startswith(flwr.__version__) and output["torch"][1] == torch.__version__
    )
    assert output["python"][1] == ".".join(map(str, sys.version_info[:3]))
    assert (output["cuda"][0] == "ok") == torch.cuda.is_available()


def test_each_check_has_a_line_on_a_terminal(folder):
    result = fedcomp("doctor", "--keys", folder, "--server", f"127.0.0.1:{free_port()}")
    assert result.exit_code == 2
    lines = result.stdout.splitlines()
    assert all(re.match(r"[✓✗–] [\w. ']{12,}  \S", line) for line in lines) and len(lines) > 12
    wrong = [line for line in lines if line.startswith("✗")][-1]
    assert re.match(
        r"✗ server {14}nothing listens on 127.0.0.1:\d+; start the server or relay there \(fedcomp server start",
        wrong,
    )


def in_process(tmp_path: Path, *words: str) -> tuple[int, dict[str, dict]]:
    """Run `fedcomp doctor` in a process in which modules in `tmp_path` have precedence over installed ones."""
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "fedcomp", "doctor", "--json", *words],
        env=os.environ | {"PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 2), done.stderr
    return done.returncode, {check["what"]: check for check in json.loads(done.stdout)["checks"]}


def test_an_unsupported_flower_and_a_broken_torch_fail(tmp_path):
    for name, version in (("flwr", "1.20.0"), ("rich", "13.0.0")):
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    (tmp_path / "torch.py").write_text("raise OSError('libc10.so: cannot open shared object file')")
    needed = {r.name: r.specifier for r in map(Requirement, metadata.requires("fedcomp"))}
    status, output = in_process(tmp_path)
    assert status == 2
    assert output["flwr"] == {
        "what": "flwr",
        "state": "failed",
        "found": f"1.20.0, but {needed['flwr']} is required",
        "fix": f"pip install 'flwr{needed['flwr']}'",
    }
    assert (output["rich"]["state"], output["rich"]["fix"]) == (
        "failed",
        f"pip install 'rich{needed['rich']}'",
    )
    assert (
        output["torch"]["found"]
        == "cannot be imported (OSError: libc10.so: cannot open shared object file)"
    )
    assert "packages" not in output and "disk" in output


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("150000 100000", 2), ("10000 100000", 1), ("max 100000", None), ("", None)],
)
def test_the_number_of_cores_is_that_of_the_container(limit, expected, tmp_path):
    (tmp_path / "cpu.max").write_text(limit)
    bound = len(os.sched_getaffinity(0))
    assert doctor.cores(tmp_path / "cpu.max") == (
        bound if expected is None else min(bound, expected)
    )
    assert doctor.cores(tmp_path / "absent") == bound


def test_more_threads_than_cores_are_reported():
    assert doctor.threads(2, 2).state == "ok"
    assert (
        doctor.threads(8, 2).line(7)
        == "✗ threads  8 on 2 cores, which slows every step; set OMP_NUM_THREADS=2"
    )


def test_the_checked_disk_is_that_of_the_run_folders(tmp_path, monkeypatch):
    assert str(tmp_path) in doctor.disk(Path("runs")).found
    (tmp_path / "runs").write_text("")
    assert doctor.disk(Path("runs")).state == "failed"
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 10**18)
    assert re.fullmatch(
        r"✗ disk  only \S+ .?B free in .*; make 1.00 EB of space free, or give --out on another disk",
        doctor.disk(Path("elsewhere")).line(4),
    )


# Ports.


def test_a_free_port_is_ok():
    port = free_port()
    assert found("--port", port)[f"port {port}"] == ("ok", "free", "")


@for_each("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_in_use_fails(family):
    try:
        taken = socket.create_server(
            ("::1" if family == socket.AF_INET6 else "127.0.0.1", 0), family=family
        )
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with taken:
        port = taken.getsockname()[1]
        status, output = examine("--port", port)
    assert status == 2
    assert output[f"port {port}"] == (
        "failed",
        "another process listens on this port (Address already in use)",
        f"stop the process that ss -ltnp 'sport = :{port}' shows, or give another --port",
    )


# Servers.


def test_a_server_accepts_its_client(folder):
    with grpc_serving(folder) as port:
        status, output = examine(
            "--server", f"localhost:{port}", "--client", folder / "clients" / "1.toml"
        )
    assert status == 0
    assert re.fullmatch(rf"localhost:{port} answers, \d+ ms", output["server"][1])
    assert re.match(
        r"valid until 20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ, 365 days", output["server certificate"][1]
    )


def test_the_enrolment_at_its_default_path_is_found(folder, tmp_path, monkeypatch):
    place = tmp_path / ".config" / "fedcomp" / "enrolment.toml"
    place.parent.mkdir(parents=True)
    (folder / "clients" / "1.toml").rename(place)
    with grpc_serving(folder) as port:
        output = found("--server", f"localhost:{port}")
        assert output["client"][:2] == ("ok", f"{place} is valid: client 1")
        assert output["server"][0] == "ok"
        assert "client" not in found("--keys", folder)
        monkeypatch.setenv("FEDCOMP_ENROLMENT", str(folder / "clients" / "0.toml"))
        assert found("--server", f"localhost:{port}")["client"][1].endswith("client 0")
    monkeypatch.setenv("FEDCOMP_ENROLMENT", "absent.toml")
    assert found()["client"][1] == "absent.toml cannot be read (No such file or directory)"


def test_a_machine_without_an_enrolment_says_how_to_make_one(folder):
    state, says, fix = found()["client"]
    assert state == "skipped" and "/enrolment.toml, and FEDCOMP_ENROLMENT is not set" in says
    assert "fedcomp keys init" in fix
    assert "client" not in found("--keys", folder)


def test_a_client_of_other_keys_is_refused_by_the_server(folder, tmp_path):
    keys.make(tmp_path / "others", 1)
    path = tmp_path / "others" / "clients" / "0.toml"
    with grpc_serving(folder) as port:
        output = found("--server", f"localhost:{port}", "--client", path)["server"]
    assert output[0] == "failed" and "is not signed by the CA that this client trusts" in output[1]


def test_the_server_in_the_enrolment_is_checked(tmp_path):
    port = free_port()
    keys.make(tmp_path / "keys", 1, port=port)
    output = found("--enrolment", tmp_path / "keys" / "clients" / "0.toml")
    assert output["server"][1] == f"nothing listens on localhost:{port}"


def test_a_certificate_is_checked_with_keys_and_skipped_without(folder):
    with grpc_serving(folder) as port:
        assert found("--server", f"localhost:{port}", "--keys", folder)["server"][0] == "ok"
        output = found("--server", f"localhost:{port}")
    assert output["server"] == (
        "skipped",
        f"localhost:{port} has a certificate that was not checked",
        "give --client FILE or --keys DIR",
    )


def test_a_server_without_tls_is_ok():
    with grpc_serving(None) as port:
        status, output = examine("--server", f"127.0.0.1:{port}")
    assert status == 0 and re.fullmatch(
        rf"127.0.0.1:{port} answers, without TLS, \d+ ms", output["server"][1]
    )


@pytest.mark.parametrize(
    ("hosts", "begins", "ends", "expected"),
    [
        (["server.example"], 0, 9, "is for server.example and not for localhost"),
        (["localhost"], -9, -1, "expired on "),
        (["localhost"], 1, 9, "begins on "),
    ],
)
def test_a_certificate_for_another_host_or_time_fails(hosts, begins, ends, expected, folder):
    ours = Authority()
    (folder / "ca.crt").write_bytes(ours.pem)
    with serving(SETTINGS, ours.context(folder.parent, hosts, begins, ends)) as port:
        status, output = examine("--server", f"localhost:{port}", "--keys", folder)
    state, what, _ = output["server"]
    assert (
        status == 2
        and state == "failed"
        and f"the certificate of localhost:{port} {expected}" in what
    )


def test_a_certificate_of_another_ca_fails(folder):
    with serving(SETTINGS, Authority().context(folder.parent)) as port:
        output = found("--server", f"localhost:{port}", "--keys", folder)
    assert "is not signed by the CA" in output["server"][1]


def test_an_invalid_address_is_refused_in_one_sentence():
    assert error_message(fedcomp("doctor", "--server", "server.example")) == (
        "--server cannot be 'server.example'; give host:port, such as server.example:8080"
    )


# Keys.


def test_a_client_file(folder):
    path = folder / "clients" / "1.toml"
    output = found("--client", path)
    assert [output[name][0] for name in ("client", "client file", "client certificate")] == [
        "ok"
    ] * 3
    path.chmod(0o644)
    output = found("--client", path)
    assert output["client file"] == (
        "failed",
        f"{path} can be read by other users (mode 644)",
        f"chmod 600 {path}",
    )
    path.write_text(path.read_text().replace("id = 1", "id = x"))
    assert found("--client", path)["client"][0] == "failed"
    assert found("--client", folder)["client"] == (
        "failed",
        f"{folder} cannot be read (Is a directory)",
        "copy it again from the folder of keys on the server",
    )


@pytest.mark.parametrize(
    ("begins", "ends", "state", "what", "fix"),
    [
        (-9, -1, "failed", "expired on", "correct the clock if it is wrong, else on the server: "),
        (-9, 5, "ok", "valid until", "renew it soon, on the server: fedcomp keys renew 3"),
        (2, 50, "failed", "begins on", "set the clock by NTP: timedatectl set-ntp true"),
    ],
)
def test_the_time_of_a_clients_certificate(begins, ends, state, what, fix, tmp_path):
    path = tmp_path / "3.toml"
    path.write_text(Authority().enrolment(3, begins, ends).text())
    path.chmod(0o600)
    output = found("--client", path)["client certificate"]
    assert output[0] == state and output[1].startswith(what) and output[2].startswith(fix)


def test_a_folder_of_keys_with_a_client_in_it(folder):
    names = ["ca", "certificate", "ca.key", "server.key", "registry", "files", "enrolled"]
    path = folder / "clients" / "1.toml"
    output = found("--keys", folder, "--client", path)
    assert [output[name][0] for name in names] == ["ok"] * 7
    assert (
        output["registry"][1] == "clients: 2 accepted"
        and output["enrolled"][1] == "client 1 is accepted"
    )
    assert (
        output["files"][1] == "2 of 2 enrolment files in clients are present and match the registry"
    )
    keys.revoke(folder, 1)
    output = found("--keys", folder, "--client", path)
    assert output["registry"][1] == "clients: 1 accepted, 1 revoked"
    assert output["enrolled"] == (
        "failed",
        "client 1 is revoked",
        f"to accept it again: fedcomp keys renew 1 --keys {folder}",
    )


def test_a_client_of_other_keys(folder, tmp_path):
    keys.make(tmp_path / "others", 1)
    output = found("--keys", folder, "--client", tmp_path / "others" / "clients" / "0.toml")
    assert output["enrolled"] == (
        "failed",
        f"the key of this client or relay is not in {folder}/registry.toml",
        f"make a new enrolment with: fedcomp keys add --keys {folder}",
    )


def test_the_enrolment_of_a_relay(folder):
    keys.add_relay(folder, ["relay.example"])
    path = folder / "relays" / "0.toml"
    output = found("--keys", folder, "--client", path)
    assert output["client"][:2] == ("ok", f"{path} is valid: relay 0")
    assert output["enrolled"][:2] == ("ok", "relay 0 is accepted")


def move(a: Path, b: Path) -> None:
    b.unlink()
    a.rename(b)


@pytest.mark.parametrize(
    ("damage", "name", "says"),
    [
        (lambda f: (f / "ca.key").chmod(0o640), "ca.key", "can be read by other users (mode 640)"),
        (
            lambda f: (f / "server.key").chmod(0o604),
            "server.key",
            "can be read by other users (mode 604)",
        ),
        (
            lambda f: (f / "server.key").write_bytes(b"no"),
            "keys",
            "server.key is not an EC P-384 private key",
        ),
        (lambda f: (f / "server.crt").unlink(), "keys", "server.crt cannot be read"),
        (
            lambda f: (f / "ca.crt").write_bytes(Authority().pem),
            "keys",
            "server.crt is not signed by",
        ),
        (lambda f: (f / "registry.toml").write_text("x"), "keys", "registry.toml is not TOML"),
        (
            lambda f: move(f / "clients" / "1.toml", f / "clients" / "0.toml"),
            "files",
            "0.toml does not match the registry's client 0",
        ),
        (lambda f: (f / "clients" / "0.toml").write_text("x"), "files", "0.toml is not TOML"),
        (
            lambda f: (f / "clients" / "0.toml").chmod(0o644),
            "files",
            "0.toml can be read by other users",
        ),
        (
            lambda f: (f / "clients" / "7.toml").touch(),
            "files",
            "7.toml belongs to none of the clients in the registry",
        ),
        (lambda f: keys.renew(f, 0, days=0), "registry", "1 accepted, 1 expired"),
        (lambda f: keys.renew_server(f, days=0), "certificate", "expired on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_folder_of_keys_fails_with_a_fix(damage, name, says, folder):
    damage(folder)
    status, output = examine("--keys", folder)
    assert status == 2 and output[name][0] == "failed" and says in output[name][1]
    command = re.search(
        r"^(?:make [^:]*: |correct .*, else )?fedcomp (keys renew .*)", output[name][2]
    )
    if command:  # the printed command fixes the problem
        assert fedcomp(*shlex.split(command[1])).exit_code == 0
        assert examine("--keys", folder)[0] == 0
    assert command or name not in ("registry", "certificate")


def test_a_folder_without_copied_enrolments_and_ca_key_is_valid(folder):
    for path in (folder / "ca.key", folder / "clients" / "0.toml"):
        path.unlink()
    status, output = examine("--keys", folder)
    assert status == 0
    assert (
        output["files"][1] == "1 of 2 enrolment files in clients are present and match the registry"
    )


def test_the_keys_of_relays_are_checked_like_those_of_clients(folder):
    def lines() -> list[str]:
        """Return the lines of the relays' keys, which follow those of the clients' keys."""
        checks = fedcomp("doctor", "--keys", folder).stdout.splitlines()
        return [line for line in checks if line.split()[1] in ("registry", "files")][2:]

    keys.add_relay(folder, [])
    accepted, files = lines()
    assert accepted.startswith("✓ registry") and accepted.endswith("relays: 1 accepted")
    assert files.startswith("✓ files") and "1 of 1 enrolment files in relays" in files
    keys.renew(folder, "relay-0", days=0)
    expired, files = lines()
    assert expired.startswith("✗ registry") and "relays: 1 expired; fedcomp keys renew" in expired
    (folder / "relays" / "0.toml").chmod(0o644)
    assert "0.toml can be read by other users" in lines()[1]
    (folder / "relays" / "0.toml").unlink()
    (folder / "relays" / "7.toml").touch()
    wrong = lines()[1]
    assert (
        "7.toml belongs to none of the relays" in wrong and "keys add --relay --host HOST" in wrong
    )


def test_a_client_that_trusts_another_ca_fails(folder):
    path = folder / "clients" / "0.toml"
    key = certificates.read_private_key(folder / "ca.key")
    other = certificates.ca_certificate(key, utc_now(), utc_now() + timedelta(days=99))
    mine = replace(Enrolment.read(path), ca=certificates.certificate_pem(other).decode())
    path.write_text(mine.text())
    output = found("--keys", folder, "--client", path)
    assert output["enrolled"] == (
        "failed",
        "client 0 is accepted, but the enrolment file trusts another CA than the folder",
        "copy clients/0.toml to the client again",
    )


# Data.


def write_images(path: Path, count: int) -> None:
    """Write a file of black images with the schema of MNIST on the Hugging Face hub."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image, file = pytest.importorskip("PIL.Image"), io.BytesIO()
    image.new("L", (28, 28)).save(file, "PNG")
    images = pa.array([{"bytes": file.getvalue(), "path": ""}] * count)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"image": images, "label": [0] * count}), path)


def test_a_folder_of_data_shows_the_number_of_examples(tmp_path):
    write_images(tmp_path / "mine" / "mnist" / "train.parquet", 1200)
    write_images(tmp_path / "mine" / "mnist" / "test.parquet", 7)
    result = fedcomp("doctor", "--json", "--data", "mine")
    output = [
        (check["state"], check["found"])
        for check in json.loads(result.stdout)["checks"]
        if check["what"] == "data"
    ]
    assert output == [
        ("skipped", "cifar10: not in mine"),
        ("ok", "mnist: 1,200 training and 7 test examples"),
        ("skipped", "shakespeare: not in mine"),
    ]


def test_an_empty_folder_and_broken_data_fail(tmp_path):
    (tmp_path / "empty").mkdir()
    status, output = examine("--data", "empty")
    assert status == 2 and output["data"][0] == "failed"
    assert output["data"][1] == "shakespeare: --data empty does not contain shakespeare/input.txt"
    assert (
        output["data"][2]
        == "give a folder that contains shakespeare/input.txt (Tiny Shakespeare of char-rnn)"
    )
    (tmp_path / "broken" / "mnist").mkdir(parents=True)
    for split in ("train", "test"):
        (tmp_path / "broken" / "mnist" / f"{split}.parquet").write_bytes(b"PAR1 and no more")
    assert found("--data", "broken")["data"][0] == "failed"
