"""Who hears of a run besides the screen, by the options: a log of JSON lines, a page for Prometheus, scalars for TensorBoard."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ..config import RunConfig
from ..observe import Observer, Observers
from .logs import STDOUT, JsonLog
from .metrics import Metrics
from .metrics_port import MetricsPort
from .tensorboard import TensorBoard


@contextmanager
def watched(config: RunConfig, observer: Observer) -> Iterator[Observers]:
    """`observer` and those that the options ask for, as one, until this is left.

    Raises ConfigError, with nothing written, for a port that is taken, a file that cannot be written, a package that is not there.
    """
    with ExitStack() as ends:
        beside: dict[str, Observer] = {}
        address = ""
        if config.tensorboard:
            beside["--tensorboard"] = ends.enter_context(TensorBoard())
        if config.metrics_port >= 0:
            beside["--metrics-port"] = metrics = Metrics()
            address = ends.enter_context(MetricsPort(config.metrics_port, metrics.text)).address
        if config.log_json is not None:
            log = ends.enter_context(JsonLog(config.log_json))
            if config.log_json == STDOUT:
                observer = Observers(log, {"the screen": observer})
            else:
                beside[f"--log-json {config.log_json}"] = log
        yield Observers(observer, beside, address)
