"""A client of a deployment. It joins runs and answers the server's assignments (requests to train) with reports (updates).

With a state folder, a client saves its state and its report before the report is sent, so it can be killed at any moment. If it receives
the same assignment after a restart, it sends the saved report again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from ..clients import device_state
from ..clients.session import ClientSession, failure_reason
from ..errors import CheckpointError, FedcompError
from ..keys.certificates import CURVE, parse_private_key, private_key_pem
from ..keys.keyring import point_of
from ..keys.signature_log import SignatureLog
from ..messages import UPDATE, Assignment, Invitation, Presence, Report, failure
from ..state_folder import StateFolder
from ..strategies.base import RoundState
from ..strategies.sealed_election import SealedElectionClient, pack_signed, unpack_signed
from .handshake import ClientSetup, session_for

HEAD, REPORT = "head", "report"  # names of entries in a stored state
KEY_FILE = "key.bin"  # file in the state folder, for the key of a client without an enrolment
SIGNED = "signed/"  # prefix of names in the signature log; entry "signed/3": signatures of client 3


class DeployedClient:
    """A client of a deployment, over any transport. `folder`: its state folder, or None to keep the state in memory only.

    `key`: the private key of the client's enrolment, with which it signs sealed ballots (encrypted votes), or None for a client without an
    enrolment. Such a client makes its own key pair, stores it in the state folder, and sends the server the public key when it joins.
    """

    def __init__(
        self,
        setup: ClientSetup,
        folder: StateFolder | None,
        key: ec.EllipticCurvePrivateKey | None = None,
    ):
        self.setup, self.folder, self.log = setup, folder, SignatureLog(folder)
        self.enrolled = key is not None
        self.key = key or load_or_create_key(folder)
        self.run = ""  # name of the run that the client has joined
        self.client_id = setup.client_id
        self._session: ClientSession | None = None  # None before the client joins a run
        # The report on the last assignment, or None after it was saved in the folder.
        self._report: Report | None = None
        # Round, phase, model version and `_phase_inputs` of the last assignment, or None if the client did not answer it with an update.
        self._answered: tuple[int, str, str, str] | None = None
        self._inputs = ""  # `_phase_inputs` of the last assignment
        self._saved = True  # whether the folder holds the current state

    @property
    def has_joined(self) -> bool:
        return self._session is not None

    @property
    def session(self) -> ClientSession:
        """The client's session in its run. Raises RuntimeError before the client has joined a run."""
        if self._session is None:
            raise RuntimeError("the client has not joined a run; call join first")
        return self._session

    def join(self, invitation: Invitation) -> Presence:
        """Join a run and continue from the state stored for this run, if any. Return the client's answer to the invitation.

        Raises the errors of `session_for`, and CheckpointError if the stored state is damaged.
        """
        with self.setup.shared.lock:
            if not self.has_joined or invitation.run != self.run:
                if self.has_joined:
                    self._log_signatures(self.run, self.client_id, self.round_state)
                joined = session_for(invitation, self.setup, self.key, self.log)
                self.client_id, self._session = joined
                self.run, self._inputs = invitation.run, ""
                self._report = self._answered = None
                self._restore()
                self._restore_signatures()
            key = b"" if self.enrolled else point_of(self.key.public_key())
            version = self.session.states.at(self.client_id).version
            return Presence(self.run, self.client_id, version, "", key)

    def answer(self, assignment: Assignment) -> Report | None:
        """Handle an assignment, save the report and return it. Return None if the assignment is not for this client.

        Raises CheckpointError if the report cannot be saved; the state folder then holds the state after the previous report.
        """
        (report,) = handle([(self, assignment)])
        self.save()
        return report

    def repeated_report(self, assignment: Assignment) -> Report | None:
        """Return the last report if it answers this assignment, else None. Raises CheckpointError if the stored report is damaged."""
        a = assignment
        if self._answered != (a.round, a.phase, a.version, _phase_inputs(a)):
            return None
        if self._report is not None or self.folder is None:
            return self._report
        try:
            return self._stored_report(self.folder.load())
        except (KeyError, TypeError, ValueError, AttributeError, FedcompError) as error:
            raise self._damaged(error) from error

    def release(self) -> None:
        """Free the memory of the last report."""
        self._report = None

    def record(self, assignment: Assignment, report: Report) -> None:
        """Keep an assignment's report in memory until `save` writes it to disk."""
        self._report, self._inputs, self._saved = report, _phase_inputs(assignment), False
        self._answered = self._key_of(report)

    def save(self) -> None:
        """Write the client's state and last report to disk if they have changed, and free the memory of the report.

        Raises CheckpointError if writing fails; the next call then tries again.
        """
        report = self._report
        if self.folder is None or self._saved or report is None:
            return
        pending = self.session.states.at(self.client_id).memory.pending
        # The report's frame (encoded update) is not stored a second time if the error-feedback memory contains it.
        is_pending = pending is not None and report.frame == pending
        layout = self.session.replica.layout.fingerprint
        head = {"run": self.run, "client": self.client_id, "layout": layout}
        head |= {"accepted": self._inputs, "frame_is_pending": is_pending}
        packed = replace(report, frame=b"" if is_pending else report.frame).pack_parts()
        entries = device_state.pack(self.session, self.client_id)
        entries |= {REPORT: packed, HEAD: json.dumps(head).encode()}
        self.folder.save(entries)
        self._saved = True
        self.release()

    @property
    def round_state(self) -> RoundState | None:
        """The state of the client in its current or last round."""
        return self.session.rounds.get(self.client_id)

    def _log_signatures(self, run: str, client_id: int, state: RoundState | None) -> None:
        """Write the signatures in a round state to the signature log of a run, so that they outlast the state."""
        if signed := pack_signed(state):
            self.log.add(run, {f"{SIGNED}{client_id}": signed})

    def _restore_signatures(self) -> None:
        """Copy the signatures of this run to the signature log, or from it if the client returns to the run without its state."""
        state = self.round_state
        self._log_signatures(self.run, self.client_id, state)
        if isinstance(self.session.algorithm, SealedElectionClient) and not pack_signed(state):
            if signed := self.log.entries(self.run).get(f"{SIGNED}{self.client_id}"):
                self.session.rounds[self.client_id] = unpack_signed(signed)

    def _restore(self) -> None:
        """Restore the stored state if it belongs to this run, client and model.

        Otherwise, copy its signatures to the signature log, because `save` will overwrite it after the first report.
        """
        if self.folder is None or not (stored := self.folder.load()):
            return
        try:
            head = json.loads(stored[HEAD])
            own = (self.run, self.client_id, self.session.replica.layout.fingerprint)
            if (head["run"], head["client"], head["layout"]) != own:
                state = device_state.unpack_round(stored)
                self._log_signatures(head["run"], head["client"], state)
                return
            device_state.restore(self.session, self.client_id, stored)
            self._inputs = head["accepted"]
            self._answered = self._key_of(self._stored_report(stored))
        except (KeyError, TypeError, ValueError, AttributeError, FedcompError) as error:
            raise self._damaged(error) from error

    def _stored_report(self, stored: Mapping[str, Any]) -> Report:
        """Return the report in a stored state of this client. Raises KeyError, ValueError or ProtocolError for a damaged state."""
        report = Report.unpack(stored[REPORT])
        pending = self.session.states.at(self.client_id).memory.pending
        if pending is not None and json.loads(stored[HEAD]).get("frame_is_pending"):
            report.frame = pending
        return report

    def _key_of(self, report: Report) -> tuple[int, str, str, str] | None:
        """Return the value of `_answered` for a report on the last assignment, or None if the report has no update."""
        if report.kind != UPDATE:
            return None
        return report.round, report.phase, report.version, self._inputs

    def _damaged(self, error: Exception) -> CheckpointError:
        assert self.folder is not None
        return CheckpointError(
            f"the state in --state-dir {self.folder.path} is damaged ({error}); remove the folder, so that "
            "the client joins as a new client"
        )


