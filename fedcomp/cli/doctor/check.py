"""The result of a check, printed as one line."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from ...errors import FedcompError
from ..keys import days_left

if TYPE_CHECKING:
    from cryptography import x509

SOON = timedelta(days=30)
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
SIGNS = {OK: "✓", FAILED: "✗", SKIPPED: "–"}


@dataclass(frozen=True)
class Check:
    what: str  # the subject of the check
    state: str  # ok, failed or skipped
    found: str
    fix: str = ""

    def line(self, width: int) -> str:
        return f"{SIGNS[self.state]} {self.what:<{width}}  {self.found}{f'; {self.fix}' if self.fix else ''}"


def refused(what: str, error: FedcompError, before: str = "") -> Check:
    return Check(what, FAILED, *parted(before + str(error)))


def parted(sentence: str) -> tuple[str, str]:
    """Split one of fedcomp's error messages into the finding and the fix."""
    found, _, fix = sentence.partition("; ")
    return found, fix


def validity(
    what: str, certificate: "x509.Certificate", now: datetime, remedy: str, before: str = ""
) -> Check:
    """Check that a certificate is valid now. One that has not begun shows that this machine's clock is behind."""
    from ...keys.enrolment import iso

    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begins <= now < ends:
        when = f"begins on {iso(begins)}" if now < begins else f"ended on {iso(ends)}"
        return Check(
            what,
            FAILED,
            f"{before}{when}, and it is {iso(now)} by this machine's clock",
            "set the clock by NTP: timedatectl set-ntp true"
            if now < begins
            else f"correct the clock if it is wrong, else {remedy}",
        )
    days = days_left(ends, now)
    return Check(
        what,
        OK,
        f"{before}good until {iso(ends)}, {days} days",
        f"renew it soon, {remedy}" if ends - now < SOON else "",
    )
