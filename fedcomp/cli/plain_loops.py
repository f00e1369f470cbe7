"""Plain PyTorch loops that train the clients of a simulation and do nothing else, and the arithmetic of the device."""

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
from ..training.local_sgd import LocalSGD
from ..training.own_loop import LocalRound

Plans = Sequence[Sequence[np.ndarray]]  # for each client its batches, positions of examples

LARGEST_PIECE = 1 << 22  # input values of the big batch that go through the model at once
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices of `product`


def usual_loop(
    task: Task, data: Examples, shards: Sequence[np.ndarray], plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return the loop of tutorials: for each client a deep copy of the model, a shuffling DataLoader, an optimizer, and a difference.

    It shuffles by itself and takes only the number of batches from a client's plan. A task's `train_fn` replaces the steps.
    """
    model = initial_model(task, 0).to(data.device)
    sent = _sent(model)
    collate = getattr(data, "collate", None)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard, plan in zip(shards, plans, strict=True):
            local, own = copy.deepcopy(model), data.subset(shard)
            if task.train_fn is not None:
                task.train_fn(
                    local.train(), own, LocalRound.of(sgd, torch.device(data.device), 0, 1, 0)
                )
            else:
                optimizer = _optimizer(task, local, sgd)
                loader = DataLoader(own, sgd.batch_size, shuffle=True, collate_fn=collate)
                batches = itertools.chain.from_iterable(itertools.repeat(loader))
                for batch in itertools.islice(batches, len(plan)):
                    optimizer.zero_grad()
                    _loss(task, local, as_batch(batch, task.target).to(data.device)).backward()
                    optimizer.step()
            before, after = model.state_dict(), local.state_dict()
            updates.append({name: after[name] - before[name] for name in sent})
        return updates

    return run


def lean_loop(
    task: Task, data: Examples, shards: Sequence[np.ndarray], plans: Plans, sgd: LocalSGD
) -> Callable[[], list[dict[str, Tensor]]]:
    """Return the leanest loop over a module: one resident model, examples by index, an optimizer of torch.

    A task's `train_fn` replaces the steps.
    """
    model = initial_model(task, 0).to(data.device).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sent = _sent(model)

    def run() -> list[dict[str, Tensor]]:
        updates = []
        for shard, batches in zip(shards, plans, strict=True):
            model.load_state_dict(state)
            if task.train_fn is not None:
                own = data.subset(shard)
                task.train_fn(model, own, LocalRound.of(sgd, torch.device(data.device), 0, 1, 0))
            else:
                optimizer = _optimizer(task, model, sgd)
                for positions in batches:
                    optimizer.zero_grad()
                    rows = torch.from_numpy(positions).to(data.device)
                    _loss(task, model, data.batch(rows)).backward()
                    optimizer.step()
            after = model.state_dict()
            updates.append({name: after[name] - state[name] for name in sent})
        return updates

    return run


def big_batch(task: Task, data: Examples, plans: Plans, sgd: LocalSGD) -> Callable[[], None]:
    """Return the loop of one model that takes the batches of all clients as one, the limit of the arithmetic.

    A batch of more than LARGEST_PIECE values is taken in pieces whose gradients are added.
    """
    model = initial_model(task, 0).to(data.device)
    optimizer = _optimizer(task, model, sgd)
    # The examples of each step, of all clients that take it.
    steps = [
        torch.from_numpy(np.concatenate([batch for batch in batches if batch is not None]))
        for batches in itertools.zip_longest(*plans)
    ]
    steps = [step.to(data.device) for step in steps]
    values = sum(part[0].numel() for part in tensors(data.batch(steps[0][:1]).inputs))
    piece = max(1, LARGEST_PIECE // max(1, values))

    def run() -> None:
        for rows in steps:
            optimizer.zero_grad()
            for some in rows.split(piece):
                loss = _loss(task, model, data.batch(some))
                (loss * (len(some) / len(rows))).backward()
            optimizer.step()

    return run


def flops_of_an_example(task: Task, data: Examples, batch: int) -> float:
    """Return the floating-point operations of a step for one example, forward and backward, as torch counts them; 0 if it counts none."""
    model = initial_model(task, 0).train()
    batch = min(batch, len(data))
    examples = data.batch(torch.arange(batch, device=data.device)).to("cpu")
    counter = FlopCounterMode(display=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `flags` warns where there is no GPU of Intel
        # torch does not count the LSTM of mkldnn.
        with torch.backends.mkldnn.flags(enabled=False), counter:
            _loss(task, model, examples).backward()
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


def _sent(model: torch.nn.Module) -> list[str]:
    """Return the names in a model's state_dict, without frozen parameters."""
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}
    return [name for name in model.state_dict() if name not in frozen]


def _loss(task: Task, model: torch.nn.Module, batch: Batch) -> Tensor:
    return task.loss_of(task.outputs(model, batch), batch.targets)


def _optimizer(task: Task, model: torch.nn.Module, sgd: LocalSGD) -> torch.optim.Optimizer:
    """Return the optimizer with the clipping and the proximal term of `sgd`, which pulls towards the current weights."""
    if task.optimizer is not None:
        optimizer = task.optimizer(model.parameters())
    else:
        chosen = read_optimizer(sgd.optimizer)
        optimizer = chosen.make(model.parameters(), sgd.lr, sgd.momentum, sgd.weight_decay)
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
