"""The command `fedcomp`. Do not import torch, numpy, numba or flwr at module level, so that --help answers at once."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

from .. import __version__, spec
from ..config import ALTERNATIVE_OPTIONS, KEYS, RunConfig, data_folder
from ..errors import UserError
from ..run_display import LineDisplay, RunDisplay
from . import deployment_commands, doctor, flags, keys, reproduce, results
from .comparison.alternatives import (
    Alternative,
    alternatives,
    compares_compression,
    has_alternatives,
)
from .exits import command_group, print_help, stoppable
from .flags import option, switch

SIMULATION_ONLY = ("network", "attack", "cohort_batch", "residuals")
NOT_IN_BENCH = "rounds out resume checkpoint_every plain log_json metrics_port tensorboard".split()

app = command_group(
    pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.callback(invoke_without_command=True)
def fedcomp(
    context: typer.Context, version: bool = switch("--version", "Print the version.")
) -> None:
    """Federated learning with compressed updates. Byte counts are the sizes of the encoded updates and models sent, not estimates."""
    if version:
        print(f"fedcomp {__version__}")
        raise typer.Exit
    print_help(context)


@app.command("sim")
@flags.with_run_flags(panel="Comparison")
def simulation(
    target_accuracy: str | None = option(
        "ACCURACY", "Report the rounds and bytes needed to reach this accuracy, such as 90%."
    ),
    side_by_side: str | None = option(
        "[auto|N]",
        "Number of compared runs to execute at the same time; auto = as many as there are CPU cores if each run uses a single core, "
        "otherwise 1.",
    ),
    baseline: bool | None = option(
        None,
        "Add an uncompressed run named dense to the comparison. The compression ratios of the other runs are then relative to the bytes of "
        "this run. Default: added if the compared runs differ in their compression.",
        "--baseline/--no-baseline",
    ),
    dry_run: bool | None = option(
        None,
        "Do not execute the run; print the number of parameters, the sizes of encoded updates, and the bytes that the run would send.",
        "--dry-run",
    ),
    **run_flags: Any,
) -> None:
    """Simulate a federation of virtual clients on this machine.

    Numbers may be written 0.01, 1% or 1/100. Flags override the --config file. With --resume, flags and the --config file override the
    options stored in the run folder. If an option such as --uplink or --seed is given more than once, fedcomp runs every combination of the
    values and compares the results.
    """
    values = flags.run_values(run_flags, ALTERNATIVE_OPTIONS)
    target = results.parse_accuracy(target_accuracy)
    compare = has_alternatives(values)
    baseline_flag = "--baseline" if baseline else "--no-baseline"
    for flag, value in {"--side-by-side": side_by_side, baseline_flag: baseline}.items():
        if value is not None and not compare:
            raise UserError(
                f"{flag} applies to comparisons only; give an option such as --uplink more than once, or leave {flag} out"
            )
    if dry_run:
        from .dry_run import print_forecasts

        dense = compares_compression(values) if baseline is None else baseline
        print_forecasts(alternatives(values, dense) if compare else [Alternative("", values)])
        return
    own_flags = {
        "target_accuracy": target_accuracy,
        "side_by_side": side_by_side,
        "baseline": baseline,
    }
    run_flags = own_flags | run_flags
    if compare:
        _compare(values, run_flags, side_by_side or "auto", target, baseline)
        return
    config = RunConfig(**values)

    def run(display: RunDisplay) -> None:
        from ..sim import simulate

        simulate(config, display)

    _run(run, config, run_flags, ("fedcomp", "sim"), target)


def _run(
    run: Callable[[RunDisplay], Any],
    config: RunConfig,
    run_flags: dict[str, Any],
    command: Sequence[str],
    target: float | None = None,
) -> None:
    """Call `run(display)`, which executes a run, and write the HTML report. Exit with status 1 if no update was accepted."""
    display = _display(config)

    def stop_message(cause: str) -> str:
        if not display.has_started:
            return f"{cause} before the run began"
        resume = flags.resume_command(run_flags, display.header.out, command)
        return f"{cause} {display.reached}; continue with: {resume}"

    with stoppable(stop_message, display):
        run(display)
    if display.has_started:
        from .report.page import after_run

        after_run(Path(display.header.out), LineDisplay().on_warning, target)
    if display.summary is not None and not display.summary.client_updates:
        raise typer.Exit(1)


def _compare(
    values: dict[str, Any],
    run_flags: dict[str, Any],
    side_by_side: str,
    target: float | None,
    baseline: bool | None,
) -> None:
    """Run all combinations of option values, show their progress, and print a table of the results."""
    from .comparison.comparison import Comparison
    from .comparison.displays import FAILED, ComparisonLines, ComparisonView

    lines_only = _prints_lines(values.get("plain", False))
    display = ComparisonLines() if lines_only else ComparisonView()
    comparison = Comparison(values, display, side_by_side, target, baseline)

    def stop_message(cause: str) -> str:
        if not display.out:
            return f"{cause} before the first run of the comparison began"
        resume = flags.resume_command(run_flags, display.out, ("fedcomp", "sim"))
        return (
            f"{cause} with {display.ended} of {len(display.all)} runs done; continue with: {resume}"
        )

    with stoppable(stop_message, display):
        lines = comparison.run()
    comparison.show(lines)
    if all(progress.state == FAILED for progress in display.all):
        raise typer.Exit(1)


def _display(config: RunConfig) -> RunDisplay:
    """Return the display of a run: none if the JSON log goes to standard output, else lines of text or a dashboard."""
    if config.log_json == "-":
        return RunDisplay()
    if _prints_lines(config.plain):
        return LineDisplay()
    from .dashboard import Dashboard

    return Dashboard()


def _prints_lines(plain: bool) -> bool:
    """Return whether to print lines of text instead of a dashboard: with --plain, or if standard output cannot show a dashboard."""
    return plain or not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")


@app.command()
def init(path: Path = typer.Argument(Path("my_task.py"), help="The file to write.")) -> None:
    """Write an example task to a Python file, ready to run and edit."""
    from importlib import resources

    if path.suffix != ".py" or not str(path).isprintable():
        raise UserError(
            f"'{path}' does not end in .py or is not printable; name a Python file: fedcomp init my_task.py"
        )
    source = resources.files("fedcomp").joinpath("tasks", "example_task.py")
    example = source.read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example)
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        why = "exists and is not overwritten" if exists else f"cannot be written: {error.strerror}"
        raise UserError(f"{path} {why}; name another file: fedcomp init PATH") from None
    (command,) = re.findall(r"^ +(fedcomp sim .*)$", example, re.MULTILINE)
    command = command.replace("my_task.py:task", shlex.quote(f"{path}:task"))
    print(f"{path} is written; run it with:\n\n    {command}\n")


@app.command()
def codecs() -> None:
    """List the codecs with their default options, their properties, and the papers that describe them."""
    from .listing import print_codecs

    print_codecs()


@app.command()
def tasks(data: Path | None = flags.DATA) -> None:
    """List the built-in tasks with their numbers of parameters and examples, and the location of their data."""
    from .listing import print_tasks

    print_tasks(data_folder(data))


@app.command()
def report(
    folders: list[Path] = typer.Argument(
        ...,
        metavar="RUN...",
        help="Folders of runs (finished or not) or of comparisons. The report averages runs that differ only in the seed.",
    ),
    out: Path | None = option(
        "DIR",
        "Folder to write report.html to. Default: RUN, or the current folder if several RUNs are given.",
    ),
    target_accuracy: str | None = option(
        "ACCURACY", "Report the rounds and bytes needed to reach this accuracy, such as 90%."
    ),
) -> None:
    """Write a report on runs as one self-contained HTML page with a recommendation, charts, and tables of results and settings."""
    from .report.page import write_and_print_path

    write_and_print_path(folders, out, target_accuracy)


app.command()(doctor.doctor)
app.command()(reproduce.reproduce)
app.command()(deployment_commands.client)
app.command()(deployment_commands.relay)
bench = command_group("Measure codecs and simulations on this machine.")
app.add_typer(bench, name="bench")
app.add_typer(keys.app, name="keys")
server = command_group("Serve a federation of real clients.")
app.add_typer(server, name="server")


@bench.command("codecs")
def bench_codecs(
    numel: str | None = option(
        "N", "Compress a random vector of N normally distributed values. Default: 1M (one million)."
    ),
    task: str | None = option(
        None, "Compress a model update of this task instead of a random vector."
    ),
    data: Path | None = flags.DATA,
    codec: list[str] | None = option(
        None, "Codec to measure; may be given more than once. Default: all codecs."
    ),
    device: flags.Device = "cpu",
    repeats: int = option(
        "N", "Number of repetitions; median times are shown.", default=5, min=1, max=1000
    ),
    json: bool = flags.JSON,
    picture: Path | None = option(
        "FILE", "Write an SVG chart of the codecs' error against bits per parameter to this file."
    ),
) -> None:
    """Encode and decode a vector with codecs, and measure their speed, encoded size and error.

    Times are compared with the time to copy the vector.
    """
    from ..training import devices
    from .bench_codecs import bench, normal, update_of

    if task is not None and numel is not None:
        raise UserError(
            "--numel compresses a random vector and --task a model update; give one of them"
        )
    if data is not None and task is None:
        raise UserError("--data is the folder of a task's data; give --task as well")
    try:
        count = spec.parse_count(numel or "1M")
    except spec.MALFORMED:
        advice = "give a whole number such as 1000000, 25M or 1G"
        raise UserError(f"--numel is '{numel}'; {advice}") from None
    target = devices.parse_device(device)
    vector = update_of(task, data_folder(data), target) if task else normal(count, target)
    bench(vector, codec or (), repeats, json, picture)


@bench.command("sim")
@flags.with_run_flags(without=NOT_IN_BENCH)
def bench_sim(
    rounds: int = option("N", "Number of rounds to measure.", default=5, min=1, max=10_000),
    loops: str = typer.Option(
        "lean",
        metavar="[lean|usual|big-batch|none]",
        help="Plain PyTorch training loops to compare with, separated by commas: lean (all clients reuse one model, and batches are "
        "selected by index), usual (a copy of the model and a DataLoader for each client), big-batch (one model trains on the merged "
        "batches of all clients), or none.",
    ),
    json: bool = flags.JSON,
    **run_flags: Any,
) -> None:
    """Measure a simulation: client updates per second, the time of each part of a round, and the fraction of the device's peak FLOP/s.

    Warm-up rounds are not measured. After each measured round, the PyTorch loops in --loops train as many clients as the round did. The
    last line of output names the three most expensive parts of a round besides training; the part named rest is the time outside of all
    other parts. The run folder is deleted at the end.
    """
    from .bench_sim import bench

    bench(flags.run_config(run_flags), rounds, loops, json)


@server.command("start")
@flags.with_run_flags(without=SIMULATION_ONLY, panel="The server's port")
def start(
    port: int | None = option(
        "N",
        "Port to listen on; 0 = any free port.",
        shown=deployment_commands.PORT,
        min=0,
        max=65_535,
    ),
    host: str | None = option(
        "HOST",
        "Address of this machine to listen on. Default: all addresses; with --insecure, only the loopback address.",
    ),
    keys: str | None = option("DIR", "Folder of keys, written by fedcomp keys init.", shown=KEYS),
    insecure: bool | None = option(
        None, "Serve without TLS and keys, for a trial on one machine.", "--insecure"
    ),
    transport: str | None = option(
        None,
        f"Transport of the messages: {deployment_commands.TRANSPORT_HELP}.",
        shown="grpc",
        click_type=deployment_commands.TRANSPORTS,
    ),
    **run_flags: Any,
) -> None:
    """Start the server of a run, wait until --clients clients have connected, and run the rounds with them.

    Clients connect to one port, with TLS and the keys that fedcomp keys init creates. With --insecure, they connect without TLS and keys.
    Options such as --rounds and --uplink have the same meaning as in fedcomp sim.
    """
    config = flags.run_config(run_flags)
    port_options: dict[str, Any] = {"port": port, "host": host, "keys": keys}
    port_options |= {"insecure": insecure, "transport": transport}
    _run(
        lambda display: deployment_commands.serve(config, display, **port_options),
        config,
        port_options | run_flags,
        ("fedcomp", "server", "start"),
    )


def main() -> None:
    """Run the command line. Raises SystemExit with the exit status."""
    # Let idle OpenMP threads sleep early. On shared cores, spinning threads make a round take ten times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # None if the parent process closed the stream
            setattr(sys, name, open(os.devnull, "w"))
        # Print ? for characters that the terminal's encoding lacks.
        getattr(sys, name).reconfigure(errors="replace")
    try:
        get_command(app)(prog_name="fedcomp")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Avoid a traceback if Ctrl-C is pressed while the interpreter exits.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
