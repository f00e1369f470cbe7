"""Scalars for TensorBoard, one point per round, by the names of metrics.jsonl. Needs the package tensorboard."""

import math
from pathlib import Path
from typing import Any

from ..callbacks import Callback, Header, RoundRecord
from ..errors import ConfigError

FOLDER = "tensorboard"  # in the run folder
SCALARS = (
    "accuracy",
    "loss",
    "train_loss",
    "uplink_bytes",
    "downlink_bytes",
    "seconds",
    "accepted",
    "rejected",
)
HOURS = "simulated_hours"  # of runs on a virtual network
RATIO = "ratio"  # bytes of float32 models over bytes of frames


class TensorBoard(Callback):
    """Writes scalars into the run folder. Raises ConfigError if the package is not installed."""

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
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def on_run_start(self, header: Header) -> None:
        """Open the event file. A resumed run hides the points after its checkpoint."""
        self._writer = self._open(
            str(Path(header.out) / FOLDER),
            purge_step=header.first_round if header.first_round > 1 else None,
        )

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
