"""fedcomp in a Flower App: fedcomp's strategies with a ClientApp for them, and compression for Flower's own strategies."""

from .compressed import Compressed
from .compression import compression_mod
from .strategy import FlowerStrategy, client_app

__all__ = ["Compressed", "FlowerStrategy", "client_app", "compression_mod"]
