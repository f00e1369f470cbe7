"""Execution of the runs of a reproduction, each in its own folder. Finished runs are not repeated."""

import dataclasses
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedcomp.config import RUN_FILE, RunConfig, data_folder, first_difference, read_run
from fedcomp.errors import DataError, RunFolderError
from fedcomp.runs import Run, load

from .base import Experiment, Method, MethodResult, Options, Reproduction, Results

# File in a run folder with the run's compute time, including the time before interruptions.
TIME_FILE = "spent.json"


@dataclass(frozen=True)
class ComputeTime:
    """Compute time of one or more runs, in seconds."""

    wall_s: float = 0.0
    processor_s: float = 0.0  # processor time, summed over all cores

    def __add__(self, other: "ComputeTime") -> "ComputeTime":
        return ComputeTime(self.wall_s + other.wall_s, self.processor_s + other.processor_s)


@dataclass(frozen=True)
class LocalOptions:
    """The options of runs that depend on the machine: the folder of the data, and the device."""

    data: str | None = None
    device: str = "auto"


def choice_slug(choice: Options) -> str:
    """Return a choice of options as part of a folder name, such as `lr-0.1`, or "" if the choice has no options."""
    return "-".join(
        f"{name.replace('_', '-')}-{value:g}"
        if isinstance(value, float)
        else f"{name.replace('_', '-')}-{value}"
        for name, value in choice.items()
    )


def config_of(
    experiment: Experiment,
    method: Method,
    choice: Options,
    seed: int,
    local: LocalOptions = LocalOptions(),
) -> RunConfig:  # noqa: B008
    """Return the options of one run. The run is evaluated only after its last round, unless the experiment sets eval_every."""
    own = {
        **experiment.common,
        **method.options,
        **choice,
        "seed": seed,
        "data": local.data,
        "device": local.device,
    }
    rounds = own.get("rounds", RunConfig.rounds)
    return RunConfig(**{"eval_every": rounds, "checkpoint_every": max(1, rounds // 4)} | own)


def reproduce(
    reproduction: Reproduction,
    experiment: Experiment,
    out: Path,
    local: LocalOptions,
    log: Callable[[str], None],
) -> tuple[Results, ComputeTime]:
    """Run the methods of an experiment, and return the results and the total compute time.

    Runs that are already finished in the folder `out` are not repeated. `log` is called with one line for each run. Raises UserError if
    data are missing or a folder contains a run with other options.
    """
    _check_data(reproduction, local)
    results, total = {}, ComputeTime()
    for name, method in experiment.methods.items():

        def run(choice: Options, seed: int, name: str = name, method: Method = method) -> Run:
            nonlocal total
            parts = [name, choice_slug(choice), f"seed-{seed}"]
            config = config_of(experiment, method, choice, seed, local)
            finished, time, was_done = _run(config, out / "-".join(filter(None, parts)))
            total += time
            log(
                f"{', '.join(filter(None, (name, choice_text(choice), f'seed {seed}')))}: {100 * finished.accuracy:.1f} %, "
                + ("done before" if was_done else f"{time.wall_s:.0f} s")
            )
            return finished

        first = [run(choice, 0) for choice in method.choices]
        best = max(range(len(first)), key=lambda i: first[i].accuracy)
        choice = method.choices[best]
        tried = {
            choice_text(c) or name: r.accuracy for c, r in zip(method.choices, first, strict=True)
        }
        results[name] = MethodResult(
            (first[best], *(run(choice, seed) for seed in range(1, experiment.seeds))),
            choice,
            tried,
        )
    return results, total


def _check_data(reproduction: Reproduction, local: LocalOptions) -> None:
    if not reproduction.needs:
        return
    folder = data_folder(local.data)
    if folder is None or not (folder / reproduction.needs).is_dir():
        raise DataError(
            f"reproduction '{reproduction.name}' needs the data folder {reproduction.needs}/, which is not in "
            f"{folder or 'FEDCOMP_DATA'}; give the folder that contains it with --data"
        )


def _run(config: RunConfig, folder: Path) -> tuple[Run, ComputeTime, bool]:
    """Start or continue a run. Return the run, its compute time, and whether it was already finished."""
    config = dataclasses.replace(config, out=str(folder))
    if (folder / RUN_FILE).is_file():
        _check_same(config, folder)
        if (run := load(folder)).summary is not None and len(run.records) >= config.rounds:
            return run, _spent(folder), True
        config = dataclasses.replace(config, resume=True)
    from fedcomp.sim import simulate

    before, began = _spent(folder), _now()
    try:
        simulate(config)
    finally:
        now = _now()
        spent = before + ComputeTime(now.wall_s - began.wall_s, now.processor_s - began.processor_s)
        if (folder / RUN_FILE).is_file():
            (folder / TIME_FILE).write_text(json.dumps(dataclasses.asdict(spent)), encoding="utf-8")
    return load(folder), spent, False


def _check_same(config: RunConfig, folder: Path) -> None:
    """Raise RunFolderError if the folder contains a run with options other than `config`."""
    from fedcomp.strategies import resolved

    stored = {f.name: f.default for f in dataclasses.fields(config)} | read_run(folder)
    different = first_difference(resolved(dataclasses.replace(config, resume=True)), stored)
    if different or stored.get("rounds") != config.rounds:
        raise RunFolderError(
            f"{folder} contains a run with a different '{different or 'rounds'}'; give another --out, or remove that folder"
        )


def _now() -> ComputeTime:
    """Return the current time, and the processor time of this process and its finished child processes."""
    own, others = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return ComputeTime(
        time.perf_counter(), own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    )


def _spent(folder: Path) -> ComputeTime:
    try:
        return ComputeTime(**json.loads((folder / TIME_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return ComputeTime()


def choice_text(choice: Options) -> str:
    """Return a choice of options as text, such as `lr 0.1`."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in choice.items()
    )
