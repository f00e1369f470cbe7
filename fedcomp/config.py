"""The options of a run, with types, defaults and help texts. Command-line flags, TOML keys and docs are generated from these options.

The metadata of a field can contain:

    help        effect of the option, with its unit
    changeable  True if a resumed run may change the option
    low, high   smallest and largest value
    above       limit that values must exceed
    choices     allowed values
    parse       function that parses the value, to check it
    example     valid value, shown in the error message if `parse` raises one of the errors in `spec.MALFORMED`
"""

import dataclasses
import math
import os
import shlex
import tomllib
import types
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from . import local_optimizer, schedules, spec
from .errors import ConfigError, DataError, RunFolderError, SpecError, closest, nearest

RUN_FILE = "config.toml"  # the file in a run folder that stores the options
# The file in the folder of a comparison (several runs) that stores the options.
ALTERNATIVES_FILE = "alternatives.toml"
# Options that a resumed run does not inherit from the stored run.
NOT_INHERITED = {"out", "resume", "plain", "log_json", "metrics_port", "tensorboard"}
AUTO = "auto"


class StrategyDefault(str):
    """A default that the strategy may override. A value that the user gives is a plain str and is never overridden."""


def option(default: Any, help: str, *, changeable: bool = False, **limits: Any) -> Any:
    """Return the dataclass field of an option. `limits` are metadata of the field, which the module docstring lists."""
    return field(default=default, metadata={"help": help, "changeable": changeable, **limits})


count = partial(option, low=1)
zero_or_more = partial(option, low=0)
fraction = partial(option, above=0.0, high=1.0)
positive = partial(option, above=0.0, high=schedules.MAX_FLOAT)
non_negative = partial(option, low=0.0, high=schedules.MAX_FLOAT)


