"""The dense baseline of a comparison: a run with the same options, but with an uncompressed uplink and downlink."""

from collections.abc import Mapping
from typing import Any

from .config import RunConfig

NAME = "dense"
CODECS = {"uplink": "identity", "downlink": "identity", "memory": "none", "downlink_memory": "none"}
COMPRESSION_OPTIONS = {*CODECS, "density_warmup", "density_schedule", "budget", "bandwidths"}
# Strategies that refuse the codec `identity` (no compression). The baseline of a run with one of them uses the strategy `average`.
COMPRESSING_STRATEGIES = set(
    "election fetchsgd gtopk powersgd shared-scale sketched-sgd vote".split()
)


def strategy_name(text: str) -> str:
    """Return the name of a strategy without its options, such as `powersgd` for `powersgd:rank=2`."""
    return text.partition(":")[0].strip()


def is_dense(options: Mapping[str, Any]) -> bool:
    """Return whether a run with these options sends updates and broadcasts uncompressed."""
    return all(
        options.get(name, getattr(RunConfig, name)) == "identity" for name in ("uplink", "downlink")
    )


def dense(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run's dense baseline: codec `identity`, and no error-feedback memory, density schedule or byte budget."""
    remaining = {name: value for name, value in options.items() if name not in COMPRESSION_OPTIONS}
    name = strategy_name(remaining.get("strategy", RunConfig.strategy))
    if name in COMPRESSING_STRATEGIES:
        remaining["strategy"] = RunConfig.strategy
    # SCAFFOLD requires the error-feedback memory `residual`, which stays zero for uncompressed updates.
    return remaining | CODECS | ({"memory": "residual"} if name == "scaffold" else {})
