"""A Flower mod that compresses the updates of an existing ClientApp. Flower passes an app's messages through its mods.

    app = ClientApp(mods=[compression_mod()])

On the server, wrap the strategy in `fedcomp.transports.flower.Compressed`. Without this wrapper, messages pass through the mod unchanged.
The mod decodes the server's message into the ArrayRecord that the app expects. The update is the difference between the arrays that the app
returns and the arrays that it received. The mod compresses the update with error feedback. The server chooses the codecs and names them in
each message. The client chooses the error-feedback memory.

A SuperNode (Flower's client program) starts a new process for each message. When the SuperNode ends, the client's Context (Flower's storage
for an app's state) is lost. The mod therefore writes a client's state to a file, one per run, before it returns a reply. In Flower's
simulation engine, the mod stores the state in the client's Context.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from ...clients import device_state
from ...clients.replica import NeedDense, Replica
from ...clients.session import ClientStates, EncodingSession
from ...clients.state import ClientState
from ...codecs import codec
from ...errors import CheckpointError, ConfigError, FedcompError, ProtocolError
from ...memories import available_memories
from ...memories import memory as memory_of
from ...messages import FAILED, NEED_DENSE, TRAIN, UPDATE, Assignment, Report, failure
from ...state_folder import State, StateFolder, packed, unpacked
from ...strategies.base import ClientAlgorithm
from .packed_records import ArrayLayout, Parcel
from .records import MESSAGE, from_records

ClientAppCallable = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, ClientAppCallable], Message]

RUNS = 4  # number of runs whose states a client keeps; older files are removed
TICKET_BYTES = 16  # length of a ticket (hash of an update)
# Names of the values in the server's messages that identify the run. A client ignores its stored state if one of the values differs.
ANNOUNCED = ("training", "uplink", "downlink", "layout")
HEAD = "head"  # entry of a stored state: a JSON object with the layout and the values that identify the run
CONTEXT_KEY = "fedcomp"  # name of the client's state in a Context


def compression_mod(memory: str = "residual", state_dir: str | Path | None = None) -> Mod:
    """Return a Flower mod that compresses the updates of a ClientApp. List the mod first, so that the other mods see decoded arrays.

    `memory`: spec of the error-feedback memory, which stores the parts of updates that were not sent. Raises ConfigError for a memory that
    a mod cannot support.

    `state_dir`: folder for the clients' states. On a SuperNode, the default is ~/.local/state/fedcomp. In Flower's simulation engine, the
    default is to store a client's state in its Context, which lasts until the run ends. Each client has a folder in `state_dir`, named
    after the `partition-id` in its node config, or else after its node id. A SuperNode without its own key gets a new node id, and
    therefore a new folder, at each restart.
    """
    check_memory(memory)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.has_content() or MESSAGE not in message.content:
            return call_next(message, context)
        storage = Storage(context, state_dir)
        try:
            return _answer(storage, memory, message, lambda: call_next(message, context))
        finally:
            storage.close()

    return mod


def check_memory(memory: str) -> None:
    """Raise ConfigError for an error-feedback memory that needs support from the server or from the client's training loop."""
    name = memory.partition(":")[0]
    cls = available_memories().get(name)
    if cls and (cls.counterpart is not None or cls.required_strategy or cls.needs_moments):
        raise ConfigError(
            f"memory '{name}' needs state that a Flower mod cannot access; use memory='residual', or run fedcomp client instead"
        )
    # Check the spec. A ConfigError only means that the memory does not suit the codec stc; the server may choose another codec.
    with suppress(ConfigError):
        memory_of(memory, codec("stc"), 1)


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "fedcomp"


def in_simulation() -> bool:
    """Return whether the app runs in a Ray actor, as it does in Flower's simulation engine but not in a SuperNode."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def folder_name(context: Context) -> str:
    """Return the name of a client's folder, which differs between the clients of a machine."""
    partition = context.node_config.get("partition-id")
    name = f"node-{context.node_id}" if partition is None else f"partition-{partition}"
    return name.replace(os.sep, "_")


def _answer(
    storage: "Storage", memory: str, message: Message, call_app: Callable[[], Message]
) -> Message:
    """Decode a message, call the app, and encode the update in its reply."""
    parcel = from_records(message.content, Parcel)
    a, stage = Assignment.unpack(parcel.message), "download"
    try:
        client = _download(storage, memory, a)
        arrays = client.layout.record(client.replica.weights, parcel.uncompressed)
        message.content = parcel.unpacked(message.content, arrays)
        if a.phase != TRAIN:
            client.save(storage)
    except FedcompError as error:  # the model could not be decoded, so do not call the app
        kind = NEED_DENSE if isinstance(error, NeedDense) else FAILED
        report = failure(a, stage, str(error), kind=kind)
        return Message(Parcel.of(report).put(RecordDict(), ""), reply_to=message)
    version = client.replica.version, client.replica.fingerprint
    reply = call_app()
    if reply.has_error():
        return reply
    report = Report(a.round, a.phase, a.client, UPDATE, *version, b"", "", 0, 0.0, "", "")
    if a.phase != TRAIN:
        reply.content = Parcel.of(report).put(reply.content, "")
        return reply
    try:
        stage = "train"
        key, trained = _trained(client.layout, reply.content)
        stage = "encode"
        start = client.layout.as_received(client.replica.weights, arrays)
        frame = client.encode(a, client.layout.vector(trained).sub_(start))
        client.save(storage)
    except FedcompError as error:
        records = reply.content.items()  # do not send the app's arrays with a failure report
        others = RecordDict({k: r for k, r in records if not isinstance(r, ArrayRecord)})
        reply.content = Parcel.of(failure(a, stage, str(error), *version)).put(others, "")
        return reply
    report = replace(report, frame=frame, ticket=client.state.ticket)
    reply.content = Parcel.of(report, key, client.layout.uncompressed(trained)).put(
        reply.content, key
    )
    return reply


