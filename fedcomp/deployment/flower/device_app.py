"""The ClientApp of a deployment: a client in the SuperNode that `fedcomp client --transport flower` starts.

Flower starts a new process for each message from the server. Each process therefore reads the client's state from the state folder, and
writes it back before it sends the answer. The state folder also has files with the client's options (`SETUP`), with the server's invitation
(`INVITED`) and with log messages (`MESSAGES`), which `fedcomp client` prints.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from ...callbacks import LogMessage
from ...config import data_folder
from ...errors import FedcompError, UserError
from ...keys.enrolment import Enrolment
from ...keys.keyring import read_roster
from ...messages import Assignment, Farewell, Invitation, Presence, failure
from ...state_folder import StateFolder
from ...tasks import load
from ...tasks.check import data_of
from ...transports.flower.records import from_records, to_records
from .. import log_messages
from ..deployed_client import DeployedClient
from ..handshake import ClientSetup

FOLDER = "fedcomp-state"  # key in Flower's node config for the path of the state folder
SETUP, INVITED, MESSAGES = "setup.json", "invitation.bin", "messages.jsonl"
# INVITATION: name of the entry in the file INVITED. REFUSED: event name of the log message which says why the client cannot take part.
INVITATION, REFUSED = "invitation", "refused"

app = ClientApp()


@app.query("join")
def join(message: Message, context: Context) -> Message:
    invitation = from_records(message.content, Invitation)
    with _open_client(context) as (client, folder):
        try:
            presence = client.join(invitation)
            folder.save({INVITATION: invitation.pack()}, INVITED)
            partition_id = client.setup.partition_id
            _log_message(folder, log_messages.joined(presence, client.session, partition_id))
        except FedcompError as error:
            presence = Presence(invitation.run, client.client_id, "", str(error))
            _log_message(folder, LogMessage(str(error), REFUSED))
    return Message(to_records(presence), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    assignment = from_records(message.content, Assignment)
    downlink_bytes = sum(map(len, assignment.frames))
    with _open_client(context) as (client, folder):
        try:
            stored = folder.load(INVITED)
            if INVITATION not in stored:
                raise UserError("this client has not joined the run; start this client again")
            client.join(Invitation.unpack(stored[INVITATION]))
            report = client.answer(assignment)
            if report is None:
                raise UserError(
                    f"the server's assignment is for client {assignment.client}, not for this client"
                )
        except FedcompError as error:
            report = failure(assignment, "encode", str(error))
        _log_message(folder, log_messages.answered(assignment, report, downlink_bytes))
    return Message(to_records(report, {"num-examples": report.examples}), reply_to=message)


@app.query("leave")
def leave(message: Message, context: Context) -> Message:
    farewell = from_records(message.content, Farewell)
    with _open_client(context) as (client, folder):
        _log_message(folder, log_messages.over(farewell, stay=False))
        answer = Presence(farewell.run, client.client_id, "", "")
        return Message(to_records(answer), reply_to=message)


@contextmanager
def _open_client(context: Context) -> Iterator[tuple[DeployedClient, StateFolder]]:
    """Yield the client and its state folder, which is locked until the `with` block ends."""
    path = Path(str(context.node_config[FOLDER]))
    options = json.loads((path / SETUP).read_text())
    task = load(options["task"], data_folder(options["data"]))
    roster = read_roster(Path(options["roster"])) if options["roster"] else None
    device, ids = torch.device(options["device"]), ("client", "partition_id", "partitions")
    own = *(options[name] for name in ids), roster, options["sealed"]
    setup = ClientSetup(task, data_of(task, "train"), device, *own)
    key = Enrolment.read(options["enrolment"]).key_pair[0] if options["enrolment"] else None
    folder = StateFolder(path)
    try:
        yield DeployedClient(setup, folder, key), folder
    finally:
        folder.close()


def _log_message(folder: StateFolder, message: LogMessage) -> None:
    with (folder.path / MESSAGES).open("a", encoding="utf-8") as file:
        file.write(json.dumps([message, message.event, dict(message.values)]) + "\n")
