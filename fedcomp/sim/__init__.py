"""Simulations of federated learning with virtual clients, without Flower (flwr)."""

from typing import Any

__all__ = ["simulate"]


def __getattr__(name: str) -> Any:
    if name != "simulate":
        raise AttributeError(f"module 'fedcomp.sim' has no attribute '{name}'")
    from .run import simulate

    return simulate
