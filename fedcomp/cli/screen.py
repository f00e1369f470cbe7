"""Shared parts of the dashboards of a run and of a comparison: the terminal's second screen, the panel of facts, the progress bar."""

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
# Colours of middle lightness, to be read on a dark and on a light background.
LABEL = "dim"
FRAME = "dim"
BAR = "deep_sky_blue3"
DONE = "spring_green4"
WARNING = "dark_orange3"
REJECTED = "red3"


class Screen:
    """A spinner from `open` to `draw`, then `picture(width, height)` on the terminal's second screen, until `close`."""

    def __init__(
        self, console: Console | None, picture: Callable[[int, int], RenderableType], spinner: str
    ):
        self.console = console or Console(file=sys.stdout, highlight=False)
        self._picture = picture
        self._ends = ExitStack()
        self.status = self.console.status(spinner, spinner="line")

    def open(self) -> Self:
        self._ends.enter_context(self.status)
        return self

    def draw(self, *beside: AbstractContextManager[object]) -> None:
        """Show the picture, and stay in the contexts `beside` meanwhile."""
        self.close()
        for context in beside:
            self._ends.enter_context(context)
        self._ends.enter_context(
            Live(
                console=self.console,
                screen=True,
                refresh_per_second=REFRESHES_PER_SECOND,
                redirect_stdout=False,
                redirect_stderr=False,
                get_renderable=lambda: self._picture(*self.console.size),
            )
        )

    def close(self) -> None:
        """Give the terminal's first screen back."""
        self._ends.close()


def fitted(lines: list[Text], width: int) -> list[Text]:
    """Cut lines to at most `width` characters, in place."""
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return lines


def progress_bar(before: str, share: float, after: str, width: int) -> Text:
    room = max(width - len(before) - len(after), 0)
    filled = int(2 * room * share)
    bar = "━" * (filled // 2) + "╸" * (filled % 2)
    return Text.assemble(
        (before, "bold"),
        (bar, DONE if share == 1 else BAR),
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
    """Return labels and values in a frame, in as many columns as fit and at most `max_rows` rows, with a note below them."""
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
    return Panel(
        Group(*lines),
        title=title,
        title_align="left",
        subtitle=Text(path),
        subtitle_align="left",
        border_style=FRAME,
        width=width,
        height=len(lines) + 2,
    )


def _columns(cells: Sequence[Text], columns: int, max_rows: int) -> list[Text]:
    """Return the first of the cells in columns, down one and then down the next."""
    rows = min(-(-len(cells) // columns), max_rows)
    lines = [Text() for _ in range(rows)]
    for first in range(0, rows * columns, rows):
        left = max(line.cell_len for line in lines)
        for line, cell in zip(lines, cells[first : first + rows], strict=False):
            line.pad_right(left - line.cell_len + 2 * GAP * bool(first))
            line.append_text(cell)
    return lines
