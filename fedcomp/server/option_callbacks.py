"""The callbacks that options add to a run: a log of JSON lines, a metrics page for Prometheus, scalars for TensorBoard."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from ..callbacks import Callback, CallbackList
from ..config import RunConfig
from .logs import STDOUT, JsonLog
from .tensorboard import TensorBoard


@contextmanager
def with_option_callbacks(config: RunConfig, callback: Callback) -> Iterator[CallbackList]:
    """Yield one callback that combines `callback` with those of the options, which are closed on exit.

    Raises ConfigError, with nothing written, if a port is in use, a file cannot be written, or a package is not installed.
    """
    with ExitStack() as exit_stack:
        others: dict[str, Callback] = {}
        address = ""
        if config.tensorboard:
            others["--tensorboard"] = exit_stack.enter_context(closing(TensorBoard()))
        if config.metrics_port >= 0:
            from .metrics import Metrics, serve

            others["--metrics-port"] = metrics = Metrics()
            address = exit_stack.enter_context(serve(metrics.registry, config.metrics_port))
        if config.log_json is not None:
            log = exit_stack.enter_context(JsonLog(config.log_json))
            if config.log_json == STDOUT:
                callback = CallbackList(log, {"the screen": callback})
            else:
                others[f"--log-json {config.log_json}"] = log
        yield CallbackList(callback, others, address)
