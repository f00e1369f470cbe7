"""Examples of a task: `Data` in memory, or `LazyData` read from a dataset batch by batch.

The inputs of a batch are a tensor, a tuple of tensors (positional arguments of the model) or a dict of tensors (keyword arguments).
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, default_collate

from ..errors import SpecError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
DATA_FORMS = (
    "a fedcomp Data, a pair (inputs, targets) of tensors or arrays, a torch Dataset, a Hugging Face Dataset, or a list or dict of "
    "one of these for each client"
)
TARGET = "labels"  # key of the targets in a batch that is a dict


class Batch(NamedTuple):
    """The inputs and targets of several examples."""

    inputs: Inputs
    # A tensor, or nested tuples, lists and dicts of tensors. None if there are no targets.
    targets: Any

    def __len__(self) -> int:
        return len(tensors(self.inputs)[0])

    def to(self, device: torch.device | str) -> "Batch":
        return self.mapped(lambda t: t.to(device))

    def split(self, size: int) -> list["Batch"]:
        """Return batches of `size` examples. The last batch may be smaller."""
        return [self.part(slice(at, at + size)) for at in range(0, len(self), size)]

    def part(self, rows: slice) -> "Batch":
        """Return the examples with the indices `rows`, as views of this batch."""
        return self.mapped(lambda t: t[rows])

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor of the inputs and targets."""
        return Batch(map_tensors(self.inputs, function), map_nested(self.targets, function))


@dataclass(frozen=True)
class Data:
    """Examples in memory.

    `inputs` are N examples, one per row: a tensor [N, ...], or a tuple or dict of such tensors. `targets` is a tensor [N, ...]; partitions
    by class need integers [N]. `groups` [N] are the groups of the examples, such as user ids. The partition `natural` assigns all examples
    of a group to the same client. `n_clients` is the number of clients if the data was given for each client separately, else 0.
    """

    inputs: Inputs
    targets: Tensor
    groups: np.ndarray | None = None
    n_clients: int = 0

    def __len__(self) -> int:
        return len(self._whole)

    @property
    def _whole(self) -> Batch:
        return Batch(self.inputs, self.targets)

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def single_input(self) -> Tensor:
        """The inputs of data whose `inputs` is one tensor, not a tuple or dict."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    def batch(self, rows: Tensor) -> Batch:
        """Return the examples with the indices `rows`, an int64 tensor on the device of the data."""
        return self._whole.mapped(lambda t: t.index_select(0, rows))

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all examples in batches of nearly equal size, at most `size`. The batches are views of the data."""
        for rows in _slices(len(self), size):
            yield self._whole.part(rows)

    def subset(self, rows: np.ndarray | None = None) -> Dataset[Any]:
        """Return the examples with the indices `rows`, by default all examples, as a torch Dataset of pairs (input, target)."""
        inputs: Any = (
            self.inputs
        )  # `Any`, because torch's type hints do not accept a tensor as a Dataset
        targets: Any = self.targets
        if isinstance(inputs, dict):
            inputs = StackDataset(**inputs)
        elif isinstance(inputs, tuple):
            inputs = StackDataset(*inputs)
        pairs: Dataset[Any] = StackDataset(inputs, targets)
        return pairs if rows is None else Subset(pairs, rows.tolist())

    def labels(self) -> Tensor:
        """Return the target of every example."""
        return self.targets

    def column(self, name: str | None) -> np.ndarray | None:
        """Return `inputs[name]` as an array, or `groups` if `name` is None. Raises SpecError if `inputs` is not a dict with this key."""
        if name is None:
            return self.groups
        if not isinstance(self.inputs, dict) or name not in self.inputs:
            raise SpecError(
                f"the task's data has no column '{name}'; name a key of the inputs, which must be a dict"
            )
        return self.inputs[name].cpu().numpy()

    def to(self, device: torch.device | str) -> "Data":
        return replace(self, **self._whole.to(device)._asdict())

    @cached_property
    def digest(self) -> str:
        """The shapes of the inputs and a hash of the targets, to detect changed data when a run is resumed."""
        shapes = map_tensors(self.inputs, lambda t: list(t.shape))
        content = self.targets.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return f"{shapes} {hashlib.sha256(content).hexdigest()[:16]}"


