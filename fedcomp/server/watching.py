"""Who hears of a run besides the screen, by the options: a log of JSON lines, a page for Prometheus, scalars for TensorBoard."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..callbacks import Callback, CallbackList
from ..config import RunConfig
from .logs import STDOUT, JsonLog
from .metrics import Metrics
from .metrics_port import MetricsPort
from .tensorboard import TensorBoard


@contextmanager
def watched(config: RunConfig, callback: Callback) -> Iterator[CallbackList]:
    """`callback` and those that the options ask for, as one, until this is left.

    Raises ConfigError, with nothing written, for a port that is taken, a file that cannot be written, a package that is not there.
    """
    with ExitStack() as ends:
        beside: dict[str, Callback] = {}
        address = ""
        if config.tensorboard:
            beside["--tensorboard"] = ends.enter_context(TensorBoard())
        if config.metrics_port >= 0:
            beside["--metrics-port"] = metrics = Metrics()
            address = ends.enter_context(MetricsPort(config.metrics_port, metrics.text)).address
        if config.log_json is not None:
            log = ends.enter_context(JsonLog(config.log_json))
            if config.log_json == STDOUT:
                callback = CallbackList(log, {"the screen": callback})
            else:
                beside[f"--log-json {config.log_json}"] = log
        yield CallbackList(callback, beside, address)
