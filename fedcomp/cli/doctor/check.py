"""The result of a check, printed as one line."""

from dataclasses import dataclass

from ...errors import FedcompError

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
SYMBOLS = {OK: "✓", FAILED: "✗", SKIPPED: "–"}


@dataclass(frozen=True)
class Check:
    """The result of one check. The fields are the keys of `fedcomp doctor --json`."""

    what: str  # the subject of the check
    state: str  # ok, failed or skipped
    found: str
    fix: str = ""

    def line(self, width: int) -> str:
        return f"{SYMBOLS[self.state]} {self.what:<{width}}  {self.found}{f'; {self.fix}' if self.fix else ''}"


def ok(what: str, found: str, fix: str = "") -> Check:
    return Check(what, OK, found, fix)


def skipped(what: str, found: str, fix: str = "") -> Check:
    return Check(what, SKIPPED, found, fix)


def failed(what: str, found: str, fix: str) -> Check:
    return Check(what, FAILED, found, fix)


def refused(what: str, error: FedcompError | str) -> Check:
    """Return a failed check from an error message of fedcomp, which consists of the problem, a semicolon, and the fix."""
    found, _, fix = str(error).partition("; ")
    return Check(what, FAILED, found, fix)
