"""Every option of a run, once: type, default and effect. Flags, TOML files and docs are made from this.

A field's metadata holds `help` (its effect, with the unit), and where they apply `low` and `high` (a closed range), `above` (an open lower
end), `choices`, and `reads` (a function that parses the text) with the examples `such_as` and `or_a`. `local`: the option belongs to this
machine or invocation, so a resumed run may change it.
"""

import dataclasses
import math
import os
import shlex
import time
import tomllib
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

from . import local_optimizer, schedules, spec
from .errors import ConfigError, DataError, RunFolderError, SpecError, closest, nearest

RUN_FILE = "config.toml"  # in a run folder
ALTERNATIVES_FILE = "alternatives.toml"  # in the folder of several
LARGEST_TOML = 1 << 20  # bytes
# Options that a resumed run does not take over from the run before.
NOT_TAKEN_OVER = {"out", "resume", "plain", "log_json", "metrics_port", "tensorboard"}


AUTO = "auto"


class Usual(str):
    """A default that a strategy may replace. The same text given explicitly is never replaced."""


def option(default: Any, help: str, *, local: bool = False, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, "local": local, **limits})


@dataclass(frozen=True)
class RunConfig:
    """The options that `fedcomp sim` and `fedcomp server start` share. Raises ConfigError or SpecError for values that are not valid."""

    task: str = option("digits", "what is learned: a built-in name or path/file.py:name")
    data: str | None = option(None, "folder of the task's data; default: FEDCOMP_DATA", local=True)
    init: str | None = option(
        None, "safetensors file with initial weights, such as model.safetensors of another run"
    )
    partition: str = option(
        "iid",
        "how clients share the data: iid, classes:N, shards:N, dirichlet:A, natural, natural:column=NAME",
    )
    clients: int = option(10, "number of clients", low=1)
    rounds: int = option(50, "number of rounds; a resumed run may raise it", low=1, local=True)
    participation: float = option(
        0.1, "share of the clients in a round's cohort, at least 2 of them", above=0.0, high=1.0
    )
    quorum: float = option(
        1.0,
        "share of a cohort whose accepted updates end the round",
        above=0.0,
        high=1.0,
        local=True,
    )
    deadline: float = option(
        0.0,
        "seconds that a phase of a round may take; later answers are left out; 0 = no limit",
        low=0.0,
        local=True,
    )
    network: str | None = option(
        None,
        "virtual network of a simulation, which gives rounds a duration: mobile, fixed, lte-m, lora, "
        "uniform:up=100kB,down=1MB,latency=50ms,step=20ms, lognormal:up=100kB,spread=1,absent=5%, or a CSV file",
    )
    local_steps: int = option(5, "steps of local SGD in a round", low=1, high=1_000_000)
    local_epochs: int = option(
        0,
        "passes over a client's data in a round, in place of --local-steps; 0 = off",
        low=0,
        high=10_000,
    )
    batch_size: int = option(
        20, "examples in a step; a client with fewer uses all of them", low=1, high=1_000_000
    )
    optimizer: str = option(
        local_optimizer.SGD,
        "optimizer of the clients, any of torch.optim: sgd, adamw:lr=3e-4,weight_decay=0.1, rmsprop:alpha=0.9",
        reads=local_optimizer.read,
        such_as="adamw:lr=3e-4",
    )
    optimizer_state: str = option(
        "fresh",
        "state of a client's optimizer, such as the moments of Adam: fresh in each round, or kept by the client",
        choices=("fresh", "kept"),
    )
    lr: float | None = option(
        None,
        "learning rate of the clients; when not given, that of --optimizer, 0.05 for sgd, and torch's default for others",
        above=0.0,
        high=schedules.LARGEST,
    )
    step_schedule: str | None = option(
        None,
        "multiple of the learning rate by step within a round: cosine, linear:to=0.1, or values and from which step on: 0.1,1@5",
        reads=schedules.RATE.read,
        such_as="cosine",
    )
    accumulate: int = option(
        1,
        "batches whose gradients are accumulated before each step",
        low=1,
        high=10_000,
    )
    momentum: float = option(
        0.0,
        "momentum of local SGD; starts from zero in every round without --keep-momentum",
        low=0.0,
        high=1.0,
    )
    keep_momentum: bool = option(
        False, "clients keep their momentum between rounds, except where their update was sent"
    )
    weight_decay: float = option(
        0.0,
        "weight decay of local SGD; with vote and election, of the server's step",
        low=0.0,
        high=schedules.LARGEST,
    )
    augment: bool = option(
        False, "augment training examples as the task defines; CIFAR-10: random crops and flips"
    )
    proximal: float = option(
        0.0,
        "weight of FedProx's proximal term, towards the global model; 0 = none",
        low=0.0,
        high=schedules.LARGEST,
    )
    clip: float = option(
        0.0, "largest L2 norm of a local gradient; 0 = no clipping", low=0.0, high=schedules.LARGEST
    )
    strategy: str = option(
        "average",
        "how updates become a model; may choose --uplink, --memory and --downlink if these are not given",
    )
    weights: str = option("uniform", "weight of a client's update", choices=("uniform", "examples"))
    weight_cap: float = option(
        0.0, "largest weight as a multiple of the cohort's mean weight; 0 = no cap", low=0.0
    )
    uplink: str = option(Usual("stc:density=1/100"), "codec from client to server")
    downlink: str = option(Usual("stc:density=1/100"), "codec from server to client")
    memory: str = option(
        Usual("auto"),
        "memory of the clients around the uplink codec; auto = what the strategy requires, else residual for a codec that "
        "contracts, else none",
    )
    downlink_memory: str = option(
        Usual("auto"), "memory of the server around the downlink codec; auto as for --memory"
    )
    density_warmup: int = option(
        0, "rounds in which the uplink's density falls from 25 % to its own", low=0
    )
    lr_warmup: int = option(0, "rounds in which the learning rate grows to --lr", low=0)
    lr_schedule: str | None = option(
        None,
        "learning rate by round, after --lr-warmup: cosine, linear:to=0.001, poly:power=2, geometric:to=0.001, "
        "step:every=30,factor=0.1, or values and their first rounds: 0.1,0.01@30",
        reads=schedules.RATE.read,
        such_as="cosine",
    )
    local_steps_schedule: str | None = option(
        None,
        "local steps by round, likewise: 1,8@21 is 1 in rounds 1 to 20, then 8; 8@21 is --local-steps until then",
        reads=schedules.WHOLE.read,
        such_as="1,8@21",
    )
    batch_size_schedule: str | None = option(
        None,
        "examples in a step by round, likewise: step:every=20,factor=2 doubles --batch-size every 20 rounds",
        reads=schedules.WHOLE.read,
        such_as="20,40@21",
    )
    density_schedule: str | None = option(
        None,
        "density of the uplink by round, likewise, after --density-warmup: 10%,1%@10 or geometric:to=0.1%",
        reads=schedules.SHARE.read,
        such_as="10%,1%@10",
    )
    horizon: int = option(
        0,
        "last round of the schedules' curves; 0 = the last round of the run as it was started, also if it is resumed with "
        "more --rounds",
        low=0,
        local=True,
    )
    budget: str | None = option(
        None,
        "bytes that a round's cohort may send, such as 200kB, or the time that each client may take to send, such as 30s; "
        "determines the uplink's density",
        reads=spec.budget,
        such_as="200kB",
        or_a="time, such as 30s",
    )
    bandwidths: str | None = option(
        None,
        "bytes a second of the clients' uplinks, assigned in turn, such as 10kB,1MB; divide --budget among clients",
        reads=spec.sizes,
        such_as="10kB,1MB",
    )
    relays: int = option(
        0,
        "relays that add the frames of their clients and send the server the sum; 0 = none",
        low=0,
        high=1_000_000,
    )
    clip_update: float = option(
        0.0,
        "largest L2 norm of a client's decoded update; the server scales longer ones down; 0 = no clipping",
        low=0.0,
        high=schedules.LARGEST,
    )
    server_optimizer: str = option(
        "sgd",
        "optimizer that applies the averaged update: sgd, sgd:momentum=0.9, sgd:momentum=0.9,nesterov=true, "
        "adam:beta1=0.9,beta2=0.99,tau=0.001 or yogi",
    )
    server_lr: float = option(
        1.0,
        "learning rate of the server's optimizer; for adam and yogi such as 0.01",
        above=0.0,
        high=schedules.LARGEST,
    )
    cache: float = option(
        1.0, "size of the broadcast cache as a multiple of the dense model", low=0.0, high=1e6
    )
    attack: str | None = option(
        None,
        "virtual Byzantine clients, name:count with options, several joined by +, such as inverted:2+alie:clients=3/7,z=1.5",
    )
    engine: str = option(
        AUTO,
        "how virtual clients train: one after the other, batched, in a worker process for each core, or in Ray actors, one "
        "for each core, on the cluster of RAY_ADDRESS if it is set",
        choices=(AUTO, "serial", "batched", "processes", "ray"),
    )
    precision: str = option(
        "float32",
        "of forward and backward passes; weights and updates are float32. bfloat16 is faster on most GPUs and on CPUs with "
        "AMX or AVX512-BF16; float16 scales the loss",
        choices=("float32", "bfloat16", "float16"),
    )
    cohort_batch: int = option(
        0,
        "clients trained at once by the batched engine; 0 = chosen by rule on a CPU, and to fill a quarter of the free memory "
        "on a GPU",
        low=0,
        high=1_000_000,
    )
    residuals: str = option(
        AUTO,
        "where the memories of virtual clients are stored between rounds: on the device, in host memory, or in the checkpoint; "
        "auto = the first with enough room",
        choices=(AUTO, "device", "host", "file"),
        local=True,
    )
    device: str = option(
        AUTO,
        "auto, cpu, cuda or cuda:N; auto = the first GPU if there is one, else the CPU; in a simulation several GPUs that "
        "share each cohort, such as cuda:0,cuda:1",
    )
    seed: int = option(0, "seed of all random draws", low=0, high=2**63 - 1)
    eval_every: int = option(
        1, "rounds between evaluations; the last round is always evaluated", low=1
    )
    evaluate: str = option(
        "server",
        "where the model is evaluated: on the server, with the test data; by the clients, each with held-out data of its own; "
        "or both",
        choices=("server", "clients", "both"),
    )
    holdout: float = option(
        0.2,
        "share of a client's examples that it evaluates on and does not train on, with --evaluate clients or both; unless the "
        "task has test data of each client",
        above=0.0,
        high=0.9,
    )
    checkpoint_every: str = option(
        AUTO,
        "rounds between checkpoints; auto: a server saves every round, a simulation spends at most a twentieth of its time "
        "on saving",
        local=True,
    )
    out: str | None = option(
        None, "run folder; default: a new folder runs/TASK-YYYYMMDD-HHMMSS", local=True
    )
    resume: bool = option(False, "continue the run in --out", local=True)
    plain: bool = option(False, "one line a round instead of the dashboard", local=True)
    log_json: str | None = option(
        None,
        "file that gets each event as a line of JSON; - = standard output, in place of the dashboard",
        local=True,
    )
    metrics_port: int = option(
        -1,
        "port of the loopback address that serves /metrics to Prometheus; 0 = a free one, -1 = none",
        low=-1,
        high=65535,
        local=True,
    )
    tensorboard: bool = option(
        False,
        "write scalars for TensorBoard to the folder tensorboard of the run folder",
        local=True,
    )

    def __post_init__(self) -> None:
        if type(self.checkpoint_every) is int:
            object.__setattr__(self, "checkpoint_every", str(self.checkpoint_every))
        for f in dataclasses.fields(self):
            _check(f, getattr(self, f.name))
        self._check_optimizer()
        if self.checkpoint_every != AUTO:
            every = self.checkpoint_every
            if not (every.isascii() and every.isdigit() and int(every[:9]) > 0):
                raise ConfigError(
                    f"--checkpoint-every is {every}; give a number of rounds, or auto"
                )
        for schedule in schedules.of_options(self, self.horizon or self.rounds).values():
            schedule.check(self.rounds)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the clients, from --lr or --optimizer."""
        return local_optimizer.read(self.optimizer).default_lr if self.lr is None else self.lr

    @property
    def clients_evaluate(self) -> bool:
        """Whether clients evaluate the model."""
        return self.evaluate != "server"

    def evaluates(self, where: str, round: int) -> bool:
        """Return whether the model is evaluated in a round `where`: by the "server", or by the "clients"."""
        due = round % self.eval_every == 0 or round == self.rounds
        return due and self.evaluate in (where, "both")

    def _check_optimizer(self) -> None:
        """Raise ConfigError for options that the optimizer does not use."""
        chosen = local_optimizer.read(self.optimizer)
        if None not in (self.lr, chosen.lr) and chosen.lr != self.lr:
            raise ConfigError(
                f"--optimizer {self.optimizer} and --lr {self.lr:g} give two learning rates; leave one out"
            )
        if self.momentum and not chosen.takes("momentum"):
            raise ConfigError(f"--momentum: {chosen.name} takes none; leave it out")
        if self.keep_momentum and not chosen.plain_sgd:
            raise ConfigError("--keep-momentum belongs to sgd; give --optimizer-state kept instead")


def suggestion(
    name: str,
    known: Collection[str],
    spelled: Callable[[str], str] = "'{}'".format,
    otherwise: str = "see fedcomp sim --help",
) -> str:
    """Return the end of a sentence about an unknown option of a run: the closest known option, or else `otherwise`."""
    close = closest(name, known)
    return f"did you mean {spelled(close)}?" if close else otherwise


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return "--" + name.replace("_", "-")


def option_type(name: str) -> type:
    """Return int, float, bool or str: the type of a field that is not None."""
    hint: Any = RunConfig.__dataclass_fields__[name].type
    if isinstance(hint, type):
        return hint
    return next(kind for kind in hint.__args__ if kind is not types.NoneType)


def _check(f: dataclasses.Field[Any], value: Any) -> None:
    limits, name = f.metadata, flag(f.name)
    kinds = f.type.__args__ if isinstance(f.type, types.UnionType) else (f.type,)
    if float in kinds:
        kinds = (*kinds, int)
    if type(value) not in (*kinds, Usual):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} is {value!r}, of type {type(value).__name__}; give {wanted}")
    if value is None:
        return
    if isinstance(value, str) and (not value.strip() or not value.isprintable()):
        raise ConfigError(f"{name} is {value!r}; give a text of printable characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; give a finite number")
    if "reads" in limits:
        try:
            with spec.reading(value, name):
                limits["reads"](value)
        except (ValueError, KeyError, ZeroDivisionError, OverflowError):
            other = f", or a {limits['or_a']}" if "or_a" in limits else ""
            raise ConfigError(
                f"{name} is '{value}'; give bytes, such as {limits['such_as']}{other}"
            ) from None
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{name} cannot be '{value}'; {nearest(str(value), limits['choices'])}")
    if "low" in limits and value < limits["low"]:
        raise ConfigError(f"{name} is {value}; give at least {limits['low']:g}")
    if "above" in limits and value <= limits["above"]:
        raise ConfigError(f"{name} is {value}; give more than {limits['above']:g}")
    if "high" in limits and value > (high := limits["high"]):
        most = f"{high:g}" if isinstance(high, float) else high
        raise ConfigError(f"{name} is {value}; give at most {most}")


def may_span(f: dataclasses.Field[Any]) -> bool:
    """Return whether an option given several times makes alternatives: other curves of the same task, and not a switch."""
    return not f.metadata["local"] and not isinstance(f.default, bool) and f.name != "task"


SPANNING = tuple(f.name for f in dataclasses.fields(RunConfig) if may_span(f))


def from_values(
    values: dict[str, Any], source: str, several: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a TOML table or of flags, converted to the types of the fields. Options named in `several` may be lists.

    Raises ConfigError naming `source` and the nearest key.
    """
    hints, result = get_type_hints(RunConfig), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in result:
            raise ConfigError(f"{source}: '{key}' is given twice; keep one")
        if name not in hints:
            raise ConfigError(f"{source}: unknown option '{key}'; {suggestion(name, hints)}")
        listed = isinstance(value, list) and not any(isinstance(v, dict | list) for v in value)
        many = listed and name in several and value
        if isinstance(value, dict | list) and not many:
            raise ConfigError(f"{source}: '{key}' holds several values; give one")
        given = value if many else [value]
        try:
            read = [
                None if one is None else spec.convert(str(one), hints[name], f"{source}: '{key}'")
                for one in given
            ]
        except SpecError as error:
            raise ConfigError(str(error)) from None
        result[name] = read if len(read) > 1 else read[0]
    return result


