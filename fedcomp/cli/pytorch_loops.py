"""Plain PyTorch loops, which train clients without compression and aggregation, and a matrix product to measure peak FLOP/s."""

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from ..local_optimizer import read as read_optimizer
from ..tasks import Task, initial_model
from ..tasks.data import Batch, Examples, as_batch, tensors
from ..training.engine import Job
from ..training.local_sgd import LocalSGD
from ..training.own_loop import LocalRound

# For each client and each local step, the indices of the examples in the batch.
Plans = Sequence[Sequence[np.ndarray]]

MAX_PIECE_VALUES = 1 << 22  # maximum number of input values in one forward pass of `big_batch`
SIDE = {"cpu": 2048, "cuda": 8192}  # number of rows of the square matrices in `matrix_product`


def usual_loop(
    task: Task, data: Examples, shards: Sequence[np.ndarray], plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a training loop as in common tutorials: a deep copy of the model, a shuffling DataLoader and an optimizer for each client.

    `shards` contains the indices of each client's examples. The DataLoader draws the batches, so only the number of batches in `plans` is
    used. If the task has a `train_fn`, the loop calls this function in place of local steps. The loop returns the clients' updates.
    """
    model = initial_model(task, 0).to(data.device)
    names = _trained(model)
    collate = getattr(data, "collate", None)
    own_round = LocalRound.of(Job(1, 0, []), sgd, torch.device(data.device), 0)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard, plan in zip(shards, plans, strict=True):
            local, own = copy.deepcopy(model), data.subset(shard)
            if task.train_fn is not None:
                task.train_fn(local.train(), own, own_round)
            else:
                optimizer = _optimizer(task, local, sgd)
                loader = DataLoader(own, sgd.batch_size, shuffle=True, collate_fn=collate)
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
                for batch in itertools.islice(batches, len(plan)):
                    optimizer.zero_grad()
                    _loss(task, local, as_batch(batch, task.target).to(data.device)).backward()
                    optimizer.step()
            before, after = model.state_dict(), local.state_dict()
            updates.append({name: after[name] - before[name] for name in names})
        return updates

    return run


def lean_loop(
    task: Task, data: Examples, shards: Sequence[np.ndarray], plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return a training loop with little overhead: one model that stays on the device, examples selected by index, and a torch optimizer.

    `shards` contains the indices of each client's examples. If the task has a `train_fn`, the loop calls this function in place of local
    steps. The loop returns the clients' updates.
    """
    model = initial_model(task, 0).to(data.device).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    names = _trained(model)
    own_round = LocalRound.of(Job(1, 0, []), sgd, torch.device(data.device), 0)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard, batches in zip(shards, plans, strict=True):
            model.load_state_dict(state)
            if task.train_fn is not None:
                task.train_fn(model, data.subset(shard), own_round)
            else:
                optimizer = _optimizer(task, model, sgd)
                for positions in batches:
                    optimizer.zero_grad()
                    rows = torch.from_numpy(positions).to(data.device)
                    _loss(task, model, data.batch(rows)).backward()
                    optimizer.step()
            after = model.state_dict()
            updates.append({name: after[name] - state[name] for name in names})
        return updates

    return run


def big_batch(task: Task, data: Examples, plans: Plans, sgd: LocalSGD) -> Callable[[], None]:
    """Return a training loop that trains one model on the concatenated batches of all clients.

    The speed of the loop is an upper bound for loops that train each client separately. A batch of more than MAX_PIECE_VALUES input values
    is split into pieces, whose gradients are accumulated.
    """
    model = initial_model(task, 0).to(data.device)
    optimizer = _optimizer(task, model, sgd)
    # For each local step, the indices of the examples of all clients that execute the step.
    steps = [
        torch.from_numpy(np.concatenate([batch for batch in batches if batch is not None]))
        for batches in itertools.zip_longest(*plans)
    ]
    steps = [step.to(data.device) for step in steps]
    values = sum(part[0].numel() for part in tensors(data.batch(steps[0][:1]).inputs))
    piece = max(1, MAX_PIECE_VALUES // max(1, values))

    def run() -> None:
        for rows in steps:
            optimizer.zero_grad()
            for part in rows.split(piece):
                loss = _loss(task, model, data.batch(part))
                (loss * (len(part) / len(rows))).backward()
            optimizer.step()

    return run


def flops_of_an_example(task: Task, data: Examples, batch: int) -> float:
    """Return the floating-point operations per example of a training step, or 0 if torch cannot count the operations."""
    model = initial_model(task, 0).train()
    batch = min(batch, len(data))
    examples = data.batch(torch.arange(batch, device=data.device)).to("cpu")
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mkldnn.flags warns on machines without an Intel GPU
        # FlopCounterMode does not count the operations of mkldnn's LSTM.
        with torch.backends.mkldnn.flags(enabled=False), counter:
            _loss(task, model, examples).backward()
    return counter.get_total_flops() / batch


def matrix_product(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], Tensor], float]:
    """Return (a function that multiplies two large matrices, the number of floating-point operations of one call)."""
    side = SIDE.get(device.type, SIDE["cpu"])
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return lambda: a @ b, 2.0 * side**3


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the duration of the call `run()` in seconds, including the work that the call starts on the device."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _trained(model: torch.nn.Module) -> list[str]:
    """Return the names in a model's state_dict, except for the names of frozen parameters."""
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    return [name for name in model.state_dict() if name not in frozen]


def _loss(task: Task, model: torch.nn.Module, batch: Batch) -> Tensor:
    return task.loss_of(task.outputs(model, batch), batch.targets)


def _optimizer(task: Task, model: torch.nn.Module, sgd: LocalSGD) -> torch.optim.Optimizer:
    """Return a client's optimizer. It clips gradients if `clip` is set, and adds the proximal term of FedProx if `proximal` is set."""
    if task.optimizer is not None:
        optimizer = task.optimizer(model.parameters())
    else:
        spec = read_optimizer(sgd.optimizer)
        optimizer = spec.make(model.parameters(), sgd.lr, sgd.momentum, sgd.weight_decay)
    start = [parameter.detach().clone() for parameter in model.parameters()] if sgd.proximal else []

    def adjust_gradients(*_: object) -> None:
        if sgd.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), sgd.clip)
        for parameter, before in zip(model.parameters(), start, strict=False):
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - before, alpha=sgd.proximal)

    if sgd.clip or sgd.proximal:
        optimizer.register_step_pre_hook(adjust_gradients)
    return optimizer
