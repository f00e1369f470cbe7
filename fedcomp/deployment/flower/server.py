"""`fedcomp server start --transport flower`: Flower's server program, the SuperLink, starts a ServerApp, which runs the rounds."""

import dataclasses
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

from ...callbacks import Callback, Summary
from ...config import RunConfig, StrategyDefault
from ...errors import ConfigError, FedcompError
from ...keys.connection import join_address
from ...keys.key_folder import CA_CRT, REGISTRY, serving_files
from ...keys.registry import Registry
from ...server.option_callbacks import with_option_callbacks
from ..ports import LOOPBACK
from ..start import Endpoint, refuse_ports_in_use, refuse_simulation_options
from . import processes
from .events import EventReader
from .server_app import EVENTS, FOLDER, SETTINGS

START_S = 60.0  # time limit for the SuperLink to open its port
POLL_S = 0.2  # time between two reads of the ServerApp's events
LOG = "flower.log"
CONNECTION = "fedcomp"  # name of the SuperLink connection in Flower's configuration
PROJECT = {
    "name": "fedcomp-run",
    "version": "0.1.0",
    "description": "An App of installed fedcomp modules",
    "license": "Apache-2.0",
    "dependencies": [],
}
COMPONENTS = {
    "serverapp": "fedcomp.deployment.flower.server_app:app",
    "clientapp": "fedcomp.deployment.flower.device_app:app",
}
TRUST_WARNING = (
    "--transport flower: anyone who can reach port {port} of {host} can submit Apps to Flower's SuperLink, and these Apps run code on "
    "this machine and on every SuperNode; keep the port within a network that you trust, or use --transport grpc"
)


def serve(
    config: RunConfig,
    endpoint: Endpoint,
    callback: Callback | None = None,
    opened: Callable[[int], None] = lambda port: None,
) -> Summary:
    """Run a deployment through Flower. The arguments and the result are those of `fedcomp.deployment.start.serve`.

    If `endpoint` has no host, the SuperLink listens on the loopback address. Raises UserError for invalid options. If one of Flower's
    processes fails, raises FedcompError and keeps their log file.
    """
    refuse_simulation_options(config)
    if config.relays:
        raise ConfigError(
            "--relays needs --transport grpc; leave --relays or --transport flower out"
        )
    endpoint = dataclasses.replace(
        endpoint, host=endpoint.host or LOOPBACK, port=endpoint.port or processes.free_port()
    )
    refuse_ports_in_use(config, endpoint)
    with ExitStack() as exit_stack:
        callback = exit_stack.enter_context(with_option_callbacks(config, callback or Callback()))
        folder = Path(tempfile.mkdtemp(prefix="fedcomp-flower-"))
        link = SuperLink(endpoint, folder)
        exit_stack.callback(link.stop)
        link.start()
        events = EventReader(folder / EVENTS, callback)
        (folder / SETTINGS).write_text(json.dumps(_settings(config, endpoint, link.register())))
        opened(endpoint.port)
        callback.on_warning(TRUST_WARNING.format(port=endpoint.port, host=endpoint.host))
        link.submit()
        while not events.ended:
            # Check the processes before reading the events. If a process has ended by then, the file already has all of its events.
            running = link.running()
            events.read()
            if not running and not events.ended:
                sentence = "Flower ended before the run was complete"
                raise link.failure(sentence, "; continue the run with --resume")
            time.sleep(POLL_S)
        assert events.summary is not None
        return events.summary


def _settings(config: RunConfig, endpoint: Endpoint, enrolled: list[Any] | None) -> dict[str, Any]:
    """Return the settings of the ServerApp, with --log-json, --metrics-port and --tensorboard off, because `serve` itself handles these."""
    replaced = dataclasses.replace(config, log_json=None, metrics_port=-1, tensorboard=False)
    unset = type(None), StrategyDefault
    options = {k: value for k, value in vars(replaced).items() if not isinstance(value, unset)}
    keys = str(endpoint.keys) if endpoint.keys else None
    server = {"host": endpoint.host, "port": endpoint.port, "keys": keys, "cwd": str(Path.cwd())}
    return {"options": options, "enrolled": enrolled} | server


