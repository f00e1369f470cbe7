"""A test loss that is no finite number: files have null in its place, as for a round that was not evaluated, so that a run says it once."""

from math import isfinite

from ..tasks import Data
from ..tasks.data import non_finite
from .warning_log import WarningLog

NOT_FINITE = "test loss"  # the kind of the warning


def check_loss(warn: WarningLog, round: int, loss: float | None, test: Data) -> None:
    """Warn once in a run if the loss of a round on the data `test` is not finite. None: the round was not evaluated."""
    if loss is None or isfinite(loss) or NOT_FINITE in warn.kinds:
        return
    found = non_finite(test)
    why = (
        f"the test data holds {found}, correct test()"
        if found
        else "the model may have diverged, try a smaller --lr"
    )
    warn(
        f"round {round}: the test loss is {loss}, null in the files of the run, which goes on; {why}",
        kind=NOT_FINITE,
    )
