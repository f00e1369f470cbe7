"""Evaluation of the model on the held-out data of clients."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .. import seeds
from ..layout import Layout
from ..messages import ReportedMetrics, check_metric_names
from ..profiling import timed
from ..tasks import Task
from ..tasks.data import Examples
from ..tasks.running_statistics import (
    CALIBRATION_EXAMPLES,
    recalibrate_on,
    recalibrated_layers,
    recalibration_error,
)
from ..training.engine import seeded_torch
from ..training.evaluation import evaluate
from .trainer import Shards


class ClientEvaluator:
    """Evaluates the model on the held-out data of clients.

    `shards[client]` are the indices of the client's training examples in `train`, and `held_out[client]` those of its held-out examples in
    `test`. `train` and `test` must be on `device`, and the model is moved to `device`. Before each evaluation, the running statistics of
    batch normalization are computed again, from up to 2,000 of the client's training examples, if the model has such layers.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        device: torch.device,
        seed: int,
        train: Examples,
        shards: Shards,
        test: Examples,
        held_out: Shards,
    ):
        self.task, self.layout, self.model = task, Layout.of(model), model.to(device)
        self.device, self.seed = device, seed
        self.train, self.shards = train, shards
        self.test, self.held_out = test, held_out
        self.buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.calibrates = bool(recalibrated_layers(self.model)) and not (
            task.evaluate_fn is not None and recalibration_error(task, self.model, train, device)
        )

    def evaluate(self, round: int, client: int, weights: Tensor) -> ReportedMetrics:
        """Return the metrics of the model with these weights [numel] on a client's held-out examples, or no metrics if it has no examples.

        Raises ProtocolError if the name of a metric cannot be sent to the server.
        """
        rows = self.held_out[client]
        if not len(rows):
            return ReportedMetrics()
        seed = seeds.key(self.seed, "evaluation", round, client)
        weights = weights.to(self.device)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[name])
        with timed("evaluation"), seeded_torch(seed, self.device):
            if self.calibrates:
                drawn = seeds.generator(self.seed, "recalibration", 0, client)
                sample = drawn.permutation(self.shards[client])[:CALIBRATION_EXAMPLES]
                self.layout.scatter(weights, self.model)
                recalibrate_on(self.task, self.model, self.train, sample, self.device)
            parts = self.task, self.model, self.layout, weights, self.test, self.device
            loss, accuracy, metrics = evaluate(*parts, rows=rows, lenient=True)
        numbers: Mapping[str, float | None] = {"accuracy": accuracy, "loss": loss, **metrics}
        measured = {name: value for name, value in numbers.items() if value is not None}
        check_metric_names(measured)
        return ReportedMetrics(evaluation=measured, examples=len(rows))
