"""A task's examples: the form in which a run reads them, and the forms in which people have them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

FORMS = "a fedcomp Data, a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs"


@dataclass(frozen=True)
class Data:
    """Examples as resident tensors, so that a batch is gathered by index."""

    inputs: Tensor  # [N, ...]
    targets: Tensor  # [N, ...]; for partitions by class: int64 [N]
    groups: np.ndarray | None = None  # [N] group of each example, for the partition `natural`

    def __len__(self) -> int:
        return len(self.inputs)


def non_finite(data: Data, rows: np.ndarray | None = None) -> str:
    """Describe non-finite examples among all or `rows`, such as "NaN or infinity in 7 of 400 examples"; "" if all are finite."""
    parts = [part for part in (data.inputs, data.targets) if part.is_floating_point()]
    count = len(data) if rows is None else len(rows)
    bad = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        part = part if rows is None else part[torch.from_numpy(rows).to(part.device)]
        bad |= ~part.isfinite().reshape(count, -1).all(1).cpu()
    return f"NaN or infinity in {int(bad.sum())} of {count} examples" if bad.any() else ""


class Examples:
    """What a Task was given as its data, one of FORMS or a function that returns one; called, it is the Data.

    What is of no such form is returned as it is: the task's check says so.
    """

    def __init__(self, given: Any):
        self.given = given

    def __call__(self) -> Any:
        made = callable(self.given) and not isinstance(self.given, Dataset | Data)
        return data_from(self.given() if made else self.given)

    def __repr__(self) -> str:
        return f"Examples({getattr(self.given, '__name__', type(self.given).__name__)})"


def data_from(given: Any) -> Any:
    """Data from one of FORMS; anything else as it is.

    Of arrays, float64 becomes torch's default type, and integers int64, as layers and losses want them. A Dataset is read from its first
    item to its last, and held in memory. Raises what a Dataset raises, and ValueError where its items are no pairs or differ in shape.
    """
    if isinstance(given, Dataset) and hasattr(given, "__len__"):
        return _read(given)
    if isinstance(given, tuple | list) and len(given) == 2:
        return Data(*map(_tensor, given))
    return given


def _read(dataset: Any) -> Data:
    items = [dataset[i] for i in range(len(dataset))]
    for item in items:
        if isinstance(item, Mapping | str) or not isinstance(item, Sequence) or len(item) != 2:
            raise ValueError(
                f"an item is a {type(item).__name__}; let the Dataset give pairs (input, target)"
            )
    columns = [[_tensor(value) for value in column] for column in zip(*items, strict=True)] or [
        [],
        [],
    ]
    for name, column in zip(("inputs", "targets"), columns, strict=True):
        if len({(value.shape, value.dtype) for value in column}) > 1:
            raise ValueError(
                f"{name} of the Dataset differ in shape or type; pad, crop or convert them to one"
            )
    return Data(*(torch.stack(column) if column else torch.empty(0) for column in columns))


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype == np.float64:
        return torch.tensor(array, dtype=torch.get_default_dtype())
    return torch.tensor(array, dtype=torch.int64 if array.dtype.kind in "iu" else None)
