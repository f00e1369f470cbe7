"""The command-line flags of a run, generated from the fields of RunConfig.

A flag that is not given is None. A given flag is True or False if it is boolean, else a list of texts. Precedence, from low to high:
default, resumed run, --config file, flag.
"""

import inspect
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from .. import config, spec
from ..config import RunConfig
from ..errors import ConfigError

# Headings in --help, and the names of the options below each heading.
PANELS = {
    "Task and data": "task data init partition clients seed",
    "Rounds": "rounds participation quorum deadline network strategy weights weight_cap relays attack evaluate eval_every holdout horizon",
    "Server step": "clip_update server_optimizer server_lr",
    "Local training": "local_steps local_steps_schedule local_epochs batch_size batch_size_schedule accumulate augment",
    "Optimizer of the clients": "optimizer optimizer_state lr lr_warmup lr_schedule step_schedule momentum keep_momentum "
    "weight_decay proximal clip",
    "Compression": "uplink memory density_warmup density_schedule budget bandwidths downlink downlink_memory cache",
    "Machine": "device residuals engine cohort_batch precision",
    "Output": "out resume checkpoint_every plain log_json metrics_port tensorboard",
}
METAVARS = {int: "N", float: "X", str: "TEXT"}
Command = TypeVar("Command", bound=Callable[..., None])


def option(
    metavar: str | None,
    help: str,
    *names: str,
    default: Any = None,
    panel: str | None = None,
    shown: object = None,
    **limits: Any,
) -> Any:
    """Return a typer option. `panel` is its heading in the help. `shown` is the default that the help shows in place of `default`."""
    help += "" if shown is None else rf" [dim]\[default: {shown}][/dim]"
    return typer.Option(
        default, *names, metavar=metavar, help=help, rich_help_panel=panel, **limits
    )


def switch(name: str, help: str) -> Any:
    """Return a boolean flag that is off by default."""
    return typer.Option(False, name, help=help)


# Options that several commands share.
DATA = option(
    "DIR",
    "Folder of the task's data. Default: the folder that the environment variable FEDCOMP_DATA names.",
)
ENROLMENT_DEFAULT = "the file that the environment variable FEDCOMP_ENROLMENT names, or else ~/.config/fedcomp/enrolment.toml"
JSON = switch("--json", "Print JSON instead of text.")
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="[auto|cpu|cuda|cuda:N]",
        help="Device to compute on; auto = the first GPU if there is one, else the CPU.",
    ),
]


def with_run_flags(
    without: Collection[str] = (), panel: str | None = None
) -> Callable[[Command], Command]:
    """Return a decorator that adds --config and the options of RunConfig, except those in `without`, to `command(…, **flags)`.

    `panel` is the heading, in the help, of the command's own options. Options that are not boolean are parsed as lists of values, because a
    flag may be repeated. `run_values` rejects repeated flags for options that may have only one value.
    """
    options = [
        _option(RunConfig.__dataclass_fields__[name], panel)
        for panel, names in PANELS.items()
        for name in names.split()
        if name not in without
    ]
    help = "TOML file with options of the run. Flags override the values in the file."
    file = option("FILE", help, "--config", panel="Output")

    def decorate(command: Command) -> Command:
        parameters = list(inspect.signature(command).parameters.values())[:-1]
        for parameter in parameters:
            parameter.default.rich_help_panel = panel
        signature = inspect.Signature([*parameters, *options, _parameter("config", str, file)])
        vars(command)["__signature__"] = signature
        command.__annotations__ = {}
        return command

    return decorate


def _option(f: Any, panel: str) -> inspect.Parameter:
    kind = config.option_type(f.name)
    flag = config.flag(f.name)
    name = f"{flag}/--no-{flag.removeprefix('--')}" if kind is bool else flag
    choices = f.metadata.get("choices")
    metavar = None if kind is bool else f"[{'|'.join(choices)}]" if choices else METAVARS[kind]
    shown = f"{f.default:g}" if isinstance(f.default, float) else f.default
    shown = None if shown is False else shown
    declared = option(metavar, f.metadata["help"], name, panel=panel, shown=shown)
    return _parameter(f.name, bool if kind is bool else list[str], declared)


def _parameter(name: str, kind: Any, declared: Any) -> inspect.Parameter:
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=declared, annotation=kind | None)


def run_config(given: Mapping[str, Any]) -> RunConfig:
    """Return the options of a run. Raises UserError for invalid options."""
    return RunConfig(**run_values(given))


def run_values(given: Mapping[str, Any], repeatable: Collection[str] = ()) -> dict[str, Any]:
    """Return the options, by name, that flags, the --config file or a resumed run set. Options in `repeatable` may have a list of values.

    Raises UserError for invalid options.
    """
    flags = {name: value for name, value in given.items() if value not in (None, ())}
    file = flags.pop("config", None)
    values = config.read_toml(file, repeatable) if file is not None else {}
    for name, value in flags.items():
        values[name] = _converted(name, value, repeatable)
    if "local_steps" in flags and values.get("local_epochs"):
        raise ConfigError("--local-steps and --local-epochs exclude each other; give one of them")
    if values.get("resume") and "out" in values:
        alternatives = config.expand_home(values["out"], "--out") / config.ALTERNATIVES_FILE
        if repeatable and alternatives.is_file():
            return config.read_toml(alternatives, repeatable) | values
        return config.inherited_options(values["out"]) | values
    return values


def _converted(name: str, value: Any, repeatable: Collection[str]) -> Any:
    if isinstance(value, bool):
        return value
    given, flag = [value] if isinstance(value, str) else value, config.flag(name)
    times = f"{flag} is given {len(given)} times"
    if repeatable and name == "task" and len(given) > 1:
        raise ConfigError(
            f"{times}, but all compared runs need the same task; give one task, and compare runs of several tasks with fedcomp report"
        )
    if name not in config.ALTERNATIVE_OPTIONS:
        given = given[-1:]  # only the last value counts
    if repeated := [one for one in given if given.count(one) > 1]:
        raise ConfigError(f"{flag} {repeated[0]} is given twice; give it once")
    if len(given) > 1 and name not in repeatable:
        raise ConfigError(f"{times}; give it once, or compare the values with fedcomp sim")
    converted = [spec.convert(one, config.option_type(name), flag) for one in given]
    return converted if len(converted) > 1 else converted[0]


def resume_command(given: Mapping[str, Any], out: str, command: Sequence[str]) -> str:
    """Return the shell command that continues the run in the folder `out`. The run was started by `command` with the flags `given`."""
    words = [*command]
    for name, value in given.items():
        flag = config.flag(name)
        if value is None or name in ("out", "resume"):
            continue
        if isinstance(value, bool):
            words += [flag if value else "--no-" + flag.removeprefix("--")]
            continue
        for one in value if isinstance(value, list | tuple) else [value]:
            words += [flag, str(one)]
    return shlex.join([*words, "--out", out, "--resume"])
