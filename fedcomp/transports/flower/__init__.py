"""fedcomp in a Flower App: fedcomp's strategies and their clients, and compression for Flower's own strategies."""

from .client_app import client_app
from .compressed import Compressed
from .compression import compression_mod
from .strategy import FlowerStrategy

__all__ = ["Compressed", "FlowerStrategy", "client_app", "compression_mod"]
