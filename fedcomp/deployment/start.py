"""The server of a deployment. A deployment is a run whose clients are separate processes, usually on other machines.

The server checks the options, runs the rounds and writes summary.json. It exchanges messages with the clients over gRPC, or over another
transport that the caller gives, such as Flower's (deployment/flower).
"""

import dataclasses
import json
import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..callbacks import Callback, Header, RoundRecord, Summary
from ..config import AUTO, RunConfig, keys_command
from ..errors import ConfigError, RunFolderError
from ..formatting import named_clients
from ..keys.key_folder import CA_CRT, REGISTRY, serving_files
from ..keys.registry import Registry
from ..layout import Layout, model_fingerprint
from ..memories import with_memories
from ..messages import Invitation, Presence
from ..server.asynchronous_loop import make_loop
from ..server.availability import Quota
from ..server.broadcasts import Broadcasts
from ..server.evaluation import Evaluator
from ..server.initial_weights import start_from
from ..server.option_callbacks import with_option_callbacks
from ..server.results import bandwidths_of, client_config
from ..server.round_loop import RoundResult
from ..server.server_run import ServerRun
from ..strategies import resolved
from ..strategies.base import DEADLINE, cohort_size
from ..tasks import initial_model
from ..tasks.check import check, data_of, layout_of, local_data
from ..tasks.data import Examples
from ..tasks.partition import partition
from ..training import devices
from ..training.local_sgd import LocalSGD
from ..training.optimizers import check_optimizer
from ..transports.grpc import Credentials, GrpcTransport, PortSettings, RelayTerms
from ..transports.relays import check as check_relays
from ..transports.relays import warn_if_inexact
from .client_traffic import ClientTraffic
from .connected_clients import ConnectedClients
from .handshake import pack_options
from .ports import LOOPBACK, listen

# Value of `engine` in the [resolved] table of config.toml, which distinguishes a deployment's run folder from a simulation's.
ENGINE = "deployed"
INSECURE = (
    "--insecure: no TLS and no keys, so anyone who can reach {where} can take part as any client, and read and change messages; "
    "for more than a trial, make keys with fedcomp keys init, and leave --insecure out"
)
# Error messages for options that apply to simulations only. A deployment accepts only their default values, and the values in ALLOWED.
SIMULATION_ONLY = {
    "network": "--network simulates the network of a simulation's clients; leave --network out, or use fedcomp sim",
    "attack": "--attack makes a simulation's clients Byzantine; leave --attack out, or use fedcomp sim",
    "cohort_batch": "--cohort-batch applies to simulations only; leave it out, because deployed clients train outside the server's process",
    "residuals": "--residuals applies to simulations only; leave it out, because each deployed client keeps its state on its own disk",
    "engine": "--engine applies to simulations only; leave it out, because deployed clients train outside the server's process",
    "checkpoint_every": "--checkpoint-every applies to simulations only; leave it out, because a server saves its state after every round",
}
ALLOWED = {"engine": (AUTO, "serial"), "checkpoint_every": (AUTO, "1")}
# The size limit of a client's encoded update is a sum: UPDATE_BYTES per parameter, which suffice for an uncompressed update; BALLOT_BYTES
# per parameter and client of a round, for sealed ballots (encrypted votes); and SPARE_BYTES.
UPDATE_BYTES, BALLOT_BYTES, SPARE_BYTES = 8, 1 / 4, 1 << 20
# The size limit of a message to a relay is MAX_RELAY_MODELS times the model's size in float32, plus SPARE_BYTES.
MAX_RELAY_MODELS = 16


