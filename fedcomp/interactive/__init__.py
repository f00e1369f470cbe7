"""Simulations that a Python script or notebook starts by one function call."""

from .call import simulate

__all__ = ["simulate"]
