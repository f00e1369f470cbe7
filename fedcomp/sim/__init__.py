"""Simulations: virtual clients in one process. Only `run` and `grid` need flwr; the batched engine does without."""

from typing import Any

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    if name != "simulate":
        raise AttributeError(f"module 'fedcomp.sim' has no attribute '{name}'")
    from .run import simulate

    return simulate
