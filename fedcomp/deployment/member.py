"""A client's part in a run: what it is asked, what it answers, and what of it is on its disk before the answer leaves.

A kill at any moment loses nothing: asked the same again, it sends the reply that it kept.
"""

import json
from collections import deque
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from ..clients.client import Client
from ..errors import CheckpointError, FedcompError
from ..keys.signature_log import Past
from ..messages import UPDATE, Assignment, Report
from ..state_folder import Kept, StateFolder
from ..strategies import signed_attempts
from ..strategies.client_algorithm import RoundState
from ..strategies.sealed_election import SealedElectionClient, with_keys
from ..strategies.signed_attempts import SIGNED
from .handshake import Invitation, Own, Presence, client_for

PASSED = 32  # versions that are remembered over a restart
WEIGHTS, MOMENTUM, BUFFERS, MEMORY, HELD, HEAD, REPORT = (
    "weights",
    "momentum",
    "buffers",
    "memory.",
    "held.",
    "head",
    "report",
)


class Member:
    """A client that takes part in a run, and what it keeps of it on its disk. Answers messages, whoever carries them."""

    def __init__(self, own: Own, folder: StateFolder | None):
        self.own, self.folder, self.past = own, folder, Past(folder)
        self.run = ""  # that it is invited to
        self.who = own.client_id
        self.key: ec.EllipticCurvePrivateKey | None = (
            None  # that it signs with, the one with which it comes to the server
        )
        self.client: Client | None = None
        self._report: Report | None = None  # the last one
        self._accepted = ""  # what its assignment named
        self._asker = (
            0  # the SuperLink run that it came from: another when the server was started again
        )
        self._passed: deque[str] = deque(maxlen=PASSED)

    def join(self, invitation: Invitation) -> Presence:
        """Take part in a run, where this client left it or from the start. What does not go together is the reason in the answer."""
        with self.own.common.turn:
            if self.client is None or invitation.run != self.run:
                if self.client is not None:
                    self._remember(self.run, self.who, self.client.round_state)
                who, client = client_for(invitation, self.own)
                client.algorithm = with_keys(
                    client.algorithm,
                    invitation.run,
                    invitation.options,
                    who,
                    self.key,
                    self.own.roster,
                    self.past,
                )
                self.who, self.client = who, client
                self.run, self._report, self._accepted = invitation.run, None, ""
                self._passed.clear()
                self._restore()
                self._recall()
            return Presence(self.run, self.who, self.client.replica.version, "")

    def answer(self, assignment: Assignment, asker: int = 0) -> Report | None:
        """The report on an assignment, kept before it is given. `asker`: the SuperLink run that it comes from.

        None for one that this client cannot have been meant by, and for a copy of one that comes after a later one was answered: the
        server is done with it, and to train for it again would roll back what was answered since. Raises CheckpointError when the
        report cannot be kept: the disk then stands where the client's last report left it.
        """
        if (
            self.client is None
            or assignment.client != self.who
            or self._overtaken(assignment, asker)
        ):
            return None
        last = self._report
        named = _named(assignment)
        asked = (assignment.round, assignment.phase, named, assignment.version)
        if (
            last is not None
            and last.kind == UPDATE
            and asked == (last.round, last.phase, self._accepted, last.version)
        ):
            return last
        with self.own.common.turn:
            report = self.client.handle(assignment)
        self._report, self._accepted, self._asker = report, named, asker
        self._save()
        return report

    def _overtaken(self, assignment: Assignment, asker: int) -> bool:
        """Whether the same server has heard this client's answer to a later question. One that was started again may go back."""
        last, phases = self._report, self.client.algorithm.phases
        if (
            last is None
            or asker != self._asker
            or not {assignment.phase, last.phase} <= set(phases)
        ):
            return False
        return (assignment.round, phases.index(assignment.phase)) < (
            last.round,
            phases.index(last.phase),
        )

    def _save(self) -> None:
        if self.folder is None:
            return
        client, kept = self.client, {}
        state = client.memory.state_dict(copy=False)
        for name, value in state.items():
            kept[MEMORY + name] = value
        kept[WEIGHTS] = client.replica.weights
        if client.momentum is not None:
            kept[MOMENTUM] = client.momentum
        if client.buffers:
            kept[BUFFERS] = save_tensors(
                {name: value.cpu().contiguous() for name, value in client.buffers.items()}
            )
        if client.replica.version not in self._passed:
            self._passed.append(client.replica.version)
        held = client.round_state
        for name, value in held.values.items() if held else ():
            kept[HELD + name] = value
        kept[REPORT] = self._report.pack()
        kept[HEAD] = json.dumps(
            {
                "run": self.run,
                "client": self.who,
                "layout": client.replica.layout.fingerprint,
                "version": client.replica.version,
                "passed": list(self._passed),
                "ticket": client.ticket,
                "after": client.after,
                "accepted": self._accepted,
                "asker": self._asker,
                "held": held and [held.round, held.loss],
            }
        ).encode()
        self.folder.save(kept)

    def _remember(self, run: str, who: int, held: RoundState | None) -> None:
        """Keep what was signed in a run apart from the state, which another run, or another client half, replaces."""
        if signed := signed_attempts.pack(held):
            self.past.add(run, {f"{SIGNED}{who}": signed})

    def _recall(self) -> None:
        """Know what was signed in this run when this client comes back to it."""
        held = self.client.round_state
        self._remember(self.run, self.who, held)
        if isinstance(self.client.algorithm, SealedElectionClient) and not signed_attempts.pack(
            held
        ):
            signed = self.past.of(self.run).get(f"{SIGNED}{self.who}")
            self.client.round_state = signed_attempts.unpack(signed) if signed else held

    def _restore(self) -> None:
        """Stand where this client stood when it was last heard of in this run."""
        kept = self.folder.load() if self.folder else {}
        try:
            head = json.loads(kept.get(HEAD, b"{}"))
            held = _held(head, kept)
            mine = (head.get("run"), head.get("client"), head.get("layout"))
            same = mine == (self.run, self.who, self.client.replica.layout.fingerprint)
            if same:
                self._stand(head, kept, held)
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            FedcompError,
        ) as error:
            raise CheckpointError(
                f"what --state-dir {self.folder.path} holds is damaged ({error}); remove it, and the client takes part "
                "like one that is new"
            ) from error
        if not same:  # it is replaced by this client's first report
            self._remember(head.get("run", ""), head.get("client", -1), held)

    def _stand(self, head: Mapping[str, Any], kept: Kept, held: RoundState | None) -> None:
        client = self.client
        self._passed.extend(head["passed"])
        client.replica.restore(kept[WEIGHTS], head["version"], head["passed"])
        client.ticket, client.after, self._accepted = (
            head["ticket"],
            head["after"],
            head["accepted"],
        )
        client.memory.load_state_dict(
            {name[len(MEMORY) :]: value for name, value in kept.items() if name.startswith(MEMORY)},
            copy=False,
        )
        client.round_state = held
        client.momentum = kept.get(MOMENTUM)
        client.buffers = load_tensors(kept[BUFFERS]) if BUFFERS in kept else None
        self._report, self._asker = Report.unpack(kept[REPORT]), head.get("asker", 0)


def _held(head: Mapping[str, Any], kept: Kept) -> RoundState | None:
    if not head.get("held"):
        return None
    return RoundState(
        *head["held"],
        {name[len(HELD) :]: value for name, value in kept.items() if name.startswith(HELD)},
    )


def _named(assignment: Assignment) -> str:
    """What the question of a phase depends on: asked about something else, in the same phase, a client answers anew."""
    announced = (
        sha256(b"".join(len(part).to_bytes(8) + part for part in assignment.announced)).hexdigest()
        if assignment.announced
        else ""
    )
    return assignment.accepted + announced
