"""fedcomp from Python: simulations as a call, in scripts and in notebooks."""

from .call import simulate

__all__ = ["simulate"]
