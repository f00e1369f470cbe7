"""The metrics of a run over HTTP, on a loopback port of their own."""

import threading
from socketserver import ThreadingMixIn
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ..errors import ConfigError

HOST, PATH = "127.0.0.1", "/metrics"
MAX_CONNECTIONS = 8  # connections at once; further ones are closed
TIMEOUT_S = 5.0  # of a connection that is silent
POLL_S = 0.2  # between checks whether to close


class RequestHandler(WSGIRequestHandler):
    timeout = TIMEOUT_S

    def log_message(self, *message: Any) -> None: ...


class MetricsPort(ThreadingMixIn, WSGIServer):
    """Serves the metrics of a registry while it is entered. Port 0: a free one. Raises ConfigError if the port cannot be opened."""

    daemon_threads, block_on_close = True, False

    def __init__(self, port: int, registry: CollectorRegistry):
        self._connections = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, port), RequestHandler)
        except OSError as error:
            raise ConfigError(
                f"--metrics-port {port}: the port cannot be opened on {HOST} ({error.strerror}); give another port, or 0 for "
                "a free one"
            ) from error
        self.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(
            target=self.serve_forever, args=(POLL_S,), name="fedcomp-metrics", daemon=True
        )

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}{PATH}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of connections that ended or timed out."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
