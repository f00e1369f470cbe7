"""A whole deployment in this process: the server runs in the caller's thread, relays and clients in other threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from fedcomp.sim import simulate
from fedcomp.tasks import Data, Task, load

TASK = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
RETRY_S = (0.05, 0.1)
PATIENCE_S = 30.0


@cache
def parts(task: str) -> tuple[Task, Data, SharedObjects]:
    """Return a task, its training data and the objects that all clients share, among them a lock for torch's global generator."""
    loaded = load(task, None)
    return loaded, loaded.train(), SharedObjects()


@dataclass
class Process:
    """A client or relay in a thread, its log messages, and the error that ended it."""

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
    """A ClientProcess in a thread."""

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
    """A RelayProcess in a thread, and its port."""

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
    """An exception that ends a run after its script has ended."""


class Scripted(Callback):
    """A callback that advances a script by one step after each round and records the server's warnings."""

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
    """A server, and the clients and relays that were started for it."""

    def __init__(self, config: RunConfig, keys: Path | None):
        self.config, self.keys, self.port = config, keys, 0
        self.clients: list[Clients] = []
        self.relays: list[Relay] = []
        self.callback = Scripted(None)

    @property
    def warnings(self) -> list[str]:
        return self.callback.warnings

    def start(self, *clients: int, at: Relay | None = None) -> Clients:
        """Start a process of these clients, which connect to the relay `at` or else to the server. The server must be running."""
        made = Clients()
        self.clients.append(made)
        made.start(at.port if at else self.port, clients, self.keys, self.config.task)
        return made

    def relay(self, **options) -> Relay:
        """Start a relay. The server must be running. With keys, relays have the enrolments of relays 0, 1, and so on."""
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
        """Run the server, and start a process for each sequence of clients. If a script is given, the run ends when the script ends.

        `behind`: for each relay to start, its clients. `then` is called when all processes were started. `on_answer` is called with the
        round and the number of answers. A server that is run again uses the same port.
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
    """Yield after each round until a condition holds. `what`: message if the condition does not hold in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        yield


@contextmanager
def deployed(folder: Path, keys: Path | None = None, **options) -> Iterator[Deployed]:
    """Yield a deployment whose run folder is `folder`/run. Its clients and relays end with the `with` block."""
    usual = {"task": TASK, "participation": 1.0, "batch_size": 10, "rounds": 2}
    usual |= {"seed": 5, "device": "cpu", "out": str(folder / "run")}
    run = Deployed(RunConfig(**usual | options), keys)
    try:
        yield run
    finally:
        for process in [*run.clients, *run.relays]:
            process.process.end()
        for process in [*run.clients, *run.relays]:
            process.end()
            assert process.ended


def simulated(run: Deployed, **changes) -> Path:
    """Simulate a deployed run, with changed options if any. Return the run folder of the simulation."""
    folder = Path(run.config.out).with_name("simulated")
    simulate(replace(run.config, out=str(folder), engine="serial", **changes))
    return folder
