"""fedcomp in a Flower App: strategies of fedcomp with their clients, and compression around strategies of Flower."""

from .client_app import client_app
from .compressed import Compressed
from .compression import compression_mod
from .strategy import FlowerStrategy

__all__ = ["Compressed", "FlowerStrategy", "client_app", "compression_mod"]
