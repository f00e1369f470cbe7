"""The command `fedcomp`. Nothing at module level may import torch, numpy, numba or flwr: help must answer at once."""

import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import __version__, spec
from ..config import SPANNING, RunConfig, data_folder, suggestion
from ..errors import INTERRUPTED, FedcompError, UserError
from ..formatting import one_line
from . import deployed, doctor, flags, keys, reproduce, results
from .comparison.alternatives import (
    Alternative,
    alternatives,
    compares_compression,
    is_span,
)
from .signals import Signals

if TYPE_CHECKING:
    from ..watch import Watch

UNWRITABLE = (
    errno.EIO,
    errno.ENOSPC,
    errno.EPIPE,
)  # what files raise for these are errors of our own
OUTPUT_LOST = (
    1  # exit status where standard output is a full disk or a pipe that nobody reads any more
)


def complain(sentence: str) -> None:
    """One line on standard error, whatever the sentence quotes."""
    with suppress(OSError):  # there is nowhere else to say it
        print(f"fedcomp: {one_line(sentence)}", file=sys.stderr)


def output_lost(error: BaseException | None = None) -> str | None:
    """Why standard output cannot be written, judged by `error` and by a flush, None while it can.

    What could not be written is dropped: the interpreter would try again when it leaves.
    """
    try:
        sys.stdout.flush()
    except OSError as late:
        error = late
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return f"standard output cannot be written ({error.strerror})"


class OneSentence(TyperGroup):
    """A group whose foreseeable errors are one sentence on standard error and an exit status; others keep their traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            status = super().main(*args, standalone_mode=False, **kwargs)
        except click.UsageError as error:
            complain(_usage(error))
            status = error.exit_code
        except FedcompError as error:
            complain(str(error))
            status = error.exit_status
        except click.Abort:
            status = INTERRUPTED
        except OSError as error:
            if not (lost := output_lost(error)):
                raise
            complain(lost)
            status = OUTPUT_LOST
        if lost := output_lost():
            complain(lost)
            status = status or OUTPUT_LOST
        sys.exit(status or 0)


def _usage(error: click.UsageError) -> str:
    said = (
        error.format_message()
        .partition(" Did you mean")[0]
        .partition(" (Did you mean")[0]
        .rstrip(".")
    )
    said = said[:1].lower() + said[1:]
    if isinstance(error, click.NoSuchOption) and error.ctx:
        known = {
            flag.removeprefix("--").replace("-", "_"): flag
            for parameter in error.ctx.command.params
            for flag in (*parameter.opts, *parameter.secondary_opts)
            if flag.startswith("--")
        }
        name = error.option_name.lstrip("-").replace("-", "_")
        help = f"see {error.ctx.command_path} --help"
        return f"{said}; {suggestion(name, known, lambda one: known[one], help)}"
    if near := getattr(error, "possibilities", None):
        return f"{said}; did you mean {' or '.join(near)}?"
    if isinstance(error, click.BadOptionUsage):
        return said
    return f"{said}; see {error.ctx.command_path if error.ctx else 'fedcomp'} --help"


app = typer.Typer(
    cls=OneSentence,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def fedcomp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Federated learning with compressed updates: every byte counted is a byte sent."""
    if version:
        print(f"fedcomp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def simulation(
    dry_run: bool | None,
    target_accuracy: str | None,
    side_by_side: str | None,
    baseline: bool | None,
    **given: Any,
) -> None:
    """Simulate a federation of virtual clients on this machine.

    Numbers may be written 0.01, 1% or 1/100. An option is taken from its flag, else from the --config file, else from the run that
    --resume continues, else it has its default. An option of an experiment that is given again, such as a second --uplink or --seed,
    makes alternatives: all are run, beside each other where there is room, and compared. Alternatives that differ in their
    compression are compared with a line that compresses nothing, named dense.
    """
    values, target = flags.run_values(given, SPANNING), results.share(target_accuracy)
    several = is_span(values)
    if side_by_side is not None and not several:
        raise UserError(
            "--side-by-side is for several alternatives; give an option such as --uplink more than once, or leave it out"
        )
    if baseline is not None and not several:
        raise UserError(
            f"--{'' if baseline else 'no-'}baseline is for several alternatives; give an option such as --uplink more than once, or "
            "leave it out"
        )
    if dry_run:
        from .dry_run import show

        dense = compares_compression(values) if baseline is None else baseline
        show(alternatives(values, dense) if several else [Alternative("", values)])
        return
    own = {
        "target_accuracy": target_accuracy,
        "side_by_side": side_by_side,
        "baseline": baseline,
    } | given
    if several:
        _compared(values, own, side_by_side or "auto", target, baseline)
        return
    config = RunConfig(**values)

    def simulated(watch: "Watch") -> None:
        from ..sim import simulate

        simulate(config, watch)

    _watched(simulated, _watch(config), own, ("fedcomp", "sim"), target)