@dataclass(eq=False)
class LazyData:
    """Examples of a map-style dataset, read when a batch needs them.

    `dataset` is a torch Dataset with a length or a Hugging Face Dataset. `collate(items)` converts a list of items to a batch, like the
    `collate_fn` of `torch.utils.data.DataLoader`; the default stacks tensors and numbers. A batch is a pair (inputs, targets), a longer
    tuple (input, …, targets), or a dict with the targets under the key `target`. Batches are moved to `device`. `groups` and `n_clients`
    have the same meaning as in Data.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    target: str = TARGET
    groups: np.ndarray | None = None
    device: torch.device | str = "cpu"
    n_clients: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: Tensor) -> Batch:
        positions = rows.tolist()
        if self.collate is None and _is_hugging_face(self.dataset):
            columns = self.dataset[positions]
            batch: Any = {name: _stack_column(name, column) for name, column in columns.items()}
        elif hasattr(self.dataset, "__getitems__"):
            batch = (self.collate or default_collate)(self.dataset.__getitems__(positions))
        else:
            batch = (self.collate or default_collate)([self.dataset[i] for i in positions])
        return as_batch(batch, self.target).to(self.device)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all examples in batches of nearly equal size, at most `size`."""
        for rows in _slices(len(self), size):
            yield self.batch(torch.arange(rows.start, rows.stop))

    def subset(self, rows: np.ndarray | None = None) -> Dataset[Any]:
        """Return the examples with the indices `rows`, by default all examples, as a dataset with unchanged items."""
        if rows is None:
            return self.dataset
        if _is_hugging_face(self.dataset):
            return self.dataset.select(rows)
        return Subset(self.dataset, rows.tolist())

    def labels(self) -> Tensor:
        """Return the target of every example. Every item is read if the dataset has no column or attribute with the targets."""
        if _is_hugging_face(self.dataset):
            labels: Any = _whole_column(self.dataset, self.target)
        else:  # torchvision's datasets have one of these attributes
            labels = getattr(self.dataset, "targets", getattr(self.dataset, "labels", None))
        if labels is None:
            items = (self.dataset[i] for i in range(len(self.dataset)))
            labels = [
                item[self.target] if isinstance(item, Mapping) else item[-1] for item in items
            ]
        return labels if isinstance(labels, Tensor) else torch.as_tensor(np.asarray(labels))

    def column(self, name: str | None) -> np.ndarray | None:
        """Return the column or attribute `name` of the dataset, or `groups` if `name` is None. Raises SpecError if there is none."""
        if name is None:
            return self.groups
        if _is_hugging_face(self.dataset) and name in self.dataset.column_names:
            return _whole_column(self.dataset, name)
        values = getattr(self.dataset, name, None)
        if values is not None and len(values) == len(self):
            return np.asarray(values)
        raise SpecError(
            f"the task's data has no column '{name}'; name a column or an attribute of the dataset"
        )

    def to(self, device: torch.device | str) -> "LazyData":
        return replace(self, device=device)

    @cached_property
    def digest(self) -> str:
        """The number of examples and, for a Hugging Face Dataset, its fingerprint, to detect changed data when a run is resumed."""
        return f"{len(self)} {getattr(self.dataset, '_fingerprint', '')}".strip()


Examples = Data | LazyData


class DataSource:
    """The value of `train` or `test` in a Task: data in one of the forms that DATA_FORMS describes, or a function that returns such data.

    Calling a DataSource returns the data as `data_from` converts it.
    """

    def __init__(
        self, value: Any, collate: Callable[[list[Any]], Any] | None = None, target: str = TARGET
    ):
        self.value, self.collate, self.target = value, collate, target

    def __call__(self) -> Any:
        is_function = callable(self.value) and not isinstance(self.value, Dataset | Data | LazyData)
        return data_from(self.value() if is_function else self.value, self.collate, self.target)


def data_from(
    value: Any, collate: Callable[[list[Any]], Any] | None = None, target: str = TARGET
) -> Any:
    """Convert data in one of the forms that DATA_FORMS describes to Data or LazyData.

    Any other value is returned unchanged, so that check.py reports it. NumPy float64 arrays become tensors of torch's default dtype, and
    integer arrays become int64 tensors, as layers and losses require. If a dict or list contains the data of each client, the data is
    concatenated, and the keys of the dict or the positions in the list become the groups. Raises ValueError for a client without examples.
    """
    if isinstance(value, Data | LazyData):
        return value
    if _is_hugging_face(value) or (isinstance(value, Dataset) and hasattr(value, "__len__")):
        return LazyData(value, collate, target)
    if isinstance(value, Mapping) and target in value and all(map(_is_array, value.values())):
        inputs = map_tensors(value, _as_tensor)
        return Data(inputs, inputs[target])
    if isinstance(value, tuple) and len(value) > 2 and all(map(_is_array, value)):
        *arrays, targets = map(_as_tensor, value)
        return Data(tuple(arrays), targets)
    if isinstance(value, Mapping) or (isinstance(value, list) and not _is_pair(value)):
        by_client = value if isinstance(value, Mapping) else dict(enumerate(value))
        return _concatenate(
            {key: data_from(part, collate, target) for key, part in by_client.items()}
        )
    if isinstance(value, tuple | list) and len(value) == 2:
        inputs, targets = value
        return Data(map_tensors(inputs, _as_tensor), _as_tensor(targets))
    return value


