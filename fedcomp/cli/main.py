"""The command `fedcomp`. Nothing at module level may import torch, numpy, numba or flwr: help must answer at once."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_command

from .. import __version__, spec
from ..config import ALTERNATIVE_OPTIONS, KEYS, RunConfig, data_folder
from ..errors import UserError
from ..formatting import one_line
from . import deployed, doctor, flags, keys, reproduce, results
from .comparison.alternatives import Alternative, alternatives, compares_compression, is_span
from .exits import CommandGroup, command_group, stoppable

if TYPE_CHECKING:
    from ..run_display import RunDisplay
    from .comparison.progress import ComparisonDisplay

COMPARISON, PORT = "Comparison", "The server's port"  # panels of the help
SIMULATION_ONLY = ("network", "attack", "cohort_batch", "residuals")
NOT_MEASURED = "rounds out resume checkpoint_every plain log_json metrics_port tensorboard".split()

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def fedcomp(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """Federated learning with compressed updates: every byte counted is a byte sent."""
    if version:
        print(f"fedcomp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command("sim")
@flags.with_run_flags()
def simulation(
    target_accuracy: str | None = typer.Option(
        None,
        metavar="SHARE",
        rich_help_panel=COMPARISON,
        help="Report rounds and bytes needed to reach this accuracy, such as 90%, in table and report.",
    ),
    side_by_side: str | None = typer.Option(
        None,
        metavar="[auto|N]",
        rich_help_panel=COMPARISON,
        help="Processes that run alternatives at once; auto = one for each core of a CPU if the model is trained on one, else one.",
    ),
    baseline: bool | None = typer.Option(
        None,
        "--baseline/--no-baseline",
        rich_help_panel=COMPARISON,
        help="Add a line named dense, which compresses nothing in either direction; ratios refer to its bytes. "
        "Default: added where alternatives differ in their compression.",
    ),
    dry_run: bool | None = typer.Option(
        None,
        "--dry-run",
        rich_help_panel=COMPARISON,
        help="Print parameters, sizes of frames and expected bytes, and train nothing.",
    ),
    **given: Any,
) -> None:
    """Simulate a federation of virtual clients on this machine.

    Numbers may be written 0.01, 1% or 1/100. An option is taken from its flag, else from the --config file, else from the run that
    --resume continues, else it has its default. An option of an experiment that is given again, such as a second --uplink or --seed,
    makes alternatives: all are run, beside each other where there is room, and compared. Alternatives that differ in their
    compression are compared with a line that compresses nothing, named dense.
    """
    values, target = flags.run_values(given, ALTERNATIVE_OPTIONS), results.share(target_accuracy)
    several = is_span(values)
    for flag, value in (
        ("--side-by-side", side_by_side),
        ("--baseline" if baseline else "--no-baseline", baseline),
    ):
        if value is not None and not several:
            raise UserError(
                f"{flag} is for several alternatives; give an option such as --uplink more than once, or leave it out"
            )
    if dry_run:
        from .dry_run import show

        dense = compares_compression(values) if baseline is None else baseline
        show(alternatives(values, dense) if several else [Alternative("", values)])
        return
    given = {
        "target_accuracy": target_accuracy,
        "side_by_side": side_by_side,
        "baseline": baseline,
    } | given
    if several:
        _compare(values, given, side_by_side or "auto", target, baseline)
        return
    config = RunConfig(**values)

    def run(watch: "RunDisplay") -> None:
        from ..sim import simulate

        simulate(config, watch)

    _run(run, config, given, ("fedcomp", "sim"), target)


def _run(
    run: Callable[["RunDisplay"], Any],
    config: RunConfig,
    given: dict[str, Any],
    command: Sequence[str],
    target: float | None = None,
) -> None:
    """Show a run and write its report. Exit with status 1 if no client's update was accepted in any round."""
    watch = _watch(config)

    def stopped(why: str) -> str:
        if not watch.header:
            return f"{why} before the run began"
        again = flags.resume_command(given, watch.header.out, command)
        return f"{why} {watch.reached}; continue with: {again}"

    with stoppable(stopped, watch):
        run(watch)
    if watch.header:
        from .reports import after_run

        after_run(
            Path(watch.header.out),
            lambda sentence: print(f"warning: {one_line(sentence)}", file=sys.stderr),
            target,
        )
    if watch.summary is not None and not watch.summary.client_updates:
        raise typer.Exit(1)


