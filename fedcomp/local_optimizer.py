"""Optimizers of local training, described by spec strings such as `adamw:lr=3e-4,weight_decay=0.1`.

The name in a spec string is the name of a class of `torch.optim` in lower case, and the options are arguments of the class. The options
`beta1` and `beta2` set the argument `betas`. For `sgd` without options, this module does not import torch, which would take seconds.
"""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, make_dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from . import spec
from .errors import SpecError

if TYPE_CHECKING:
    from torch.optim import Optimizer

SGD = "sgd"
SGD_LR = 0.05  # default learning rate of sgd
SGD_OPTIONS = ("momentum", "weight_decay")  # options of sgd that are also command-line flags
OPTIONAL_BOOLEANS = (
    "foreach",
    "fused",
)  # boolean arguments of torch optimizers whose default is None
UNSUPPORTED = {
    "lbfgs": "evaluates the loss several times a step",
    "sparseadam": "takes sparse gradients only",
}


@dataclass(frozen=True)
class LocalOptimizer:
    """A class of `torch.optim` and its arguments. `lr` is None if the user gave no learning rate in --optimizer."""

    name: str = SGD
    lr: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def is_plain_sgd(self) -> bool:
        """Whether the optimizer is SGD without options other than momentum and weight decay, as the engine `batched` requires."""
        return self.name == SGD and all(key in SGD_OPTIONS for key, _ in self.options)

    @property
    def default_lr(self) -> float:
        """The learning rate if --lr is not given: lr in --optimizer, else 0.05 for sgd, and torch's default for other optimizers."""
        if self.lr is not None:
            return self.lr
        return SGD_LR if self.name == SGD else float(_arguments(self.name)["lr"].default)

    @property
    def has_momentum(self) -> bool:
        """Whether the optimizer has the option `momentum`."""
        return self.name == SGD or "momentum" in _arguments(self.name)

    def make(
        self, parameters: Iterable[Any], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> "Optimizer":
        """Return a torch optimizer for the parameters. The options of the spec string override `momentum` and `weight_decay`."""
        options = dict(self.options)
        if momentum and "momentum" in _arguments(self.name):
            options.setdefault("momentum", momentum)
        betas = [options.pop(name) for name in ("beta1", "beta2") if name in options]
        if betas:
            options["betas"] = tuple(betas)
        if weight_decay:
            options.setdefault("weight_decay", weight_decay)
        return _classes()[self.name](parameters, lr=lr, **options)


@cache  # clients parse the same spec string in every round
def read(text: str) -> LocalOptimizer:
    """Parse a spec string such as `adamw:lr=3e-4`. Raises SpecError for an unknown optimizer or option."""
    part = spec.parse_part(text, "optimizer")
    if part.name == SGD and not part.options:
        return LocalOptimizer()
    if why := UNSUPPORTED.get(part.name):
        raise SpecError(
            f"{part.name} is not supported, because it {why}; give another optimizer, or a task with its own train_fn"
        )
    given = vars(spec.build(part, _option_classes(), "optimizer"))
    options = {name: value for name, value in given.items() if value is not None}
    if len({"beta1", "beta2"} & options.keys()) == 1:
        beta1, beta2 = _arguments(part.name)["betas"].default
        options = {"beta1": beta1, "beta2": beta2} | options
    lr = options.pop("lr", None)
    if lr is not None and not lr > 0:
        raise SpecError(f"lr is {lr:g}; give more than 0")
    return LocalOptimizer(part.name, lr, tuple(sorted(options.items())))


@cache
def _option_classes() -> dict[str, type]:
    """Return a dataclass for each optimizer, by name. Its fields are the options of the optimizer, with the default None."""
    classes = {}
    for name in _classes():
        kinds: dict[str, Any] = {}
        for key, argument in _arguments(name).items():
            default = argument.default
            if key == "betas":
                kinds |= {"beta1": float, "beta2": float}
            elif isinstance(default, bool) or key in OPTIONAL_BOOLEANS:
                kinds[key] = bool
            elif isinstance(default, int) and key.endswith("steps"):
                kinds[key] = int
            elif isinstance(default, int | float | None):
                kinds[key] = float
        kinds.pop("differentiable", None)  # not supported, since nothing differentiates the steps
        fields = [(key, kind | None, None) for key, kind in kinds.items()]
        classes[name] = make_dataclass(name, fields)
    return classes


@cache
def _classes() -> dict[str, type]:
    from torch import optim

    classes = [cls for cls in vars(optim).values() if inspect.isclass(cls)]
    found = {cls.__name__.lower(): cls for cls in classes if issubclass(cls, optim.Optimizer)}
    return {name: cls for name, cls in found.items() if name not in ("optimizer", *UNSUPPORTED)}


def _arguments(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(_classes()[name]).parameters
    return {key: p for key, p in parameters.items() if key != "params"}
