"""A client's part in a run: what it is asked, what it answers, and what of it is on its disk before the answer leaves.

A kill at any moment loses nothing: asked the same again, it sends the reply that it kept.
"""

import json
from hashlib import sha256

from cryptography.hazmat.primitives.asymmetric import ec

from ..clients import device_state
from ..clients.session import ClientSession, reason
from ..errors import CheckpointError, FedcompError
from ..keys.signature_log import Past
from ..messages import UPDATE, Assignment, Invitation, Presence, Report, failure
from ..state_folder import StateFolder
from ..strategies import signed_attempts
from ..strategies.client_algorithm import RoundState
from ..strategies.sealed_election import SealedElectionClient, with_keys
from ..strategies.signed_attempts import SIGNED
from .handshake import Own, session_for

HEAD, REPORT = "head", "report"


class Member:
    """A client that takes part in a run, and what it keeps of it on its disk. Answers messages, whoever carries them."""

    def __init__(self, own: Own, folder: StateFolder | None):
        self.own, self.folder, self.past = own, folder, Past(folder)
        self.run = ""  # that it is invited to
        self.who = own.client_id
        self.key: ec.EllipticCurvePrivateKey | None = (
            None  # that it signs with, the one with which it comes to the server
        )
        self.session: ClientSession | None = None
        self._report: Report | None = None  # the last one
        self._accepted = ""  # what its assignment named
        self._asker = (
            0  # the SuperLink run that it came from: another when the server was started again
        )

    def join(self, invitation: Invitation) -> Presence:
        """Take part in a run, where this client left it or from the start. What does not go together is the reason in the answer."""
        with self.own.common.turn:
            if self.session is None or invitation.run != self.run:
                if self.session is not None:
                    self._remember(self.run, self.who, self.round_state)
                self.who, self.session = session_for(
                    invitation,
                    self.own,
                    lambda algorithm, who: with_keys(
                        algorithm,
                        invitation.run,
                        invitation.options,
                        who,
                        self.key,
                        self.own.roster,
                        self.past,
                    ),
                )
                self.run, self._report, self._accepted = invitation.run, None, ""
                self._restore()
                self._recall()
            return Presence(self.run, self.who, self.session.replica.version, "")

    def answer(self, assignment: Assignment, asker: int = 0) -> Report | None:
        """The report on an assignment, kept before it is given. `asker`: the SuperLink run that it comes from.

        None for one that this client cannot have been meant by, and for a copy of one that comes after a later one was answered: the
        server is done with it, and to train for it again would roll back what was answered since. Raises CheckpointError when the
        report cannot be kept: the disk then stands where the client's last report left it.
        """
        if (
            self.session is None
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
            report = self._handle(assignment)
        self._report, self._accepted, self._asker = report, named, asker
        self._save()
        return report

    def _overtaken(self, assignment: Assignment, asker: int) -> bool:
        """Whether the same server has heard this client's answer to a later question. One that was started again may go back."""
        last, phases = self._report, self.session.algorithm.phases
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

    @property
    def round_state(self) -> RoundState | None:
        """The round that the client is in, or was in last."""
        return self.session.rounds.get(self.who)

    def _handle(self, assignment: Assignment) -> Report:
        try:
            (report,) = self.session.handle([assignment])
            return report
        except CheckpointError:
            raise
        except Exception as error:  # of the user's code, or of a server's bad message
            replica = self.session.replica
            return failure(assignment, "train", reason(error), replica.version, replica.fingerprint)

    def _save(self) -> None:
        if self.folder is None:
            return
        head = {
            "run": self.run,
            "client": self.who,
            "layout": self.session.replica.layout.fingerprint,
            "accepted": self._accepted,
            "asker": self._asker,
        }
        self.folder.save(
            device_state.pack(self.session, self.who)
            | {REPORT: self._report.pack(), HEAD: json.dumps(head).encode()}
        )

    def _remember(self, run: str, who: int, state: RoundState | None) -> None:
        """Keep the signatures of a run apart from the state, which another run or algorithm replaces."""
        if signed := signed_attempts.pack(state):
            self.past.add(run, {f"{SIGNED}{who}": signed})

    def _recall(self) -> None:
        """Restore the signatures of this run when the client returns to it."""
        state = self.round_state
        self._remember(self.run, self.who, state)
        if isinstance(self.session.algorithm, SealedElectionClient) and not signed_attempts.pack(
            state
        ):
            if signed := self.past.of(self.run).get(f"{SIGNED}{self.who}"):
                self.session.rounds[self.who] = signed_attempts.unpack(signed)

    def _restore(self) -> None:
        """Return to the stored state if it is of this run, client and model; the first report replaces any other."""
        kept = self.folder.load() if self.folder else {}
        if not kept:
            return
        try:
            head = json.loads(kept[HEAD])
            mine = (self.run, self.who, self.session.replica.layout.fingerprint)
            if (head["run"], head["client"], head["layout"]) != mine:
                self._remember(head["run"], head["client"], device_state.unpack_round(kept))
                return
            device_state.restore(self.session, self.who, kept)
            self._accepted, self._asker = head["accepted"], head["asker"]
            self._report = Report.unpack(kept[REPORT])
        except (KeyError, TypeError, ValueError, AttributeError, FedcompError) as error:
            raise CheckpointError(
                f"what --state-dir {self.folder.path} holds is damaged ({error}); remove it, and the client takes part "
                "like one that is new"
            ) from error


def _named(assignment: Assignment) -> str:
    """What the question of a phase depends on: asked about something else, in the same phase, a client answers anew."""
    announced = (
        sha256(b"".join(len(part).to_bytes(8) + part for part in assignment.announced)).hexdigest()
        if assignment.announced
        else ""
    )
    return assignment.accepted + announced