app.command("sim")(
    flags.with_run_flags(
        simulation,
        flags.parameter(
            "target_accuracy",
            str,
            typer.Option(
                "--target-accuracy",
                metavar="SHARE",
                rich_help_panel="Comparison",
                help="Tell rounds and bytes to it, such as 90%, in table and report.",
            ),
        ),
        flags.parameter(
            "side_by_side",
            str,
            typer.Option(
                "--side-by-side",
                metavar="[auto|N]",
                rich_help_panel="Comparison",
                help="Alternatives that run at once, in processes; auto = one for each core of a CPU "
                "where the model is trained on one, else one after the other.",
            ),
        ),
        flags.parameter(
            "baseline",
            bool,
            typer.Option(
                "--baseline/--no-baseline",
                rich_help_panel="Comparison",
                help="Add a line named dense, which compresses nothing in either direction; ratios refer to its bytes. "
                "Default: added where alternatives differ in their compression.",
            ),
        ),
        flags.parameter(
            "dry_run",
            bool,
            typer.Option(
                "--dry-run",
                rich_help_panel="Comparison",
                help="Print parameters, sizes of frames and expected bytes, and train nothing.",
            ),
        ),
    )
)


def _watched(
    run: Callable[["Watch"], Any],
    watch: "Watch",
    given: dict[str, Any],
    command: Sequence[str],
    target: float | None = None,
) -> None:
    """Show a run and write its report. When it is ended from outside, say how to continue it.

    Exit with status 1 if no client's update was accepted in any round.
    """
    _to_its_end(lambda: run(watch), watch, lambda why: _stopped(why, watch, given, command))
    if watch.header:
        from .reports import after_run

        after_run(
            Path(watch.header.out),
            lambda sentence: print(f"warning: {one_line(sentence)}", file=sys.stderr),
            target,
        )
    if watch.summary is not None and not watch.summary.client_updates:
        raise typer.Exit(1)


def _compared(
    values: dict[str, Any],
    given: dict[str, Any],
    side_by_side: str,
    target: float | None,
    baseline: bool | None,
) -> None:
    """Alternatives on the screen, their table, and how to continue them when they are ended from outside."""
    from .comparison import run

    if _plain(values.get("plain", False)):
        from .comparison.lines import Lines as Screen
    else:
        from .comparison.comparison_view import ComparisonView as Screen
    watch, found = Screen(), []
    comparison = run.Comparison(values, watch, side_by_side, target, baseline)
    command = ("fedcomp", "sim")
    _to_its_end(
        lambda: found.extend(comparison.run()),
        watch,
        lambda why: run.continued(why, flags.resume_command(given, watch.out, command), watch),
    )
    comparison.show(found)
    if comparison.exit_status:
        raise typer.Exit(comparison.exit_status)


def _to_its_end(run: Callable[[], Any], watch: Any, stopped: Callable[[str], str]) -> None:
    """Do it on the screen; where it is ended from outside, say what `stopped` makes of why."""
    with Signals() as signals:
        try:
            with watch, signals.held_back_afterwards():
                run()
        except (KeyboardInterrupt, OSError) as error:
            lost = output_lost(error)
            number = signals.heard or (
                signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
            )
            if not (number or lost):
                raise
            complain(stopped("interrupted" if number else f"{lost}: stopped"))
            raise typer.Exit(128 + number if number else OUTPUT_LOST) from None


def _watch(config: RunConfig) -> "Watch":
    if config.log_json == "-":
        from ..watch import Watch

        return Watch()
    if _plain(config.plain):
        from .plain import Plain

        return Plain()
    from .dashboard import Dashboard

    return Dashboard()


def _plain(asked: bool) -> bool:
    """Whether lines are written in place of a dashboard."""
    return asked or not sys.stdout.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown")


def _stopped(why: str, watch: "Watch", given: dict[str, Any], command: Sequence[str]) -> str:
    if not watch.header:
        return f"{why} before the run began"
    done = (
        f"after round {watch.last_round} of {watch.header.rounds}"
        if watch.last_round
        else "before round 1 was done"
    )
    return f"{why} {done}; continue with: {flags.resume_command(given, watch.header.out, command)}"


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.", show_default=True)] = Path(
        "my_task.py"
    ),
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
    print(
        f"{path} is written; run it with:\n\n    {shlex.join(['fedcomp', 'sim', '--task', f'{path}:task'])}\n"
    )


