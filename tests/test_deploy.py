"""The files in deploy/ and the commands in the documentation are valid. Parts that need neither Docker nor systemd are run."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import click
import pytest
import yaml
from tls_servers import grpc_serving
from typer.main import get_command

from fedcomp.cli import flags
from fedcomp.cli.comparison.alternatives import alternatives
from fedcomp.cli.main import app
from fedcomp.config import ALTERNATIVE_OPTIONS
from fedcomp.errors import UserError
from fedcomp.keys import key_folder as keys

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BEGINS = r"(?:\$ |sudo )?(?:[A-Z_]+=\S+ )*(?:\S*/)?fedcomp(?![\w./:-]| [=@])"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
# The keys of our service in the Compose specification, with their types.
SERVICE = {
    "build": dict,
    "cap_drop": list,
    "command": list,
    "cpus": str,
    "environment": dict,
    "image": str,
    "init": bool,
    "logging": dict,
    "ports": list,
    "read_only": bool,
    "restart": str,
    "security_opt": list,
    "stop_grace_period": str,
    "tmpfs": list,
    "user": str,
    "volumes": list,
}
INSTRUCTIONS = {
    "FROM",
    "ARG",
    "WORKDIR",
    "COPY",
    "RUN",
    "ENV",
    "USER",
    "VOLUME",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
}


def parsed(words: list[str]) -> str:
    """Return the name of the command that these words call. Raises ClickException or UserError if the command does not accept them."""
    command, context = get_command(app), None
    name, words = "fedcomp", [word for word in words if word != "--help"]
    while isinstance(command, click.Group):
        context = click.Context(command, info_name=name, parent=context)
        if not words or words[0].startswith("-"):
            break
        name = words.pop(0)
        if (below := command.get_command(context, name)) is None:
            raise click.UsageError(f"no command {name}")
        command = below
    given = command.make_context(name, words, parent=context).params
    if name == "sim":
        own = {"dry_run", "side_by_side", "target_accuracy"}
        own |= {"rounds", "loops", "trace", "json"} if context.info_name == "bench" else set()
        alternatives(
            flags.run_values(
                {key: value for key, value in given.items() if key not in own} | {"resume": None},
                ALTERNATIVE_OPTIONS,
            )
        )
    if name == "start":
        door = {"port", "host", "keys", "insecure", "transport"}
        flags.run_config(
            {key: value for key, value in given.items() if key not in door} | {"resume": None}
        )
    return name


def lines_of(page: Path) -> list[str]:
    """Return the fedcomp commands of a page, from code blocks and from inline code."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    blocks = re.findall(r"^```(\w*)\n(.*?)^```|^ {4,}(\S[^\n]*)$", text, re.DOTALL | re.MULTILINE)
    code = [
        line.strip()
        for language, block, single in blocks
        if language in ("", "sh", "console", "text")
        for line in (block or single).split("\n")
    ]
    parts = [part.strip() for line in code for part in re.split(r"&&|(?<=\s)[|;&](?=\s|$)", line)]
    return [part for part in parts if re.match(BEGINS, part)] + re.findall(
        rf"`({BEGINS}[^`]*)`", text
    )


def words_of(line: str) -> list[str]:
    return shlex.split(re.sub(rf"^{BEGINS}", "", line), comments=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_documentation_is_valid(page):
    for line in lines_of(page):
        try:
            parsed(words_of(line))
        except (click.ClickException, UserError) as error:
            pytest.fail(f"{page.name}: {line}: {error}")


def test_invalid_commands_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Type `fedcomp keys renw 3`.\n\n    fedcomp sim --clients 3 && fedcomp client --sever a:1\n\n"
        "```sh\nFEDCOMP_DATA=x fedcomp server start --roundz 3  # a comment\n```\n"
    )
    lines = lines_of(page)
    assert len(lines) == 4 and parsed(words_of(lines[0])) == "sim"
    for line in lines[1:]:
        with pytest.raises(click.ClickException):
            parsed(words_of(line))
    with pytest.raises(UserError):
        parsed(["server", "start", "--clients", "some"])


# The server.