def as_batch(collated: Any, target: str = TARGET) -> Batch:
    """Convert the result of a collate function to a Batch. Raises ValueError unless it has inputs and targets, or is a dict."""
    if isinstance(collated, Batch):
        return collated
    if isinstance(collated, Mapping):
        return Batch(dict(collated), collated.get(target))
    if isinstance(collated, tuple | list) and len(collated) >= 2:
        *parts, targets = collated
        inputs = parts[0] if len(parts) == 1 else parts
        if isinstance(inputs, Mapping):
            return Batch(dict(inputs), targets)
        return Batch(tuple(inputs) if isinstance(inputs, list) else inputs, targets)
    raise ValueError(
        f"a batch is of type {type(collated).__name__}, without inputs and targets; change each item of the dataset to a tuple "
        "(input, target) or a dict, or give the task a collate function"
    )


def map_tensors(inputs: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor of a batch's inputs."""
    if isinstance(inputs, Mapping):
        return {name: function(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map(function, inputs))
    return function(inputs)


def map_nested(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply a function to every tensor in nested tuples, lists and dicts. Other values are unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_nested(part, function) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_nested(part, function) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def concatenate_nested(parts: Sequence[Any]) -> Any:
    """Concatenate tensors, or nested tuples, lists and dicts of tensors with equal structure. Raises TypeError for other parts."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: concatenate_nested([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple | list):
        columns = [concatenate_nested(column) for column in zip(*parts, strict=True)]
        return columns if isinstance(first, list) else tuple(columns)
    if first is None:
        return None
    raise TypeError(
        f"metrics need outputs and targets that are tensors, not {type(first).__name__}; return tensors, or tuples or dicts of tensors"
    )


def tensors(inputs: Inputs) -> list[Tensor]:
    """Return all tensors of a batch's inputs."""
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def describe_non_finite(data: Any, rows: np.ndarray | None = None) -> str:
    """Return a description of the non-finite values, such as "NaN or infinity in 7 of 400 examples", or "" if there are none.

    Only the examples with the indices `rows` are examined, by default all. LazyData is not examined.
    """
    if not isinstance(data, Data):
        return ""
    parts = [part for part in (*tensors(data.inputs), data.targets) if part.is_floating_point()]
    count = len(data) if rows is None else len(rows)
    bad = torch.zeros(count, dtype=torch.bool)
    for part in parts:
        part = part if rows is None else part[torch.from_numpy(rows).to(part.device)]
        bad |= ~part.isfinite().reshape(count, -1).all(1).cpu()
    return f"NaN or infinity in {int(bad.sum())} of {count} examples" if bad.any() else ""


def _concatenate(parts: dict[Any, Any]) -> Any:
    """Concatenate the data of clients. If a value in `parts` is not data, return this value, so that check.py reports it."""
    by_client = list(parts.values())
    other = [part for part in by_client if not isinstance(part, Data | LazyData)]
    if other or not parts:
        return other[0] if other else parts
    if empty := [name for name, part in parts.items() if not len(part)]:
        raise ValueError(f"client {empty[0]!r} has no examples; leave the client out")
    groups = np.repeat(np.array(list(parts)), [len(part) for part in by_client])
    lazy = [part for part in by_client if isinstance(part, LazyData)]
    if not lazy:
        inputs = concatenate_nested([part.inputs for part in by_client])
        return Data(inputs, torch.cat([part.targets for part in by_client]), groups, len(parts))
    datasets = [part.subset() for part in by_client]
    if all(map(_is_hugging_face, datasets)):
        from datasets import concatenate_datasets

        whole = concatenate_datasets(datasets)
    else:
        whole = ConcatDataset(datasets)
    return replace(lazy[0], dataset=whole, groups=groups, n_clients=len(parts))


def _slices(count: int, size: int) -> list[slice]:
    """Split the indices 0 to `count` − 1 into as few slices as possible, with at most `size` and about equally many indices each."""
    parts = np.array_split(np.arange(count), -(-count // size))
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def _is_hugging_face(value: Any) -> bool:
    """Return whether an object is a Hugging Face Dataset, without an import of the package `datasets`."""
    return all(hasattr(value, name) for name in ("column_names", "with_format", "select"))


def _whole_column(dataset: Any, name: str) -> np.ndarray:
    """Return a column of a Hugging Face Dataset, even if the columns that the Dataset's format selects do not include it."""
    return np.asarray(dataset.with_format("numpy", columns=[name])[:][name])


def _is_pair(values: list[Any]) -> bool:
    """Return whether a list is a pair (inputs, targets). Otherwise, it has the data of each client."""
    data_types = (Data, LazyData, Dataset, Mapping, tuple)
    return len(values) == 2 and not any(
        isinstance(value, data_types) or _is_hugging_face(value) for value in values
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _stack_column(name: str, column: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column
    try:
        return default_collate(list(map(torch.as_tensor, column)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"column '{name}' cannot be stacked ({str(error).splitlines()[0]}); drop the column, or give the task a collate function"
        ) from error


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype == np.float64:
        return torch.tensor(array, dtype=torch.get_default_dtype())
    return torch.tensor(array, dtype=torch.int64 if array.dtype.kind in "iu" else None)
