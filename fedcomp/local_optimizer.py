"""Optimizers of local training by spec string: `adamw:lr=3e-4,weight_decay=0.1`.

The name is that of a class of `torch.optim` in lower case, and the options are its arguments; `beta1` and `beta2` stand for `betas`.
torch is imported for other optimizers than `sgd` only.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from . import spec
from .errors import SpecError, nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer

SGD = "sgd"
SGD_LR = 0.05
FIELDS = ("momentum", "weight_decay")  # options of sgd with flags of their own
UNSUITED = {
    "lbfgs": "evaluates the loss several times a step",
    "sparseadam": "takes sparse gradients only",
}


@dataclass(frozen=True)
class LocalOptimizer:
    """A class of `torch.optim` and its arguments. `lr` is None where the spec string gives none."""

    name: str = SGD
    lr: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def plain_sgd(self) -> bool:
        """Whether momentum and weight decay say everything, so that clients can be trained together."""
        return self.name == SGD and all(key in FIELDS for key, _ in self.options)

    @property
    def default_lr(self) -> float:
        """The learning rate where neither the spec string nor --lr gives one: 0.05 of sgd, else that of torch."""
        if self.lr is not None:
            return self.lr
        if self.name == SGD:
            return SGD_LR
        return float(_arguments(self.name)["lr"].default)

    def takes(self, option: str) -> bool:
        """Whether the optimizer has an option of this name."""
        return (self.name == SGD and option in FIELDS) or option in _arguments(self.name)

    def make(
        self,
        parameters: Iterable[Any],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> "Optimizer":
        """Return the optimizer of the parameters. `momentum` and `weight_decay` hold where the spec string does not give them."""
        options = dict(self.options)
        if momentum and "momentum" in _arguments(self.name):
            options.setdefault("momentum", momentum)
        betas = [options.pop(name) for name in ("beta1", "beta2") if name in options]
        if betas:
            options["betas"] = tuple(betas)
        if weight_decay:
            options.setdefault("weight_decay", weight_decay)
        return _classes()[self.name](parameters, lr=lr, **options)


def read(text: str) -> LocalOptimizer:
    """Return the optimizer that a spec string names. Raises SpecError for an unknown name or option."""
    part = spec.parse_part(text, "optimizer")
    if part.name == SGD and not part.options:
        return LocalOptimizer()
    if part.name in UNSUITED:
        raise SpecError(f"{part.name} {UNSUITED[part.name]}; give another optimizer, or a train_fn")
    if part.name not in _classes():
        raise SpecError(f"unknown optimizer '{part.name}'; {nearest(part.name, _classes())}")
    options: dict[str, Any] = {}
    for given, raw in part.options:
        key = given.replace("-", "_") or "lr"
        if key in options:
            raise SpecError(f"{key} is given twice; keep one")
        options[key] = _value(part.name, key, raw)
    if len({"beta1", "beta2"} & options.keys()) == 1:
        beta1, beta2 = _arguments(part.name)["betas"].default
        options = {"beta1": beta1, "beta2": beta2} | options
    lr = options.pop("lr", None)
    if lr is not None and not lr > 0:
        raise SpecError(f"lr is {lr:g}; give more than 0")
    return LocalOptimizer(part.name, lr, tuple(sorted(options.items())))


def _value(name: str, key: str, raw: str) -> Any:
    arguments = _arguments(name)
    known = [
        a
        for a, p in arguments.items()
        if isinstance(p.default, bool | int | float) or p.default is None
    ]
    if "betas" in arguments:
        known += ["beta1", "beta2"]
    if key not in known:
        raise SpecError(f"optimizer '{name}' has no option '{key}'; {nearest(key, known)}")
    if key in arguments and (isinstance(arguments[key].default, bool) or raw in ("true", "false")):
        return spec.convert(raw, bool, key)
    whole = key in arguments and type(arguments[key].default) is int and key.endswith("steps")
    return spec.convert(raw, int if whole else float, key)


@cache
def _classes() -> dict[str, type]:
    from torch import optim

    return {
        cls.__name__.lower(): cls
        for cls in vars(optim).values()
        if inspect.isclass(cls)
        and issubclass(cls, optim.Optimizer)
        and cls is not optim.Optimizer
        and cls.__name__.lower() not in UNSUITED
    }


def _arguments(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_classes()[name].__init__).parameters
    return {key: p for key, p in parameters.items() if key not in ("self", "params")}
