"""The handshake by which a client joins a run.

The client checks the options in the server's invitation, and makes a session, with which it trains and encodes its updates in this run. An
invitation contains no code. Its spec strings (such as `stc:density=1%`) name code that is already installed on the client's machine.
"""

import functools
import json
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric import ec

from ..clients.evaluation import ClientEvaluator
from ..clients.replica import Replica
from ..clients.session import ClientSession, ClientStates
from ..clients.state import ClientState
from ..clients.trainer import Trainer
from ..codecs import codec
from ..config import RunConfig, from_values
from ..errors import ProtocolError, UserError
from ..keys.keyring import PinnedKeys
from ..keys.signature_log import SignatureLog
from ..layout import Layout, model_fingerprint
from ..memories import memory
from ..messages import Invitation
from ..strategies import make_client_algorithm
from ..strategies.base import ClientAlgorithm
from ..strategies.sealed_election import SealedElectionClient
from ..tasks import Task, initial_model
from ..tasks.check import check, local_data
from ..tasks.data import Examples
from ..tasks.partition import hold_out, partition, partition_test_data
from ..training.engine import SequentialJobs
from ..training.local_sgd import LocalSGD
from ..training.own_loop import client_engine

# The options of a run that determine what a client does.
CLIENT_OPTIONS = """
    partition clients local_steps local_epochs batch_size optimizer optimizer_state accumulate step_schedule lr momentum
    keep_momentum weight_decay clip proximal augment precision uplink downlink memory strategy seed evaluate holdout
""".split()

SAME = "install the same version of fedcomp on both sides"
STACK_BYTES = 64 << 20  # size limit in float32 of the updates of clients that train together

T = TypeVar("T")


def pack_options(config: RunConfig) -> str:
    """Return a run's options for an invitation as JSON. Options outside CLIENT_OPTIONS and options with default values are left out."""
    defaults = RunConfig()
    values = {name: getattr(config, name) for name in CLIENT_OPTIONS}
    return json.dumps({k: v for k, v in values.items() if v != getattr(defaults, k)})


def unpack_options(invitation: Invitation) -> RunConfig:
    """Return the options of an invitation. Raises ProtocolError for unreadable options, and ConfigError for invalid values."""
    try:
        values = json.loads(invitation.options)
        if not isinstance(values, dict) or not set(values) <= set(CLIENT_OPTIONS):
            raise ProtocolError(
                f"the invitation has options that this client does not know; {SAME}"
            )
        return RunConfig(**from_values(values, "the invitation"))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the options of the invitation cannot be read; {SAME}") from error


