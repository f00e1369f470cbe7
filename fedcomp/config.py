"""Every option of a run, once: type, default, unit and effect. Flags, TOML files and docs are made from this.

A field's metadata holds `help` (its effect, with the unit), `unit`, and where it applies `low`/`high` (a closed range), `above` (an open
lower end), `choices`, `reads` (what reads the text, and may say itself what is wrong with it) with `such_as` and `or_a`, or `local`: the
option belongs to this machine or invocation, so a resumed run may change it.
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

from . import schedules, spec
from .errors import ConfigError, RunFolderError, SpecError, closest, nearest

RUN_FILE = "config.toml"  # in a run folder
ALTERNATIVES_FILE = "alternatives.toml"  # in the folder of several
LARGEST_TOML = 1 << 20  # bytes
NOT_TAKEN_OVER = {
    "out",
    "resume",
    "plain",
    "log_json",
    "metrics_port",
    "tensorboard",
}  # by a resumed run, from the one before


AUTO = "auto"  # default of --checkpoint-every


class Usual(str):
    """A default in whose place a strategy may have its own. The same text, given in so many words, is kept."""


def option(default: Any, help: str, *, unit: str = "", local: bool = False, **limits: Any) -> Any:
    return field(default=default, metadata={"help": help, "unit": unit, "local": local, **limits})


@dataclass(frozen=True)
class RunConfig:
    """What `fedcomp sim` and `fedcomp server start` share. Checked when made; raises ConfigError or SpecError."""

    task: str = option("digits", "what is learned: a built-in name or path/file.py:name")
    data: str | None = option(
        None, "folder of the task's data; FEDCOMP_DATA when not given", local=True
    )
    init: str | None = option(
        None,
        "safetensors file with the weights that the run starts from, such as model.safetensors of another run; clients "
        "download them",
    )
    partition: str = option(
        "iid", "how clients share the data: iid, classes:N, shards:N, dirichlet:A, natural"
    )
    clients: int = option(10, "number of clients", low=1)
    rounds: int = option(50, "number of rounds; a resumed run may raise it", low=1, local=True)
    participation: float = option(
        0.1, "share of the clients in a round's cohort, at least 2 of them", above=0.0, high=1.0
    )
    quorum: float = option(
        1.0,
        "share of a cohort whose accepted updates close its round; 1 = when all have answered",
        above=0.0,
        high=1.0,
        local=True,
    )
    deadline: float = option(
        0.0,
        "seconds that an exchange may take, each of a round that has several; who answers later is left "
        "out; 0 = no limit",
        unit="seconds",
        low=0.0,
        local=True,
    )
    network: str | None = option(
        None,
        "virtual network of a simulation, which gives rounds their time: mobile, fixed, lte-m, lora, "
        "uniform:up=100kB,down=1MB,latency=50ms,step=20ms, lognormal:up=100kB,spread=1,absent=5%, or a "
        "CSV file",
    )
    local_steps: int = option(
        5, "steps of local SGD in a round", unit="steps", low=1, high=1_000_000
    )
    local_epochs: int = option(
        0,
        "passes over a client's data in a round, in place of --local-steps; 0 = off",
        unit="epochs",
        low=0,
        high=10_000,
    )
    batch_size: int = option(
        20,
        "examples in a step; a client with fewer uses all it has",
        unit="examples",
        low=1,
        high=1_000_000,
    )
    lr: float = option(0.05, "learning rate of local SGD", above=0.0, high=schedules.LARGEST)
    momentum: float = option(
        0.0, "momentum of local SGD, from zero in every round unless it is kept", low=0.0, high=1.0
    )
    keep_momentum: bool = option(
        False, "clients keep their momentum between rounds, but for where their update was sent"
    )
    weight_decay: float = option(
        0.0,
        "weight decay of local SGD; under vote and election, of the server's step after the vote",
        low=0.0,
        high=schedules.LARGEST,
    )
    augment: bool = option(
        False,
        "clients train on examples changed at random in the task's own way: of CIFAR-10, cropped and flipped",
    )
    proximal: float = option(
        0.0,
        "pull of local SGD towards the model of the round's start, the term of FedProx; 0 = none",
        low=0.0,
        high=schedules.LARGEST,
    )
    clip: float = option(
        0.0, "largest L2 norm of a local gradient; 0 = no clipping", low=0.0, high=schedules.LARGEST
    )
    strategy: str = option(
        "average",
        "how updates become a model; may choose --uplink, --memory and --downlink where these are left out",
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
        "contracts, else none; dgc chooses topk where --uplink is left out",
    )
    downlink_memory: str = option(
        Usual("auto"), "memory of the server around the downlink codec; auto likewise"
    )
    density_warmup: int = option(
        0, "rounds in which the uplink's density falls from 25 % to its own", unit="rounds", low=0
    )
    lr_warmup: int = option(
        0, "rounds in which the learning rate grows to --lr", unit="rounds", low=0
    )
    lr_schedule: str | None = option(
        None,
        "learning rate by round, after --lr-warmup: cosine, linear:to=0.001, poly:power=2, "
        "geometric:to=0.001, step:every=30,factor=0.1, or values and from which round on: 0.1,0.01@30",
        reads=schedules.RATE.read,
        such_as="cosine",
    )
    local_steps_schedule: str | None = option(
        None,
        "local steps by round, likewise: 1,8@21 is 1 in rounds 1 to 20, then 8; 8@21 is "
        "--local-steps until then",
        unit="steps",
        reads=schedules.WHOLE.read,
        such_as="1,8@21",
    )
    batch_size_schedule: str | None = option(
        None,
        "examples in a step by round, likewise: step:every=20,factor=2 doubles --batch-size "
        "every 20 rounds",
        unit="examples",
        reads=schedules.WHOLE.read,
        such_as="20,40@21",
    )
    density_schedule: str | None = option(
        None,
        "density of the uplink by round, likewise, after --density-warmup: 10%,1%@10 or "
        "geometric:to=0.1%",
        reads=schedules.SHARE.read,
        such_as="10%,1%@10",
    )
    horizon: int = option(
        0,
        "round that the curves of schedules end with; 0 = the last round of the run as it was begun, even if it is "
        "resumed with more --rounds",
        unit="rounds",
        low=0,
        local=True,
    )
    budget: str | None = option(
        None,
        "bytes that a round's cohort may send, such as 200kB, or how long each client may take to send, such "
        "as 30s; decides the uplink's density",
        reads=spec.budget,
        such_as="200kB",
        or_a="time, such as 30s",
    )
    bandwidths: str | None = option(
        None,
        "bytes a second of the clients' uplinks, dealt out in turn, such as 10kB,1MB; shares of --budget",
        reads=spec.sizes,
        such_as="10kB,1MB",
    )
    relays: int = option(
        0,
        "relays that add the frames of their clients and send the server the sum; 0 = each frame reaches the server",
        unit="relays",
        low=0,
        high=1_000_000,
    )
    clip_update: float = option(
        0.0,
        "largest L2 norm of a client's update, as its frame says it; the server takes less of a longer one; "
        "0 = no clipping",
        low=0.0,
        high=schedules.LARGEST,
    )
    server_optimizer: str = option(
        "sgd",
        "what the server makes of the averaged update: sgd, sgd:momentum=0.9, "
        "sgd:momentum=0.9,nesterov=true, adam:beta1=0.9,beta2=0.99,tau=0.001 or yogi",
    )
    server_lr: float = option(
        1.0,
        "step of the server along what its optimizer makes of the averaged update; for adam and yogi such as "
        "0.01",
        above=0.0,
        high=schedules.LARGEST,
    )
    cache: float = option(
        1.0,
        "size of the broadcast cache as a multiple of the dense model",
        unit="dense models",
        low=0.0,
        high=1e6,
    )
    attack: str | None = option(
        None,
        "virtual Byzantine clients, name:count with options, several joined by +, such as "
        "inverted:2+alie:clients=3/7,z=1.5",
    )
    engine: str = option(
        "auto",
        "local SGD: one client after the other, batched over clients, in one worker process for each core, or in "
        "Ray actors, one for each core, on the cluster that RAY_ADDRESS names if it is set",
        choices=("auto", "serial", "batched", "processes", "ray"),
    )
    precision: str = option(
        "float32",
        "of forward and backward of local SGD; weights and updates are float32. bfloat16 is faster where "
        "the device has it: most GPUs, CPUs with AMX or AVX512-BF16",
        choices=("float32", "bfloat16"),
    )
    cohort_batch: int = option(
        0,
        "clients trained at once by the batched engine; 0 = by rule on a CPU, on a GPU what fills a quarter of "
        "the memory that is free",
        unit="clients",
        low=0,
        high=1_000_000,
    )
    residuals: str = option(
        "auto",
        "where virtual clients keep what was not sent, between rounds: on the device, in memory, or in the "
        "checkpoint on the disk; auto = the first that holds it all",
        choices=("auto", "device", "host", "file"),
        local=True,
    )
    device: str = option(
        "auto",
        "auto, cpu, cuda or cuda:N; auto = the first GPU, or the CPU where there is none; in a simulation several "
        "GPUs that share each cohort, such as cuda:0,cuda:1",
    )
    seed: int = option(0, "seed of everything that is drawn", low=0, high=2**63 - 1)
    eval_every: int = option(
        1, "rounds between evaluations; the last round is always evaluated", unit="rounds", low=1
    )
    checkpoint_every: str = option(
        AUTO,
        "rounds between checkpoints; auto: a server saves every round, a simulation spends at most a twentieth of its time on it",
        local=True,
    )
    out: str | None = option(
        None, "run folder; a new folder runs/TASK-YYYYMMDD-HHMMSS when not given", local=True
    )
    resume: bool = option(False, "continue the run in --out", local=True)
    plain: bool = option(False, "one line a round instead of the dashboard", local=True)
    log_json: str | None = option(
        None,
        "file that gets a JSON object a line for everything that happens; - = standard output, in place "
        "of the dashboard",
        local=True,
    )
    metrics_port: int = option(
        -1,
        "port of this machine's loopback address that serves /metrics to Prometheus; 0 = a free one, -1 = none",
        low=-1,
        high=65535,
        local=True,
    )
    tensorboard: bool = option(
        False, "scalars for TensorBoard, in the folder tensorboard of the run folder", local=True
    )

    def __post_init__(self) -> None:
        if type(self.checkpoint_every) is int:
            object.__setattr__(self, "checkpoint_every", str(self.checkpoint_every))
        for f in dataclasses.fields(self):
            _check(f, getattr(self, f.name))
        if self.checkpoint_every != AUTO:
            every = self.checkpoint_every
            if not (every.isascii() and every.isdigit() and int(every[:9]) > 0):
                raise ConfigError(
                    f"--checkpoint-every is {every}; give a number of rounds, or auto"
                )
        for schedule in schedules.of_options(self, self.horizon or self.rounds).values():
            schedule.check(self.rounds)


def suggestion(
    name: str,
    known: Collection[str],
    spelled: Callable[[str], str] = "'{}'".format,
    otherwise: str = "see fedcomp sim --help",
) -> str:
    """Return the end of a sentence about an unknown option of a run: the closest known option, or else `otherwise`."""
    if name == "optimizer" and name not in known and "lr" in known:
        local = ", ".join(map(spelled, ("lr", "momentum", "weight_decay")))
        return f"clients train with SGD ({local}), and {spelled('server_optimizer')} sets the server's optimizer"
    close = closest(name, known)
    return f"did you mean {spelled(close)}?" if close else otherwise


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--" + name.replace("_", "-")


def option_type(name: str) -> type:
    """Return int, float, bool or str: the type of a field that is not None."""
    hint = RunConfig.__dataclass_fields__[name].type
    if isinstance(hint, type):
        return hint
    return next(kind for kind in hint.__args__ if kind is not types.NoneType)


def _check(f: dataclasses.Field, value: Any) -> None:
    limits, name = f.metadata, flag(f.name)
    kinds = (
        f.type.__args__
        if isinstance(f.type, types.UnionType)
        else (f.type, int)
        if f.type is float
        else (f.type,)
    )
    if type(value) not in (*kinds, Usual):
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give {' or '.join(kind.__name__ for kind in kinds)}"
        )
    if isinstance(value, str) and (not value.strip() or not value.isprintable()):
        raise ConfigError(f"{name} is {value!r}; give a text of printable characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; give a finite number")
    if "reads" in limits and value is not None:
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
    if "high" in limits and value > limits["high"]:
        raise ConfigError(f"{name} is {value}; give at most {_shown(limits['high'])}")


def _shown(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)  # 2**63 - 1 whole


def may_span(f: dataclasses.Field) -> bool:
    """Whether an option given several times makes alternatives: it makes another curve of the same task, and is no switch."""
    return not f.metadata["local"] and not isinstance(f.default, bool) and f.name != "task"


SPANNING = tuple(f.name for f in dataclasses.fields(RunConfig) if may_span(f))


def from_values(
    values: dict[str, Any], source: str, several: Collection[str] = ()
) -> dict[str, Any]:
    """Values of a TOML table or of flags, as the types of the fields; lists of the options named in `several` as lists of more than one.

    Raises ConfigError naming `source` and the nearest key.
    """
    hints, result = get_type_hints(RunConfig), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in result:
            raise ConfigError(f"{source}: '{key}' is given twice; keep one")
        if name not in hints:
            raise ConfigError(f"{source}: unknown option '{key}'; {suggestion(name, hints)}")
        many = (
            isinstance(value, list)
            and name in several
            and value
            and not any(isinstance(one, dict | list) for one in value)
        )
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
    """The options in a TOML file, such as a run folder's config.toml; those named in `several` may be lists.

    Raises ConfigError when it is absent, malformed or holds an unknown key.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ConfigError(f"--config {path} is no file; give a TOML file that can be read")
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
    """What config.toml of a run folder holds, [resolved] included. Raises RunFolderError when there is none or it cannot be read."""
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
    """The options of a stored run, for a resumed run to take over where it is given none of its own."""
    stored = read_run(folder)
    names = {f.name for f in dataclasses.fields(RunConfig)} - NOT_TAKEN_OVER
    return from_values({key: value for key, value in stored.items() if key in names}, str(folder))


