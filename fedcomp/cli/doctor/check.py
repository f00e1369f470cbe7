"""What a check finds: one line."""

from dataclasses import dataclass
from datetime import datetime, timedelta

from ...errors import FedcompError
from ..keys import days_left

SOON = timedelta(days=30)
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
SIGNS = {OK: "✓", FAILED: "✗", SKIPPED: "–"}


@dataclass(frozen=True)
class Check:
    what: str
    state: str  # ok, failed or skipped
    found: str
    fix: str = ""  # what to do

    def line(self, width: int) -> str:
        return f"{SIGNS[self.state]} {self.what:<{width}}  {self.found}{f'; {self.fix}' if self.fix else ''}"


def refused(what: str, error: FedcompError, before: str = "") -> Check:
    return Check(what, FAILED, *parted(before + str(error)))


def parted(sentence: str) -> tuple[str, str]:
    """A sentence of ours as what is found and what to do."""
    found, _, fix = sentence.partition("; ")
    return found, fix


def ending(what: str, ends: datetime, now: datetime, remedy: str, before: str = "") -> Check:
    from ...keys.enrolment import iso

    if now >= ends:
        return Check(
            what,
            FAILED,
            f"{before}ended on {iso(ends)}, and it is {iso(now)} by this machine's clock",
            f"correct the clock if it is wrong, else {remedy}",
        )
    days = days_left(ends, now)
    return Check(
        what,
        OK,
        f"{before}good until {iso(ends)}, {days} days",
        f"renew it soon, {remedy}" if ends - now < SOON else "",
    )
