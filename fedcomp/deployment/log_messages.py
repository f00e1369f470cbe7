"""The messages that a client prints about its work, with their values for the JSON log."""

from collections.abc import Sequence

from ..callbacks import LogMessage
from ..clients.session import ClientSession
from ..messages import TRAIN, UPDATE, Assignment, Farewell, Presence, Report


def joined(presence: Presence, session: ClientSession) -> LogMessage:
    memory = session.states.at(presence.client).memory
    examples = session.trainer.examples(presence.client)
    return LogMessage(
        f"takes part as client {presence.client}, with {examples} examples, uplink {memory.codec}, memory {memory.name}",
        "joined",
        client=presence.client,
        run=presence.run,
        version=presence.version,
        examples=examples,
        uplink=str(memory.codec),
        memory=memory.name,
    )


def answered(assignment: Assignment, report: Report, downlink_bytes: int) -> LogMessage:
    has_update = report.kind == UPDATE
    outcome = (
        f"{len(report.frame)} bytes up, loss {report.loss:.4f}"
        if has_update
        else f"{report.stage}: {report.reason}"
    )
    return LogMessage(
        f"round {assignment.round}{f' {assignment.phase}' * (assignment.phase != TRAIN)}: {downlink_bytes} bytes down, {outcome}",
        "answered",
        client=report.client,
        round=report.round,
        phase=report.phase,
        downlink_bytes=downlink_bytes,
        uplink_bytes=len(report.frame),
        loss=report.loss if has_update else None,
        stage=report.stage,
        reason=report.reason,
    )


def unknown(assignment: Assignment, clients: Sequence[int]) -> LogMessage:
    names = f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
    return LogMessage(
        f"round {assignment.round}: the server announces a key of {names} that differs from the key that this client knows from earlier "
        "in this run or from --roster: this client seals no ballot for the announced key and counts no ballot signed with it",
        "unknown_key",
        round=assignment.round,
        clients=list(clients),
    )


def over(farewell: Farewell, stay: bool) -> LogMessage:
    return LogMessage(
        f"the run is over after round {farewell.round}{'; waiting for the next one' * stay}",
        "over",
        run=farewell.run,
        round=farewell.round,
    )
