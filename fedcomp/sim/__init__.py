"""Simulations: virtual clients in one process."""

from .run import simulate

__all__ = ["simulate"]
