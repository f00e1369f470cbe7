"""How commands end: one-line error messages on standard error, exit statuses, and signals."""

import errno
import inspect
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperGroup

from ..config import suggestion
from ..errors import INTERRUPTED, FedcompError
from ..formatting import one_line

UNWRITABLE = (errno.EIO, errno.ENOSPC, errno.EPIPE)  # device error, full disk, closed pipe
OUTPUT_LOST = 1  # exit status if standard output cannot be written
# SIGHUP is sent when the terminal is closed.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds after a signal during which further signals are ignored, so that they do not interrupt the clean-up.
BURST_S = 0.5


def print_error(message: str) -> None:
    """Print a message on standard error as one line."""
    with suppress(OSError):  # standard error may be closed already
        print(f"fedcomp: {one_line(message)}", file=sys.stderr)


def output_lost(error: BaseException | None = None) -> str | None:
    """Flush standard output. If it cannot be written, discard the buffered output and return the reason, else return None.

    `error`: the exception with which the command ended, if any. If a write to standard output caused it, the output counts as lost.
    """
    try:
        sys.stdout.flush()
    except OSError as late:
        error = late
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return None
    # Discard the buffer, which the interpreter would try to write again at exit.
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, sys.stdout.fileno())
    os.close(null_device)
    return f"standard output cannot be written ({error.strerror})"


class CommandGroup(TyperGroup):
    """A group of commands. A command that raises FedcompError ends with one line of text and an exit status, without a traceback."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command with the help texts of its arguments, which typer 0.20 loses with click 8.5."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.callback is not None:
            parameters = inspect.signature(command.callback).parameters
            for argument in command.params:
                if isinstance(argument, TyperArgument) and argument.help is None:
                    argument.help = getattr(parameters[argument.name or ""].default, "help", None)
        return command

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            status = super().main(*args, **kwargs | {"standalone_mode": False})
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


def command_group(help: str = "", **settings: Any) -> typer.Typer:
    """Return a group of commands. Without a command, the group prints its help."""
    group = typer.Typer(cls=CommandGroup, add_completion=False, rich_markup_mode="rich", **settings)
    group.callback(invoke_without_command=True, help=help)(print_help)
    return group


def print_help(context: typer.Context) -> None:
    """Print the help of a group if the command line names no command of the group."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def _usage(error: click.UsageError) -> str:
    text = error.format_message().partition(" Did you mean")[0].partition(" (Did you mean")[0]
    message = text[:1].lower() + text[1:].rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.ctx:
        flags = [flag for p in error.ctx.command.params for flag in (*p.opts, *p.secondary_opts)]
        known = {flag[2:].replace("-", "_"): flag for flag in flags if flag.startswith("--")}
        name = error.option_name.lstrip("-").replace("-", "_")
        help = f"see {error.ctx.command_path} --help"
        return f"{message}; {suggestion(name, known, known.__getitem__, help)}"
    if near := getattr(error, "possibilities", None):
        return f"{message}; did you mean {' or '.join(near)}?"
    if isinstance(error, click.BadOptionUsage):
        return message
    return f"{message}; see {error.ctx.command_path if error.ctx else 'fedcomp'} --help"


@contextmanager
def stoppable(
    stop_message: Callable[[str], str], screen: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Run a `with` block inside the context `screen`. If a signal arrives or standard output cannot be written, end the command cleanly.

    In both cases, `stop_message(cause)` is printed on standard error. The exit status is 128 plus the signal's number, or OUTPUT_LOST after
    a failed write.
    """
    received = 0  # number of the last signal
    ignored_until_s = -math.inf

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal received, ignored_until_s
        if (now_s := time.monotonic()) >= ignored_until_s:
            received, ignored_until_s = number, now_s + BURST_S
            raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, on_signal)
    try:
        with screen or nullcontext():
            try:
                yield
            finally:
                ignored_until_s = math.inf  # a signal must not interrupt the clean-up
    except (KeyboardInterrupt, OSError) as error:
        lost = output_lost(error)
        if isinstance(error, KeyboardInterrupt):
            received = received or signal.SIGINT
        if not (received or lost):
            raise
        print_error(stop_message("interrupted" if received else f"{lost}: stopped"))
        raise typer.Exit(128 + received if received else OUTPUT_LOST) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
