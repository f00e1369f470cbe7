"""The engine that trains a stack of clients together."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...layout import Layout
from ...tasks.base import Task
from ...tasks.data import Data
from ...tasks.user_errors import client_error, ran_out_of_memory
from ...training.engine import Engine, Job, JobResult
from ...training.local_sgd import NO_TRACES, LocalSGD, Traces, anchors, descend, plan_changes
from .choice import MAPPED, NotMapped, gradients_of, mapped_gradients
from .convolutions import FORMS
from .losses import Parameters
from .regression import Regression
from .traced import agrees

# Positions in the data [m, b], and the draws of augmentation for each [m, b, ...].
Batch = tuple[Tensor, Tensor | None]


class BatchedEngine:
    """Trains a stack of clients, at most `at_once` of them together; 0: all whose batches have the same sizes.

    Takes `model` over and moves it to `device`. Only its frozen tensors and buffers are used. `way` is one of choice.WAYS. If the device
    runs out of memory, half as many clients are trained together from then on, and `warn` is called once.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layout: Layout,
        device: torch.device | str,
        at_once: int = 0,
        *,
        way: str = "auto",
        warn: Callable[[str], None] = lambda sentence: None,
    ):
        self.task = task
        self.model = model.to(device)
        self.layout = layout
        self.device = torch.device(device)
        self.at_once = at_once
        self.warn, self._warned = warn, False
        parameters = dict(model.named_parameters())
        self.coarse = {
            e.name: parameters[e.name].dtype
            for e in layout
            if parameters[e.name].dtype != torch.float32
        }
        self.gradients, self.way = gradients_of(task, model, self.device, way)
        self.regression = Regression.of(task, model, layout) if way == "auto" else None
        self._doubted = self.way in FORMS  # until it has been compared with the model itself

    def train(
        self,
        start: Tensor,
        data: Data,
        plans: Sequence[Sequence[np.ndarray]],
        sgd: LocalSGD,
        *,
        traces: Traces = NO_TRACES,
        changes: Sequence[np.ndarray] = (),
    ) -> tuple[Tensor, Tensor]:
        """Run local SGD from `start` (float32 [n]) for every client, on its batches of `data`; all on the engine's device.

        `plans`: the batches of each client. `changes`: what plan_changes drew for each client; empty without augmentation. Return the
        updates, float32 [m, n], and each client's mean over its steps of the loss before the step, float32 [m]. Clients whose batches
        have the same sizes are trained together. Raises NotMapped for a model that cannot be batched, and ConfigError if the device's
        memory does not hold one client.
        """
        self.model.train()
        updates = torch.empty(
            len(plans), self.layout.numel, dtype=torch.float32, device=self.device
        )
        losses = torch.empty(len(plans), dtype=torch.float32, device=self.device)
        sizes = [tuple(len(batch) for batch in plan) for plan in plans]
        order = sorted(range(len(plans)), key=sizes.__getitem__)
        done = 0
        for size, group in itertools.groupby(order, key=sizes.__getitem__):
            waiting, whole = list(group), self._regresses(data, size, sgd, traces)
            while waiting:
                at_once = len(waiting) if whole or not self.at_once else self.at_once
                some = waiting[: math.ceil(len(waiting) / math.ceil(len(waiting) / at_once))]
                rows, place = slice(done, done + len(some)), torch.tensor(some, device=self.device)
                mine, batches = traces.rows(place), self._batches(plans, changes, some, size)
                found = self._within_memory(start, updates[rows], data, batches, sgd, mine)
                if found is None:  # fewer are trained at once now
                    continue
                losses[rows] = found
                traces.put(place, mine)
                waiting, done = waiting[len(some) :], rows.stop
        if order == sorted(order):
            return updates, losses
        place = torch.from_numpy(np.argsort(order)).to(self.device)
        return updates[place], losses[place]

    def _batches(
        self,
        plans: Sequence[Sequence[np.ndarray]],
        changes: Sequence[np.ndarray],
        some: Sequence[int],
        size: Sequence[int],
    ) -> list[Batch]:
        """Return the batches of some clients, step by step."""

        def split(rows: list[np.ndarray]) -> Sequence[Tensor]:
            return torch.from_numpy(np.stack(rows)).to(self.device).split(size, dim=1)

        positions = split([np.concatenate(plans[client]) for client in some])
        drawn = split([changes[client] for client in some]) if changes else itertools.repeat(None)
        return list(zip(positions, drawn, strict=False))

    def _within_memory(self, start: Tensor, stack: Tensor, *rest: object) -> Tensor | None:
        """Call `_train`. Return None if memory ran out; fewer clients are trained together from then on."""
        try:
            return self._train(start, stack, *rest)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.empty_cache()
        if len(stack) == 1:
            other = "" if self.device.type == "cpu" else ", or --device cpu"
            raise ConfigError(
                f"the memory of {self.device} does not hold the training of one client; give a smaller --batch-size{other}"
            )
        self.at_once = len(stack) // 2
        if not self._warned:
            self._warned = True
            self.warn(
                f"the memory of {self.device} is too small to train {len(stack)} clients at once; fewer are from now on"
            )
        return None

    def _train(
        self,
        start: Tensor,
        stack: Tensor,
        data: Data,
        batches: Sequence[Batch],
        sgd: LocalSGD,
        traces: Traces,
    ) -> Tensor:
        """Write the updates into `stack` [m, n] and return the losses [m]."""
        base = self._rounded(start)
        stack.copy_(base.expand_as(stack))
        if self._regresses(data, [positions.shape[1] for positions, _ in batches], sgd, traces):
            losses = self.regression.descend(
                stack, data, [positions for positions, _ in batches], sgd.lr
            )
            stack -= base
            return losses
        views = self.layout.views(stack)
        parameters = {
            name: view.to(self.coarse.get(name, torch.float32)) for name, view in views.items()
        }
        weights, losses = list(parameters.values()), []
        momenta = traces.momenta(self.layout, weights)
        near = anchors(self.layout, base, weights, sgd)
        for batch in batches:
            gradients, loss = self._gradients(parameters, data, batch, sgd)
            traces.step(self.layout, gradients)
            momenta = descend(weights, traces.pulled(self.layout, gradients), momenta, sgd, near)
            losses.append(loss)
        traces.end(self.layout, momenta)
        for name in self.coarse:
            views[name].copy_(parameters[name])
        stack -= base
        return torch.stack(losses).mean(0, dtype=torch.float32)

    def _regresses(self, data: Data, sizes: Sequence[int], sgd: LocalSGD, traces: Traces) -> bool:
        """Return whether softmax regression trains these batches; it needs no memory besides the updates."""
        return (
            self.regression is not None and not traces and self.regression.suits(data, sizes, sgd)
        )

    def _gradients(
        self, parameters: Parameters, data: Data, batch: Batch, sgd: LocalSGD
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Return the gradients of a batch [m, *shape], clipped, and the losses [m]."""
        (positions, changes), lower = batch, sgd.precision != "float32"
        inputs, targets = _gathered(data.inputs, positions), _gathered(data.targets, positions)
        if changes is not None:
            inputs = self.task.augment.apply(inputs.flatten(0, 1), changes.flatten(0, 1)).view(
                inputs.shape
            )
        if self._doubted:
            self._doubted = False
            if not agrees(self.gradients, self.task, self.model, parameters, data):
                self.gradients, self.way = mapped_gradients(self.task, self.model), MAPPED
        try:
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=lower, cache_enabled=False
            ):
                gradients, losses = self.gradients(parameters, inputs, targets)
        except RuntimeError as error:
            if "vmap" not in str(error) and "atching rule" not in str(error):
                raise
            raise NotMapped(self.task, self.device, str(error)) from error
        if lower:
            gradients = [g.to(p.dtype) for g, p in zip(gradients, parameters.values(), strict=True)]
        return _clipped(gradients, sgd.clip) if sgd.clip else gradients, losses

    def _rounded(self, start: Tensor) -> Tensor:
        """Return `start` in the precision of the model."""
        rounded = start.clone() if self.coarse else start
        for name, view in self.layout.views(rounded).items():
            if name in self.coarse:
                view.copy_(view.to(self.coarse[name]))
        return rounded


class BatchedJobs(Engine):
    """Trains jobs as stacks. If a stack fails, its clients are trained one by one, so that only those fail that must."""

    def __init__(self, engine: BatchedEngine):
        self.engine, self.device = engine, engine.device

    def train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, *, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        if not jobs:
            return start.new_empty(0, len(start)), []
        try:
            return self._train(start, data, jobs, sgd, seed)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if len(jobs) == 1:
                return start.new_empty(0, len(start)), [client_error(error)]
        alone = [self.train(start, data, [job], sgd, seed=seed) for job in jobs]
        return torch.cat([updates for updates, _ in alone]), [
            result for _, results in alone for result in results
        ]

    def _train(
        self, start: Tensor, data: Data, jobs: Sequence[Job], sgd: LocalSGD, seed: int
    ) -> tuple[Tensor, list[JobResult | Exception]]:
        stack = Traces.stack([job.traces for job in jobs])
        plans, changes = [job.batches for job in jobs], []
        if sgd.augment:
            changes = [
                plan_changes(self.engine.task, sgd, job.batches, seed, job.round, job.client)
                for job in jobs
            ]
        updates, losses = self.engine.train(start, data, plans, sgd, traces=stack, changes=changes)
        for i, job in enumerate(jobs):
            job.traces.take(stack, i)
        return updates, [JobResult(loss) for loss in losses.tolist()]


def _gathered(examples: Tensor, positions: Tensor) -> Tensor:
    return examples.index_select(0, positions.flatten()).view(*positions.shape, *examples.shape[1:])


def _clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Scale gradients [m, ...] so that the norm of each row over all tensors is at most `limit`."""
    norms = torch.stack(
        [gradient.reshape(len(gradient), -1).float().norm(dim=1) for gradient in gradients]
    ).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [
        gradient * factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
        for gradient in gradients
    ]
