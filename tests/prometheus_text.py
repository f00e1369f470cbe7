"""A strict parser of the Prometheus text format 0.0.4, written from the format's grammar."""

import re

NAME, LABEL = r"[a-zA-Z_:][a-zA-Z0-9_:]*", r"[a-zA-Z_][a-zA-Z0-9_]*"
PAIR = rf'({LABEL})="((?:[^"\\\n]|\\["\\n])*)"'
SAMPLE = re.compile(rf"({NAME})(?:\{{((?:{PAIR})(?:,{PAIR})*)\}})? ([0-9.eE+-]+|NaN|[+-]Inf)")
ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def unescaped(text: str) -> str:
    return re.sub(r'\\["\\n]', lambda match: ESCAPES[match[0]], text)


def parsed(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Parse a page to (name, labels) → value. Fails if a scraper would reject a line or count a sample twice."""
    assert page.endswith("\n")
    found: dict = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    family = ""
    for line in page[:-1].split("\n"):
        if line.startswith("# HELP "):
            family = re.fullmatch(rf"# HELP ({NAME}) [^\n]+", line)[1]
            assert family not in helped, f"{family} has two HELP lines"
            helped.add(family)
        elif line.startswith("# TYPE "):
            name, kind = re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line).groups()
            assert name == family and name not in kinds
            assert (kind == "counter") == name.endswith("_total")
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"not a sample: {line!r}"
            assert match[1] in [family + suffix for suffix in SUFFIXES[kinds[family]]], (
                f"{match[1]} is in the samples of {family}"
            )
            labels = tuple(
                (name, unescaped(value)) for name, value in re.findall(PAIR, match[2] or "")
            )
            assert len(dict(labels)) == len(labels) and (match[1], labels) not in found
            found[match[1], labels] = float(match[match.lastindex])
    for name in [name for name, kind in kinds.items() if kind == "histogram"]:
        buckets = [
            (float(dict(labels)["le"]), value)
            for (sample, labels), value in found.items()
            if sample == f"{name}_bucket"
        ]
        assert buckets == sorted(buckets) and [count for _, count in buckets] == sorted(
            count for _, count in buckets
        )
        assert buckets[-1] == (float("inf"), found[f"{name}_count", ()])
    return found
