"""How commands end: errors as one sentence on standard error, exit statuses, and signals."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any, Self

import click
import typer
from typer.core import TyperGroup

from ..config import suggestion
from ..errors import INTERRUPTED, FedcompError
from ..formatting import one_line

UNWRITABLE = (errno.EIO, errno.ENOSPC, errno.EPIPE)  # a full disk, or a pipe without a reader
OUTPUT_LOST = 1  # exit status where standard output cannot be written
ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal closes
BURST_S = 0.5  # signals that follow another one within this time count as one: clean-up has begun


def print_error(sentence: str) -> None:
    """Print one line on standard error, whatever the sentence quotes."""
    with suppress(OSError):  # there is nowhere else to say it
        print(f"fedcomp: {one_line(sentence)}", file=sys.stderr)


def output_lost(error: BaseException | None = None) -> str | None:
    """Return why standard output cannot be written, judged by `error` and by a flush; None if it can.

    Unwritten output is dropped, because the interpreter would try to write it again at exit.
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


class CommandGroup(TyperGroup):
    """A group whose foreseeable errors are one sentence on standard error and an exit status. Other errors keep their traceback."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> Any:
        if not standalone_mode:
            return super().main(*args, standalone_mode=False, **kwargs)
        try:
            status = super().main(*args, standalone_mode=False, **kwargs)
        except click.UsageError as error:
            print_error(_usage(error))
            status = error.exit_code
        except FedcompError as error:
            print_error(str(error))
            status = error.exit_status
        except click.Abort:
            status = INTERRUPTED
        except OSError as error:
            if not (lost := output_lost(error)):
                raise
            print_error(lost)
            status = OUTPUT_LOST
        if lost := output_lost():
            print_error(lost)
            status = status or OUTPUT_LOST
        sys.exit(status or 0)


def command_group(help: str) -> typer.Typer:
    """Return a group of commands that prints its help if no command is given."""
    group = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="rich")

    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    group.callback(invoke_without_command=True, help=help)(alone)
    return group


def _usage(error: click.UsageError) -> str:
    text = error.format_message().partition(" Did you mean")[0].partition(" (Did you mean")[0]
    said = text[:1].lower() + text[1:].rstrip(".")
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


class Signals:
    """While entered, each signal raises KeyboardInterrupt and sets `heard` to its number. Ignored signals (nohup) stay ignored."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._held_back = False
        self._raised_s = float("-inf")
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held_back_afterwards(self) -> Iterator[None]:
        """Ignore signals from the end of this block on, so that they do not interrupt the clean-up."""
        try:
            yield
        finally:
            self._held_back = True

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._held_back or now_s - self._raised_s < BURST_S:
            return
        self.heard = number
        self._raised_s = now_s
        raise KeyboardInterrupt


@contextmanager
def stoppable(
    stopped: Callable[[str], str], screen: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Run a block that signals and a lost standard output may end. `screen` is entered around it.

    Then the command ends with the sentence that `stopped` makes of the cause, and with the exit status of the signal.
    """
    with Signals() as signals:
        try:
            with screen or nullcontext(), signals.held_back_afterwards():
                yield
        except (KeyboardInterrupt, OSError) as error:
            lost, number = output_lost(error), signals.heard
            if isinstance(error, KeyboardInterrupt):
                number = number or signal.SIGINT
            if not (number or lost):
                raise
            print_error(stopped("interrupted" if number else f"{lost}: stopped"))
            raise typer.Exit(128 + number if number else OUTPUT_LOST) from None