def handle(assignments: Sequence[tuple[DeployedClient, Assignment]]) -> list[Report | None]:
    """Return the clients' reports on assignments. Clients that share a session train together.

    A report is None if the client has not joined the run, or if the assignment is for another client id. Call `DeployedClient.save` before
    you send a client's report.
    """
    reports: list[Report | None] = [None] * len(assignments)
    by_session: dict[ClientSession, list[int]] = {}  # indices of assignments
    for i, (client, assignment) in enumerate(assignments):
        if not client.has_joined or assignment.client != client.client_id:
            continue
        reports[i] = client.repeated_report(assignment)
        if reports[i] is None:
            client.release()
            by_session.setdefault(client.session, []).append(i)
    for session, indices in by_session.items():
        with assignments[indices[0]][0].setup.shared.lock:
            answers = _handle(session, [assignments[i][1] for i in indices])
        for i, report in zip(indices, answers, strict=True):
            assignments[i][0].record(assignments[i][1], report)
            reports[i] = report
    return reports


def _handle(session: ClientSession, assignments: Sequence[Assignment]) -> list[Report]:
    try:
        return session.handle(assignments)
    except Exception as error:  # an error in the user's code, or a malformed assignment
        why, fingerprint = failure_reason(error), session.replica.fingerprint
        return [
            failure(a, "train", why, session.states.at(a.client).version, fingerprint)
            for a in assignments
        ]


def load_or_create_key(folder: StateFolder | None) -> ec.EllipticCurvePrivateKey:
    """Return the private key that a client without an enrolment has stored in its state folder. If there is none, make and store one."""
    stored = folder.load(KEY_FILE) if folder else {}
    if KEY_FILE in stored:
        return parse_private_key(stored[KEY_FILE])
    key = ec.generate_private_key(CURVE())
    if folder is not None:
        folder.save({KEY_FILE: private_key_pem(key)}, KEY_FILE)
    return key


def _phase_inputs(assignment: Assignment) -> str:
    """Return the ticket of the client's last accepted update, followed by a hash of the values that the strategy announces, if any.

    Two assignments are the same if this text, the round, the phase and the model version are equal.
    """
    if not assignment.announced:
        return assignment.accepted
    announced = b"".join(len(part).to_bytes(8) + part for part in assignment.announced)
    return assignment.accepted + sha256(announced).hexdigest()