@app.command()
def codecs() -> None:
    """List the codecs, with their options as they are when not given, and their sources."""
    from .listing import print_codecs

    print_codecs()


@app.command()
def tasks(
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the data; FEDCOMP_DATA when not given."),
    ] = None,
) -> None:
    """List the built-in tasks: parameters, examples, and where each finds its data."""
    from .task_list import show

    show(data_folder(RunConfig(data=data and str(data))))


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="Run folders, finished or not, or folders of alternatives; runs "
            "that differ in their seeds alone become one line with its spread.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of report.html; RUN when there is one, else the current folder.",
        ),
    ] = None,
    target_accuracy: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Report rounds and bytes to this accuracy, such as 90%."
        ),
    ] = None,
) -> None:
    """Write runs as one HTML page that needs no network: verdict, charts, tables of results and settings."""
    from . import reports

    reports.show(folders, out, target_accuracy)


bench = typer.Typer(cls=OneSentence, add_completion=False, rich_markup_mode="rich")
app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def measurements(context: typer.Context) -> None:
    """Measure on this machine."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bench.command("codecs")
def bench_codecs(
    numel: Annotated[
        str | None,
        typer.Option(metavar="N", help="Elements of a vector of normal values; 1M when not given."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Take an update of this task in place of normal values."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the task's data; FEDCOMP_DATA when not given."),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A codec, may be given again; all when not given."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="[auto|cpu|cuda|cuda:N]", help="Where the vector lies.")
    ] = "cpu",
    repeats: Annotated[
        int, typer.Option(metavar="N", min=1, max=1000, help="Of which the medians are shown.")
    ] = 5,
    json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw bits against error, as SVG.")
    ] = None,
) -> None:
    """Measure what codecs cost and keep, beside a plain copy of the vector."""
    from ..training import devices
    from . import bench, measure

    if task is not None and numel is not None:
        raise UserError("--numel is for normal values and --task for an update; give one of them")
    if data is not None and task is None:
        raise UserError("--data is the folder of a task's data; give --task as well")
    try:
        count = spec.count(numel or "1M")
    except (ValueError, KeyError, ZeroDivisionError, OverflowError):
        raise UserError(
            f"--numel is '{numel}'; give a whole number such as 1000000, 25M or 1G"
        ) from None
    where = devices.choose(device)
    folder = data_folder(RunConfig(data=data and str(data)))
    if data is not None and not folder.is_dir():
        raise UserError(f"--data {data} is no folder; give the one that holds the task's data")
    vector = (
        measure.normal(count, where) if task is None else measure.update_of(task, folder, where)
    )
    bench.codecs(vector, codec or (), repeats, json, picture)


def bench_sim(rounds: int, trace: Path | None, json: bool, **given: Any) -> None:
    """Measure rounds of a simulation: client updates a second, where the time goes, how much of the device's arithmetic is reached.

    The options are those of fedcomp sim. The rounds are real ones, in a folder that is removed; the first is not counted. After each,
    plain PyTorch trains as many of the clients, and one model takes the same examples as one big batch.
    """
    from .bench_sim import sim as bench

    bench(flags.run_config(given), rounds or 5, json, trace)


bench.command("sim")(
    flags.with_run_flags(
        bench_sim,
        flags.parameter(
            "rounds",
            int,
            typer.Option(
                "--rounds",
                metavar="N",
                min=1,
                max=10_000,
                help="That are measured; 5 when not given.",
            ),
        ),
        flags.parameter(
            "trace",
            Path,
            typer.Option(
                "--trace",
                metavar="FILE",
                help="Write what was done when, for Perfetto or chrome://tracing.",
            ),
        ),
        flags.parameter(
            "json", bool, typer.Option("--json", help="Print JSON in place of a table.")
        ),
        without=(
            "rounds",
            "out",
            "resume",
            "checkpoint_every",
            "plain",
            "log_json",
            "metrics_port",
            "tensorboard",
        ),
    )
)


app.add_typer(keys.app, name="keys")
app.command()(doctor.doctor)
app.command()(reproduce.reproduce)


server = typer.Typer(cls=OneSentence, add_completion=False, rich_markup_mode="rich")
app.add_typer(server, name="server")


@server.callback(invoke_without_command=True)
def serving(context: typer.Context) -> None:
    """Serve a federation of real clients."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def start(**given: Any) -> None:
    """Start the server of a run, wait for --clients clients, and run it with them.

    Clients come through one port, with TLS and the keys of fedcomp keys init. The options of the run are those of fedcomp sim.
    """
    config = flags.run_config(
        {name: value for name, value in given.items() if name not in deployed.DOOR_NAMES}
    )
    _watched(
        lambda watch: deployed.serve(given, config, watch),
        _watch(config),
        given,
        ("fedcomp", "server", "start"),
    )


