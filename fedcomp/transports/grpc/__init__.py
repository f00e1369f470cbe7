"""Messages over gRPC: one bidirectional stream per client, with mutual TLS. docs/wire-format.md specifies the bytes."""

from . import options  # before gRPC is imported
from .client import GrpcConnection
from .credentials import Credentials
from .server import GrpcTransport
from .wire import Refused

__all__ = ["Credentials", "GrpcConnection", "GrpcTransport", "Refused", "options"]
