"""Robust strategies as functions of vectors, and byzfl's aggregators to compare them with."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedcomp.codecs import Update
from fedcomp.codecs.update import Dense, Sparse
from fedcomp.layout import Layout
from fedcomp.strategies import RoundStrategy, StrategyConfig, strategy
from fedcomp.strategies.base import AcceptedUpdate, RoundUpdates

NAMES = "median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"
FRONTS = "", ",mix=true", ",buckets=2", ",buckets=2,mix=true"


def oracle() -> ModuleType:
    """Return the module `byzfl.aggregators` without importing byzfl itself, whose benchmarks import torchvision.

    Not every build of torch can load torchvision.
    """
    if "byzfl" not in sys.modules:
        found = importlib.util.find_spec("byzfl") or pytest.skip("byzfl is not installed")
        sys.modules["byzfl"] = importlib.util.module_from_spec(found)
    return importlib.import_module("byzfl.aggregators")


def rule(text: str, numel: int, **rules: Any) -> RoundStrategy:
    """Return a strategy for a model with `numel` parameters."""
    return strategy(
        text, StrategyConfig(uplink="identity", memory="none", **rules), Layout.flat(numel)
    )


def accepted(updates: list[Update | None]) -> list[AcceptedUpdate]:
    return [AcceptedUpdate(client, update, 1, 0.0, "") for client, update in enumerate(updates)]


def aggregated(
    made: RoundStrategy, vectors: np.ndarray, sparse: bool = False, round: int = 1
) -> np.ndarray:
    """Return the aggregate that a strategy computes from vectors [m, n]: float32 [n]."""
    rows = np.asarray(vectors, np.float32)
    updates = [
        Sparse(row.size, np.flatnonzero(row), row[row != 0]) if sparse else Dense(row)
        for row in rows
    ]
    into = torch.zeros(rows.shape[1])
    made.aggregate(RoundUpdates(round, {"train": accepted(updates)}, into.clone()), into)
    return into.numpy()


def clouds(kind: str, m: int, n: int, byzantine: int, seed: int = 0) -> np.ndarray:
    """Return m vectors [n], float32, the last `byzantine` of which are Byzantine."""
    rng = np.random.default_rng(seed)
    honest = (rng.standard_normal(n) + 0.3 * rng.standard_normal((m, n))).astype(np.float32)
    lies = {
        "honest": honest[m - byzantine :],
        "far": 1e6 * rng.standard_normal((byzantine, n)),
        "inverted": -10 * honest[m - byzantine :],
        "colluding": np.repeat(
            honest.mean(0)[None] - 1.5 * honest.std(0), byzantine, axis=0
        ),  # a small shift is enough (Baruch et al. 2019)
        "mimic": np.repeat(honest[:1], byzantine, axis=0),
        "zero": np.zeros((byzantine, n)),
        "largest": np.full((byzantine, n), np.finfo(np.float32).max),
    }[kind]
    return np.concatenate([honest[: m - byzantine], lies]).astype(np.float32)


KINDS = "honest", "far", "inverted", "colluding", "mimic", "zero"
