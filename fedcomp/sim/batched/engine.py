"""The batched engine, which trains many clients together. The weights of these clients are the rows of one matrix, the stack."""

import itertools
import math
from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...layout import Layout
from ...tasks.base import Task
from ...tasks.data import Data, Examples
from ...tasks.user_errors import client_error, is_out_of_memory
from ...training.engine import Engine, Job, JobResult
from ...training.local_sgd import Descent, LocalSGD, Tensors, Traces, plan_augmentation
from ...training.parameter_memory import free_parameters
from ..processes import unbatched_engine
from .gradients import LAYERED, MAPPED, Parameters, layered_gradients, mapped_gradients
from .regression import Regression

# Parts of torch's error messages for models that torch.func.vmap cannot run, such as models that change a buffer in the forward pass.
UNMAPPABLE = ("vmap", "atching rule", "mutate a captured Tensor")

# A batch of each client: indices of examples in the data [clients, batch size], and the random numbers [clients, batch size, ...] of the
# augmentation, or None without augmentation.
CohortBatch = tuple[Tensor, Tensor | None]


class NotBatchable(ConfigError):
    """Error for a task that the batched engine does not support. `problem` is the error message without the advice to change --engine."""

    def __init__(self, task: Task, device: torch.device, message: str):
        self.problem = f"the model of task '{task.name}' cannot be trained by the batched engine: {_shortened(message)}"
        super().__init__(f"{self.problem}; give --engine {unbatched_engine(device)}")


def _shortened(message: str) -> str:
    if ".item()" in message or "data-dependent control flow" in message:
        return "its forward pass or loss depends on the values of tensors (.item(), or an if statement on a tensor)"
    if "mutate a captured Tensor" in message:
        return "its forward pass changes a buffer"
    return message.strip().split("\n")[0].split(". ")[0].removesuffix(".")[:120]


