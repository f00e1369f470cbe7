"""Reproductions: claims of papers, the runs that test them, and whether they hold here. One paper, one file; one line here."""

from fedcomp.errors import UserError, nearest

from . import dgc_warmup, ef_signsgd, election, fetchsgd, sbc, stc_cifar10, stc_mnist
from .base import CAVEAT, Claim, Form, Judgement, Measured, Method, Reproduction, Results

__all__ = [
    "CAVEAT",
    "Claim",
    "Form",
    "Judgement",
    "Measured",
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
    """Every reproduction, by name."""
    return dict(_REPRODUCTIONS)


def reproduction(name: str) -> Reproduction:
    """Raises UserError for an unknown name."""
    if name not in _REPRODUCTIONS:
        raise UserError(f"unknown reproduction '{name}'; {nearest(name, _REPRODUCTIONS)}")
    return _REPRODUCTIONS[name]
