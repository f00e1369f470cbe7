"""Named faults at a chosen point of a round: `faults.fail_at(client, round, phase, fault)`.

They happen in clients that are threads of this process (`Clients`). Each client has a state folder and a connection of its own, which can
be cut in the middle of a message. A killed client is started again from its folder; a slow one waits until its round is over. Faults that
need processes, SIGSTOP, SIGKILL and a full disk, are in tests/deployment/test_outages.py.
"""

import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from every_codec import reseal
from tcp_proxy import TcpProxy

from fedcomp.codecs import Codec, codec
from fedcomp.deployment.client_process import ClientProcess, HostedClient, Target
from fedcomp.deployment.deployed_client import DeployedClient
from fedcomp.deployment.handshake import ClientSetup, SharedObjects
from fedcomp.errors import FrameError
from fedcomp.messages import TRAIN, UPDATE, Assignment, Report
from fedcomp.state_folder import FILE, StateFolder
from fedcomp.transports.grpc import GrpcConnection

PATIENCE_S = 60.0
BEFORE, KEPT, AMID, AFTER, WIRE = (
    "before training",
    "kept, before the reply",
    "amid the reply",
    "after it",
    "on its way",
)
AMID_BYTES = 12  # bytes of a reply that are sent before the connection is cut


class Killed(BaseException):
    """Ends a thread as SIGKILL ends a process, so that no clean-up code runs."""


def another_round(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, round=report.round - 1)


def another_size(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, frame=codec("identity").encode(torch.ones(7)))


def garbage(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, frame=bytes(range(251)))


def not_a_number(report: Report, uplink: Codec, numel: int) -> Report:
    """Return the report with one number of its frame replaced by NaN, and a valid checksum."""
    for at in range(9, len(report.frame) - 3):
        data = bytearray(report.frame)
        data[at : at + 4] = struct.pack("<f", float("nan"))
        spoiled = reseal(bytes(data), numel)
        with suppress(FrameError):
            uplink.open(report.frame, numel)
            try:
                uplink.open(spoiled, numel)
            except FrameError as error:
                if "NaN or infinity" in str(error):
                    return replace(report, frame=spoiled)
    raise AssertionError("this frame contains no number")


# Name → the point of the round at which the fault happens, and its action.
FAULTS = {
    "killed before training": (BEFORE, "kill"),
    "killed before its reply": (KEPT, "kill"),
    "killed amid its reply": (AMID, "kill"),
    "killed after its reply": (AFTER, "kill"),
    "slow before training": (BEFORE, "wait"),
    "slow before its reply": (KEPT, "wait"),
    "cut before its reply": (KEPT, "cut"),
    "cut amid its reply": (AMID, "cut"),
    "cut after its reply": (AFTER, "cut"),
    "a reply of another round": (WIRE, another_round),
    "a reply of another size": (WIRE, another_size),
    "garbage": (WIRE, garbage),
    "not a number": (WIRE, not_a_number),
}
HARMLESS = [
    how for how in FAULTS if how.startswith(("killed", "cut"))
]  # faults after which the update still counts in its round
DELAYED = [how for how in FAULTS if how.startswith("slow")]
REFUSED = [how for how in FAULTS if FAULTS[how][0] == WIRE]


@dataclass
class Faults:
    """The planned faults, each of which happens once, and the faults that have happened."""

    planned: dict[tuple[int, int, str], str] = field(default_factory=dict)
    happened: list[tuple[int, int, str, str]] = field(default_factory=list)
    rounds_over: int = 0
    corrupted: dict[tuple[int, int, str], str] = field(
        default_factory=dict
    )  # reports that were corrupted

    def __post_init__(self) -> None:
        self._condition, self._released = threading.Condition(), False

    def fail_at(self, client: int, round: int, phase: str, how: str) -> None:
        assert how in FAULTS
        self.planned[client, round, phase] = how

    def due(self, client: int, round: int, phase: str, place: str) -> str | Callable | None:
        """Return the action of the fault at this point, or None. A report that was corrupted is corrupted again when it is sent again."""
        where = client, round, phase
        how = self.planned.get(where, self.corrupted.get(where))
        if how is None or FAULTS[how][0] != place:
            return None
        if self.planned.pop(where, None) is None:
            return FAULTS[how][1]
        if place == WIRE:
            self.corrupted[where] = how
        self.happened.append((client, round, phase, how))
        return FAULTS[how][1]

    def over(self, round: int) -> None:
        """Mark a round as over, so that its slow clients continue."""
        with self._condition:
            self.rounds_over = max(self.rounds_over, round)
            self._condition.notify_all()

    def release(self) -> None:
        with self._condition:
            self._released = True
            self._condition.notify_all()

    def wait(self, round: int) -> None:
        """Wait until this round is over."""
        with self._condition:
            assert self._condition.wait_for(
                lambda: self._released or self.rounds_over >= round, PATIENCE_S
            )


