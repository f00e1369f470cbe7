"""Clients: the training around a memory and a codec, the processes that run it, and a mod for Flower apps."""

from typing import Any

__all__ = ["compression_mod"]


def __getattr__(name: str) -> Any:
    """Import the mod when it is asked for: what trains in a simulation needs no flwr."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from .compression import compression_mod

    return compression_mod
