"""Plain PyTorch loops that train the clients of a simulation and do nothing else, and the arithmetic of the device."""

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from ..tasks import Data, Task, initial_model
from ..training.local_sgd import LocalSGD

Plans = Sequence[Sequence[np.ndarray]]  # for each client its batches, positions of examples

LARGEST_PIECE = 1 << 22  # input values of the big batch that go through the model at once
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices of `product`


def usual_loop(
    task: Task, data: Data, shards: Sequence[np.ndarray], plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return the loop of tutorials: for each client a deep copy of the model, a shuffling DataLoader, torch.optim.SGD, and a difference.

    It shuffles by itself and takes only the number of batches from a client's plan.
    """
    model = initial_model(task, 0).to(data.inputs.device)
    examples = TensorDataset(data.inputs, data.targets)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard, plan in zip(shards, plans, strict=True):
            local = copy.deepcopy(model)
            optimizer = _optimizer(local, sgd)
            own = Subset(examples, shard.tolist())
            loader = DataLoader(own, batch_size=sgd.batch_size, shuffle=True)
            batches = itertools.chain.from_iterable(itertools.repeat(loader))
            for inputs, targets in itertools.islice(batches, len(plan)):
                optimizer.zero_grad()
                task.loss(local(inputs), targets).backward()
                optimizer.step()
            before = model.state_dict()
            updates.append(
                {name: value - before[name] for name, value in local.state_dict().items()}
            )
        return updates

    return run


def lean_loop(
    task: Task, data: Data, plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return the leanest loop over a module: one resident model, examples by index from resident tensors, torch.optim.SGD."""
    model = initial_model(task, 0).to(data.inputs.device)
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for batches in plans:
            model.load_state_dict(state)
            optimizer = _optimizer(model, sgd)
            for batch in batches:
                optimizer.zero_grad()
                rows = torch.from_numpy(batch).to(data.inputs.device)
                task.loss(model(data.inputs[rows]), data.targets[rows]).backward()
                optimizer.step()
            updates.append(
                {name: value - state[name] for name, value in model.state_dict().items()}
            )
        return updates

    return run


def big_batch(task: Task, data: Data, plans: Plans, sgd: LocalSGD) -> Callable[[], None]:
    """Return the loop of one model that takes the batches of all clients as one, the limit of the arithmetic.

    A batch of more than LARGEST_PIECE values is taken in pieces whose gradients are added.
    """
    model = initial_model(task, 0).to(data.inputs.device)
    optimizer = _optimizer(model, sgd)
    # The examples of each step, of all clients that take it.
    steps = [
        torch.from_numpy(np.concatenate([batch for batch in batches if batch is not None]))
        for batches in itertools.zip_longest(*plans)
    ]
    steps = [step.to(data.inputs.device) for step in steps]
    piece = max(1, LARGEST_PIECE // max(1, data.inputs[0].numel()))

    def run() -> None:
        for rows in steps:
            optimizer.zero_grad()
            for some in rows.split(piece):
                loss = task.loss(model(data.inputs[some]), data.targets[some])
                (loss * (len(some) / len(rows))).backward()
            optimizer.step()

    return run


def flops_of_an_example(task: Task, data: Data, batch: int) -> float:
    """Return the floating-point operations of a step for one example, forward and backward, as torch counts them; 0 if it counts none."""
    model = initial_model(task, 0).train()
    batch = min(batch, len(data))
    inputs, targets = data.inputs[:batch].cpu(), data.targets[:batch].cpu()
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `flags` warns where there is no GPU of Intel
        # torch does not count the LSTM of mkldnn.
        with torch.backends.mkldnn.flags(enabled=False), counter:
            task.loss(model(inputs), targets).backward()
    return counter.get_total_flops() / batch


def product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], float]:
    """Return a large matrix product and its floating-point operations."""
    side = SIDE.get(device.type, SIDE["cpu"])
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return lambda: a @ b, 2.0 * side**3


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the duration of a call, until the device is done."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def _optimizer(model: torch.nn.Module, sgd: LocalSGD) -> torch.optim.SGD:
    """Return SGD with the clipping and the proximal term of `sgd`, which pulls towards the current weights."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay
    )
    start = [parameter.detach().clone() for parameter in model.parameters()] if sgd.proximal else []

    def change(*_: object) -> None:
        if sgd.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), sgd.clip)
        for parameter, before in zip(model.parameters(), start, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - before, alpha=sgd.proximal)

    if sgd.clip or sgd.proximal:
        optimizer.register_step_pre_hook(change)
    return optimizer