def settings(config: RunConfig) -> dict[str, Any]:
    """The options that are set, as plain values for TOML and for comparison."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value is not None}


def first_difference(config: RunConfig, stored: dict[str, Any]) -> str | None:
    """The name of the first option in which `config` differs from a stored run, options local to an invocation aside.

    An option that there was not yet when the run was begun had its default.
    """
    mine = settings(config)
    for f in dataclasses.fields(config):
        if not f.metadata["local"] and mine.get(f.name) != stored.get(f.name, f.default):
            return f.name
    return None


def with_horizon(config: RunConfig) -> RunConfig:
    """With the round that the curves of its schedules end with, where there are some: as given, else as the resumed run has it, else the
    last. Raises RunFolderError for a resumed run that cannot be read.
    """
    texts = [value for name, value in vars(config).items() if name.endswith("_schedule")]
    if config.horizon or not any(map(schedules.ends, texts)):
        return config
    stored = read_run(config.out) if config.resume and config.out else {}
    return dataclasses.replace(config, horizon=int(stored.get("horizon", 0)) or config.rounds)


def largest_batch(config: RunConfig) -> int:
    """Examples in the largest step of a run."""
    return max(
        schedules.of_options(config, config.horizon or config.rounds)["batch_size"].values(
            config.rounds
        )
    )


def data_folder(config: RunConfig) -> Path | None:
    """The folder that the data is read from, if one is named."""
    folder = config.data or os.environ.get("FEDCOMP_DATA")
    return at_home(folder, "--data" if config.data else "FEDCOMP_DATA") if folder else None


def at_home(folder: str | Path, name: str) -> Path:
    """A folder whose ~ is spelt out. Raises ConfigError for a user that is not here."""
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


KEYS = "keys"  # the folder of keys where --keys names no other


def keys_command(folder: str | Path, *words: object) -> str:
    """What to type about a folder of keys: `fedcomp keys renew 3`, with --keys where the folder is not the usual one."""
    return shlex.join(
        [
            "fedcomp",
            "keys",
            *map(str, words),
            *(["--keys", str(folder)] if Path(folder) != Path(KEYS) else []),
        ]
    )
