"""The log messages of a client about runs and rounds. Each has a sentence to print, and an event name and values for the JSON log."""

from collections.abc import Sequence

from ..callbacks import LogMessage
from ..clients.session import ClientSession
from ..messages import TRAIN, UPDATE, Assignment, Farewell, Presence, Report


def joined(presence: Presence, session: ClientSession, partition_id: int | None) -> LogMessage:
    p, memory = presence, session.states.at(presence.client).memory
    examples, uplink = session.trainer.examples(p.client), str(memory.codec)
    total = len(session.trainer.data)
    share = f"all {total}" if examples == total else f"{examples} of {total}"
    part = "K selects a part" if partition_id is None else partition_id
    sentence = f"joined the run as client {p.client}, with {share} examples (--partition-id {part}), uplink {uplink}, memory {memory.name}"
    values = {"run": p.run, "version": p.version, "examples": examples, "uplink": uplink}
    return LogMessage(sentence, "joined", client=p.client, memory=memory.name, **values)


def answered(assignment: Assignment, report: Report, downlink_bytes: int) -> LogMessage:
    r, has_update = report, report.kind == UPDATE
    work = f"round {assignment.round}{f' {assignment.phase}' * (assignment.phase != TRAIN)}"
    outcome = (
        f"{len(r.frame)} bytes up, loss {r.loss:.4f}" if has_update else f"{r.stage}: {r.reason}"
    )
    values = {"client": r.client, "round": r.round, "phase": r.phase, "stage": r.stage}
    values |= {"downlink_bytes": downlink_bytes, "uplink_bytes": len(r.frame)}
    values |= {"loss": r.loss if has_update else None, "reason": r.reason}
    return LogMessage(f"{work}: {downlink_bytes} bytes down, {outcome}", "answered", **values)


def unknown(assignment: Assignment, clients: Sequence[int]) -> LogMessage:
    names = f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
    sentence = (
        f"round {assignment.round}: this client does not accept the key that the server announces for {names}, because the server has "
        "announced another key earlier in this run, or --roster has another key; this client encrypts no ballot for the announced key and "
        "ignores ballots signed with it; if the key was renewed, give the newest --roster and take part in the next run"
    )
    return LogMessage(sentence, "unknown_key", round=assignment.round, clients=list(clients))


def over(farewell: Farewell, stay: bool) -> LogMessage:
    sentence = f"the run is over after round {farewell.round}{'; waiting for the next run' * stay}"
    return LogMessage(sentence, "over", run=farewell.run, round=farewell.round)