class FailingClient(DeployedClient):
    """A client with faults before and after its answers. `on_join` is called with the client when it has joined a run."""

    def __init__(
        self,
        setup: ClientSetup,
        folder: StateFolder,
        proxy: TcpProxy,
        faults: Faults,
        on_join: Callable[[DeployedClient], None],
        kill: Callable[[], None],
        killed: Callable[[], bool],
    ):
        super().__init__(setup, folder)
        self.proxy, self.faults, self.on_join = proxy, faults, on_join
        self.kill, self.killed = kill, killed

    def join(self, invitation):
        before = self.session if self.has_joined else None
        presence = super().join(invitation)
        if self.session is not before:
            self.on_join(self)
        return presence

    def repeated_report(self, assignment: Assignment) -> Report | None:
        if self.killed():
            raise Killed
        self.assignment = assignment
        self.act(BEFORE, assignment)
        return super().repeated_report(assignment)

    def save(self) -> None:
        super().save()
        self.act(KEPT, self.assignment)
        amid = self.due(AMID, self.assignment)
        if amid is not None:
            self.proxy.cut_after(AMID_BYTES, *([self.kill] if amid == "kill" else []))

    def corrupted(self, report: Report) -> Report:
        """Return the report to send in place of `report`."""
        if report.kind == UPDATE and (corrupt := self.due(WIRE, self.assignment)):
            return corrupt(report, *self._made_with(report))
        return report

    def due(self, place: str, a: Assignment):
        return self.faults.due(self.client_id, a.round, a.phase, place)

    def act(self, place: str, assignment: Assignment) -> None:
        what = self.due(place, assignment)
        if what == "kill":
            self.kill()
            raise Killed
        if what == "wait":
            self.faults.wait(assignment.round)
        elif what == "cut":
            self.proxy.cut_now()

    def _made_with(self, report: Report) -> tuple[Codec, int]:
        """Return the codec and the number of values of a report's frame. Only in the training phase the frame is an update of the model."""
        session = self.session
        if report.phase == TRAIN:
            return session.states.at(self.client_id).memory.codec, session.replica.layout.numel
        numbers = codec("identity")
        return numbers, next(
            n for n in range(10_000) if len(numbers.encode(torch.zeros(n))) == len(report.frame)
        )


@dataclass
class CorruptingConnection:
    """A connection to the server that corrupts reports."""

    connection: GrpcConnection
    member: FailingClient

    async def send(self, message) -> None:
        corrupted = self.member.corrupted(message) if isinstance(message, Report) else message
        await self.connection.send(corrupted)

    def messages(self):
        return self.connection.messages()


class FailingProcess(ClientProcess):
    """A client process in which faults happen after a reply was sent."""

    killed = False

    def kill(self) -> None:
        """End the process as SIGKILL does. May be called from any thread."""
        self.killed = True
        self.end()

    async def _answer(self, hosted, connection, message) -> None:
        await super()._answer(hosted, CorruptingConnection(connection, hosted.client), message)
        if isinstance(message, Assignment):
            what = hosted.client.due(AFTER, message)
            if what == "kill":
                self.kill()
            elif what == "cut":
                hosted.client.proxy.cut_now()


class Clients:
    """Clients 0, 1, … in threads, each with its own folder and TCP proxy. A killed client is started again."""

    def __init__(self, port: int, folder: Path, faults: Faults, setups: list[ClientSetup]):
        self.folder, self.faults, self.setups = folder, faults, setups
        self.proxies = [TcpProxy(port) for _ in setups]
        self.output: list[list[str]] = [[] for _ in setups]
        self.errors: list[BaseException] = []
        self.processes: dict[int, FailingProcess] = {}
        self.members: dict[int, FailingClient] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._stopped: set[int] = set()
        self.on_join: Callable[[DeployedClient], None] = lambda member: None

    def member(self, client: int) -> DeployedClient:
        return self.members[client]

    def start(self) -> None:
        for client in range(len(self.setups)):
            if client not in self._threads and client not in self._stopped:
                self.begin(client)

    def begin(self, client: int) -> None:
        """Start a client that was stopped or has not run before."""
        self._stopped.discard(client)
        self._threads[client] = threading.Thread(
            target=self._keep_running, args=(client,), name=f"client {client}"
        )
        self._threads[client].start()

    def end(self, client: int) -> None:
        """Stop a client as Ctrl-C does."""
        self._stopped.add(client)
        self.processes[client].end()
        self._threads.pop(client).join(PATIENCE_S)

    def forget(self, client: int) -> None:
        """Delete the state that a stopped client has stored for the run. The client keeps its key."""
        (self.folder / str(client) / FILE).unlink()

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads.values())
        assert not self.errors, self.errors

    def stop(self) -> None:
        """Stop all clients at once."""
        for client, living in self.processes.items():
            self._stopped.add(client)
            living.end()
        for proxy in self.proxies:
            proxy.close()
        for thread in self._threads.values():
            thread.join(PATIENCE_S)

    def _keep_running(self, client: int) -> None:
        killed = True
        while killed and (client not in self._stopped or client not in self.processes):
            folder, killed = StateFolder(self.folder / str(client)), False
            try:
                self._run(client, folder)
                killed = self.processes[client].killed
            except Killed:
                killed = True
            except BaseException as error:
                if client not in self._stopped:
                    self.errors.append(error)
            finally:
                folder.close()

    def _run(self, client: int, folder: StateFolder) -> None:
        proxy = self.proxies[client]
        setup = self.setups[client]
        member = FailingClient(
            replace(
                setup, shared=SharedObjects(setup.shared.lock)
            ),  # a restarted client shares nothing with the killed one
            folder,
            proxy,
            self.faults,
            lambda member: self.on_join(member),
            lambda: self.processes[client].kill(),
            lambda: self.processes[client].killed,
        )
        self.members[client] = member
        hosted = HostedClient(Target("127.0.0.1", proxy.port), member)
        process = FailingProcess(
            {client: hosted}, self.output[client].append, patience_s=PATIENCE_S
        )
        self.processes[client] = process
        process.run()
