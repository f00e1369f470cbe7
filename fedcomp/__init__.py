"""Federated learning with compressed updates: every byte counted is a byte sent."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "Augmentation": "tasks",
    "Data": "tasks",
    "FedcompError": "errors",
    "FrameError": "errors",
    "Layout": "layout",
    "LazyData": "tasks",
    "LocalRound": "training.own_loop",
    "NonFiniteError": "errors",
    "Run": "runs",
    "RunConfig": "config",
    "Task": "tasks",
    "UserError": "errors",
    "available_codecs": "codecs",
    "available_memories": "memories",
    "available_strategies": "strategies",
    "available_tasks": "tasks",
    "codec": "codecs",
    "load": "runs",
    "memory": "memories",
    "simulate": "interactive",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a name's home when it is first asked for: `fedcomp --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedcomp' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