class BatchedEngine(Engine):
    """Engine that runs local SGD for at most `at_once` clients together, or for any number of clients if `at_once` is 0.

    Clients are trained together if their batches have the same sizes. The engine takes ownership of `model`, moves it to `device`, and
    frees the memory of its large trainable parameters, because it uses only the frozen parameters and the buffers. If the device runs out
    of memory, the engine trains half as many clients together from then on. It calls `warn` when this first happens.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        device: torch.device | str,
        at_once: int = 0,
        *,
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self.task = task
        self.model = model.to(device)
        self.layout = layout
        self.device = torch.device(device)
        self.at_once = at_once
        self.warn, self._warned = warn, False
        parameters = dict(model.named_parameters())
        # Dtypes by parameter name; `low_precision` has those other than float32.
        dtypes = {e.name: parameters[e.name].dtype for e in layout}
        self.low_precision = {name: d for name, d in dtypes.items() if d != torch.float32}
        layered = layered_gradients(task, model)
        self.gradient_method = LAYERED if layered else MAPPED
        self.gradients = layered or mapped_gradients(task, model)
        self.regression = Regression.of(task, model, layout)
        free_parameters(self.model)

    def train(
        self, start: Tensor, data: Examples, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        """Train the clients of `jobs` together. If an error occurs, train each client alone, so that only clients that cause errors fail.

        Raises NotBatchable for a model that cannot be batched, and ConfigError if the device's memory is too small for one client.
        """
        assert isinstance(data, Data)  # runs whose data is not in memory use another engine
        if not jobs:
            return start.new_empty(0, len(start)), []
        try:
            updates, losses = self.train_together(start, data, jobs, sgd, seed)
            return updates, [JobResult(loss) for loss in losses.tolist()]
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if len(jobs) == 1:
                return start.new_empty(0, len(start)), [client_error(error)]
        single = [self.train(start, data, [job], sgd, seed=seed) for job in jobs]
        return torch.cat([updates for updates, _ in single]), [
            result for _, results in single for result in results
        ]

    def train_together(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> tuple[Tensor, Tensor]:
        """Run local SGD for each job from the weights `start`. All tensors are on the engine's device.

        Return the updates, float32 [clients, numel], and the training losses, float32 [clients]. A training loss is the batch loss before
        each step, averaged over the client's steps.
        """
        self.model.train()
        m, n = len(jobs), self.layout.numel
        updates = torch.empty(m, n, dtype=torch.float32, device=self.device)
        losses = torch.empty(m, dtype=torch.float32, device=self.device)
        sizes = [tuple(len(batch) for batch in job.batches) for job in jobs]
        order = sorted(range(m), key=sizes.__getitem__)
        done = 0
        for size, group in itertools.groupby(order, key=sizes.__getitem__):
            waiting = list(group)
            has_traces = any(job.traces for job in jobs)
            unlimited = not self.at_once or self._uses_regression(data, size, sgd, has_traces)
            while waiting:
                at_once = len(waiting) if unlimited else self.at_once
                size_of_chunk = math.ceil(len(waiting) / math.ceil(len(waiting) / at_once))
                chunk = [jobs[i] for i in waiting[:size_of_chunk]]
                rows = slice(done, done + len(chunk))
                traces = Traces.stack([job.traces for job in chunk])
                batches = self._batches(chunk, sgd, seed, size)
                chunk_losses = self._train_within_memory(
                    start, updates[rows], data, batches, sgd, traces
                )
                if chunk_losses is None:  # memory ran out, so self.at_once was halved
                    unlimited = False
                    continue
                losses[rows] = chunk_losses
                for row, job in enumerate(chunk):
                    job.traces.copy_from(traces.map(itemgetter(row)))
                waiting, done = waiting[len(chunk) :], rows.stop
        if order == sorted(order):
            return updates, losses
        index = torch.from_numpy(np.argsort(order)).to(self.device)
        return updates[index], losses[index]

    def _batches(
        self, jobs: Sequence[Job], sgd: LocalSGD, seed: int, sizes: Sequence[int]
    ) -> list[CohortBatch]:
        """Return a `CohortBatch` for each step. `sizes` are the batch sizes of the steps, which are the same for all jobs."""

        def split(rows: Sequence[np.ndarray]) -> Sequence[Tensor]:
            return torch.from_numpy(np.stack(rows)).to(self.device).split(sizes, dim=1)

        positions = split([np.concatenate(job.batches) for job in jobs])
        drawn = [
            plan_augmentation(self.task, sgd, job.batches, seed, job.round, job.client)
            for job in jobs
        ]
        augmentations = [draws for draws in drawn if draws is not None]
        if not augmentations:
            return [(step, None) for step in positions]
        return list(zip(positions, split(augmentations), strict=True))

    def _train_within_memory(
        self,
        start: Tensor,
        stack: Tensor,
        data: Data,
        batches: Sequence[CohortBatch],
        sgd: LocalSGD,
        traces: Traces,
    ) -> Tensor | None:
        """Call `_train` and return its losses. If memory runs out, halve `at_once` and return None."""
        try:
            return self._train(start, stack, data, batches, sgd, traces)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()
        if len(stack) == 1:
            other = "" if self.device.type == "cpu" else ", or --device cpu"
            raise ConfigError(
                f"the memory of {self.device} is too small to train one client; give a smaller --batch-size{other}"
            )
        self.at_once = len(stack) // 2
        if not self._warned:
            self._warned = True
            self.warn(
                f"the memory of {self.device} is too small to train {len(stack)} clients at once; from now on at most "
                f"{self.at_once} clients are trained at once"
            )
        return None

    def _train(
        self,
        start: Tensor,
        stack: Tensor,
        data: Data,
        batches: Sequence[CohortBatch],
        sgd: LocalSGD,
        traces: Traces,
    ) -> Tensor:
        """Train the clients of `batches`, write their updates into the rows of `stack`, and return their losses [clients]."""
        base = self._rounded(start)
        stack.copy_(base.expand_as(stack))
        steps = [positions for positions, _ in batches]
        sizes = [positions.shape[1] for positions in steps]
        if self.regression is not None and self._uses_regression(data, sizes, sgd, bool(traces)):
            losses = self.regression.descend(stack, data, steps, sgd.lr)
            stack -= base
            return losses
        views = self.layout.views(stack)
        parameters = {
            name: view.to(self.low_precision.get(name, torch.float32))
            for name, view in views.items()
        }
        descent = Descent(self.layout, list(parameters.values()), sgd, traces, base)
        step_losses = []
        for batch in batches:
            gradients, loss = self._gradients(parameters, data, batch, sgd)
            descent.step(gradients)
            step_losses.append(loss)
            del gradients  # free these gradients before the next batch needs memory
        descent.finish()
        for name in self.low_precision:
            views[name].copy_(parameters[name])
        stack -= base
        return torch.stack(step_losses).mean(0, dtype=torch.float32)

    def _uses_regression(
        self, data: Data, sizes: Sequence[int], sgd: LocalSGD, has_traces: bool
    ) -> bool:
        """Return whether the compiled kernels of softmax regression train batches of these `sizes`."""
        return (
            self.regression is not None
            and not has_traces
            and self.regression.supports(data, sizes, sgd)
        )

    def _gradients(
        self, parameters: Parameters, data: Data, batch: CohortBatch, sgd: LocalSGD
    ) -> tuple[Tensors, Tensor]:
        """Return the clipped gradients [clients, ...] for a batch of each client, and the losses [clients] before the step."""
        (positions, augmentation), autocast = batch, sgd.precision != "float32"
        inputs, targets = _gather(data.single_input, positions), _gather(data.targets, positions)
        if augmentation is not None and self.task.augment is not None:
            flat = self.task.augment.apply(inputs.flatten(0, 1), augmentation.flatten(0, 1))
            inputs = flat.view(inputs.shape)
        try:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=autocast, cache_enabled=False
            ):
                gradients, losses = self.gradients(parameters, inputs, targets)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in UNMAPPABLE):
                raise
            raise NotBatchable(self.task, self.device, str(error)) from error
        if autocast:
            gradients = [g.to(p.dtype) for g, p in zip(gradients, parameters.values(), strict=True)]
        return _clipped(gradients, sgd.clip) if sgd.clip else gradients, losses

    def _rounded(self, start: Tensor) -> Tensor:
        rounded = start.clone() if self.low_precision else start
        for name, view in self.layout.views(rounded).items():
            if name in self.low_precision:
                view.copy_(view.to(self.low_precision[name]))
        return rounded


def _gather(examples: Tensor, positions: Tensor) -> Tensor:
    return examples.index_select(0, positions.flatten()).view(*positions.shape, *examples.shape[1:])


def _clipped(gradients: Tensors, limit: float) -> list[Tensor]:
    """Clip each client's gradient (row i of all tensors for client i) to the L2 norm `limit`."""
    norms = torch.stack(
        [gradient.reshape(len(gradient), -1).float().norm(dim=1) for gradient in gradients]
    ).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [
        gradient * factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
        for gradient in gradients
    ]
