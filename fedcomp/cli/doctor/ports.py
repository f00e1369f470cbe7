"""Check that a server can listen on a port of this machine."""

import errno
import socket
from collections.abc import Iterator

from .asked import Asked
from .check import FAILED, OK, Check


def checks(asked: Asked) -> Iterator[Check]:
    if asked.port is not None:
        yield listening(asked.port)


def listening(port: int) -> Check:
    """Check that a server can listen on a port on every address of this machine."""
    what = f"port {port}"
    for family, everywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as trial:
                trial.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as servers do: what was closed just now is no hindrance
                if family == socket.AF_INET6:
                    trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                trial.bind((everywhere, port))
                trial.listen(1)
        except PermissionError:
            return Check(
                what,
                FAILED,
                "this user may not listen there",
                "give --port with a number from 1024",
            )
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # a machine without IPv6
            return Check(
                what,
                FAILED,
                f"something listens there already ({error.strerror})",
                f"stop what ss -ltnp 'sport = :{port}' shows, or give --port with another number",
            )
    return Check(what, OK, "free")
