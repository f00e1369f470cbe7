"""A test loss that is no finite number: files have null in its place, as for a round that was not evaluated, so that a run says it once."""

from collections.abc import Callable, Iterable
from math import isfinite

from ..observe import RoundRecord
from ..tasks import Data
from ..tasks.data import non_finite

NOT_FINITE = "null in the files of the run"


class FiniteLoss:
    """Follows the loss of a run on its test data, and warns once."""

    def __init__(self, warn: Callable[[str], None]):
        self.warn, self.warned = warn, False

    def recall(self, records: Iterable[RoundRecord]) -> None:
        """What an interrupted run has said in these rounds, it does not say again."""
        self.warned = any(
            NOT_FINITE in sentence for record in records for sentence in record.warnings
        )

    def look(self, round: int, loss: float | None, test: Data) -> None:
        """At what a round's evaluation on `test` gave; None where it was not evaluated."""
        if self.warned or loss is None or isfinite(loss):
            return
        self.warned = True
        found = non_finite(test)
        why = (
            f"the test data holds {found}, correct test()"
            if found
            else "the model may have diverged, try a smaller --lr"
        )
        self.warn(f"round {round}: the test loss is {loss}, {NOT_FINITE}, which goes on; {why}")
