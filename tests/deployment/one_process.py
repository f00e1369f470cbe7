"""A whole deployment in this process: the server in the thread that calls `deployed`, client processes in threads."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tiny_task import task

from fedcomp import RunConfig
from fedcomp.callbacks import Callback, PortFigures, RoundRecord, Summary
from fedcomp.deployment.client_process import ClientProcess, Seat, Target
from fedcomp.deployment.handshake import Common, Own
from fedcomp.deployment.member import Member
from fedcomp.deployment.start import Door, serve
from fedcomp.errors import FedcompError
from fedcomp.keys.enrolment import Enrolment

TASK = f"{Path(__file__).parents[1] / 'tiny_task.py'}:task"
TRAIN = task.train()
COMMON = Common()  # torch has one source of randomness in a process: one client after the other
RETRY_S = (0.05, 0.1)
PATIENCE_S = 30.0


@dataclass
class Clients:
    """A client process in a thread: what it says, and the error that ended it."""

    said: list[str] = field(default_factory=list)
    error: FedcompError | None = None

    def start(self, port: int, clients: Sequence[int], keys: Path | None) -> None:
        seats = {}
        for client in clients:
            enrolled = keys and Enrolment.read(keys / "clients" / f"{client}.toml")
            own = Own(task, TRAIN, torch.device("cpu"), client, client, common=COMMON)
            member = Member(own, None, enrolled.pair[0] if enrolled else None)
            seats[client] = Seat(Target("localhost", port, enrolled), member)
        self.process = ClientProcess(
            seats, lambda sentence: self.said.append(str(sentence)), retry_s=RETRY_S
        )
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.process.run()
        except FedcompError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self.thread.is_alive()

    def has_said(self, text: str) -> bool:
        return any(text in sentence for sentence in [*self.said])


class Over(BaseException):
    """The script of a run has ended."""


class Scripted(Callback):
    """Goes on with a script after each round, and keeps what the server warns about. `port()` returns the figures of its port."""

    port: Callable[[], PortFigures]

    def __init__(self, script: Iterator[None] | None):
        self.script, self.warnings = script, []

    def serving(self, port: Callable[[], PortFigures]) -> None:
        self.port = port

    def round_done(self, record: RoundRecord) -> None:
        if self.script is not None:
            try:
                next(self.script)
            except StopIteration:
                raise Over from None

    def warning(self, sentence: str) -> None:
        self.warnings.append(sentence)


class Deployed:
    """A server's port and keys, and the clients that were started for it."""

    def __init__(self, config: RunConfig, keys: Path | None):
        self.config, self.keys, self.port = config, keys, 0
        self.clients: list[Clients] = []
        self.callback = Scripted(None)

    @property
    def warnings(self) -> list[str]:
        return self.callback.warnings

    def start(self, *clients: int) -> Clients:
        """Start a process of these clients. The server has to serve."""
        made = Clients()
        self.clients.append(made)
        made.start(self.port, clients, self.keys)
        return made

    def serve(
        self, *processes: Sequence[int], script: Iterator[None] | None = None
    ) -> Summary | None:
        """Run the server, with processes of these clients started when it can be reached. Rounds end when the script ends."""

        def opened(port: int) -> None:
            self.port = port
            for clients in processes:
                self.start(*clients)

        self.callback = Scripted(script)
        try:
            return serve(self.config, Door(0, "127.0.0.1", self.keys), self.callback, opened)
        except Over:
            return None


def rounds_until(true: Callable[[], bool], what: object = None) -> Iterator[None]:
    """Yield once a round until a condition holds. `what` is shown if it does not come about."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        yield


@contextmanager
def deployed(folder: Path, keys: Path | None = None, **options) -> Iterator[Deployed]:
    usual = {"participation": 1.0, "batch_size": 10, "seed": 5, "device": "cpu", "rounds": 2}
    config = RunConfig(task=TASK, out=str(folder / "run"), **usual | options)
    run = Deployed(config, keys)
    try:
        yield run
    finally:
        for clients in run.clients:
            clients.process.end()
            clients.thread.join(PATIENCE_S)
