"""Federations over the gRPC transport, whose clients are threads of this process.

with Network(folder).federation(config) as run:
    run.faults.fail_at(1, 3, "train", "killed before its reply")
    outcomes = run.rounds()
"""

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import tiny_task
import torch
from faults import Clients, Faults

from fedcomp import RunConfig
from fedcomp.callbacks import Callback
from fedcomp.deployment.connected_clients import ConnectedClients
from fedcomp.deployment.handshake import ClientSetup, SharedObjects, pack_options
from fedcomp.layout import Layout
from fedcomp.messages import Assignment, Invitation, Presence
from fedcomp.server.asynchronous_loop import make_loop
from fedcomp.server.availability import Quota
from fedcomp.server.broadcasts import Broadcasts
from fedcomp.server.results import client_config, make_strategy
from fedcomp.server.round_loop import RoundResult
from fedcomp.strategies import resolved
from fedcomp.strategies.base import DEADLINE
from fedcomp.tasks import Task, initial_model
from fedcomp.transports.grpc import GrpcTransport, PortSettings

PATIENCE_S = 60.0  # longest wait for anything that must happen


class Network:
    """Makes federations whose files are in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    @contextmanager
    def federation(self, config: RunConfig, task: Task = tiny_task.task) -> Iterator["Networked"]:
        with ExitStack() as ends:
            yield Networked(self, resolved(config), task, ends)


class RecordingCallback(Callback):
    """Records the warnings of the server."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, sentence: str) -> None:
        self.warnings.append(sentence)


class Networked:
    """A run with its server in this thread and each of its clients in another thread with its own connection."""

    def __init__(self, net: Network, config: RunConfig, task: Task, ends: ExitStack):
        self.config, self.task, self.faults, self.callback = (
            config,
            task,
            Faults(),
            RecordingCallback(),
        )
        model = initial_model(task, config.seed)
        self.layout = Layout.of(model)
        self.on_round: Callable[[RoundResult], None] = lambda outcome: None
        self.strategy = make_strategy(config, self.layout)
        broadcasts = Broadcasts.of(self.strategy, self.layout.gather(model))
        options = dataclasses.replace(
            client_config(config, self.strategy), uplink=str(self.strategy.uplink)
        )
        name = secrets.token_hex(16)
        invitation = Invitation(
            name, -1, pack_options(options), self.layout.fingerprint, broadcasts.first
        )
        largest_report = 8 * self.strategy.layout.numel + (1 << 20)
        self.transport = GrpcTransport(
            PortSettings(
                *("127.0.0.1", 0, invitation, config.clients, largest_report),
                grace_s=Quota.later(config, config.clients).grace_s(config.clients),
            ),
            on_joined=self._on_joined,
            on_left=lambda client: self.connected_clients.leave(client),
            on_late_answer=lambda client: self.connected_clients.mark_responsive(client),
            on_poll=self._check,
            warn=self.callback.on_warning,
        )
        self.connected_clients = ConnectedClients(
            self.transport, Quota.first(config, resumed=False), lambda: self.callback
        )
        self.loop = make_loop(
            self.strategy, broadcasts, self.transport, gather=self.connected_clients.gather
        )
        self.strategy.set_identity(name, self.transport.public_key, invitation.options)
        self.transport.open()
        ends.callback(self.transport.close)
        self.folder = net.folder / name
        train, common = (
            task.train(),
            SharedObjects(),
        )  # clients train one after another, since torch has one global generator
        self.clients = Clients(
            self.transport.port,
            self.folder,
            self.faults,
            [
                ClientSetup(task, train, torch.device("cpu"), client, client, shared=common)
                for client in range(config.clients)
            ],
        )
        ends.callback(self.clients.stop)
        ends.callback(self.faults.release)

    def rounds(self, first: int = 1, last: int | None = None) -> list[RoundResult]:
        """Run rounds as a deployment does."""
        self.clients.start()
        outcomes = []
        for outcome in self.loop.rounds(range(first, (last or self.config.rounds) + 1)):
            outcomes.append(outcome)
            self.on_round(outcome)
            self.connected_clients.quota = Quota.later(self.config, self.config.clients)
            self.connected_clients.mark_silent(
                r.client for r in outcome.rejections if r.stage == DEADLINE
            )
            self.faults.over(outcome.round)
        return outcomes

    def send_farewell(self) -> None:
        """Send the farewell, and wait until the clients have ended."""
        self.transport.send_farewell(self.config.rounds)
        self.clients.join(PATIENCE_S)

    def wait_until_responsive(self, client: int) -> None:
        """Wait until a client is connected and no longer silent."""
        end = time.monotonic() + PATIENCE_S
        while client not in self.transport.clients() or client in self.connected_clients.silent:
            assert time.monotonic() < end, f"client {client} is not responsive"
            time.sleep(0.02)

    def weights_of(self, client: int) -> torch.Tensor:
        """Return a client's weights after it has downloaded the current version."""
        replica, b = self.clients.member(client).session.replica, self.loop.broadcasts
        d = b.download(replica.version)
        replica.apply(
            Assignment(0, "", client, d.form, d.base, b.version, b.fingerprint, d.frames, "")
        )
        return replica.weights

    def _check(self) -> None:
        if self.clients.errors:
            raise self.clients.errors[0]

    def _on_joined(self, client: int, presence: Presence) -> None:
        loop = self.loop
        if client in loop.versions or presence.version != loop.broadcasts.first:
            loop.versions[client] = presence.version
        self.connected_clients.join(client)