def logical_lines(path: Path) -> list[str]:
    """Return the lines of a Dockerfile, with continued lines joined and without comments."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    return [line for line in re.sub(r"\\\n", " ", text).split("\n") if line.strip()]


def instructions() -> list[tuple[str, str]]:
    return [tuple(line.split(maxsplit=1)) for line in logical_lines(DEPLOY / "Dockerfile")]


def test_the_dockerfile_names_existing_files_and_pinned_versions():
    output = instructions()
    assert {name for name, _ in output} == INSTRUCTIONS
    assert output[0][0] == "FROM" and output[-1] == ("ENTRYPOINT", '["serve"]')
    for name, rest in output:
        if name == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
    users = [rest for name, rest in output if name == "USER"]
    assert users and users[-1] not in ("root", "0")
    run = next(rest for name, rest in output if name == "RUN" and "pip install" in rest)
    assert [
        pin for pin in (ROOT / "constraints.txt").read_text().split() if pin.startswith("torch==")
    ] == re.findall(r"torch==\S+", run)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert re.search(r"'\.\[(\w+)\]'", run)[1] in extras
    assert "uid 10001" in dict(output)["RUN"] and os.access(DEPLOY / "serve", os.X_OK)


def test_the_health_check_succeeds_only_for_this_server_through_tls(tmp_path):
    keys.make(tmp_path / "keys", 1)
    check = json.loads(dict(instructions())["HEALTHCHECK"].partition(" CMD ")[2])
    assert check[0] == "python" and "8080" in check[2] and "/keys/" in check[2]

    def status(port: int) -> int:
        code = check[2].replace("8080", str(port)).replace("/keys/", f"{tmp_path / 'keys'}/")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60
        ).returncode

    with grpc_serving(tmp_path / "keys") as port:
        assert status(port) == 0
    assert status(port) != 0
    keys.make(tmp_path / "others", 1)
    with grpc_serving(tmp_path / "others") as port:
        assert status(port) != 0


@pytest.mark.parametrize("there", [False, True])
def test_serve_begins_a_run_and_continues_one(tmp_path, there):
    shown = tmp_path / "fedcomp"
    shown.write_text('#!/bin/sh\nfor word; do printf "%s\\n" "$word"; done\n')
    shown.chmod(0o755)
    run = tmp_path / "a run"
    if there:
        run.mkdir()
        (run / "config.toml").touch()
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FEDCOMP_RUN": str(run)}
    done = subprocess.run(
        [DEPLOY / "serve", *service()["command"]],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert parsed(words) == "start"
    assert words[:6] == ["server", "start", "--keys", "/keys", "--out", str(run)]
    assert words[6:] == service()["command"] + ["--resume"] * there


def service() -> dict:
    return json.loads(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", json.dumps(COMPOSE)))["services"][
        "server"
    ]


def test_compose_starts_the_server_with_few_privileges():
    assert set(COMPOSE) == {"name", "services"}
    output = service()
    assert {name: type(value) for name, value in output.items()} == SERVICE
    build = output["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    volumes = {volume["target"]: volume for volume in output["volumes"]}
    paths = dict(re.findall(r"\$\{FEDCOMP_(KEYS|RUN):-(/\w+)", (DEPLOY / "serve").read_text()))
    assert {name: path for name, path in paths.items()} == {
        "KEYS": "/keys",
        "RUN": "/runs",
    } and volumes.keys() == set(paths.values())
    assert volumes["/keys"]["read_only"] and not volumes["/runs"].get("read_only")
    assert not any(volume["bind"]["create_host_path"] for volume in volumes.values())
    assert (
        output["read_only"]
        and output["cap_drop"] == ["ALL"]
        and output["init"]
        and not output["user"].startswith("0")
    )
    assert output["ports"] == ["8080:8080"] and output["restart"].startswith("on-failure")
    assert all(isinstance(word, str) for word in output["command"])


# A client.


def unit() -> ConfigParser:
    parser = ConfigParser(interpolation=None, strict=False, delimiters="=")
    parser.optionxform = str
    parser.read(DEPLOY / "fedcomp-client.service")
    return parser


def test_the_unit_starts_a_client_and_does_not_restart_it_after_a_user_error():
    told = unit()["Service"]
    words = told["ExecStart"].split()
    assert words[0].endswith("/fedcomp") and words[-1] == "$FEDCOMP_OPTIONS"
    assert parsed(words[1:-1]) == "client"
    (options,) = re.findall(
        r"FEDCOMP_OPTIONS=(.*)", (DEPLOY / "fedcomp-client.service").read_text()
    )
    assert parsed([*words[1:-1], *options.split()]) == "client"
    assert (
        int(told["RestartPreventExitStatus"]) == UserError.exit_status
        and told["Restart"] == "on-failure"
    )
    assert int(told["SuccessExitStatus"]) == 128 + signal.SIGTERM
    assert (
        told["DynamicUser"] == "yes"
        and told["StateDirectory"] == "fedcomp"
        and "NUMBA_CACHE_DIR=%C/fedcomp" in told["Environment"]
    )
    assert "MemoryDenyWriteExecute" not in told, "numba compiles"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path):
    text = (DEPLOY / "fedcomp-client.service").read_text()
    (tmp_path / "fedcomp-client.service").write_text(
        text.replace("/opt/fedcomp/bin/fedcomp ", f"{sys.executable} ")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", tmp_path / "fedcomp-client.service"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    newer = re.compile(r"Unknown key(?: name)? '(RestartSteps|RestartMaxDelaySec)' in section")
    ours = [
        line
        for line in done.stderr.splitlines()
        if "fedcomp-client.service" in line and not newer.search(line)
    ]
    assert ours == [] and done.returncode == 0, done.stderr
