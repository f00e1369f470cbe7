"""A whole deployment in this process: the server in the thread that calls `deployed`, relay and client processes in threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from fedcomp import RunConfig
from fedcomp.callbacks import Callback, PortFigures, RoundRecord, Summary
from fedcomp.deployment.client_process import ClientProcess, HostedClient, Target
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import ClientSetup, SharedObjects
from fedcomp.deployment.relay_process import RelayProcess
from fedcomp.deployment.start import Endpoint, serve
from fedcomp.errors import FedcompError
from fedcomp.keys.enrolment import Enrolment
from fedcomp.tasks import Data, Task, load

TASK = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
RETRY_S = (0.05, 0.1)
PATIENCE_S = 30.0


@cache
def parts(task: str) -> tuple[Task, Data, SharedObjects]:
    """Return a task, its training data and the objects that its clients share. They share a lock, since torch has one global generator."""
    loaded = load(task, None)
    return loaded, loaded.train(), SharedObjects()


@dataclass
class Process:
    """A client or relay process in a thread, its messages, and the error that ended it."""

    output: list[str] = field(default_factory=list)
    error: FedcompError | None = None

    def log_message(self, sentence: str) -> None:
        self.output.append(str(sentence))

    def begin(self, process: ClientProcess | RelayProcess) -> None:
        self.process = process
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.process.run()
        except FedcompError as error:
            self.error = error

    def end(self) -> None:
        self.process.end()
        self.thread.join(PATIENCE_S)

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def has_logged(self, text: str) -> bool:
        return any(text in sentence for sentence in [*self.output])


class Clients(Process):
    """A client process, run in a thread."""

    def start(self, port: int, clients: Sequence[int], keys: Path | None, task: str = TASK) -> None:
        hosted_clients = {}
        loaded, train, shared = parts(task)
        for client in clients:
            enrolled = keys and Enrolment.read(keys / "clients" / f"{client}.toml")
            own = ClientSetup(loaded, train, torch.device("cpu"), client, client, shared=shared)
            member = DeployedClient(own, None, enrolled.key_pair[0] if enrolled else None)
            hosted_clients[client] = HostedClient(Target("localhost", port, enrolled), member)
        self.begin(ClientProcess(hosted_clients, self.log_message, retry_s=RETRY_S))


class Relay(Process):
    """A relay process, run in a thread, and its port."""

    port = 0

    def start(self, server_port: int, enrolled: Enrolment | None, **options) -> None:
        """Start the relay and wait until it listens. A restarted relay uses the same port."""
        opened = threading.Event()

        def listens(port: int) -> None:
            self.port = port
            opened.set()

        target = Target("localhost", server_port, enrolled)
        retry = {"retry_s": RETRY_S, "opened": listens}
        self.begin(
            RelayProcess(target, "127.0.0.1", self.port, self.log_message, **retry, **options)
        )
        assert opened.wait(PATIENCE_S), (self.output, self.error)


class Over(BaseException):
    """Raised to end a run, when its script has ended."""


class Scripted(Callback):
    """Advances a script by one step after each round, and records the server's warnings. `port()` returns the figures of its port."""

    port: Callable[[], PortFigures]

    def __init__(
        self, script: Iterator[None] | None, on_answer: Callable[[int, int], None] | None = None
    ):
        self.script, self.on_answer, self.warnings = script, on_answer, []

    def on_progress(self, round: int, answered: int, cohort: int) -> None:
        if self.on_answer is not None:
            self.on_answer(round, answered)

    def on_port_open(self, port: Callable[[], PortFigures]) -> None:
        self.port = port

    def on_round_end(self, record: RoundRecord) -> None:
        if self.script is not None:
            try:
                next(self.script)
            except StopIteration:
                raise Over from None

    def on_warning(self, sentence: str) -> None:
        self.warnings.append(sentence)


class Deployed:
    """A server's port and keys, and the clients that were started for it."""

    def __init__(self, config: RunConfig, keys: Path | None):
        self.config, self.keys, self.port = config, keys, 0
        self.clients: list[Clients] = []
        self.relays: list[Relay] = []
        self.callback = Scripted(None)

    @property
    def warnings(self) -> list[str]:
        return self.callback.warnings

    def start(self, *clients: int, at: Relay | None = None) -> Clients:
        """Start a process of these clients, behind `relay` if it is given. The server must be running."""
        made = Clients()
        self.clients.append(made)
        made.start(at.port if at else self.port, clients, self.keys, self.config.task)
        return made

    def relay(self, **options) -> Relay:
        """Start a relay. The server must be running. With keys, the first relay has the enrolment of relay 0, and so on."""
        made, id = Relay(), len(self.relays)
        self.relays.append(made)
        enrolled = self.keys and Enrolment.read(self.keys / "relays" / f"{id}.toml")
        made.start(self.port, enrolled, **options)
        return made

    def serve(
        self,
        *processes: Sequence[int],
        behind: Sequence[Sequence[int]] = (),
        script: Iterator[None] | None = None,
        on_answer: Callable[[int, int], None] | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> Summary | None:
        """Run the server, and start processes of these clients when it can be reached. The run ends when the script ends.

        `behind`: for each relay to start, the clients behind it. `then` is called when all processes were started. `on_answer` is called
        with the round and the number of answers. A server that is run again uses the same port.
        """

        def opened(port: int) -> None:
            self.port = port
            for clients in processes:
                self.start(*clients)
            for clients in behind:
                self.start(*clients, at=self.relay())
            then()

        self.callback = Scripted(script, on_answer)
        endpoint = Endpoint(self.port, "127.0.0.1", self.keys)
        try:
            return serve(self.config, endpoint, self.callback, opened)
        except Over:
            return None


def rounds_until(true: Callable[[], bool], what: object = None) -> Iterator[None]:
    """Yield once in each round until a condition holds. `what` is the message if it does not become true in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        yield


@contextmanager
def deployed(folder: Path, keys: Path | None = None, **options) -> Iterator[Deployed]:
    usual = {
        "task": TASK,
        "participation": 1.0,
        "batch_size": 10,
        "seed": 5,
        "device": "cpu",
        "rounds": 2,
    }
    config = RunConfig(out=str(folder / "run"), **usual | options)
    run = Deployed(config, keys)
    try:
        yield run
    finally:
        for process in [*run.clients, *run.relays]:
            process.process.end()
        for process in [*run.clients, *run.relays]:
            process.thread.join(PATIENCE_S)
            assert process.ended
