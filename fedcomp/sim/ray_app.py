"""What an actor of Flower's Ray engine runs for a message: a ClientApp that trains one client.

Actors are processes that keep nothing of a client: any of them may get any. What goes on with a client between rounds (running
statistics, momentum) comes in its message and goes back in the answer; what many messages have in common (the task, its data, the weights
that a round starts from) lies in Ray's object store, once a machine, and is fetched by reference.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from ..clients.flower import STYPE
from ..clients.session import reason
from ..config import RunConfig, data_folder
from ..errors import FedcompError
from ..layout import Layout
from ..tasks import Data, initial_model, load
from ..training import devices
from ..training.engine import Done, Job, trained
from ..training.local_sgd import LocalSGD, SerialEngine, Traces

JOB, DONE, VECTORS = "job", "done", "vectors"  # records of a message
REASON = "reason"  # in the second
PARTITION = "partition-id"  # in the config of Flower's virtual nodes
BATCHES = "batches"
UPDATE = "update"
MOMENTUM = "momentum"
GRADIENTS = "gradients"
SQUARES = "squares"
PULL = "pull"
BUFFERS = "buffers"
TYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "int64": torch.int64}


class Untrained(FedcompError):
    """What went wrong with a client in an actor, in words."""


@dataclass(frozen=True)
class Setup:
    """What all clients of a run have in common."""

    config: RunConfig  # `task` and `data` as they are found from any folder
    device: str
    dtype: torch.dtype  # torch's default


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor as the object store holds it: its bytes, which all processes of a machine share and none may change."""

    raw: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Stored":
        tensor = tensor.detach().cpu().contiguous()
        return cls(tensor.reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self) -> Tensor:
        """A view."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it may not be written to
            return torch.from_numpy(self.raw).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Errand:
    """What Flower calls in an actor for the ClientApp. The references are to a Setup, to the inputs and targets of the examples, and to the
    weights [n]; `fetch` reads one.

    A query has the actor load the run's task: the answer is why it cannot, "" if it can. With the last two it can train.
    """

    run: str
    setup: Any
    fetch: Callable[[Any], Any]
    examples: tuple[Any, Any] | None = None
    start: Any = None

    def __call__(self) -> ClientApp:
        app = ClientApp()

        @app.query()
        def load_task(message: Message, context: Context) -> Message:
            return Message(
                RecordDict({DONE: ConfigRecord({REASON: Bench.why_not(self)})}), reply_to=message
            )

        @app.train()
        def train(message: Message, context: Context) -> Message:
            return Message(Bench.of(self).answer(message.content), reply_to=message)

        return app


class Bench:
    """The resident part of an actor, made for the first client of a run and kept for the others."""

    _last: "Bench | None" = None

    def __init__(self, run: str, setup: Setup):
        torch.set_num_threads(1)
        torch.set_default_dtype(setup.dtype)
        devices.keep_freed_memory()
        self.run, config = run, setup.config
        self.device = torch.device(setup.device)
        task = load(config.task, data_folder(config))
        model = initial_model(task, config.seed)
        self.engine = SerialEngine(task, model, Layout.of(model), self.device)
        self._kept: dict[str, tuple[Any, Any]] = {}

    @classmethod
    def why_not(cls, errand: Errand) -> str:
        """Why this process cannot have one for a run, "" if it can and now has."""
        try:
            cls._last = cls(errand.run, errand.fetch(errand.setup))
            return ""
        except Exception as error:
            return reason(error)

    @classmethod
    def of(cls, errand: Errand) -> "Bench":
        """The one of this process, with the examples and the weights of an errand."""
        if cls._last is None or cls._last.run != errand.run:  # an actor that took another's place
            cls._last = cls(errand.run, errand.fetch(errand.setup))
        bench = cls._last
        bench.data = bench._once(
            "examples",
            errand.examples,
            lambda refs: Data(*(bench._tensor(errand.fetch(ref)) for ref in refs)),
        )
        bench.start = bench._once(
            "start", errand.start, lambda ref: bench._tensor(errand.fetch(ref))
        )
        return bench

    def answer(self, asked: RecordDict) -> RecordDict:
        job, sgd, seed = job_of(asked, self.device)
        update = torch.empty_like(self.start)
        done = trained(self.engine, self.start, self.data, job, sgd, seed, update)
        return answer_of(done, update, job.traces)

    def _once(self, what: str, key: Any, make: Callable[[Any], Any]) -> Any:
        """The last one, if it was for the same references."""
        if what not in self._kept or self._kept[what][0] != key:
            self._kept[what] = key, make(key)
        return self._kept[what][1]

    def _tensor(self, stored: Stored) -> Tensor:
        return stored.tensor().to(self.device)


def asked_of(job: Job, sgd: LocalSGD, seed: int) -> RecordDict:
    """The content of a message that asks for a job."""
    vectors = {BATCHES: torch.from_numpy(np.concatenate(job.batches)), **_followed(job.traces)}
    vectors |= {} if job.traces.pull is None else {PULL: job.traces.pull}
    lengths = [len(batch) for batch in job.batches]
    head = {
        "who": job.who,
        "round": job.round,
        "seed": seed,
        "lengths": lengths,
        "sgd": dataclasses.asdict(sgd),
    }
    return _records(JOB, head, vectors, job.buffers)


def job_of(asked: RecordDict, device: torch.device) -> tuple[Job, LocalSGD, int]:
    """What `asked_of` wrote down: the job with its traces on the device, the options, and the run's seed."""
    head, vectors, buffers = _read(JOB, asked)
    batches = np.split(vectors[BATCHES].numpy(), np.cumsum(head["lengths"])[:-1])
    job = Job(head["round"], head["who"], batches, buffers, _traces(vectors, device))
    return job, LocalSGD(**head["sgd"]), head["seed"]


