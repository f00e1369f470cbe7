"""`fedcomp.simulate`, which runs a simulation from a Python script or notebook, and its displays."""

from .call import simulate

__all__ = ["simulate"]