def read_toml(path: str | Path, several: Collection[str] = ()) -> dict[str, Any]:
    """Return the options in a TOML file, such as a run folder's config.toml; those named in `several` may be lists.

    Raises ConfigError if it is absent, malformed or holds an unknown key.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ConfigError(f"--config {path} is not a file; give a TOML file that can be read")
        if Path(path).stat().st_size > LARGEST_TOML:
            raise ConfigError(
                f"--config {path} is larger than {LARGEST_TOML} bytes; give a TOML file with options"
            )
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        values.pop("resolved", None)  # what a run decided for its machine
        return from_values(values, str(path), several)
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give a TOML file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from error


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return the content of a run folder's config.toml, with [resolved]. Raises RunFolderError if there is none or it cannot be read."""
    path = at_home(folder, "--out") / RUN_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(
            f"--out {folder} holds no run to continue; leave --resume out to start one"
        ) from error
    except OSError as error:
        raise RunFolderError(
            f"{path} cannot be read ({error.strerror}); give a run folder that can"
        ) from error
    except (ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path} cannot be read ({error}); start a new run with another --out"
        ) from error


def options_of_run(folder: str | Path) -> dict[str, Any]:
    """Return the options of a stored run that a resumed run takes over unless it is given others."""
    stored = read_run(folder)
    names = {f.name for f in dataclasses.fields(RunConfig)} - NOT_TAKEN_OVER
    return from_values({key: value for key, value in stored.items() if key in names}, str(folder))


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the options that are set, as plain values for TOML and for comparison."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value is not None}


