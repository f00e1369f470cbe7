"""The ClientApp that a run's bundle names: one client under Flower's own SuperNode, started by `fedcomp client --stock`.

Flower starts a process for each message. What a client holds between messages is therefore read from its state folder each time, and
written there before the answer leaves. The folder also holds what the client is (`SETUP`) and the run that it was invited to.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ..callbacks import Said
from ..clients.flower import from_records, to_records
from ..config import RunConfig, data_folder
from ..errors import FedcompError, UserError
from ..messages import Assignment, Farewell, Invitation, Presence, failure
from ..state_folder import StateFolder
from ..tasks import load
from ..tasks.check import data_of
from . import log_messages as sentences
from .handshake import Own
from .member import Member

FOLDER = "fedcomp-state"  # in the node's config
SETUP, INVITED, SAID, OVER = (
    "setup.json",
    "invitation.bin",
    "said.jsonl",
    "over",
)  # in the state folder
INVITATION, REFUSED = "invitation", "refused"
UNINVITED = "this client has not joined the run; start it again, and the server invites it anew"

app = ClientApp()


@app.query("join")
def join(message: Message, context: Context) -> Message:
    invitation = from_records(message.content, Invitation)
    with _member(context) as member:
        try:
            presence = member.join(invitation)
            member.folder.save({INVITATION: invitation.pack()}, INVITED)
            _say(member, sentences.joined(presence, member.session))
        except FedcompError as error:
            presence = Presence(invitation.run, member.who, "", str(error))
            _say(member, Said(str(error), REFUSED))
    return Message(to_records(presence), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    assignment = from_records(message.content, Assignment)
    with _member(context) as member:
        kept = member.folder.load(INVITED)
        try:
            if INVITATION not in kept:
                raise UserError(UNINVITED)
            member.join(Invitation.unpack(kept[INVITATION]))
            report = member.answer(assignment, message.metadata.run_id)
            report = report or failure(
                assignment, "phase", "this client has answered a later question"
            )
        except FedcompError as error:
            report = failure(assignment, "encode", str(error))
        _say(member, sentences.answered(assignment, report))
    return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)


@app.query("leave")
def leave(message: Message, context: Context) -> Message:
    farewell = from_records(message.content, Farewell)
    with _member(context) as member:
        (member.folder.path / OVER).touch()
        _say(member, sentences.over(farewell, stay=False))
        return Message(to_records(Presence(farewell.run, member.who, "", "")), reply_to=message)


@contextmanager
def _member(context: Context) -> Iterator[Member]:
    """The client whose state is in the folder that the node's config names, while this process has it to itself."""
    path = Path(str(context.node_config[FOLDER]))
    setup = json.loads((path / SETUP).read_text())
    task = load(setup["task"], data_folder(RunConfig(data=setup["data"])))
    device = torch.device(setup["device"])
    own = Own(
        task,
        data_of(task, "train"),
        device,
        setup["client"],
        setup["partition_id"],
        setup["partitions"],
    )
    folder = StateFolder(path)
    try:
        yield Member(own, folder)
    finally:
        folder.close()


def _say(member: Member, said: Said) -> None:
    """To whoever started the SuperNode."""
    with (member.folder.path / SAID).open("a", encoding="utf-8") as file:
        file.write(json.dumps([said, said.event, dict(said.values)]) + "\n")
