"""fedcomp in a Flower App: fedcomp's strategies with their ClientApp, and compression of the messages of Flower's own strategies."""

from .compressed import Compressed
from .compression import compression_mod
from .strategy import FlowerStrategy, client_app

__all__ = ["Compressed", "FlowerStrategy", "client_app", "compression_mod"]