def _compare(
    values: dict[str, Any],
    given: dict[str, Any],
    side_by_side: str,
    target: float | None,
    baseline: bool | None,
) -> None:
    """Show the alternatives while they run, and then their table."""
    from .comparison import run

    watch: ComparisonDisplay
    if _plain(values.get("plain", False)):
        from .comparison.progress import ComparisonLines

        watch = ComparisonLines()
    else:
        from .comparison.comparison_view import ComparisonView

        watch = ComparisonView()
    comparison = run.Comparison(values, watch, side_by_side, target, baseline)

    def stopped(why: str) -> str:
        if not watch.out:
            return f"{why} before the first alternative began"
        again = flags.resume_command(given, watch.out, ("fedcomp", "sim"))
        return f"{why} with {watch.ended} of {len(watch.all)} alternatives done; continue with: {again}"

    with stoppable(stopped, watch):
        found = comparison.run()
    comparison.show(found)
    if comparison.exit_status:
        raise typer.Exit(comparison.exit_status)


def _watch(config: RunConfig) -> "RunDisplay":
    if config.log_json == "-":
        from ..run_display import RunDisplay

        return RunDisplay()
    if _plain(config.plain):
        from .line_display import LineDisplay

        return LineDisplay()
    from .dashboard import Dashboard

    return Dashboard()


def _plain(asked: bool) -> bool:
    """Return whether to print lines in place of a dashboard."""
    return asked or not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")


@app.command()
def init(
    path: Path = typer.Argument(Path("my_task.py"), help="The file to write.", show_default=True),
) -> None:
    """Write an example task of your own, ready to run and to change."""
    from importlib import resources

    if path.suffix != ".py" or not str(path).isprintable():
        raise UserError(
            f"'{path}' is no printable name that ends in .py; name a Python file: fedcomp init my_task.py"
        )
    example = (
        resources.files("fedcomp").joinpath("tasks", "example_task.py").read_text(encoding="utf-8")
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example)
    except FileExistsError:
        raise UserError(
            f"{path} exists and is not overwritten; name another file: fedcomp init PATH"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; name another file: fedcomp init PATH"
        ) from None
    (command,) = re.findall(r"^ +(fedcomp sim .*)$", example, re.MULTILINE)
    command = command.replace("my_task.py:task", shlex.quote(f"{path}:task"))
    print(f"{path} is written; run it with:\n\n    {command}\n")


@app.command()
def codecs() -> None:
    """List the codecs with their default options, properties and sources."""
    from .listing import print_codecs

    print_codecs()


@app.command()
def tasks(data: flags.Data = None) -> None:
    """List the built-in tasks: parameters, examples, and the place of the data."""
    from .listing import print_tasks

    print_tasks(data_folder(data))


@app.command()
def report(
    folders: list[Path] = typer.Argument(
        ...,
        metavar="RUN...",
        help="Run folders, finished or not, or folders of alternatives. Runs that differ only in their seeds become one line.",
    ),
    out: Path | None = typer.Option(
        None, metavar="DIR", help="Folder of report.html. Default: RUN if there is one, else here."
    ),
    target_accuracy: str | None = typer.Option(
        None, metavar="SHARE", help="Report rounds and bytes to this accuracy, such as 90%."
    ),
) -> None:
    """Write runs as one HTML page that needs no network: verdict, charts, tables of results and settings."""
    from . import reports

    reports.show(folders, out, target_accuracy)


app.command()(doctor.doctor)
app.command()(reproduce.reproduce)
app.command()(deployed.client)
app.command()(deployed.relay)
bench = command_group("Measure on this machine.")
app.add_typer(bench, name="bench")
app.add_typer(keys.app, name="keys")
server = command_group("Serve a federation of real clients.")
app.add_typer(server, name="server")


