"""The text output of a run: one line a round, for pipes, logs and screen readers."""

import sys
from collections.abc import Sequence

from ..callbacks import Header, RoundRecord, Summary
from ..formatting import one_line
from ..run_display import (
    GAP,
    RunDisplay,
    columns_of,
    facts,
    model_file,
    rejections,
    suspects,
    verdict,
    waiting_text,
)


class LineDisplay(RunDisplay):
    """Prints a run line by line on standard output, and warnings on standard error."""

    def on_run_start(self, header: Header) -> None:
        super().on_run_start(header)
        for label, value in facts(header):
            _print(f"{label:<10}{value}")
        _print(f"{'rounds':<10}{header.first_round} to {header.rounds}")
        _print(f"{'ratios':<10}bytes of the same exchanges in float32 divided by the bytes sent")
        _print((" " * GAP).join(column.title.rjust(column.width) for column in columns_of(header)))

    def on_waiting(self, connected: Sequence[int], wanted: int) -> None:
        _print(waiting_text(connected, wanted))

    def on_round_end(self, record: RoundRecord) -> None:
        super().on_round_end(record)
        _print(
            (" " * GAP).join(
                column.cell(record).rjust(column.width) for column in columns_of(self.header)
            )
        )
        for line in rejections(record):
            _print(line)
        if suspected := suspects(record):
            _print(f"suspected: {suspected}")

    def on_warning(self, sentence: str) -> None:
        print(f"warning: {one_line(sentence)}", file=sys.stderr, flush=True)

    def on_run_end(self, summary: Summary, out: str) -> None:
        super().on_run_end(summary, out)
        for label, value in [*verdict(summary, self.totals), ("model", model_file(out))]:
            _print(f"{label:<12}{value}")


def _print(line: str) -> None:
    print(line, flush=True)
