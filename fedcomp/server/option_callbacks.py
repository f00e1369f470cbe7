"""Callbacks for the options --log-json (a log in JSON lines), --metrics-port (metrics for Prometheus) and --tensorboard (scalars)."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from ..callbacks import Callback, CallbackList, Header, RoundRecord
from ..config import RunConfig
from ..errors import ConfigError
from .logs import STDOUT, JsonLog

FOLDER = "tensorboard"  # a subfolder of the run folder
SCALARS = "accuracy loss train_loss uplink_bytes downlink_bytes seconds accepted rejected".split()
HOURS = "simulated_hours"  # scalar: virtual hours since the run began
RATIO = "ratio"  # scalar: bytes of float32 models divided by bytes of encoded updates


@contextmanager
def with_option_callbacks(config: RunConfig, callback: Callback) -> Iterator[CallbackList]:
    """Yield a callback that calls `callback`, and an own callback for each of these options that is given. Close the own callbacks on exit.

    Raises ConfigError if a port is in use, a file cannot be written, or a package is not installed.
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


class TensorBoard(Callback):
    """A callback that writes TensorBoard scalars, named like the fields of metrics.jsonl, to the run folder.

    Raises ConfigError if the package tensorboard is not installed.
    """

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--tensorboard needs the package tensorboard; install it with: pip install tensorboard"
            ) from error
        self._open = SummaryWriter
        self._writer: Any = None

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def on_run_start(self, header: Header) -> None:
        # A resumed run repeats the rounds after the checkpoint. TensorBoard hides their old scalars from `purge_step` on.
        purge_step = header.first_round if header.first_round > 1 else None
        self._writer = self._open(str(Path(header.out) / FOLDER), purge_step=purge_step)

    def on_round_end(self, record: RoundRecord) -> None:
        values = {name: getattr(record, name) for name in SCALARS}
        if sent := record.uplink_bytes + record.downlink_bytes:
            values[RATIO] = (record.dense_uplink_bytes + record.dense_downlink_bytes) / sent
        values |= {HOURS: record.simulated_hours, **record.metrics}
        for name, spread in record.client_metrics.items():
            values |= {
                f"clients/{name}": spread.mean,
                f"clients/{name}_worst_decile": spread.worst_decile,
            }
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, record.round)
        self._writer.flush()
