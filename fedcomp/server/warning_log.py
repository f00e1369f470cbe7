"""Warnings of a run: passed on to an callback, and written into the record of their round."""

import json
from collections.abc import Callable

from torch import Tensor

from ..memories.base import Changes

KINDS = "kinds"  # in a checkpoint


class WarningLog:
    """Passes warnings on and collects those of a round.

    A warning that has a kind is given once in a run, also when the run is resumed: the kinds are part of the checkpoint.
    """

    def __init__(self, pass_on: Callable[[str], None]):
        self.pass_on = pass_on
        self.kinds: set[str] = set()  # that were given
        self._of_round: list[str] = []

    def __call__(self, sentence: str, kind: str = "") -> None:
        if kind and kind in self.kinds:
            return
        if kind:
            self.kinds.add(kind)
        self._of_round.append(sentence)
        self.pass_on(sentence)

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
