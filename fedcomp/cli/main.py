"""The command `fedcomp`. Nothing at module level may import torch, numpy, numba or flwr: help must answer at once."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer.core import TyperGroup
from typer.main import get_command

from .. import __version__
from ..config import RunConfig
from ..errors import INTERRUPTED, FedcompError, UserError
from . import flags

if TYPE_CHECKING:
    from .watch import Watch


def complain(sentence: str) -> None:
    print(f"fedcomp: {sentence}", file=sys.stderr)


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
        sys.exit(status or 0)


def _usage(error: click.UsageError) -> str:
    said = error.format_message().partition(" Did you mean")[0].partition(" (Did you mean")[0].rstrip(".")
    said = said[:1].lower() + said[1:]
    if near := getattr(error, "possibilities", None):
        return f"{said}; did you mean {' or '.join(near)}?"
    if isinstance(error, click.BadOptionUsage):
        return said
    return f"{said}; see {error.ctx.command_path if error.ctx else 'fedcomp'} --help"


app = typer.Typer(cls=OneSentence, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  context_settings={"help_option_names": ["-h", "--help"]})


@app.callback(invoke_without_command=True)
def fedcomp(context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Federated learning with compressed updates: every byte counted is a byte sent."""
    if version:
        print(f"fedcomp {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
@flags.with_run_flags
def sim(**given: Any) -> None:
    """Simulate a federation of virtual clients on this machine.

    Numbers may be written 0.01, 1% or 1/100. An option is taken from its flag, else from the --config file, else from the run that
    --resume continues, else it has its default.
    """
    config = flags.run_config(given)
    watch = _watch(config)
    try:
        with watch:
            from ..sim import simulate

            simulate(config, watch)
    except KeyboardInterrupt:
        complain(_interrupted(watch, given))
        raise typer.Exit(INTERRUPTED) from None


def _watch(config: RunConfig) -> "Watch":
    if config.plain or not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        from .plain import Plain

        return Plain()
    from .dashboard import Dashboard

    return Dashboard()


def _interrupted(watch: "Watch", given: dict[str, Any]) -> str:
    if not watch.header:
        return "interrupted before the run began"
    done = f"after round {watch.last_round} of {watch.header.rounds}" if watch.last_round else "before round 1 was done"
    return f"interrupted {done}; continue with: {flags.resume_command(given, watch.header.out)}"


@app.command()
def init(path: Annotated[Path, typer.Argument(help="The file to write.", show_default=True)] = Path("my_task.py")) -> None:
    """Write an example task of your own, ready to run and to change."""
    from importlib import resources

    example = resources.files("fedcomp").joinpath("tasks", "example_task.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(example)
    except FileExistsError:
        raise UserError(f"{path} exists and is not overwritten; name another file: fedcomp init PATH") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another file: fedcomp init PATH") from None
    print(f"{path} is written; run it with:\n\n    {shlex.join(['fedcomp', 'sim', '--task', f'{path}:task'])}\n")


@app.command()
def codecs() -> None:
    """List the codecs, with their options as they are when not given, and their sources."""
    from .listing import print_codecs

    print_codecs()


def main() -> None:
    """The console script. Leaves through SystemExit."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # torch's waiting threads give way: on shared cores they cost a round tenfold
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # an ASCII terminal shows ? for what it lacks
    get_command(app)(prog_name="fedcomp")
