"""Support for Flower Apps: run a fedcomp strategy in a Flower App, or compress the messages of a Flower strategy."""

from .compressed import Compressed
from .compression import compression_mod
from .strategy import FlowerStrategy, client_app

__all__ = ["Compressed", "FlowerStrategy", "client_app", "compression_mod"]
