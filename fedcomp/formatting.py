"""Format numbers as text: bytes, ratios, percentages, durations and lists of client ids."""

import math
from collections.abc import Iterable

UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
NOTHING = "–"  # shown for a value that is not measured or not defined


def human_bytes(count: int) -> str:
    """Format a number of bytes with three digits and a decimal unit (1 kB = 1000 B), such as `999 B`, `1.23 kB` or `45.6 MB`."""
    value, unit = float(count), 0
    while value >= (1000 if unit == 0 else 999.5) and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} B" if unit == 0 else f"{three_digits(value)} {UNITS[unit]}"


def ratio(dense: int, sent: int) -> str:
    """Format the compression ratio `dense / sent` of bytes, such as `×398`. Return a dash if either number is 0."""
    return f"×{three_digits(dense / sent)}" if sent and dense else NOTHING


def percent(fraction: float | None) -> str:
    """Format a fraction as a percentage, such as `81.20 %`."""
    return NOTHING if fraction is None else f"{100 * fraction:.2f} %"


def decimal(value: float | None) -> str:
    """Format a loss with four decimals. Use scientific notation for values of 1000 or more."""
    if value is None:
        return NOTHING
    return f"{value:.4f}" if abs(value) < 1000 or not math.isfinite(value) else f"{value:.2e}"


def metric(name: str, value: float | None) -> str:
    """Format the metric `name`: an accuracy as a percentage, any other metric with `decimal`."""
    return percent(value) if name in ("accuracy", "train_accuracy") else decimal(value)


def duration(seconds: float) -> str:
    """Format a duration, such as `0.84 s`, `12.3 s`, `4 min 05 s`, `2 h 07 min` or `3 d 04 h`."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for size, part, names in ((3600, 60, ("min", "s")), (86400, 3600, ("h", "min"))):
        if whole < size:
            return f"{whole // part} {names[0]} {whole % part * 60 // part:02d} {names[1]}"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def one_line(text: str) -> str:
    """Replace control characters and line breaks with spaces, so that text from a client cannot control the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)


def named_clients(clients: Iterable[int]) -> str:
    """Format client ids as ranges, such as `client 3`, `clients 0 to 49` or `clients 0, 3 to 5`."""
    ids = sorted(set(clients))
    ranges: list[list[int]] = []
    for one in ids:
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    parts = [f"{a}" if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in ranges]
    return f"client{'s' * (len(ids) > 1)} {', '.join(parts)}"