def _trained(layout: ArrayLayout, content: RecordDict) -> tuple[str, ArrayRecord]:
    models = [(key, arrays) for key, arrays in content.array_records.items() if layout.fits(arrays)]
    if len(models) != 1:
        raise ProtocolError(
            f"the train function returned {len(models)} ArrayRecords with the names and shapes of the received arrays; return exactly one"
        )
    return models[0]


def _download(storage: "Storage", memory: str, assignment: Assignment) -> "AppClient":
    """Load a client's state, and apply the broadcasts in an assignment (message from the server) to its copy of the model.

    If the server did not accept the client's last update, the update is put back into the error-feedback memory. Raises NeedDense if the
    client needs the complete model; the stored state then stays unchanged.
    """
    announced = assignment.announcements
    try:
        run = {name: announced[name].decode() for name in ANNOUNCED} | {"memory": memory}
        seed = int(announced["seed"])
    except (KeyError, ValueError) as error:
        raise ProtocolError(
            f"a value that clients need is missing or malformed in the server's message ({error}); install the same version of fedcomp on "
            "the server and the clients"
        ) from error
    client = _load(storage, assignment.client, run, seed)
    if client is None:
        if "form" not in announced:
            raise NeedDense(
                f"no state of this run is stored in {storage}; the client needs the complete model"
            )
        client = AppClient(assignment.client, run, ArrayLayout.unpack(announced["form"]), seed)
    data = announced.get("taken", b"")
    tickets = [data[i : i + TICKET_BYTES].decode() for i in range(0, len(data), TICKET_BYTES)]
    accepted = client.state.ticket if client.state.ticket in tickets else assignment.accepted
    client.session.download(replace(assignment, accepted=accepted))
    return client


def _load(storage: "Storage", id: int, run: dict[str, str], seed: int) -> "AppClient | None":
    state = storage.load()
    if not state:
        return None
    try:
        head = json.loads(state[HEAD])
        if {name: head[name] for name in run} != run:
            return None
        client = AppClient(id, run, ArrayLayout.unpack(head["form"].encode()), seed)
        device_state.restore(client.session, id, state)
        return client
    except (KeyError, TypeError, ValueError, AttributeError, FedcompError) as error:
        raise CheckpointError(
            f"{storage}: {storage.file} is damaged ({error}); remove the file, so that the client takes part as a new client"
        ) from error


class AppClient:
    """The state of one client in a run: its copy of the model, which is zero before the first download, and its error-feedback memory."""

    def __init__(self, id: int, run: dict[str, str], layout: ArrayLayout, seed: int):
        self.id, self.layout = id, layout
        self.run = run  # the values that identify the run (ANNOUNCED), and the spec of the memory
        vector = layout.vector_layout
        self.replica = Replica(torch.zeros(vector.numel), vector, codec(run["downlink"]))
        self.replica.restore(self.replica.weights, "")
        memory = memory_of(run["memory"], codec(run["uplink"]), vector.numel, vector)
        self.state = ClientState(memory, self.replica.version)
        states = ClientStates()
        states.by_client[id] = self.state
        self.session = EncodingSession(self.replica, states, ClientAlgorithm(), seed)

    def encode(self, assignment: Assignment, update: torch.Tensor) -> bytes:
        """Return the encoded update, or b"" if the memory sends nothing. Raises NonFiniteError for an update with NaN or infinity."""
        (frame,) = self.session.encode([assignment], update[None])
        if isinstance(frame, FedcompError):
            raise frame
        return frame or b""

    def save(self, storage: "Storage") -> None:
        head = self.run | {"form": self.layout.pack().decode()}
        state = device_state.pack(self.session, self.id) | {HEAD: json.dumps(head).encode()}
        storage.save(state)


class Storage:
    """The place where the state of a client in a run is stored: a file in the client's folder, or a record in its Context."""

    def __init__(self, context: Context, state_dir: str | Path | None):
        self.context, self.file = context, f"run-{context.run_id}.bin"
        self.folder: StateFolder | None = None
        if state_dir is not None or not in_simulation():
            states = default_state_dir() if state_dir is None else Path(state_dir)
            self.folder = StateFolder(states / folder_name(context))

    def __str__(self) -> str:
        return "the client's Context" if self.folder is None else str(self.folder.path)

    def load(self) -> dict[str, Any]:
        if self.folder is not None:
            return self.folder.load(self.file)
        record = self.context.state.get(CONTEXT_KEY)
        value = record.get(self.file) if isinstance(record, ConfigRecord) else None
        return unpacked(bytearray(value)) if isinstance(value, bytes) else {}

    def save(self, state: State) -> None:
        if self.folder is None:
            self.context.state[CONTEXT_KEY] = ConfigRecord({self.file: b"".join(packed(state))})
            return
        self.folder.save(state, self.file)
        files = self.folder.path.glob("run-*.bin")
        for old in sorted(files, key=lambda path: path.stat().st_mtime_ns)[:-RUNS]:
            old.unlink()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()
