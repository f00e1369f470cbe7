"""What may change between a client's training and its report. Simulated Byzantine clients are such hooks (`sim/attacks`)."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..memories import Memory
from ..messages import Assignment, Report
from ..tasks.base import Data


class ClientHook:
    """Called by a `ClientSession` around training and encoding. The base class changes nothing."""

    needs_whole_cohort: bool = False  # all clients of a phase are to be handled in one call
    uses_updates: bool = False  # updates of a cohort are to lie on one device

    def on_assignments(self, assignments: Sequence[Assignment]) -> None:
        """Take note of the assignments of a round's first phase, before anything is done for them."""

    def silence(self, assignment: Assignment) -> str:
        """Return why a client does not answer, or "" if it does."""
        return ""

    def groups(self, assignments: Sequence[Assignment]) -> list[tuple[Hashable, list[Assignment]]]:
        """Split assignments into groups that are trained and encoded one after the other, each with a key for the methods below."""
        return [(None, list(assignments))] if assignments else []

    def training_data(self, group: Hashable, data: Data) -> Data:
        """Return the data that a group trains on in place of `data`."""
        return data

    def on_updates(
        self, group: Hashable, assignments: Sequence[Assignment], updates: Tensor
    ) -> Tensor:
        """Return the updates [k, n] that a group encodes in place of `updates`, which may be overwritten."""
        return updates

    def on_report(self, assignment: Assignment, report: Report, memory: Memory) -> Report:
        """Return the report that a client sends in place of `report`, whose frame the client's memory has proposed."""
        return report