@dataclass(frozen=True)
class RunConfig:
    """The options that `fedcomp sim` and `fedcomp server start` share. Raises ConfigError or SpecError for invalid values."""

    task: str = option(
        "digits", "Task to learn (model and data): a built-in name or path/file.py:name."
    )
    data: str | None = option(
        None,
        "Folder of the task's data. Default: the folder that the environment variable FEDCOMP_DATA names.",
        changeable=True,
    )
    init: str | None = option(
        None,
        "Safetensors file with initial weights, such as model.safetensors in the folder of another run. Default: the weights with which "
        "the task creates the model.",
    )
    partition: str = option(
        "iid",
        "How the data is partitioned among the clients: iid (at random, in equal parts), classes:N (N classes per client), shards:N (N "
        "shards per client of the data sorted by label), dirichlet:A (random class proportions from Dir(A); the smaller A, the more "
        "clients differ), natural (all examples of a user, or of another group that the data defines, belong to one client) or "
        "natural:column=NAME (all examples with the same value in column NAME belong to one client).",
    )
    clients: int = count(10, "Number of clients.")
    rounds: int = count(
        50, "Number of rounds; a resumed run may increase the number.", changeable=True
    )
    participation: float = fraction(
        0.1,
        "Fraction of the clients that take part in a round; at least 2 clients take part, even if the fraction is smaller.",
    )
    quorum: float = fraction(
        1.0,
        "A round ends as soon as the server has accepted the updates of this fraction of the clients that take part in the round; 1 = a "
        "round waits for all these clients. A simulation needs a virtual network for other values.",
        changeable=True,
    )
    deadline: float = zero_or_more(
        0.0,
        "Time limit of a round in seconds; 0 = no limit. Answers after the limit are not used. If a strategy exchanges several messages "
        "with a client in a round, the limit applies to each exchange. A simulation needs a virtual network for a limit.",
        changeable=True,
    )
    network: str | None = option(
        None,
        "Virtual network of a simulation, which determines how long rounds take: mobile, fixed, lte-m, lora, "
        "uniform:up=100kB,down=1MB,latency=50ms,step=20ms (up and down: bytes per second; step: time of a local step), "
        "lognormal:up=100kB,spread=1,absent=5% (spread: random differences between clients; absent: fraction of the time in which a "
        "client is absent), or a CSV file.",
    )
    local_steps: int = count(
        5, "Number of local optimizer steps of a client in a round.", high=1_000_000
    )
    local_epochs: int = zero_or_more(
        0,
        "Number of passes over a client's data in a round; 0 = train for --local-steps instead.",
        high=10_000,
    )
    batch_size: int = count(
        20,
        "Number of examples in a batch; a client with fewer examples uses all its examples.",
        high=1_000_000,
    )
    optimizer: str = option(
        local_optimizer.SGD,
        "Optimizer of the clients: a class of torch.optim in lower case and its arguments, such as sgd, adamw:lr=3e-4,weight_decay=0.1 or "
        "rmsprop:alpha=0.9.",
        parse=local_optimizer.read,
    )
    optimizer_state: str = option(
        "fresh",
        "State of a client's optimizer, such as the moments of Adam: fresh = reset in each round, kept = kept between rounds. To "
        "keep the momentum of sgd, give --keep-momentum.",
        choices=("fresh", "kept"),
    )
    lr: float | None = positive(
        None,
        "Learning rate of the clients. Default: lr in --optimizer, or else 0.05 for sgd and torch's default for other optimizers.",
    )
    step_schedule: str | None = option(
        None,
        "Factor by which the learning rate is multiplied in each local step of a round: a curve that starts at 1 (cosine, linear:to=0.1), "
        "or values and the steps from which they apply (0.1,1@5 = 0.1 in steps 1 to 4, then 1).",
        parse=schedules.RATE.read,
    )
    accumulate: int = count(
        1,
        "Number of batches in a local step. Their mean gradient is accumulated batch by batch, to save memory.",
        high=10_000,
    )
    momentum: float = zero_or_more(
        0.0,
        "Momentum of the clients' optimizer. The momentum of sgd starts from zero in each round, unless --keep-momentum is given.",
        high=1.0,
    )
    keep_momentum: bool = option(
        False,
        "Keep the momentum of local SGD between rounds, but reset it to zero at coordinates whose update the server accepted.",
    )
    weight_decay: float = non_negative(
        0.0,
        "Weight decay of the clients' optimizer. With the strategies vote and election, the server applies the weight decay, and clients "
        "do not.",
    )
    augment: bool = option(
        False,
        "Augment training examples as the task defines, such as with random crops and flips for CIFAR-10.",
    )
    proximal: float = non_negative(
        0.0,
        "Weight of FedProx's proximal term, which pulls local models towards the global model; 0 = none.",
    )
    clip: float = non_negative(0.0, "Clip local gradients to this L2 norm; 0 = no clipping.")
    strategy: str = option(
        "average",
        "Algorithm that aggregates the updates, such as average, median:f=2 (f: number of Byzantine clients) or vote. The strategy also "
        "sets the defaults of --uplink, --memory and --downlink.",
    )
    weights: str = option(
        "uniform",
        "Weight of a client's update: uniform = equal for all clients, examples = the client's number of examples.",
        choices=("uniform", "examples"),
    )
    weight_cap: float = zero_or_more(
        0.0,
        "Maximum weight of an update, as a multiple of the mean weight in the round; 0 = no maximum.",
    )
    uplink: str = option(
        StrategyDefault("stc:density=1/100"),
        "Codec (compression method) for updates from clients to the server; identity = no compression. fedcomp codecs lists the codecs.",
    )
    downlink: str = option(
        StrategyDefault("stc:density=1/100"),
        "Codec (compression method) for updates from the server to clients; identity = no compression.",
    )
    memory: str = option(
        StrategyDefault("auto"),
        "Error-feedback memory of each client, which keeps the part of an update that the uplink codec did not send, and adds it to later "
        "updates: residual, none or another memory. auto = the memory that the strategy requires. If it requires none, auto = residual "
        "for a lossy codec for which fedcomp codecs shows a number in the column 'contracts', and none for other codecs.",
    )
    downlink_memory: str = option(
        StrategyDefault("auto"),
        "Error-feedback memory of the server, which keeps the part of an update that the downlink codec did not send, and adds it to later "
        "updates. auto = residual for a lossy codec for which fedcomp codecs shows a number in the column 'contracts', and none for other "
        "codecs.",
    )
    density_warmup: int = zero_or_more(
        0,
        "Number of rounds at the start of the run in which the uplink density (fraction of coordinates that clients send) decreases "
        "from 25 % to the density that --uplink or --density-schedule sets.",
    )
    lr_warmup: int = zero_or_more(
        0,
        "Number of rounds at the start of the run in which the learning rate increases linearly to --lr.",
    )
    lr_schedule: str | None = option(
        None,
        "Learning rate of the clients by round, after --lr-warmup: a curve that starts at --lr (cosine, linear:to=0.001, poly:power=2, "
        "geometric:to=0.001, step:every=30,factor=0.1), or values and the rounds from which they apply (0.1,0.01@30 = 0.1 in rounds 1 to "
        "29, then 0.01).",
        parse=schedules.RATE.read,
    )
    local_steps_schedule: str | None = option(
        None,
        "Number of local steps by round, written like --lr-schedule: 1,8@21 = 1 step in rounds 1 to 20, then 8 steps; "
        "8@21 = --local-steps in rounds 1 to 20, then 8 steps.",
        parse=schedules.COUNT.read,
    )
    batch_size_schedule: str | None = option(
        None,
        "Number of examples in a batch by round, written like --lr-schedule: step:every=20,factor=2 doubles the number every 20 "
        "rounds.",
        parse=schedules.COUNT.read,
    )
    density_schedule: str | None = option(
        None,
        "Uplink density (fraction of coordinates that clients send) by round, after --density-warmup, written like --lr-schedule: "
        "10%,1%@10 or geometric:to=0.1%.",
        parse=schedules.FRACTION.read,
    )
    horizon: int = zero_or_more(
        0,
        "Round in which schedules such as cosine end; 0 = the last round, as given by --rounds when the run was first started.",
        changeable=True,
    )
    budget: str | None = option(
        None,
        "Limit from which the uplink density (fraction of coordinates that clients send) is computed: 200kB = bytes that all clients of a "
        "round together may send; 30s = time that each client may take to send. A time needs --bandwidths or a virtual network.",
        parse=spec.parse_budget,
        example="200kB, or a time, such as 30s",
    )
    bandwidths: str | None = option(
        None,
        "Uplink bandwidths of the clients in bytes per second, for --budget. The list is repeated until each client has a bandwidth: "
        "10kB,1MB = 10 kB/s for clients 0, 2, 4, … and 1 MB/s for clients 1, 3, 5, ….",
        parse=spec.parse_byte_list,
        example="10kB,1MB",
    )
    relays: int = zero_or_more(
        0,
        "Number of relays between clients and server. Each relay sums the encoded updates of its clients and sends the sum to the server. "
        "0 = no sums: the server receives each client's update.",
        high=1_000_000,
    )
    clip_update: float = non_negative(
        0.0, "Clip each client's decoded update to this L2 norm; 0 = no clipping."
    )
    server_optimizer: str = option(
        "sgd",
        "Optimizer that applies the averaged update: sgd, sgd:momentum=0.9, sgd:momentum=0.9,nesterov=true, "
        "adam:beta1=0.9,beta2=0.99,tau=0.001 or yogi.",
    )
    server_lr: float = positive(
        1.0,
        "Learning rate of the server's optimizer; adam and yogi need a small one, such as 0.01.",
    )
    cache: float = option(
        1.0,
        "Size of the server's cache of recent broadcasts (encoded changes of the model), as a multiple of the size of the float32 model. "
        "Clients that missed rounds download the missed broadcasts from the cache, or the whole model if the cache lacks one of them.",
        low=0.0,
        high=1e6,
    )
    attack: str | None = option(
        None,
        "Attacks by virtual clients: the name of an attack with the number of attacking clients, such as inverted:2, or with their ids, "
        "such as alie:clients=3/7,z=1.5 (clients 3 and 7; z is an option of this attack). Several attacks are joined by +.",
    )
    engine: str = option(
        AUTO,
        "How virtual clients train: serial = one after the other, batched = several in one batch, processes = in one worker process per "
        "core, ray = in one Ray actor per core (on the Ray cluster whose address the environment variable RAY_ADDRESS contains, if it is "
        "set, else on this machine); auto = chosen by task, model and device.",
        choices=(AUTO, "serial", "batched", "processes", "ray"),
    )
    precision: str = option(
        "float32",
        "Precision of forward and backward passes; weights and updates are float32; bfloat16 is faster on most GPUs and on CPUs with "
        "AMX or AVX512-BF16; float16 uses loss scaling.",
        choices=("float32", "bfloat16", "float16"),
    )
    cohort_batch: int = zero_or_more(
        0,
        "Number of clients that --engine batched trains together; 0 = as many as fit into a quarter of the memory of a GPU, or into the "
        "caches of a CPU.",
        high=1_000_000,
    )
    residuals: str = option(
        AUTO,
        "Where the error-feedback memories of virtual clients are stored between rounds: device = in the memory of the training device, "
        "host = in the main memory of this machine, file = in the checkpoint on disk; auto = the first of these places with enough space.",
        choices=(AUTO, "device", "host", "file"),
        changeable=True,
    )
    device: str = option(
        AUTO,
        "Device for training: auto, cpu, cuda or cuda:N; auto = the first GPU if there is one, else the CPU; in a simulation also "
        "a list of GPUs among which the clients of a round are divided, such as cuda:0,cuda:1.",
    )
    seed: int = zero_or_more(0, "Seed of all random draws.", high=2**63 - 1)
    eval_every: int = count(
        1, "Number of rounds between evaluations; the last round is always evaluated."
    )
    evaluate: str = option(
        "server",
        "Where the model is evaluated: on the server with the test data, on each client with held-out local data, or both.",
        choices=("server", "clients", "both"),
    )
    holdout: float = option(
        0.2,
        "Fraction of a client's examples that are held out for evaluation with --evaluate clients or both; ignored if the "
        "task has test data for each client.",
        above=0.0,
        high=0.9,
    )
    checkpoint_every: str = option(
        AUTO,
        "Number of rounds from one checkpoint to the next; auto = 1 in a deployment, and in a simulation so many that writing checkpoints "
        "takes at most about 5 % of the time.",
        changeable=True,
    )
    out: str | None = option(
        None, "Run folder. Default: a new folder runs/TASK-YYYYMMDD-HHMMSS.", changeable=True
    )
    resume: bool = option(False, "Continue the run in --out.", changeable=True)
    plain: bool = option(
        False, "Print one line per round instead of the dashboard.", changeable=True
    )
    log_json: str | None = option(
        None,
        "File to which each log event is appended as a line of JSON, or - for standard output instead of the dashboard.",
        changeable=True,
    )
    metrics_port: int = option(
        -1,
        "Loopback port that serves /metrics to Prometheus; 0 = any free port, -1 = no port.",
        low=-1,
        high=65535,
        changeable=True,
    )
    tensorboard: bool = option(
        False,
        "Write scalars for TensorBoard to the subfolder tensorboard of the run folder.",
        changeable=True,
    )

    def __post_init__(self) -> None:
        every: Any = self.checkpoint_every
        if type(every) is int:
            every = str(every)
            object.__setattr__(self, "checkpoint_every", every)
        for f in dataclasses.fields(self):
            _check(f, getattr(self, f.name))
        self._check_optimizer()
        if every != AUTO and not (every.isascii() and every.isdigit() and int(every[:9]) > 0):
            raise ConfigError(f"--checkpoint-every is {every}; give a number of rounds, or auto")
        for schedule in schedules.of_options(self, self.horizon or self.rounds).values():
            schedule.check(self.rounds)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the clients: --lr if given, else lr in --optimizer if given, else the optimizer's default."""
        return local_optimizer.read(self.optimizer).default_lr if self.lr is None else self.lr

    @property
    def clients_evaluate(self) -> bool:
        """Whether clients evaluate the model."""
        return self.evaluate != "server"

    def evaluates(self, where: str, round: int) -> bool:
        """Return whether the server (`where="server"`) or the clients (`where="clients"`) evaluate the model in a round."""
        due = round % self.eval_every == 0 or round == self.rounds
        return due and self.evaluate in (where, "both")

    def _check_optimizer(self) -> None:
        """Raise ConfigError for two different learning rates, or for options that the optimizer does not use."""
        chosen = local_optimizer.read(self.optimizer)
        if None not in (self.lr, chosen.lr) and chosen.lr != self.lr:
            raise ConfigError(
                f"--optimizer {self.optimizer} and --lr {self.lr:g} give different learning rates; leave one of them out"
            )
        if self.momentum and not chosen.has_momentum:
            raise ConfigError(
                f"--momentum: the optimizer {chosen.name} has no momentum option; leave --momentum out"
            )
        if self.keep_momentum and not chosen.is_plain_sgd:
            raise ConfigError(
                f"--keep-momentum needs --optimizer sgd without options other than momentum and weight_decay, but --optimizer is "
                f"{self.optimizer}; give --optimizer-state kept instead"
            )


