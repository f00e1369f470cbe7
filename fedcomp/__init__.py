"""Federated learning with compressed updates. Reported byte counts are the lengths of the encoded data sent, not estimates."""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_MODULES = {  # public name → module that defines it
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

__all__ = sorted([*_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `fedcomp --help` does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedcomp' has no attribute '{name}'")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
