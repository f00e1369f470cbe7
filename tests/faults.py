"""Faults by name, at a place of a round: `faults.fail_at(client, round, phase, how)`.

They happen in clients that are threads of this process (`Clients`): real `Process`es, with their state on the disk and a line of their own
to the server that can be cut in the middle of a request. A client that is killed is started again from its disk; one that is slow waits
until its round is over. Those that real processes need, SIGSTOP, SIGKILL and a full disk, tests/deployment/test_faults.py makes itself.
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
from line import Line

from fedcomp.clients.flower import to_records
from fedcomp.codecs import Codec, codec
from fedcomp.deployment import client_process as process
from fedcomp.deployment.client_process import Process, Target
from fedcomp.deployment.handshake import Own
from fedcomp.deployment.member import Member
from fedcomp.errors import FrameError, UnreachableError
from fedcomp.messages import UPDATE, Report
from fedcomp.state_folder import FILE, StateFolder

PATIENCE_S = 60.0
BEFORE, KEPT, AMID, AFTER, WIRE = (
    "before training",
    "kept, before the reply",
    "amid the reply",
    "after it",
    "on its way",
)
PUSH_HEAD, PUSH_PART = (
    b"/v1/fleet/push-messages",
    b"/v1/fleet/push-object",
)  # how a reply begins, and goes on


class Killed(BaseException):
    """Like SIGKILL: nothing is done on the way out."""


def another_round(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, round=report.round - 1)


def another_size(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, frame=codec("identity").encode(torch.ones(7)))


def garbage(report: Report, uplink: Codec, numel: int) -> Report:
    return replace(report, frame=bytes(range(251)))


def not_a_number(report: Report, uplink: Codec, numel: int) -> Report:
    """The frame with a NaN in the place of a number that is in it, and a checksum that fits."""
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
    raise AssertionError("no number was found in this frame")


# name → where it happens, and what.
HOW = {
    "killed before training": (BEFORE, "kill"),
    "killed before its reply": (KEPT, "kill"),
    "killed amid its reply": (AMID, "kill"),
    "killed after its reply": (AFTER, "kill"),
    "slow before training": (BEFORE, "wait"),
    "slow before its reply": (KEPT, "wait"),
    "cut before its reply": (KEPT, "cut"),
    "cut amid its reply": (AMID, "cut"),
    "cut after its reply": (AFTER, "cut"),
    "replies twice": (AFTER, "again"),
    "a reply of another round": (WIRE, another_round),
    "a reply of another size": (WIRE, another_size),
    "garbage": (WIRE, garbage),
    "not a number": (WIRE, not_a_number),
}
HARMLESS = [
    how for how in HOW if how.startswith(("killed", "cut", "replies"))
]  # the update counts in its round nevertheless
LATE = [how for how in HOW if how.startswith("slow")]
REFUSED = [how for how in HOW if HOW[how][0] == WIRE]


@dataclass
class Faults:
    """What is to happen, each once, and what has."""

    planned: dict[tuple[int, int, str], str] = field(default_factory=dict)
    happened: list[tuple[int, int, str, str]] = field(default_factory=list)
    rounds_over: int = 0
    spoilt: dict[tuple[int, int, str], str] = field(
        default_factory=dict
    )  # answers that were, on their way

    def __post_init__(self) -> None:
        self._news, self._released = threading.Condition(), False

    def fail_at(self, client: int, round: int, phase: str, how: str) -> None:
        assert how in HOW
        self.planned[client, round, phase] = how

    def due(self, client: int, round: int, phase: str, place: str) -> str | Callable | None:
        """What happens here and now. An answer that is spoilt is so again when it is asked for again, on a line that was slow."""
        where = client, round, phase
        how = self.planned.get(where, self.spoilt.get(where))
        if how is None or HOW[how][0] != place:
            return None
        if self.planned.pop(where, None) is None:
            return HOW[how][1]
        if place == WIRE:
            self.spoilt[where] = how
        self.happened.append((client, round, phase, how))
        return HOW[how][1]

    def over(self, round: int) -> None:
        """A round is over: who was slow in it goes on."""
        with self._news:
            self.rounds_over = max(self.rounds_over, round)
            self._news.notify_all()

    def release(self) -> None:
        with self._news:
            self._released = True
            self._news.notify_all()

    def wait(self, round: int) -> None:
        """Until this round is over."""
        with self._news:
            assert self._news.wait_for(
                lambda: self._released or self.rounds_over >= round, PATIENCE_S
            )


class Failing(Process):
    """A client process in which faults happen."""

    def __init__(self, member: Member, line: Line, faults: Faults, say: Callable[[str], None]):
        super().__init__(
            Target("127.0.0.1", line.port, None, None), member, say, patience_s=PATIENCE_S
        )
        self.line, self.faults, self.who = line, faults, member.who
        self._fleet = self._asked = None

    def _attend(self, fleet) -> None:
        self._fleet, self._push = fleet, fleet.reply
        fleet.reply = self._send
        super()._attend(fleet)

    def _train(self, assignment, asker):
        if assignment.client != self.member.who:
            return None
        self._asked = assignment
        self._act(BEFORE)
        report = super()._train(assignment, asker)
        if report is not None and report.kind == UPDATE and (spoil := self._due(WIRE)):
            report = spoil(report, *self._made_with(report))
        return report

    def _send(self, content, to, seconds) -> None:
        if to.metadata.message_type != process.TRAIN:
            return self._push(content, to, seconds)
        self._act(KEPT)
        what = self._due(AMID)
        if what is not None:
            self.line.cut_at(PUSH_PART)
        try:
            self._push(content, to, seconds)
        except UnreachableError:
            if what == "kill":
                self._die()
            raise
        assert what is None, "the reply went through"
        if self._act(AFTER) == "again":
            with suppress(UnreachableError):
                self._push(to_records(self.member._report), to, seconds)

    def _due(self, place: str):
        a = self._asked
        return self.faults.due(self.who, a.round, a.phase, place)

    def _act(self, place: str):
        what = self._due(place)
        if what == "kill":
            self._die()
        elif what == "wait":
            self.faults.wait(self._asked.round)
        elif what == "cut":
            self.line.cut_now()
            raise UnreachableError("the line was cut", "network")
        return what

    def _die(self) -> None:
        self._fleet.leave = lambda: None
        raise Killed

    def _made_with(self, report: Report) -> tuple[Codec, int]:
        """Codec and size of a frame: those of the model where there is one phase, else those of numbers, of which there are few."""
        session = self.member.session
        if report.phase == process.TRAIN:
            return session.states.state.memory.codec, session.replica.layout.numel
        numbers = codec("identity")
        return numbers, next(
            n for n in range(10_000) if len(numbers.encode(torch.zeros(n))) == len(report.frame)
        )


class Watched(Member):
    """A member that shows itself to a test whenever it was made anew."""

    def __init__(self, own: Own, folder: StateFolder, watch: Callable[[Member], None]):
        super().__init__(own, folder)
        self.watch = watch

    def join(self, invitation):
        before = self.session
        presence = super().join(invitation)
        if self.session is not before:
            self.watch(self)
        return presence


class Clients:
    """Clients 0, 1 … in threads, each with its folder and its line, started again when they are killed."""

    def __init__(self, port: int, folder: Path, faults: Faults, own: list[Own]):
        self.folder, self.faults, self.own = folder, faults, own
        self.lines = [Line(port) for _ in own]
        self.said: list[list[str]] = [[] for _ in own]
        self.errors: list[BaseException] = []
        self.processes: dict[int, Failing] = {}
        self._threads: dict[int, threading.Thread] = {}
        self._away: set[int] = set()
        self.watch: Callable[[Member], None] = lambda member: None

    def member(self, client: int) -> Member:
        return self.processes[client].member

    def start(self) -> None:
        for client in range(len(self.own)):
            if client not in self._threads and client not in self._away:
                self.begin(client)

    def begin(self, client: int) -> None:
        """Start one, that was stopped or never ran."""
        self._away.discard(client)
        self._threads[client] = threading.Thread(
            target=self._live, args=(client,), name=f"client {client}"
        )
        self._threads[client].start()

    def end(self, client: int) -> None:
        """Stop one as Ctrl-C does: it says good-bye to the SuperLink."""
        self._away.add(client)
        self.processes[client].end()
        self._threads.pop(client).join(PATIENCE_S)

    def forget(self, client: int) -> None:
        """Lose what a client that is stopped has kept of the run; who it is, it knows still."""
        (self.folder / str(client) / FILE).unlink()

    def join(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for thread in self._threads.values():
            thread.join(max(0.0, end - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads.values())
        assert not self.errors, self.errors

    def stop(self) -> None:
        """Whatever they are doing."""
        for client, living in self.processes.items():
            self._away.add(client)
            living.end()
        for line in self.lines:
            line.close()
        for thread in self._threads.values():
            thread.join(PATIENCE_S)

    def _live(self, client: int) -> None:
        killed = True
        while killed and (client not in self._away or client not in self.processes):
            folder, killed = StateFolder(self.folder / str(client)), False
            try:
                member = Watched(self.own[client], folder, self.watch)
                self.processes[client] = Failing(
                    member, self.lines[client], self.faults, self.said[client].append
                )
                self.processes[client].run()
            except Killed:
                killed = True
            except BaseException as error:
                if client not in self._away:
                    self.errors.append(error)
            finally:
                folder.close()