def suggestion(
    name: str,
    known: Collection[str],
    spelled: Callable[[str], str] = "'{}'".format,
    otherwise: str = "see fedcomp sim --help",
) -> str:
    """Return the end of an error message about an unknown option: the most similar known option, or `otherwise` if none is similar.

    `spelled` formats the suggested name, for example as a flag.
    """
    close = closest(name, known)
    return f"did you mean {spelled(close)}?" if close else otherwise


def flag(name: str) -> str:
    """Return the command-line flag of a field of RunConfig."""
    return "--" + name.replace("_", "-")


def option_type(name: str) -> type:
    """Return the type of a RunConfig field: int, float, bool or str (`int` also for a field of type `int | None`)."""
    hint: Any = RunConfig.__dataclass_fields__[name].type
    if isinstance(hint, type):
        return hint
    return next(kind for kind in hint.__args__ if kind is not types.NoneType)


def _check(f: dataclasses.Field[Any], value: Any) -> None:
    limits, name = f.metadata, flag(f.name)
    kinds = f.type.__args__ if isinstance(f.type, types.UnionType) else (f.type,)
    if float in kinds:
        kinds = (*kinds, int)
    if type(value) not in (*kinds, StrategyDefault):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; give a value of type {wanted}"
        )
    if value is None:
        return
    if isinstance(value, str) and (not value.strip() or not value.isprintable()):
        raise ConfigError(
            f"{name} is {value!r}; give a text of printable characters that are not only spaces"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name} is {value}; give a finite number")
    if "parse" in limits:
        try:
            with spec.error_context(value, name):
                limits["parse"](value)
        except spec.MALFORMED:
            example = limits["example"]
            raise ConfigError(f"{name} is '{value}'; give bytes, such as {example}") from None
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{name} cannot be '{value}'; {nearest(str(value), limits['choices'])}")
    if "low" in limits and value < limits["low"]:
        raise ConfigError(f"{name} is {value}; give at least {limits['low']:g}")
    if "above" in limits and value <= limits["above"]:
        raise ConfigError(f"{name} is {value}; give more than {limits['above']:g}")
    if "high" in limits and value > (high := limits["high"]):
        most = f"{high:g}" if isinstance(high, float) else high
        percent = f" (did you mean {value:g}%?)" if high == 1.0 and 2 <= value <= 100 else ""
        raise ConfigError(f"{name} is {value}; give at most {most}{percent}")