def answer_of(done: Done | Exception, update: Tensor, traces: Traces) -> RecordDict:
    """The content of the answer."""
    if isinstance(done, Exception):
        return _records(DONE, {REASON: reason(done)}, {}, None)
    return _records(DONE, {"loss": done.loss}, {UPDATE: update, **_followed(traces)}, done.buffers)


def done_of(answer: RecordDict, update: Tensor, traces: Traces) -> Done | Exception:
    """What `answer_of` wrote down; writes into `update` [n] and `traces`."""
    head, vectors, buffers = _read(DONE, answer)
    if REASON in head:
        return Untrained(head[REASON])
    update.copy_(vectors[UPDATE])
    for name, into in _followed(traces).items():
        into.copy_(vectors[name])
    return Done(head["loss"], buffers)


def _followed(traces: Traces) -> dict[str, Tensor]:
    moments = zip((GRADIENTS, SQUARES), traces.moments or (), strict=False)
    return {
        name: value for name, value in ((MOMENTUM, traces.momentum), *moments) if value is not None
    }


def _traces(vectors: Mapping[str, Tensor], device: torch.device) -> Traces:
    on = {
        name: vectors[name].to(device)
        for name in (MOMENTUM, GRADIENTS, SQUARES, PULL)
        if name in vectors
    }
    return Traces(
        on.get(MOMENTUM), (on[GRADIENTS], on[SQUARES]) if GRADIENTS in on else None, on.get(PULL)
    )


def _records(
    kind: str,
    head: dict[str, Any],
    vectors: Mapping[str, Tensor],
    buffers: dict[str, Tensor] | None,
) -> RecordDict:
    values: dict[str, Any] = {kind: json.dumps(head)}
    if buffers:
        values[BUFFERS] = save_tensors(
            {name: value.cpu().contiguous() for name, value in buffers.items()}
        )
    return RecordDict(
        {
            kind: ConfigRecord(values),
            VECTORS: ArrayRecord({name: _array(vector) for name, vector in vectors.items()}),
        }
    )


def _read(
    kind: str, records: RecordDict
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor] | None]:
    values = records[kind]
    vectors = {
        name: torch.frombuffer(bytearray(array.data), dtype=TYPES[array.dtype])
        for name, array in records[VECTORS].items()
    }
    return (
        json.loads(values[kind]),
        vectors,
        load_tensors(values[BUFFERS]) if BUFFERS in values else None,
    )


def _array(vector: Tensor) -> Array:
    values = vector.detach().cpu().contiguous().numpy()
    return Array(dtype=str(values.dtype), shape=values.shape, stype=STYPE, data=values.tobytes())
