"""Run a simulation from a Python script or notebook with one function call."""

from .call import simulate

__all__ = ["simulate"]
