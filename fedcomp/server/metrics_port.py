"""The page for Prometheus on a loopback port of its own. Nothing but GET /metrics is answered, and no run waits for who reads it."""

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Self

from ..errors import ConfigError
from .exposition import CONTENT_TYPE

HOST, PATH = "127.0.0.1", "/metrics"
READERS = 8  # at once; further ones are hung up on
PATIENCE_S = 5.0  # with a reader that does not go on
LOOK_S = 0.2  # between looks whether the port is to be closed


class Page(BaseHTTPRequestHandler):
    """One request, and the end of its connection."""

    server: "MetricsPort"
    timeout = PATIENCE_S
    server_version, sys_version = "fedcomp", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            body = self.server.page().encode()
        except Exception as error:
            self.send_error(
                HTTPStatus.INTERNAL_SERVER_ERROR, explain=f"{type(error).__name__}: {error}"
            )
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: Any) -> None: ...


class MetricsPort(ThreadingMixIn, HTTPServer):
    """Serves what `page()` gives, while it is entered. Raises ConfigError when the port cannot be opened. Port 0: a free one."""

    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    request_queue_size = 2 * READERS

    def __init__(self, port: int, page: Callable[[], str]):
        self.page, self._places = page, threading.BoundedSemaphore(READERS)
        try:
            super().__init__((HOST, port), Page)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: {HOST} cannot be listened on there ({error.strerror}); give another port, or 0 for "
                "a free one"
            ) from error
        self._thread = threading.Thread(
            target=self.serve_forever, args=(LOOK_S,), name="fedcomp-metrics", daemon=True
        )

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}{PATH}"

    def server_bind(self) -> None:
        """Without http.server's look for the name of the address, which may take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that left, or was too slow."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
