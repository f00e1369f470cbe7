"""Scalars for TensorBoard, a point a round, by the names of metrics.jsonl. Needs the package tensorboard."""

import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

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
HOURS = "simulated_hours"  # where a virtual network gives rounds their time
RATIO = "ratio"  # what float32 models would have cost, by what frames did


class TensorBoard(Callback):
    """Writes into the run folder, from the first round on, while it is entered. Raises ConfigError without the package."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "--tensorboard needs the package tensorboard; install it with: pip install tensorboard"
            ) from error
        self._open = SummaryWriter
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            self._writer.close()

    def started(self, header: Header) -> None:
        """A resumed run takes back what came after its checkpoint."""
        self._writer = self._open(
            str(Path(header.out) / FOLDER),
            purge_step=header.first_round if header.first_round > 1 else None,
        )

    def round_done(self, record: RoundRecord) -> None:
        values = {name: getattr(record, name) for name in SCALARS}
        if sent := record.uplink_bytes + record.downlink_bytes:
            values[RATIO] = (record.dense_uplink_bytes + record.dense_downlink_bytes) / sent
        values |= {HOURS: record.simulated_hours} | record.metrics
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, record.round)
        self._writer.flush()