# Options that may be given several times, so that `fedcomp sim` compares one run for each value.
ALTERNATIVE_OPTIONS = tuple(
    f.name
    for f in dataclasses.fields(RunConfig)
    if not f.metadata["changeable"] and not isinstance(f.default, bool) and f.name != "task"
)


def from_values(
    values: dict[str, Any], source: str, listable: Collection[str] = ()
) -> dict[str, Any]:
    """Convert the values in a TOML table to the types of the options. Options named in `listable` may have lists of values.

    Raises ConfigError for an unknown key or an invalid value. The message names `source`, the file.
    """
    hints, result = get_type_hints(RunConfig), {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in result:
            raise ConfigError(f"{source}: '{key}' is given twice; keep one")
        if name not in hints:
            raise ConfigError(f"{source}: unknown option '{key}'; {suggestion(name, hints)}")
        given = value if isinstance(value, list) and value and name in listable else [value]
        if any(isinstance(one, dict | list) for one in given):
            raise ConfigError(f"{source}: '{key}' has more than one value; give one")
        try:
            read = [spec.convert(str(one), hints[name], f"{source}: '{key}'") for one in given]
        except SpecError as error:
            raise ConfigError(str(error)) from None
        result[name] = read if len(read) > 1 else read[0]
    return result


def read_toml(path: str | Path, listable: Collection[str] = ()) -> dict[str, Any]:
    """Return the options in a TOML file, such as a run folder's config.toml. Options named in `listable` may have lists of values.

    Raises ConfigError if the file cannot be read or is malformed.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        values.pop("resolved", None)  # automatic choices of the run, such as the device
        return from_values(values, str(path), listable)
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror or error}; give a TOML file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}; correct the file") from error


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return the content of a run folder's config.toml, including the table [resolved] of automatic choices, such as the device.

    Raises RunFolderError if the file cannot be read.
    """
    path = expand_home(folder, "--out") / RUN_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunFolderError(
            f"--out {folder} contains no run to continue; leave --resume out to start a run"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise RunFolderError(
            f"{path} cannot be read ({why}); restore the file, or start a new run with another --out"
        ) from error


def inherited_options(folder: str | Path) -> dict[str, Any]:
    """Return the options of a stored run that a resumed run inherits unless the user gives other values."""
    stored = read_run(folder)
    names = {f.name for f in dataclasses.fields(RunConfig)} - NOT_INHERITED
    return from_values({key: value for key, value in stored.items() if key in names}, str(folder))


def settings(config: RunConfig) -> dict[str, Any]:
    """Return the options of a run that are not None, by name, for TOML files and comparisons."""
    return {key: value for key, value in dataclasses.asdict(config).items() if value is not None}


def first_difference(config: RunConfig, stored: dict[str, Any]) -> str | None:
    """Return the name of the first option that differs from the stored run although a resumed run must not change it, or None.

    `stored` lacks options that the fedcomp version of the stored run did not have. For these options, the default is compared.
    """
    mine = settings(config)
    for f in dataclasses.fields(config):
        if not f.metadata["changeable"] and mine.get(f.name) != stored.get(f.name, f.default):
            return f.name
    return None


def with_horizon(config: RunConfig) -> RunConfig:
    """Return the options of a run. If a schedule needs the option `horizon` (the round in which schedules end), the result contains it.

    The horizon is --horizon, else the horizon of the resumed run, else --rounds. Raises RunFolderError if the resumed run cannot be read.
    """
    texts = [value for name, value in vars(config).items() if name.endswith("_schedule")]
    if config.horizon or not any(map(schedules.needs_horizon, texts)):
        return config
    stored = read_run(config.out) if config.resume and config.out else {}
    return dataclasses.replace(config, horizon=int(stored.get("horizon", 0)) or config.rounds)


def largest_batch(config: RunConfig) -> int:
    """Return the largest batch size in any round of a run."""
    batch_size = schedules.of_options(config, config.horizon or config.rounds)["batch_size"]
    return int(max(batch_size.values(config.rounds)))


def data_folder(data: str | Path | None) -> Path | None:
    """Return the folder in --data, else in the environment variable FEDCOMP_DATA, else None. Raises DataError if --data is not a folder."""
    if data is None:
        folder = os.environ.get("FEDCOMP_DATA")
        return expand_home(folder, "FEDCOMP_DATA") if folder else None
    given = expand_home(data, "--data")
    if not given.is_dir():
        raise DataError(
            f"--data {data} is not a folder; give the folder that contains the task's data"
        )
    return given


def expand_home(folder: str | Path, name: str) -> Path:
    """Return a path with ~ expanded. Raises ConfigError if ~ names a user that does not exist."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{name} {folder}: ~ names a user that does not exist; give a path without ~"
        ) from error


KEYS = "keys"  # default of --keys


def keys_command(folder: str | Path, *words: object) -> str:
    """Return a command such as `fedcomp keys renew 3`, with --keys unless `folder` is the default."""
    where = [] if Path(folder) == Path(KEYS) else ["--keys", str(folder)]
    return shlex.join(["fedcomp", "keys", *map(str, words), *where])
