"""Reproductions: claims of papers, and the runs that test these claims."""

from fedcomp.errors import UserError, nearest

from . import dgc_warmup, ef_signsgd, election, fetchsgd, sbc, stc_cifar10, stc_mnist
from .base import CAVEAT, Claim, Experiment, Method, MethodResult, Reproduction, Results, Verdict

__all__ = [
    "CAVEAT",
    "Claim",
    "Experiment",
    "Verdict",
    "MethodResult",
    "Method",
    "Reproduction",
    "Results",
    "available_reproductions",
    "reproduction",
]

_REPRODUCTIONS: dict[str, Reproduction] = {
    module.REPRODUCTION.name: module.REPRODUCTION
    for module in (stc_mnist, stc_cifar10, sbc, ef_signsgd, dgc_warmup, election, fetchsgd)
}


def available_reproductions() -> dict[str, Reproduction]:
    """Return a dict of all reproductions by name."""
    return dict(_REPRODUCTIONS)


def reproduction(name: str) -> Reproduction:
    """Return the reproduction `name`. Raises UserError for an unknown name."""
    if name not in _REPRODUCTIONS:
        raise UserError(f"unknown reproduction '{name}'; {nearest(name, _REPRODUCTIONS)}")
    return _REPRODUCTIONS[name]