class SharedObjects:
    """Objects that the clients of one process share, such as the data, the model and the session. Hold `lock` while you use them."""

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self.lock = lock or threading.RLock()
        self._objects: dict[str, tuple[tuple[Any, ...], Any]] = {}

    def get_or_make(self, name: str, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Return the object stored under `name` if it was made for the same `key`. Otherwise, make it and store it in its place."""
        if name not in self._objects or self._objects[name][0] != key:
            self._objects[name] = key, make()
        return self._objects[name][1]


@dataclass(frozen=True)
class ClientSetup:
    """The settings of a client that are the same in every run."""

    task: Task
    train: Examples
    device: torch.device
    # Logical id (number of a client in the run) that a client without an enrolled key asks for, or -1.
    client_id: int = -1
    partition_id: int | None = None  # number of the client's partition, None if it uses all data
    partitions: int | None = None  # number of partitions, None for one per client of the run
    # Public key of each client by logical id (compressed P-384 point), or None to accept the keys that the server announces.
    roster: Mapping[int, bytes] | None = None
    sealed: bool = False  # whether the client sends only sealed ballots (encrypted votes)
    shared: SharedObjects = field(default_factory=SharedObjects)


def session_for(
    invitation: Invitation,
    setup: ClientSetup,
    key: ec.EllipticCurvePrivateKey,
    log: SignatureLog,
) -> tuple[int, ClientSession]:
    """Return the client's logical id, and a session with the state of a client that has not taken part in a round yet.

    `key`: the private key with which the client signs sealed ballots. `log`: the log in which the client records the signatures that it
    makes with `key`. Raises UserError or ProtocolError if the client cannot accept the invitation.
    """
    config = unpack_options(invitation)
    algorithm = make_client_algorithm(config.strategy)
    if setup.sealed and not isinstance(algorithm, SealedElectionClient):
        raise UserError(
            f"this client sends only sealed ballots (--sealed), which the server's strategy '{config.strategy}' does not use; "
            "leave --sealed out if the server may read this client's updates"
        )
    client_id = invitation.client if invitation.client >= 0 else setup.client_id
    if not 0 <= client_id < config.clients:
        raise UserError(
            f"client {client_id} is not part of this run, which has the clients 0 to {config.clients - 1}; give another "
            "--client-id or --partition-id, or start the server with more --clients"
        )
    shared = setup.shared
    batch_size, augment, seed = config.batch_size, config.augment, config.seed
    layout, fingerprint = shared.get_or_make(
        "model",
        (batch_size, augment, seed),
        lambda: (
            check(setup.task, batch_size, setup.train, setup.train, augment),
            model_fingerprint(initial_model(setup.task, seed)),
        ),
    )
    if layout.fingerprint != invitation.layout.partition("+")[0]:
        raise UserError(
            f"the run has another model (hash of tensor shapes {invitation.layout}) than --task {setup.task.name} ({layout.fingerprint}); "
            "give the task that the server was started with"
        )
    if fingerprint != invitation.layout:
        raise UserError(
            f"the frozen (untrained) parameters of --task {setup.task.name} differ from those of the server's model; the server does not "
            "send frozen parameters, so load the same ones on the server and on every client"
        )
    if isinstance(algorithm, SealedElectionClient):
        ring = PinnedKeys(invitation.run, client_id, key, setup.roster, log)
        algorithm = replace(algorithm, ring=ring, options=invitation.options)
        # The algorithm contains the client's own key, so no other client can use this session.
        session = _new_session(config, setup, algorithm, layout)
    else:
        make_session = functools.partial(_new_session, config, setup, algorithm, layout)
        run = invitation.run, invitation.options
        session = shared.get_or_make("session", run, make_session)
    session.trainer.shards[client_id], held_out = _shard(config, setup)
    if session.evaluator is not None:
        session.evaluator.held_out[client_id] = held_out
    state = session.replica.layout
    client_memory = memory(config.memory, codec(config.uplink), state.numel, state)
    session.states.by_client[client_id] = ClientState(client_memory, invitation.version)
    return client_id, session


def _new_session(
    config: RunConfig, setup: ClientSetup, algorithm: ClientAlgorithm, layout: Layout
) -> ClientSession:
    """Return a new session without clients."""
    shared = setup.shared
    model = initial_model(setup.task, config.seed)
    data = shared.get_or_make("data", (), lambda: setup.train.to(setup.device))
    engine = shared.get_or_make(
        "engine", (config.seed,), lambda: client_engine(setup.task, model, layout, setup.device)
    )
    layout_of_state = algorithm.global_layout(layout)
    state = algorithm.initial_global_state(layout.gather(model))
    replica = Replica(state, layout_of_state, codec(config.downlink))
    shards: dict[int, np.ndarray] = {}  # by client: indices of its training examples
    jobs, sgd = SequentialJobs(engine, frees_memory=True), LocalSGD.from_config(config)
    all_shards = _all_shards(config, setup) if algorithm.trains_on_partitions else None
    at_once = max(1, STACK_BYTES // (4 * layout_of_state.numel))
    work = jobs, data, shards, sgd, algorithm, config.seed
    trainer = Trainer(*work, all_shards=all_shards, at_once=at_once)
    evaluator = None
    if config.clients_evaluate:
        evaluated = initial_model(setup.task, config.seed)
        test = _test(config, setup)
        held_out: dict[int, np.ndarray] = {}  # by client: indices of its evaluation examples
        examples = data, shards, data if test is None else test[0].to(setup.device), held_out
        evaluator = ClientEvaluator(setup.task, evaluated, setup.device, config.seed, *examples)
    parts = replica, ClientStates(), trainer, algorithm, config.seed
    return ClientSession(*parts, keeps_rounds=True, evaluator=evaluator)


def _test(config: RunConfig, setup: ClientSetup) -> tuple[Examples, list[np.ndarray]] | None:
    """Return the test data and the indices of each of its partitions, or None if there is no test data or it cannot be partitioned."""
    test = setup.shared.get_or_make("test", (), lambda: local_data(setup.task, "test"))
    if test is None:
        return None
    if setup.partition_id is None:
        return None if test.column(None) is None else (test, [np.arange(len(test))])
    partitions = setup.partitions or config.clients
    shards = partition_test_data(config.partition, setup.train, test, partitions)
    return None if shards is None else (test, shards)


def _shard(config: RunConfig, setup: ClientSetup) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the client's training and evaluation examples."""
    index, partitions = setup.partition_id or 0, setup.partitions or config.clients
    if not 0 <= index < partitions:
        raise UserError(
            f"--partition-id is {index}, but the data has {partitions} partitions; give 0 to {partitions - 1}"
        )
    shards, held_out = _shards(config, setup)
    return shards[index], held_out[index]


def _all_shards(config: RunConfig, setup: ClientSetup) -> list[np.ndarray]:
    """Return the indices of every client's training examples, for strategies whose clients train on each other's data."""
    if setup.partition_id is None or setup.partitions not in (None, config.clients):
        raise UserError(
            f"with strategy '{config.strategy}', clients train on each other's data, but this client has only its own data; give "
            "this client --partition-id K and the data of the whole task, or set form=ballots in the server's --strategy"
        )
    return _shards(config, setup)[0]


def _shards(config: RunConfig, setup: ClientSetup) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the indices of the training examples in each partition, and those of the evaluation examples.

    The data of a client without a partition id is a single partition.
    """
    single, partitions = setup.partition_id is None, setup.partitions or config.clients

    def divide() -> tuple[list[np.ndarray], list[np.ndarray]]:
        if single:
            shards = [np.arange(len(setup.train))]
        else:
            settings = partitions, config.seed, setup.task.name
            shards = partition(config.partition, setup.train, *settings)
        if not config.clients_evaluate:
            return shards, [shard[:0] for shard in shards]
        if (test := _test(config, setup)) is not None:
            return shards, test[1]
        return hold_out(shards, config.holdout, config.seed)

    key = (config.partition, single, partitions, config.seed, config.evaluate, config.holdout)
    return setup.shared.get_or_make("partition", key, divide)
