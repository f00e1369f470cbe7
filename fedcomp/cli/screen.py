"""Shared parts of the dashboards of a run and of a comparison: the alternate screen, the panel of facts, the progress bar."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from ..run_display import GAP

REFRESHES_PER_SECOND = 5
# Colours of medium lightness, readable on dark and on light backgrounds.
LABEL = "dim"
FRAME = "dim"
BAR = "deep_sky_blue3"
DONE = "spring_green4"
WARNING = "dark_orange3"
REJECTED = "red3"


class Screen:
    """A spinner from `open` to `draw`, then `picture(width, height)` on the terminal's alternate screen until `close`."""

    def __init__(
        self, console: Console | None, picture: Callable[[int, int], RenderableType], spinner: str
    ):
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._picture = picture
        self._stack = ExitStack()
        self.status = self.console.status(spinner, spinner="line")

    def open(self) -> Self:
        """Show the spinner."""
        self._stack.enter_context(self.status)
        return self

    def draw(self, *contexts: AbstractContextManager[object]) -> None:
        """Show the picture until `close`, and enter `contexts` for that time."""
        self.close()
        for context in contexts:
            self._stack.enter_context(context)
        live = Live(
            console=self.console,
            screen=True,
            refresh_per_second=REFRESHES_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: self._picture(*self.console.size),
        )
        self._stack.enter_context(live)

    def close(self) -> None:
        """Return to the terminal's main screen."""
        self._stack.close()


def fitted(lines: list[Text], width: int) -> list[Text]:
    """Cut lines to at most `width` characters, in place."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def progress_bar(before: str, fraction: float, after: str, width: int) -> Text:
    """Return a line of `width` characters: the text `before`, a bar that is filled to `fraction` (0..1), and the text `after`."""
    room = max(width - len(before) - len(after), 0)
    filled = int(2 * room * fraction)
    bar = "━" * (filled // 2) + "╸" * (filled % 2)
    return Text.assemble(
        (before, "bold"),
        (bar, DONE if fraction == 1 else BAR),
        ("─" * (room - len(bar)), LABEL),
        after,
    )


def facts_panel(
    pairs: Sequence[tuple[str, str]],
    width: int,
    max_rows: int,
    *,
    title: str,
    path: str,
    note: Sequence[str] = (),
) -> Panel:
    """Return a frame with labels and values in as many columns as fit, in at most `max_rows` rows, and a note below them."""
    indent = 1 + max(len(label) for label, _ in pairs)
    cells = [Text.assemble((label.ljust(indent), LABEL), value) for label, value in pairs]
    for columns in (4, 3, 2, 1):
        lines = _columns(cells, columns, max_rows)
        if max(line.cell_len for line in lines) <= width - 4:
            break
    for i, text in enumerate(note):
        lines.append(Text.assemble((("" if i else "note").ljust(indent), LABEL), text))
    lines = fitted(lines, width - 4)
    if len(path) > width - 6:
        path = "…" + path[len(path) - width + 7 :]
    panel = Panel(Group(*lines), title=title, subtitle=Text(path), border_style=FRAME)
    panel.title_align = panel.subtitle_align = "left"
    panel.width, panel.height = width, len(lines) + 2
    return panel


def _columns(cells: Sequence[Text], columns: int, max_rows: int) -> list[Text]:
    """Return the first cells, as many as fit into `max_rows` rows, arranged column by column."""
    rows = min(-(-len(cells) // columns), max_rows)
    lines = [Text() for _ in range(rows)]
    for first in range(0, rows * columns, rows):
        left = max(line.cell_len for line in lines)
        for line, cell in zip(lines, cells[first : first + rows], strict=False):
            line.pad_right(left - line.cell_len + 2 * GAP * bool(first))
            line.append_text(cell)
    return lines