def first_difference(config: RunConfig, stored: dict[str, Any]) -> str | None:
    """Return the first option in which `config` differs from a stored run, options local to an invocation aside; None if none does.

    An option that is missing from the stored run, made by an earlier version, had its default.
    """
    mine = settings(config)
    for f in dataclasses.fields(config):
        if not f.metadata["local"] and mine.get(f.name) != stored.get(f.name, f.default):
            return f.name
    return None


def with_horizon(config: RunConfig) -> RunConfig:
    """Return the options with a horizon if their schedules need one: the given one, that of the resumed run, or the last round.

    Raises RunFolderError if the resumed run cannot be read.
    """
    texts = [value for name, value in vars(config).items() if name.endswith("_schedule")]
    if config.horizon or not any(map(schedules.ends, texts)):
        return config
    stored = read_run(config.out) if config.resume and config.out else {}
    return dataclasses.replace(config, horizon=int(stored.get("horizon", 0)) or config.rounds)


def largest_batch(config: RunConfig) -> int:
    """Return the number of examples in the largest step of a run."""
    batch_size = schedules.of_options(config, config.horizon or config.rounds)["batch_size"]
    return int(max(batch_size.values(config.rounds)))


def data_folder(data: str | Path | None) -> Path | None:
    """Return the folder of --data, or else of FEDCOMP_DATA; None without either. Raises DataError if --data is not a folder."""
    if data is None:
        folder = os.environ.get("FEDCOMP_DATA")
        return at_home(folder, "FEDCOMP_DATA") if folder else None
    given = at_home(data, "--data")
    if not given.is_dir():
        raise DataError(f"--data {data} is no folder; give the one that holds the task's data")
    return given


def at_home(folder: str | Path, name: str) -> Path:
    """Return a path with ~ expanded. Raises ConfigError for a user that does not exist."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{name} {folder}: there is no such user; give a path without ~"
        ) from error


def default_folder(label: str) -> Path:
    """Return the folder of a run without --out: runs/LABEL-YYYYMMDD-HHMMSS."""
    return Path(f"runs/{label}-{time.strftime('%Y%m%d-%H%M%S')}")


def claim_folder(wanted: Path) -> Path:
    """Create and return a new folder: `wanted`, or `wanted`-2, `wanted`-3, … if it exists.

    mkdir either creates a folder or fails, so runs that start at the same moment get different folders. Raises OSError.
    """
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise AssertionError("unreachable")


KEYS = "keys"  # default of --keys


def keys_command(folder: str | Path, *words: object) -> str:
    """Return a command such as `fedcomp keys renew 3`, with --keys unless the folder is the default one."""
    where = [] if Path(folder) == Path(KEYS) else ["--keys", str(folder)]
    return shlex.join(["fedcomp", "keys", *map(str, words), *where])