server.command("start")(flags.with_run_flags(start, *deployed.door_flags(), without=("network",)))


@app.command()
def client(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where the server is; the enrolment's when not given."
        ),
    ] = None,
    enrolment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="This client's enrolment, clients/ID.toml of the keys; a folder of them for many clients in one "
            "process. Default: FEDCOMP_ENROLMENT, or ~/.config/fedcomp/enrolment.toml.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys, for a trial.")
    ] = False,
    partition_id: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=0,
            help="Take part K of the task's data, 0 the first; all of it when "
            "not given. With --insecure it is also who this client is.",
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Parts of the data; the run's clients when not given."
        ),
    ] = None,
    client_id: Annotated[
        int | None, typer.Option(metavar="K", min=0, help="Who this client is, with --insecure.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What this client keeps; fedcomp-client-ID when not given, "
            "which many clients have below DIR.",
        ),
    ] = None,
    task: Annotated[
        str,
        typer.Option(metavar="TEXT", help="What is learned: a built-in name or path/file.py:name."),
    ] = "digits",
    data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of the task's data; FEDCOMP_DATA when not given."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="[auto|cpu|cuda|cuda:N]", help="Where this client trains.")
    ] = "auto",
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            help="For how long it tries to reach a server; for ever when not given.",
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next run when one is over.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Be N clients in one process: the first N of the enrolments in "
            "the folder --enrolment, or with --insecure those from --client-id on; they take the parts "
            "of the data from --partition-id on.",
        ),
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The clients' public keys, registry.toml of the keys; in an election "
            "with sealed ballots as the server announces them when not given.",
        ),
    ] = None,
    sealed: Annotated[
        bool,
        typer.Option(
            "--sealed",
            help="Take part in elections with sealed ballots alone, whatever the server asks for.",
        ),
    ] = False,
    log_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="File that gets what is said as JSON, an object a line; - = standard "
            "output, in place of the sentences.",
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            metavar=f"[{'|'.join(deployed.TRANSPORTS)}]",
            help=f"The server's transport, {deployed.TRANSPORT_HELP}.",
        ),
    ] = "grpc",
) -> None:
    """Take part in a federation until its run is over. Nothing that a server sends is executed."""
    with Signals() as signals:
        try:
            with deployed.saying(log_json) as say:
                deployed.take_part(
                    server,
                    enrolment,
                    insecure,
                    client_id,
                    partition_id,
                    partitions,
                    state_dir,
                    task,
                    data,
                    device,
                    patience,
                    stay,
                    say,
                    count,
                    roster,
                    sealed,
                    transport,
                )
        except KeyboardInterrupt:
            complain(
                "stopped; what this client holds is in its state folder, and the same command goes on with it"
            )
            raise typer.Exit(128 + (signals.heard or signal.SIGINT)) from None


@app.command()
def relay(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of the server. Default: the one in the enrolment."
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, max=65_535, help="Port to listen on for clients; 0 = a free one."
        ),
    ] = 8081,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address of this machine to listen on. Default: all addresses, loopback with --insecure.",
        ),
    ] = None,
    enrolment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="This relay's enrolment, relays/ID.toml in the folder of keys. Default: FEDCOMP_ENROLMENT, or "
            "~/.config/fedcomp/enrolment.toml.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and keys, for a trial.")
    ] = False,
    patience: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, help="How long to try to reach the server. Default: for ever."
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next run when one is over.")
    ] = False,
    log_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Log file, a JSON object per message; - = standard output, in place of the sentences.",
        ),
    ] = None,
) -> None:
    """Run a relay between clients and a server. Each broadcast crosses the server's link once, and reports are sent together."""
    with Signals() as signals:
        try:
            with deployed.saying(log_json) as say:
                deployed.relay(server, enrolment, insecure, host, port, patience, stay, say)
        except KeyboardInterrupt:
            complain("stopped; the same command continues, and clients reconnect to it")
            raise typer.Exit(128 + (signals.heard or signal.SIGINT)) from None


def main() -> None:
    """The console script. Leaves through SystemExit."""
    os.environ.setdefault(
        "GOMP_SPINCOUNT", "10000"
    )  # torch's waiting threads give way: on shared cores they cost a round tenfold
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called
            setattr(sys, name, open(os.devnull, "w"))
        getattr(sys, name).reconfigure(
            errors="replace"
        )  # an ASCII terminal shows ? for what it lacks
    try:
        get_command(app)(prog_name="fedcomp")
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # Ctrl-C while the interpreter leaves ends it without a word