@dataclass(frozen=True)
class Endpoint:
    """A server's host, port and keys. `keys`: a folder made by `fedcomp keys init`, or None for no TLS and clients without keys."""

    port: int = 8080  # 0 means any free port
    host: str = ""  # "": the loopback address if `keys` is None, else all addresses of this machine
    keys: Path | None = None

    @property
    def address(self) -> str:
        return self.host or ("0.0.0.0" if self.keys else LOOPBACK)

    def credentials(self) -> Credentials | None:
        """Return the server's TLS credentials, or None without keys. Raises KeysError for invalid files."""
        if self.keys is None:
            return None
        files = *serving_files(self.keys), self.keys / CA_CRT
        return Credentials(*(file.read_bytes() for file in files))


def serve(
    config: RunConfig,
    endpoint: Endpoint,
    callback: Callback | None = None,
    opened: Callable[[int], None] = lambda port: None,
) -> Summary:
    """Run the server of a deployment. Return the content of summary.json.

    The first round waits until all `config.clients` clients have joined; in a resumed run with a deadline, this wait has a time limit.
    `opened(port)` is called when clients can connect. To continue an interrupted run, call this function again with `config.resume` set.
    Raises UserError for invalid options before anything is written.
    """
    return Deployment(config, endpoint, callback or Callback()).run(opened)