class SuperLink:
    """A `flower-superlink` process that serves one run at `endpoint` and keeps its files in `folder`."""

    def __init__(self, endpoint: Endpoint, folder: Path):
        self.endpoint, self.folder = endpoint, folder
        self.log, self.home = folder / LOG, folder / "home"
        self.control = endpoint.host, endpoint.port  # address of Flower's Control API
        self._started: list[subprocess.Popen[bytes]] = []
        self._failed = False

    def start(self) -> None:
        """Start the SuperLink and wait until its port is open. Raises FedcompError if this takes longer than START_S seconds."""
        self.home.mkdir()
        host, port = self.endpoint.host, self.endpoint.port
        options, self.control = processes.superlink_options(host, port, self.home)
        self._start("flower-superlink", *options, *self._tls_options())
        self._write_files()
        deadline = time.monotonic() + START_S
        while not self._is_open():
            if not self.running() or time.monotonic() > deadline:
                raise self.failure("Flower's SuperLink did not start")
            time.sleep(0.05)

    def register(self) -> list[tuple[int, int, str]] | None:
        """Register the enrolled clients at the SuperLink. Return None if the endpoint has no keys.

        Otherwise, return the node id that Flower gives each client, its logical id (number in the run) and its public key (OpenSSH).
        """
        if self.endpoint.keys is None:
            return None
        registered = []
        for client, key in Registry(self.endpoint.keys / REGISTRY).enrolled().items():
            path = self.folder / "client.pub"
            path.write_text(key)
            answer = self._flwr("supernode", "register", str(path), CONNECTION, "--format", "json")
            registered.append((int(json.loads(answer)["node-id"]), client, key))
        return registered

    def submit(self) -> None:
        """Submit the App to the SuperLink, with a command (`flwr run`) that ends when the run ends."""
        self._start("flwr", "run", str(self.folder / "app"), CONNECTION, "--stream")

    def running(self) -> bool:
        """Return whether all started processes are still running."""
        return all(process.poll() is None for process in self._started)

    def stop(self) -> None:
        """End all processes. Remove the folder with the log, unless Flower has failed."""
        for process in self._started[::-1]:
            processes.end(process)
        if not self._failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def failure(self, sentence: str, remedy: str = "") -> FedcompError:
        """Return an error that says where Flower's log is, and make `stop` keep the log."""
        self._failed = True
        return FedcompError(f"{sentence}; {self.log} has the log{remedy}")

    def _start(self, *command: str) -> None:
        self._started.append(processes.start(command, self.home, self.log))

    def _flwr(self, *words: str) -> str:
        result = processes.run(["flwr", *words], self.home)
        if result.returncode:
            output = " ".join((result.stdout + result.stderr).split())[:500]
            raise FedcompError(f"`flwr {' '.join(words[:2])}` failed: {output}")
        return result.stdout

    def _tls_options(self) -> list[str]:
        if self.endpoint.keys is None:
            return ["--insecure"]
        certificate, key = map(str, serving_files(self.endpoint.keys))
        files = ["--ssl-certfile", certificate, "--ssl-keyfile", key]
        ca = ["--ssl-ca-certfile", str(self.endpoint.keys / CA_CRT)]
        return [*ca, *files, "--enable-supernode-auth"]

    def _write_files(self) -> None:
        keys = self.endpoint.keys
        trust = {"root-certificates": str(keys.absolute() / CA_CRT)} if keys else {"insecure": True}
        address = {"address": join_address(*self.control)} | trust
        connection = {"superlink": {"default": CONNECTION, CONNECTION: address}}
        (self.home / "config.toml").write_text(tomli_w.dumps(connection))
        (self.folder / "app").mkdir()
        config = {FOLDER: str(self.folder)}
        flwr = {"publisher": "fedcomp", "components": COMPONENTS, "config": config}
        build = {"requires": ["hatchling"], "build-backend": "hatchling.build"}
        project = {"build-system": build, "project": PROJECT, "tool": {"flwr": {"app": flwr}}}
        (self.folder / "app" / "pyproject.toml").write_text(tomli_w.dumps(project))

    def _is_open(self) -> bool:
        try:
            socket.create_connection(self.control, timeout=1.0).close()
        except OSError:
            return False
        return True
