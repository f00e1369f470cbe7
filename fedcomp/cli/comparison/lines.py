"""A line for each round of each alternative, for pipes, logs and screen readers."""

import sys
from collections.abc import Sequence

from ...callbacks import RoundRecord
from ...formatting import decimal, duration, human_bytes, one_line, percent
from .progress import DONE, FAILED, Progress, Watch


class Lines(Watch):
    """Writes to standard output; warnings go to standard error."""

    def started(self, out: str, facts: Sequence[tuple[str, str]], all: list[Progress]) -> None:
        super().started(out, facts, all)
        for label, value in facts:
            _say(f"{label:<14}{value}")

    def round_done(self, progress: Progress, record: RoundRecord) -> None:
        reached = f", accuracy {percent(record.accuracy)}" if record.accuracy is not None else ""
        reached += f", loss {decimal(record.loss)}" if record.loss is not None else ""
        _say(
            f"{progress.name}: round {record.round} of {progress.rounds}{reached}, up {human_bytes(record.uplink_bytes)}, "
            f"down {human_bytes(record.downlink_bytes)}, {duration(record.seconds)}"
        )

    def warning(self, sentence: str) -> None:
        print(f"warning: {one_line(sentence)}", file=sys.stderr, flush=True)

    def over(self, progress: Progress) -> None:
        end = {DONE: "done", FAILED: f"failed: {one_line(progress.why)}"}[progress.state]
        _say(f"{progress.name}: {end} ({self.ended} of {len(self.all)})")


def _say(line: str) -> None:
    print(line, flush=True)
