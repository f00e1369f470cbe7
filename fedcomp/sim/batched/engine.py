"""The engine that trains a stack of clients together."""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...layout import Layout
from ...tasks.base import Data, Task
from ...tasks.user_errors import ran_out_of_memory
from ...training.local_sgd import NO_TRACES, LocalSGD, Traces, anchors, descend
from .choice import MAPPED, NotMapped, gradients_of
from .convolutions import FORMS
from .losses import Parameters
from .mapped import mapped_gradients
from .regression import Regression
from .room import does_not_fit, release
from .traced import agrees

# Positions in the data [m, b], and what augmentation drew for each [m, b, ...].
Batch = tuple[Tensor, Tensor | None]


class BatchedEngine:
    """Trains a stack of clients, at most `at_once` of them together; 0 = all whose batches have the same sizes.

    Takes `model` over: moves it to `device`. Of its tensors only the frozen ones and the buffers are used. `way` is one of choice.WAYS.
    Where the memory of the device is not enough, half as many clients are trained together from then on, and `warn` hears of it once.
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
        self.warn, self._said = warn, False
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
        """Local SGD from `start` (float32 [n]) for every client of `plans`, its batches of `data`; all on the engine's device.

        `changes`: for each client what plan_changes drew, nothing without augmentation. Returns the updates, float32 [m, n], and each
        client's mean over its steps of the loss before the step, float32 [m]. Clients whose batches have the same sizes are trained
        together. Raises NotMapped for a model that cannot be batched, and ConfigError where the device's memory does not hold one client.
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
            waiting = [np.asarray(list(group))]
            if not self._regresses(data, size, sgd, traces):
                waiting = self._pieces(waiting[0])
            while waiting:
                some = waiting.pop()
                rows, place = slice(done, done + len(some)), torch.from_numpy(some).to(self.device)
                mine, batches = traces.rows(place), self._batches(plans, changes, some, size)
                found = self._within_memory(start, updates[rows], data, batches, sgd, mine)
                if found is None:
                    left = [client for piece in reversed(waiting) for client in piece]
                    waiting = self._pieces([*some, *left])
                    continue
                losses[rows] = found
                traces.put(place, mine)
                done = rows.stop
        if order == sorted(order):
            return updates, losses
        place = torch.from_numpy(np.argsort(order)).to(self.device)
        return updates[place], losses[place]

    def _batches(
        self,
        plans: Sequence[Sequence[np.ndarray]],
        changes: Sequence[np.ndarray],
        some: np.ndarray,
        size: Sequence[int],
    ) -> list[Batch]:
        """Of some clients, step by step."""
        positions = (
            torch.from_numpy(np.stack([np.concatenate(plans[client]) for client in some]))
            .to(self.device)
            .split(size, dim=1)
        )
        if not changes:
            return [(each, None) for each in positions]
        drawn = (
            torch.from_numpy(np.stack([changes[client] for client in some]))
            .to(self.device)
            .split(size, dim=1)
        )
        return list(zip(positions, drawn, strict=True))

    def _pieces(self, members: Sequence[int]) -> list[np.ndarray]:
        """The clients that are trained together, the first ones last."""
        return np.array_split(
            np.asarray(members), math.ceil(len(members) / (self.at_once or len(members)))
        )[::-1]

    def _within_memory(self, start: Tensor, stack: Tensor, *rest: object) -> Tensor | None:
        """`_train`, or None where the memory was not enough, and fewer are trained together from now on."""
        try:
            return self._train(start, stack, *rest)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
        release(self.device)  # now that nothing holds what the step had made
        if len(stack) == 1:
            raise does_not_fit(self.device)
        self.at_once = len(stack) // 2
        if not self._said:
            self._said = True
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
        """Leaves the updates in `stack` [m, n]; returns the losses [m]."""
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
        """Whether the model and what is asked of it are the regression's, which needs no memory but the updates'."""
        return (
            self.regression is not None and not traces and self.regression.suits(data, sizes, sgd)
        )

    def _gradients(
        self, parameters: Parameters, data: Data, batch: Batch, sgd: LocalSGD
    ) -> tuple[Sequence[Tensor], Tensor]:
        """The gradients of a batch [m, *shape], clipped, and the losses [m]."""
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
        """`start` as the model can hold it."""
        rounded = start.clone() if self.coarse else start
        for name, view in self.layout.views(rounded).items():
            if name in self.coarse:
                view.copy_(view.to(self.coarse[name]))
        return rounded


def _gathered(examples: Tensor, positions: Tensor) -> Tensor:
    return examples.index_select(0, positions.flatten()).view(*positions.shape, *examples.shape[1:])


def _clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Gradients [m, ...] with the norm of each row over all tensors at most `limit`."""
    norms = torch.stack(
        [gradient.reshape(len(gradient), -1).float().norm(dim=1) for gradient in gradients]
    ).norm(dim=0)
    factor = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [
        gradient * factor.to(gradient.dtype).view(-1, *[1] * (gradient.dim() - 1))
        for gradient in gradients
    ]