class Deployment(ServerRun):
    """The server's side of a run. The constructor raises UserError for invalid options.

    By default, `run` opens the port of `endpoint` with a GrpcTransport. `make_transport` makes another transport, whose port is already
    open. Its arguments are the Invitation for clients, the number of clients, and the callbacks `on_joined`, `on_left`, `on_late_answer`
    and `warn` of a GrpcTransport.
    """

    def __init__(
        self,
        config: RunConfig,
        endpoint: Endpoint,
        callback: Callback,
        make_transport: Callable[..., Any] | None = None,
    ):
        config = resolved(config)
        self.endpoint, self.make_transport = endpoint, make_transport
        refuse_simulation_options(config)
        if make_transport is None:
            refuse_ports_in_use(config, endpoint)
        self.device = devices.parse_device(config.device)
        self.registry = Registry(endpoint.keys / REGISTRY) if endpoint.keys else None
        super().__init__(config, callback)
        self.name = self._name()
        read_test = local_data if config.evaluate == "clients" else data_of
        test = read_test(self.task, "test")
        train = local_data(self.task, "train")
        self.data = test if train is None else train  # None if all data is on the clients
        self.layout = self._check_task(test)
        self.config = config = with_memories(config, self.strategy.layout.numel)
        check_relays(config, self.strategy)
        model = initial_model(self.task, config.seed)
        check_optimizer(self.task, model, LocalSGD.from_config(config))
        weights, self.model_fingerprint = self.layout.gather(model), model_fingerprint(model)
        broadcasts = Broadcasts.of(self.strategy, weights)
        start_from(config, self.folder, self.task, self.strategy, broadcasts)
        self._cohort = cohort_size(config.participation, config.clients)
        self.transport = self._transport(broadcasts.first)
        quota = Quota.first(config, self.folder.resumed).at_least(self.strategy.min_clients)
        self.connected_clients = ConnectedClients(self.transport, quota, lambda: self.callback)
        self.loop = make_loop(
            self.strategy,
            broadcasts,
            self.transport,
            gather=self.connected_clients.gather,
            on_answer=lambda *counts: self.callback.on_progress(*counts),
            bandwidths=bandwidths_of(self.strategy, config),
            evaluates=partial(config.evaluates, "clients"),
        )
        self.client_traffic = ClientTraffic(self.transport)
        self.test = None if test is None else test.to(self.device)
        self.evaluator = Evaluator(config, self.task, self.layout, train, self.test, self.device)

    def run(self, opened: Callable[[int], None] = lambda port: None) -> Summary:
        with ExitStack() as exit_stack:
            self.callback = exit_stack.enter_context(
                with_option_callbacks(self.config, self.callback)
            )
            done = self.open(exit_stack, self.data, {})
            self.transport.open()
            exit_stack.callback(self.transport.close)
            opened(self.transport.port)
            self.callback.on_port_open(self.transport.figures)
            if not self.endpoint.keys:
                self.callback.on_warning(INSECURE.format(where=self.endpoint.address))
            self.callback.on_run_start(self._header(done + 1))
            self._warn_about_missing_keys()
            for sentence in self.evaluator.warnings:
                self.warnings(sentence, kind=sentence)
            options = self.transport.invitation.options
            self.strategy.set_identity(self.name, self.transport.public_key, options)
            self._rounds(done)
            summary = self.finish(devices.describe(self.device))
            self.transport.send_farewell(self.config.rounds)
            return summary

    def _rounds(self, done: int) -> None:
        connected_clients = self.connected_clients
        started, waited_s = time.perf_counter(), 0.0
        for result in self.loop.rounds(range(done + 1, self.config.rounds + 1)):
            connected_clients.quota = self._later_quota
            connected_clients.mark_silent(
                r.client for r in result.rejections if r.stage == DEADLINE
            )
            for accepted in result.accepted:
                connected_clients.mark_responsive(accepted.client)
            record = self.record(result, started + connected_clients.waited_s - waited_s)
            length, save_started = self.folder.append(record), time.perf_counter()
            self.recovery.save(result.round, length)
            save_s = time.perf_counter() - save_started
            self.callback.on_round_end(record)
            self.callback.on_checkpoint(record.round, save_s)
            started, waited_s = time.perf_counter(), connected_clients.waited_s
            del result  # frees the round's updates before the next round

    # Preparation.

    @property
    def _later_quota(self) -> Quota:
        return Quota.later(self.config, self._cohort).at_least(self.strategy.min_clients)

    def _check_task(self, test: Examples | None) -> Layout:
        """Return the layout (tensor names and shapes) of the model.

        Check the task and the partition of the server's data among the clients. If the server has no data, check only the model.
        """
        if self.data is None:
            return layout_of(self.task)
        config, data = self.config, self.data
        partition(config.partition, data, config.clients, config.seed, self.task.name)
        return check(self.task, config.batch_size, data, test or data, config.augment)

    def _name(self) -> str:
        """Return the name of the run. A resumed run keeps its name, by which clients recognize their stored states."""
        if not self.folder.resumed:
            return secrets.token_hex(16)
        resolved = self.folder.stored.get("resolved", {})
        if resolved.get("engine") != ENGINE:
            raise RunFolderError(
                f"the run in {self.folder.path} was not made by a server; continue it with fedcomp sim, or give another --out"
            )
        return resolved["run"]

    def write_config(self) -> None:
        device = devices.describe(self.device)
        values = {"device": device, "engine": ENGINE, "run": self.name}
        self.folder.write_config(self.config, values)

    def _transport(self, initial_version: str) -> GrpcTransport:
        """Return the transport. `initial_version`: version (hash) of the model from which the run started."""
        config = client_config(self.config, self.strategy)
        options = pack_options(dataclasses.replace(config, uplink=str(self.strategy.uplink)))
        invitation = Invitation(self.name, -1, options, self.model_fingerprint, initial_version)
        make_transport = self.make_transport or self._grpc_transport
        return make_transport(
            invitation,
            self.config.clients,
            on_joined=self._on_joined,
            on_left=lambda client: self.connected_clients.leave(client),
            on_late_answer=lambda client: self.connected_clients.mark_responsive(client),
            warn=lambda sentence: self.callback.on_warning(sentence),
        )

    def _grpc_transport(self, invitation: Invitation, clients: int, **hooks: Any) -> GrpcTransport:
        per_parameter = UPDATE_BYTES + BALLOT_BYTES * self._cohort
        largest_report = int(per_parameter * self.strategy.layout.numel) + SPARE_BYTES
        grace_s = self._later_quota.grace_s(clients)
        settings = PortSettings(
            self.endpoint.address,
            self.endpoint.port,
            invitation,
            clients,
            largest_report,
            self.endpoint.credentials(),
            self.registry,
            self._relay_terms(invitation, largest_report, grace_s),
            grace_s=grace_s,
        )
        return GrpcTransport(settings, on_poll=self._on_poll, **hooks)

    def _relay_terms(self, invitation: Invitation, largest: int, grace_s: float) -> RelayTerms:
        """Return the settings that the server sends each relay.

        With --relays, a relay adds its clients' encoded updates. Without --relays, it forwards each update.
        """
        i, layout = invitation, self.strategy.layout
        limits = largest, MAX_RELAY_MODELS * 4 * layout.numel + SPARE_BYTES
        terms = RelayTerms(i.run, i.options, i.layout, i.version, self.config.clients, *limits)
        terms.grace_s = grace_s
        if self.config.relays:
            terms.codec = str(self.strategy.uplink)
            terms.shapes = json.dumps({entry.name: entry.shape for entry in layout})
        return terms

    def _header(self, first: int) -> Header:
        security = "TLS, enrolled keys" if self.endpoint.keys else "insecure: no TLS, no keys"
        where = f"{self.endpoint.address}:{self.transport.port}"
        return self.make_header(
            first,
            device=devices.describe(self.device),
            engine=f"clients connect to {where}, {security}",
        )

    # Clients.

    def _warn_about_missing_keys(self) -> None:
        keys = self.endpoint.keys
        if self.registry is None or keys is None:
            return
        enrolled = self.registry.enrolled()
        absent = [client for client in range(self.config.clients) if client not in enrolled]
        if absent:
            new = keys_command(keys, "add", "--count", len(absent))
            self.callback.on_warning(
                f"the run waits for {self.config.clients} clients, but {named_clients(absent)} cannot join without a valid key; "
                f"enrol new clients with {new}, renew revoked or expired keys with fedcomp keys renew, or start with fewer --clients"
            )

    def _on_poll(self) -> None:
        """Report the connected clients if the next round has to wait for more. Disconnect clients whose keys are no longer accepted."""
        self.connected_clients.on_poll()
        if self.registry is not None and self.registry.poll(self.callback.on_warning):
            self.transport.recheck_keys()

    def _on_joined(self, client: int, presence: Presence) -> None:
        """Record a client that joined or reconnected, and its model version."""
        loop = self.loop
        if client in loop.versions or presence.version != loop.broadcasts.first:
            loop.versions[client] = presence.version
        self.connected_clients.join(client)

    # A round.

    def record(self, result: RoundResult, began: float) -> RoundRecord:
        record = super().record(result, began)
        if self.config.relays:
            warn_if_inexact(result.round, [a.update for a in result.accepted], self.warnings)
        reported = {client.client: client.metrics for client in record.by_client}
        wire, clients = self.client_traffic.take(result, reported)
        # Unlike the sum in `result`, this sum leaves out downloads that could not be sent because their client was disconnected.
        downlink_bytes = sum(client.downlink_bytes for client in clients)
        return dataclasses.replace(
            record,
            by_client=clients,
            downlink_bytes=downlink_bytes,
            catch_up_bytes=min(record.catch_up_bytes, downlink_bytes),
            warnings=self.warnings.take(),
            wire_bytes_in=wire and wire.bytes_in,
            wire_bytes_out=wire and wire.bytes_out,
        )


def refuse_ports_in_use(config: RunConfig, endpoint: Endpoint) -> None:
    """Raise ConfigError if the server's port cannot be opened, or is the port of the metrics page (--metrics-port)."""
    if endpoint.port and config.metrics_port == endpoint.port:
        raise ConfigError(
            f"--metrics-port and --port are both {endpoint.port}; give --metrics-port another port, or 0 for any free port"
        )
    listen(endpoint.address, endpoint.port).close()


def refuse_simulation_options(config: RunConfig) -> None:
    """Raise ConfigError for options that apply to simulations only."""
    for name, sentence in SIMULATION_ONLY.items():
        if getattr(config, name) not in ALLOWED.get(name, (getattr(RunConfig, name),)):
            raise ConfigError(sentence)