@bench.command("codecs")
def bench_codecs(
    numel: str | None = typer.Option(
        None, metavar="N", help="Length of a vector of normal values. Default: 1M."
    ),
    task: str | None = typer.Option(
        None, help="Use an update of this task in place of the vector."
    ),
    data: flags.Data = None,
    codec: list[str] | None = typer.Option(
        None, help="A codec; may be given more than once. Default: all."
    ),
    device: flags.Device = "cpu",
    repeats: int = typer.Option(
        5, metavar="N", min=1, max=1000, help="Repeats; medians are shown."
    ),
    json: flags.Json = False,
    picture: Path | None = typer.Option(
        None, metavar="FILE", help="Draw bits against error, as SVG."
    ),
) -> None:
    """Measure speed, frame size and error of codecs, beside a plain copy of the vector."""
    from ..training import devices
    from .bench_codecs import bench, normal, update_of

    if task is not None and numel is not None:
        raise UserError("--numel is for normal values and --task for an update; give one of them")
    if data is not None and task is None:
        raise UserError("--data is the folder of a task's data; give --task as well")
    try:
        count = spec.parse_count(numel or "1M")
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        raise UserError(
            f"--numel is '{numel}'; give a whole number such as 1000000, 25M or 1G"
        ) from None
    where = devices.parse_device(device)
    if task is None:
        vector = normal(count, where)
    else:
        vector = update_of(task, data_folder(data), where)
    bench(vector, codec or (), repeats, json, picture)


@bench.command("sim")
@flags.with_run_flags(without=NOT_MEASURED)
def bench_sim(
    rounds: int = typer.Option(5, metavar="N", min=1, max=10_000, help="Rounds to measure."),
    loops: str = typer.Option(
        "lean",
        metavar="[lean|usual|big-batch|none]",
        help="Plain PyTorch loops to compare with, several with commas: lean keeps one model and takes examples by index, usual "
        "copies the model and makes a DataLoader for each client, big-batch takes the batches of all clients as one; none skips them.",
    ),
    trace: Path | None = typer.Option(
        None, metavar="FILE", help="Write a profile for Perfetto or chrome://tracing."
    ),
    json: flags.Json = False,
    **given: Any,
) -> None:
    """Measure rounds of a simulation: client updates a second, where the time goes, how much of the device's arithmetic is reached.

    The options are those of fedcomp sim. The rounds are real ones, in a folder that is removed; the first is not counted. After each,
    plain PyTorch trains as many of the clients. The last line names the three largest costs around training.
    """
    from .bench_sim import bench

    bench(flags.run_config(given), rounds, loops, json, trace)


@server.command("start")
@flags.with_run_flags(without=SIMULATION_ONLY)
def start(
    port: int | None = typer.Option(
        None,
        metavar="N",
        min=0,
        max=65_535,
        rich_help_panel=PORT,
        help=rf"port to listen on, 0 = a free one [dim]\[default: {deployed.PORT}][/dim]",
    ),
    host: str | None = typer.Option(
        None,
        metavar="HOST",
        rich_help_panel=PORT,
        help="address of this machine to listen on; all addresses by default, loopback with --insecure",
    ),
    keys: str | None = typer.Option(
        None,
        metavar="DIR",
        rich_help_panel=PORT,
        help=rf"folder of keys, made by fedcomp keys init [dim]\[default: {KEYS}][/dim]",
    ),
    insecure: bool | None = typer.Option(
        None,
        "--insecure",
        rich_help_panel=PORT,
        help="without TLS and keys, for a trial on one machine",
    ),
    transport: str | None = typer.Option(
        None,
        click_type=deployed.TRANSPORTS,
        rich_help_panel=PORT,
        help=rf"transport of the messages: {deployed.TRANSPORT_HELP} [dim]\[default: grpc][/dim]",
    ),
    **given: Any,
) -> None:
    """Start the server of a run, wait for --clients clients, and run it with them.

    Clients come through one port, with TLS and the keys of fedcomp keys init. The options of the run are those of fedcomp sim.
    """
    config = flags.run_config(given)
    door: dict[str, Any] = {
        "port": port,
        "host": host,
        "keys": keys,
        "insecure": insecure,
        "transport": transport,
    }
    _run(
        lambda watch: deployed.serve(config, watch, **door),
        config,
        door | given,
        ("fedcomp", "server", "start"),
    )


def main() -> None:
    """Run the console script, which ends by SystemExit."""
    # Waiting threads of torch give way: on shared cores they make a round ten times as long.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))
        # An ASCII terminal shows ? for characters that it lacks.
        getattr(sys, name).reconfigure(errors="replace")
    try:
        get_command(app)(prog_name="fedcomp")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            # Ctrl-C while the interpreter exits ends it without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
