"""Figures as Prometheus reads them: the text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats: for each family a line of help, a line with its type, and a line for each
sample; label values and help are escaped, and numbers are written as Go reads them.
"""

import bisect
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KINDS = ("counter", "gauge", "histogram")
NAME, LABEL = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*"), re.compile("(?!__)[a-zA-Z_][a-zA-Z0-9_]*")

Labels = tuple[tuple[str, str], ...]  # name and value


@dataclass(frozen=True)
class Family:
    """What one name measures. `values`: a number for each set of labels, or a Histogram."""

    name: str  # of a counter it ends in _total
    kind: str  # one of KINDS
    help: str
    values: "Mapping[Labels, float] | Histogram"

    def __post_init__(self) -> None:
        if (
            not NAME.fullmatch(self.name)
            or self.kind not in KINDS
            or (self.kind == "counter") != self.name.endswith("_total")
        ):
            raise ValueError(f"{self.name} is no name of a {self.kind}")


@dataclass
class Histogram:
    """How often a figure was at most so large, for each of the increasing `bounds`."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)  # by bound, and above all of them
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self, name: str) -> Iterable[tuple[str, Labels, float]]:
        seen = 0
        for bound, count in zip([*self.bounds, math.inf], self.counts, strict=True):
            seen += count
            yield f"{name}_bucket", (("le", number(bound)),), seen
        yield f"{name}_sum", (), self.sum
        yield f"{name}_count", (), seen


def text(families: Iterable[Family]) -> str:
    """The page."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {escaped(family.help)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        values = family.values
        samples = (
            values.samples(family.name)
            if isinstance(values, Histogram)
            else ((family.name, *item) for item in values.items())
        )
        lines += [f"{name}{_written(labels)} {number(value)}" for name, labels, value in samples]
    return "\n".join([*lines, ""])


def number(value: float) -> str:
    """A value of a sample: whole numbers whole, others with the digits that give the same float back."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**63 else repr(float(value))


def escaped(text: str) -> str:
    """A text of help."""
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _written(labels: Labels) -> str:
    if not labels:
        return ""
    if not all(LABEL.fullmatch(name) for name, _ in labels):
        raise ValueError(f"{labels} have a name that is none")
    quoted = (
        f'{name}="{_encodable(escaped(value)).replace(chr(34), chr(92) + chr(34))}"'
        for name, value in labels
    )
    return "{" + ",".join(quoted) + "}"


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
