"""Simulations from Python: one function call, in scripts and in notebooks."""

from .call import simulate

__all__ = ["simulate"]
