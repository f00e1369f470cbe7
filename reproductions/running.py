"""The runs of a reproduction, one folder each, so that what is finished is not done again."""

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

from .base import Form, Measured, Method, Options, Reproduction, Results

SPENT = "spent.json"  # in a run's folder: what it took, over all invocations


@dataclass(frozen=True)
class Spent:
    """What runs took."""

    wall_s: float = 0.0
    processor_s: float = 0.0  # of all cores

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.wall_s + other.wall_s, self.processor_s + other.processor_s)


@dataclass(frozen=True)
class Machine:
    """What is given to every run."""

    data: str | None = None
    device: str = "auto"


def named(choice: Options) -> str:
    """`lr-0.1` for a choice of the learning rate; "" for the choice of nothing."""
    return "-".join(
        f"{name.replace('_', '-')}-{value:g}"
        if isinstance(value, float)
        else f"{name.replace('_', '-')}-{value}"
        for name, value in choice.items()
    )


def config_of(
    form: Form, method: Method, choice: Options, seed: int, machine: Machine = Machine()
) -> RunConfig:  # noqa: B008
    """The options of one run, evaluated at its end unless the form says otherwise."""
    own = {
        **form.common,
        **method.options,
        **choice,
        "seed": seed,
        "data": machine.data,
        "device": machine.device,
    }
    rounds = own.get("rounds", RunConfig.rounds)
    return RunConfig(**{"eval_every": rounds, "checkpoint_every": max(1, rounds // 4)} | own)


def reproduce(
    reproduction: Reproduction, form: Form, out: Path, machine: Machine, tell: Callable[[str], None]
) -> tuple[Results, Spent]:
    """Runs whatever `out` does not hold yet. Returns the measurements by method, and what all of them took.

    `tell` gets a line a run. Raises UserError for data that are not there and for a folder that holds other runs.
    """
    _check_data(reproduction, machine)
    results, spent = {}, Spent()
    for name, method in form.methods.items():

        def run(choice: Options, seed: int, name: str = name, method: Method = method) -> Run:
            nonlocal spent
            words = [name, named(choice), f"seed-{seed}"]
            made, took, kept = _run(
                config_of(form, method, choice, seed, machine), out / "-".join(filter(None, words))
            )
            spent += took
            tell(
                f"{', '.join(filter(None, (name, shown(choice), f'seed {seed}')))}: {100 * made.accuracy:.1f} %, "
                + ("done before" if kept else f"{took.wall_s:.0f} s")
            )
            return made

        first = [run(choice, 0) for choice in method.choices]
        best = max(range(len(first)), key=lambda i: first[i].accuracy)
        choice = method.choices[best]
        tried = {
            shown(c) or name: made.accuracy for c, made in zip(method.choices, first, strict=True)
        }
        results[name] = Measured(
            (first[best], *(run(choice, seed) for seed in range(1, form.seeds))), choice, tried
        )
    return results, spent


def _check_data(reproduction: Reproduction, machine: Machine) -> None:
    """Raises DataError, before a long run, where the data of a later one would be missing."""
    if not reproduction.needs:
        return
    folder = data_folder(machine.data)
    if folder is None or not (folder / reproduction.needs).is_dir():
        raise DataError(
            f"reproduction '{reproduction.name}' needs the folder {reproduction.needs}/ of the data, which is not in "
            f"{folder or 'FEDCOMP_DATA'}; name the folder that holds it with --data"
        )


def _run(config: RunConfig, folder: Path) -> tuple[Run, Spent, bool]:
    """A run, what it took, and whether it had been done before. A started one is continued."""
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
        spent = before + Spent(now.wall_s - began.wall_s, now.processor_s - began.processor_s)
        if (folder / RUN_FILE).is_file():
            (folder / SPENT).write_text(json.dumps(dataclasses.asdict(spent)), encoding="utf-8")
    return load(folder), spent, False


def _check_same(config: RunConfig, folder: Path) -> None:
    """Raises RunFolderError where a folder holds a run of other options. What a strategy chose for itself is no difference."""
    from fedcomp.strategies import resolved

    stored = {f.name: f.default for f in dataclasses.fields(config)} | read_run(folder)
    different = first_difference(resolved(dataclasses.replace(config, resume=True)), stored)
    if different or stored.get("rounds") != config.rounds:
        raise RunFolderError(
            f"{folder} holds a run of another '{different or 'rounds'}'; give another --out, or remove that folder"
        )


def _now() -> Spent:
    """Wall clock, and processor time of this process and of its children that have ended."""
    own, others = (
        resource.getrusage(resource.RUSAGE_SELF),
        resource.getrusage(resource.RUSAGE_CHILDREN),
    )
    return Spent(
        time.perf_counter(), own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime
    )


def _spent(folder: Path) -> Spent:
    try:
        return Spent(**json.loads((folder / SPENT).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Spent()


def shown(choice: Options) -> str:
    """`lr 0.1`, for people."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:g}"
        if isinstance(value, float)
        else f"{name.replace('_', ' ')} {value}"
        for name, value in choice.items()
    )
