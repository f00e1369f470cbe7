"""The warnings of a run, which are forwarded to a callback and written into the record of their round."""

import json
from collections.abc import Callable
from math import isfinite

from torch import Tensor

from ..memories.base import Changes
from ..tasks.data import Examples, describe_non_finite

KINDS = "kinds"  # in a checkpoint
NOT_FINITE = "test loss"  # the kind of a warning


class WarningLog:
    """Forwards warnings and collects those of a round.

    A warning with a kind is shown once in a run, even if the run is resumed: the kinds are part of the checkpoint.
    """

    def __init__(self, forward: Callable[[str], None]):
        self.forward = forward
        self.kinds: set[str] = set()  # of the warnings so far
        self._of_round: list[str] = []

    def __call__(self, sentence: str, kind: str = "") -> None:
        if kind and kind in self.kinds:
            return
        if kind:
            self.kinds.add(kind)
        self._of_round.append(sentence)
        self.forward(sentence)

    def take(self) -> tuple[str, ...]:
        """Return the warnings since the last call."""
        taken, self._of_round = tuple(self._of_round), []
        return taken

    def take_changes(self) -> Changes:
        return {}, {KINDS: json.dumps(sorted(self.kinds)).encode()}

    def restore(
        self, vector: Callable[[str], Tensor | None], value: Callable[[str], bytes | None]
    ) -> None:
        self.kinds |= set(json.loads(value(KINDS) or b"[]"))


def check_loss(warn: WarningLog, round: int, loss: float | None, test: Examples | None) -> None:
    """Warn once in a run about a test loss that is not finite: metrics.jsonl has null in its place, as for a round without evaluation.

    `loss`: that of the round on the data `test`; None if the round was not evaluated.
    """
    if loss is None or isfinite(loss) or NOT_FINITE in warn.kinds:
        return
    values = describe_non_finite(test)
    why = (
        f"the test data holds {values}; correct test()"
        if values
        else "the model may have diverged; try a smaller --lr"
    )
    warn(
        f"round {round}: the test loss is {loss} (null in metrics.jsonl), and the run continues: {why}",
        kind=NOT_FINITE,
    )
