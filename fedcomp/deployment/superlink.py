"""Flower's SuperLink as a child of this process: on loopback, for one run, gone when this process goes, however it goes.

It runs in Flower's process isolation: it starts no process of its own, and a run that somebody on this machine submits is never
taken on by anybody, because that needs a secret that only this process has. Its loopback port hears processes of this user alone, where
the system tells whose they are (own_user.py); elsewhere than on Linux other users of this machine could stop the run.
"""

import json
import secrets
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

from ..errors import FedcompError
from . import children
from . import peer_credentials as own_user
from .children import LOOPBACK

START_S = 60.0
LOG, HOME = "superlink.log", ".superlink"  # in the run folder

# Nothing in the bundle is code: it names what is installed.
BUNDLE = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedcomp-run"
version = "0.1.0"
description = "Names installed modules of fedcomp"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedcomp"

[tool.flwr.app.components]
serverapp = "fedcomp.deployment.server_app:app"
clientapp = "fedcomp.deployment.client_app:app"

[tool.flwr.app.config]
"""
CONNECTION = '[superlink]\ndefault = "here"\n[superlink.here]\naddress = "{}"\ninsecure = true\n'


class SuperLink:
    """Started by `start`, ready for its run after `submit`. What it says stays in the run folder, what it needs goes with it."""

    def __init__(self, folder: Path):
        self.log, self.secret = folder.absolute() / LOG, secrets.token_bytes(32)
        self.port = 0
        self._home = folder.absolute() / HOME
        self._process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Begin to start it; `submit` waits until it is there."""
        shutil.rmtree(self._home, ignore_errors=True)  # of a server that was killed
        self._home.mkdir(0o700)
        (self._home / "app").mkdir()
        (self._home / "app" / "pyproject.toml").write_text(BUNDLE)
        secret = self._home / "secret"
        secret.touch(0o600)
        secret.write_bytes(self.secret)
        self.port = children.free_port()
        (self._home / "config.toml").write_text(CONNECTION.format(self.address))
        command = [
            sys.executable,
            "-P",
            own_user.__file__,
            "--insecure",
            "--host",
            LOOPBACK,
            "--port",
            str(self.port),
            "--isolation",
            "process",
            "--superexec-auth-secret-file",
            str(secret),
            "--disable-runtime-dependency-installation",
        ]
        with self.log.open("ab") as log:
            self._process = children.start(command, children.environment(self._home), log)

    def submit(self) -> None:
        """Wait until it is there, and submit the run. Raises FedcompError when it does not come."""
        deadline = time.monotonic() + START_S
        while not self._healthy():
            if time.monotonic() > deadline:
                raise FedcompError(
                    f"Flower's SuperLink did not start within {START_S:g} s; {self.log} has what it said"
                )
            time.sleep(0.05)
        command = [
            children.script("flwr"),
            "run",
            str(self._home / "app"),
            "here",
            "--format",
            "json",
        ]
        with children.start(
            command, children.environment(self._home), subprocess.PIPE, subprocess.PIPE
        ) as submitting:
            try:
                said, besides = submitting.communicate(timeout=START_S)
            except BaseException:
                submitting.kill()
                raise
        try:
            begun = json.loads(said)["success"] is True
        except (ValueError, KeyError, TypeError):
            begun = False
        if not begun:
            raise FedcompError(
                f"Flower did not take the run: {' '.join((said or besides).decode(errors='replace').split())[:500]}"
            )

    def check(self) -> None:
        """Raises FedcompError when it has ended."""
        if self._process is None or (status := self._process.poll()) is None:
            return
        raise FedcompError(
            f"Flower's SuperLink ended with status {status}; {self.log} has what it said, --resume continues the run"
        )

    def stop(self) -> None:
        """End it, whatever state it is in."""
        process, self._process = self._process, None
        if process is not None:
            children.end(process)
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _healthy(self) -> bool:
        self.check()
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://{self.address}/health", timeout=1
            ) as answer:
                return answer.status == 200
        except OSError:
            return False
