"""The server's copy of the model, which is evaluated after rounds and exported after the last round."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .. import seeds
from ..config import RunConfig
from ..errors import TaskError
from ..layout import Layout
from ..profiling import timed
from ..tasks import Task, initial_model
from ..tasks.check import changing_buffers
from ..tasks.data import Examples
from ..tasks.running_statistics import (
    CALIBRATION_EXAMPLES,
    recalibrate_on,
    recalibrated_layers,
    recalibration_error,
)
from ..tasks.user_errors import SEE_TRACEBACK, describe, out_of_memory
from ..training.evaluation import Evaluation, evaluate
from ..training.parameter_memory import Freed, allocate, free_parameters

NOT_EVALUATED = Evaluation(None, None, {})
ROUNDING = 1e-6  # tolerance of the check that an accuracy is between 0 and 1
NO_TRAINING_DATA = (
    "the server has no training data, so the running statistics of the model (BatchNorm) are computed from the inputs of the test data; "
    "add training data ('train') to the task on the server to compute them from training examples"
)
NO_DATA = (
    "the server has no data, so the running statistics of the model (BatchNorm) keep their initial values in model.safetensors; add "
    "training data ('train') or test data ('test') to the task on the server, or use GroupNorm"
)
INITIAL_STATISTICS = (
    "the running statistics of the model (BatchNorm) keep their initial values, because model(inputs) fails on a batch of the data ({}); "
    "make model(inputs) accept a batch of inputs, or use GroupNorm"
)
INITIAL_BUFFERS = (
    "training changes buffers of the model ({}) that clients do not send; the server evaluates and saves the model with the "
    "initial values of these buffers"
)


class Evaluator:
    """The server's copy of the model, which is used for evaluation and for the export of the trained model.

    Before an evaluation or export, running statistics such as those of BatchNorm are computed again for the current weights
    (tasks/running_statistics.py). They always come from the same sample of examples, so that the exported model equals the evaluated model.
    Other buffers keep their initial values. Between evaluations, the memory of large parameters is freed.
    """

    def __init__(
        self,
        config: RunConfig,
        task: Task,
        layout: Layout,
        train: Examples | None,
        test: Examples | None,
        device: torch.device,
    ):
        """`train` and `test`: the server's training and test data, or None; `test` must be on `device`."""
        self.config, self.task, self.layout = config, task, layout
        self.test, self.device = test, device
        self.model = initial_model(task, config.seed).to(device)
        self.warnings: list[str] = []  # warnings about the buffers of the model
        self.calibrates = bool(recalibrated_layers(self.model))
        self.calibration = test if train is None else train
        if self.calibration is None:
            self.warnings += [NO_DATA] * self.calibrates
            self.calibrates = False
        else:
            self._prepare(self.calibration, is_training_data=train is not None)
        self._freed: Freed = free_parameters(self.model)

    def _prepare(self, data: Examples, is_training_data: bool) -> None:
        """Draw the sample of `data` for running statistics. Warn if they cannot be computed, or if training changes other buffers."""
        checked = self.calibrates and self.task.evaluate_fn is not None
        if checked and (why := recalibration_error(self.task, self.model, data, self.device)):
            self.calibrates = False
            self.warnings.append(INITIAL_STATISTICS.format(why))
        if self.calibrates:
            drawn = seeds.generator(self.config.seed, "recalibration")
            self.sample = drawn.permutation(len(data))[:CALIBRATION_EXAMPLES]
            self.warnings += [NO_TRAINING_DATA] * (not is_training_data)
        if changing := changing_buffers(self.task, self.model, data):
            more = f" and {len(changing) - 1} more" if changing[1:] else ""
            self.warnings.append(INITIAL_BUFFERS.format(changing[0] + more))

    def is_initial(self, weights: Tensor) -> bool:
        """Return whether `weights` [numel] are the model's initial weights."""
        initial = self.layout.gather(initial_model(self.task, self.config.seed))
        return torch.equal(initial, weights.cpu())

    def evaluate(self, round: int, weights: Tensor) -> Evaluation:
        """Evaluate the model with `weights` [numel] after a round.

        Return NOT_EVALUATED if the server has no test data, or if the options exclude this round. Raises TaskError if the task's code
        fails or returns a wrong accuracy, and OutOfMemoryError if memory runs out.
        """
        if self.test is None or not self.config.evaluates("server", round):
            return NOT_EVALUATED
        with timed("evaluation"), self._task_errors(), self._parameters():
            if self.calibrates:
                self._load(weights)
            evaluation = evaluate(
                self.task, self.model, self.layout, weights.to(self.device), self.test, self.device
            )
        accuracy = evaluation.accuracy
        if accuracy is not None and (accuracy < -ROUNDING or accuracy > 1 + ROUNDING):
            raise TaskError(
                f"task '{self.task.name}': accuracy(outputs, targets) returned {accuracy:g} on the test data; make it return a "
                "fraction of the examples, from 0 to 1, then continue with --resume"
            )
        return evaluation

    def export(self, weights: Tensor) -> dict[str, Tensor]:
        """Return the tensors for model.safetensors: the trained parameters, or the whole `state_dict()` if it has buffers.

        Complex buffers are left out, because some versions of safetensors cannot store them.
        """
        trained = {
            name: view.contiguous() for name, view in self.layout.views(weights.cpu()).items()
        }
        buffers = {name for name, _ in self.model.named_buffers()}
        if not buffers or buffers.isdisjoint(self.model.state_dict()):
            return trained
        with self._parameters():
            with self._task_errors():
                self._load(weights)
            state = {
                name: value.cpu().contiguous().clone()
                for name, value in self.model.state_dict().items()
                if isinstance(value, Tensor) and not value.is_complex()
            }
        return state | trained

    def _load(self, weights: Tensor) -> None:
        """Copy `weights` into the model, and compute its running statistics."""
        self.layout.scatter(weights.to(self.device), self.model)
        if self.calibrates and self.calibration is not None:
            recalibrate_on(self.task, self.model, self.calibration, self.sample, self.device)

    @contextmanager
    def _parameters(self) -> Iterator[None]:
        """Allocate memory for the model's parameters, with undefined values, in a `with` block."""
        allocate(self._freed)
        try:
            yield
        finally:
            self._freed = free_parameters(self.model)

    @contextmanager
    def _task_errors(self) -> Iterator[None]:
        """Raise TaskError in place of errors in the task's code, or OutOfMemoryError if memory runs out."""
        try:
            yield
        except TaskError as error:
            raise TaskError(f"{error}; then continue with --resume") from error
        except Exception as error:
            raise out_of_memory(error) or TaskError(
                f"the evaluation of task '{self.task.name}' failed: {describe(error)}; correct the task, then continue with --resume, or "
                f"{SEE_TRACEBACK}"
            ) from error
