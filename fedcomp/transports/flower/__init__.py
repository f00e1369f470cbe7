"""fedcomp in a Flower App: strategies of fedcomp, and compression around strategies of Flower."""

from .compressed import Compressed
from .strategy import FlowerStrategy

__all__ = ["Compressed", "FlowerStrategy"]
