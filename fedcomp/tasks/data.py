"""Examples of a task: `Data` in memory, `LazyData` read from a dataset batch by batch.

Both give batches of examples by their rows. The inputs of a batch are a tensor, a tuple of tensors (positional arguments of the model)
or a dict of tensors (keyword arguments).
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, default_collate

from ..errors import ConfigError

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
FORMS = (
    "a fedcomp Data, a pair (inputs, targets) of tensors or arrays, a torch Dataset, a Hugging Face Dataset, or a list or dict of "
    "one of these for each client"
)
TARGET = "labels"  # key of the targets in a batch that is a dict


class Batch(NamedTuple):
    inputs: Inputs
    targets: Any  # a tensor; None for a dict without targets

    def __len__(self) -> int:
        return len(first_tensor(self.inputs))

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(mapped(self.inputs, lambda t: t.to(device)), _moved(self.targets, device))

    def split(self, size: int) -> list["Batch"]:
        """Return batches of `size` examples, the last one of what is left."""
        pieces = [slice(at, at + size) for at in range(0, len(self), size)]
        return [
            Batch(
                mapped(self.inputs, lambda t, p=piece: t[p]),
                None if self.targets is None else self.targets[piece],
            )
            for piece in pieces
        ]


@dataclass(frozen=True)
class Data:
    """Examples in memory, gathered into batches by index.

    `inputs` are [N, ...]: a tensor, a tuple of tensors or a dict of tensors. `targets` are [N, ...]; partitions by class need int64 [N].
    `groups` [N] holds the group of each example, for the partition `natural`.
    """

    inputs: Inputs
    targets: Tensor
    groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(first_tensor(self.inputs))

    @property
    def device(self) -> torch.device:
        return self.targets.device

    @property
    def has_single_input(self) -> bool:
        """Whether the inputs are one tensor, as the batched engine requires."""
        return isinstance(self.inputs, Tensor)

    @property
    def single_input(self) -> Tensor:
        """The inputs of data with a single input."""
        assert isinstance(self.inputs, Tensor)
        return self.inputs

    def batch(self, rows: Tensor) -> Batch:
        """Return the examples of `rows`, int64 [b] on the device of the data."""
        return Batch(
            mapped(self.inputs, lambda t: t.index_select(0, rows)),
            self.targets.index_select(0, rows),
        )

    def batches(self, size: int) -> Iterator[Batch]:
        """Walk through all examples in near-equal batches of at most `size`, without a copy."""
        for first, end in _pieces(len(self), size):
            piece = slice(first, end)
            yield Batch(mapped(self.inputs, lambda t, p=piece: t[p]), self.targets[piece])

    def subset(self, rows: np.ndarray | None = None) -> Dataset[Any]:
        """Return the examples of `rows`, or all, as a torch Dataset of pairs (input, target)."""
        items = _Items(self)
        return items if rows is None else Subset(items, rows.tolist())

    def labels(self) -> Tensor:
        """Return the target of every example."""
        return self.targets

    def column(self, name: str | None) -> np.ndarray | None:
        """Return the group of every example [N]; `name` is that of an input, or None for `groups`."""
        if name is None:
            return self.groups
        if not isinstance(self.inputs, dict) or name not in self.inputs:
            raise ConfigError(
                f"--partition natural:column={name}: the task's data has no column '{name}'"
            )
        return self.inputs[name].cpu().numpy()

    def to(self, device: torch.device | str) -> "Data":
        return replace(
            self,
            inputs=mapped(self.inputs, lambda t: t.to(device)),
            targets=self.targets.to(device),
        )

    @cached_property
    def digest(self) -> str:
        """Fingerprint of the data, compared when a run is resumed: shapes of the inputs, and 16 hex digits of the targets."""
        shapes = mapped(self.inputs, lambda t: list(t.shape))
        content = self.targets.cpu().contiguous().view(torch.uint8).numpy()
        return f"{shapes} {hashlib.sha256(content).hexdigest()[:16]}"


class LazyData:
    """Examples of a map-style dataset, read when a batch needs them.

    `dataset` is a torch Dataset with a length or a Hugging Face Dataset. `collate(items) → batch` makes a batch of a list of items, as in
    `torch.utils.data.DataLoader`; without it, tensors and numbers are stacked. A batch is a pair (inputs, targets), a longer tuple
    (input, …, targets), or a dict, in which `target` is the key of the targets. Batches are moved to `device`.
    """

    has_single_input = False

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any] | None = None,
        target: str = TARGET,
        groups: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ):
        self.dataset, self.collate, self.target = dataset, collate, target
        self.groups, self.device = groups, device

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, rows: Tensor) -> Batch:
        positions = rows.tolist()
        if self.collate is None and _is_hugging_face(self.dataset):
            columns = self.dataset[positions]
            found: Any = {name: _stacked(name, column) for name, column in columns.items()}
        elif hasattr(self.dataset, "__getitems__"):
            found = (self.collate or default_collate)(self.dataset.__getitems__(positions))
        else:
            found = (self.collate or default_collate)([self.dataset[i] for i in positions])
        return as_batch(found, self.target).to(self.device)

    def batches(self, size: int) -> Iterator[Batch]:
        """Walk through all examples in near-equal batches of at most `size`."""
        for first, end in _pieces(len(self), size):
            yield self.batch(torch.arange(first, end))

    def subset(self, rows: np.ndarray | None = None) -> Dataset[Any]:
        """Return the examples of `rows`, or all, as a dataset of the items as they are."""
        if rows is None:
            return self.dataset
        if _is_hugging_face(self.dataset):
            return self.dataset.select(rows)
        return Subset(self.dataset, rows.tolist())

    def labels(self) -> Tensor:
        """Return the target of every example; reads all items where the dataset has no `targets` and no column of targets."""
        if _is_hugging_face(self.dataset):
            return self._label_tensor(_whole_column(self.dataset, self.target))
        for name in ("targets", "labels"):  # as the datasets of torchvision have them
            if (known := getattr(self.dataset, name, None)) is not None:
                return self._label_tensor(known)
        items = [self.dataset[i] for i in range(len(self.dataset))]
        return self._label_tensor(
            [item[self.target] if isinstance(item, Mapping) else item[-1] for item in items]
        )

    def column(self, name: str | None) -> np.ndarray | None:
        """Return the group of every example [N]: `groups`, or the column `name`."""
        if name is None:
            return self.groups
        if _is_hugging_face(self.dataset) and name in self.dataset.column_names:
            return _whole_column(self.dataset, name)
        if (known := getattr(self.dataset, name, None)) is not None and len(known) == len(self):
            return np.asarray(known)
        raise ConfigError(
            f"--partition natural:column={name}: the task's data has no column '{name}'"
        )

    def to(self, device: torch.device | str) -> "LazyData":
        return LazyData(self.dataset, self.collate, self.target, self.groups, device)

    @cached_property
    def digest(self) -> str:
        """Length of the dataset, and the fingerprint of a Hugging Face Dataset."""
        return f"{len(self)} {getattr(self.dataset, '_fingerprint', '')}".strip()

    @staticmethod
    def _label_tensor(labels: Any) -> Tensor:
        return labels if isinstance(labels, Tensor) else torch.as_tensor(np.asarray(labels))


Examples = Data | LazyData


class Source:
    """Data as a Task was given it: one of FORMS or a function that returns one. Calling it returns the Data or LazyData.

    Anything else is returned unchanged, and the check of the task reports it.
    """

    def __init__(
        self, given: Any, collate: Callable[[list[Any]], Any] | None = None, target: str = TARGET
    ):
        self.given, self.collate, self.target = given, collate, target

    def __call__(self) -> Any:
        made = callable(self.given) and not isinstance(self.given, Dataset | Data | LazyData)
        return data_from(self.given() if made else self.given, self.collate, self.target)

    def __repr__(self) -> str:
        return f"Source({getattr(self.given, '__name__', type(self.given).__name__)})"


def data_from(
    given: Any, collate: Callable[[list[Any]], Any] | None = None, target: str = TARGET
) -> Any:
    """Return one of FORMS as Data or LazyData; anything else unchanged.

    float64 arrays become torch's default type and integers int64, as layers and losses want them. Data for each client is joined, and its
    groups are the keys of a dict or the positions in a list.
    """
    if isinstance(given, Data | LazyData):
        return given
    if _is_hugging_face(given) or (isinstance(given, Dataset) and hasattr(given, "__len__")):
        return LazyData(given, collate, target)
    if isinstance(given, Mapping) or (isinstance(given, list) and not _is_pair(given)):
        by_client = given if isinstance(given, Mapping) else dict(enumerate(given))
        return _joined({key: data_from(part, collate, target) for key, part in by_client.items()})
    if isinstance(given, tuple | list) and len(given) == 2:
        inputs, targets = given
        return Data(mapped(inputs, _tensor), _tensor(targets))
    return given


def as_batch(found: Any, target: str = TARGET) -> Batch:
    """Convert the result of a collate function to a Batch. Raises ValueError unless it is a tuple, a list or a dict."""
    if isinstance(found, Batch):
        return found
    if isinstance(found, Mapping):
        return Batch(dict(found), found.get(target))
    if isinstance(found, tuple | list) and len(found) >= 2:
        *inputs, targets = found
        only = inputs[0] if len(inputs) == 1 else tuple(inputs)
        return Batch(dict(only) if isinstance(only, Mapping) else only, targets)
    raise ValueError(
        f"a batch is a {type(found).__name__}; let the items be pairs (input, target), tuples or dicts, or give the task a collate"
    )


def mapped(inputs: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every tensor of a batch's inputs."""
    if isinstance(inputs, Mapping):
        return {name: function(value) for name, value in inputs.items()}
    if isinstance(inputs, tuple):
        return tuple(map(function, inputs))
    return function(inputs)


def first_tensor(inputs: Inputs) -> Tensor:
    """Return one tensor of the inputs of a batch."""
    return tensors(inputs)[0]


def tensors(inputs: Inputs) -> list[Tensor]:
    """Return all tensors of the inputs of a batch."""
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]


def non_finite(data: Any, rows: np.ndarray | None = None) -> str:
    """Describe non-finite examples among all or `rows`, such as "NaN or infinity in 7 of 400 examples"; "" if all are finite.

    LazyData is not read: "".
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


class _Items(Dataset[Any]):
    """The examples of a Data one by one, as pairs (input, target)."""

    def __init__(self, data: Data):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Any, Tensor]:
        return mapped(self.data.inputs, lambda t: t[row]), self.data.targets[row]


class _Joined(Dataset[Any]):
    """Several datasets one after the other, as torch's ConcatDataset; `__getitem__` alone is needed of each."""

    def __init__(self, parts: Sequence[Any]):
        self.parts = list(parts)
        self.ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, row: int) -> Any:
        number = int(np.searchsorted(self.ends, row, side="right"))
        return self.parts[number][row - (int(self.ends[number - 1]) if number else 0)]


def _joined(parts: dict[Any, Any]) -> Any:
    """Join the data of several clients. Anything else than data is returned unchanged, for the check of the task."""
    found = list(parts.values())
    if not found or not all(isinstance(part, Data | LazyData) and len(part) for part in found):
        return next((part for part in found if not isinstance(part, Data | LazyData)), parts)
    groups = np.repeat(np.array(list(parts)), [len(part) for part in found])
    if all(isinstance(part, Data) and part.has_single_input for part in found):
        return Data(
            torch.cat([part.inputs for part in found]),
            torch.cat([part.targets for part in found]),
            groups,
        )
    if all(isinstance(part, LazyData) and _is_hugging_face(part.dataset) for part in found):
        from datasets import concatenate_datasets

        whole = concatenate_datasets([part.dataset for part in found])
        return LazyData(whole, found[0].collate, found[0].target, groups)
    datasets = [part.dataset if isinstance(part, LazyData) else _Items(part) for part in found]
    first = next((part for part in found if isinstance(part, LazyData)), None)
    collate, target = (first.collate, first.target) if first else (None, TARGET)
    return LazyData(_Joined(datasets), collate, target, groups)


def _pieces(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Split `count` positions into the fewest near-equal pieces of at most `size`, the larger ones first: (first, end) of each."""
    pieces = -(-count // size)
    ends = [0]
    for number in range(pieces):
        ends.append(ends[-1] + count // pieces + (number < count % pieces))
    return itertools.pairwise(ends)


def _is_hugging_face(given: Any) -> bool:
    """Whether an object is a Hugging Face Dataset, by what it can do: the library is not imported."""
    return all(hasattr(given, name) for name in ("column_names", "with_format", "select"))


def _whole_column(dataset: Any, name: str) -> np.ndarray:
    """Return a column of a Hugging Face Dataset, also one that its format leaves out of batches."""
    return np.asarray(dataset.with_format("numpy", columns=[name])[:][name])


def _is_pair(given: list[Any]) -> bool:
    """Whether a list is (inputs, targets), and not the data of several clients."""
    by_client = (Data, LazyData, Dataset, Mapping, tuple)
    return len(given) == 2 and not any(
        isinstance(part, by_client) or _is_hugging_face(part) for part in given
    )


def _stacked(name: str, column: Any) -> Tensor:
    """Return a column of a Hugging Face batch as one tensor."""
    if isinstance(column, Tensor):
        return column
    try:
        return default_collate(list(map(torch.as_tensor, column)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"column '{name}' cannot be stacked ({str(error).splitlines()[0]}); drop it, or give the task a collate"
        ) from error


def _moved(value: Any, device: torch.device | str) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    array = np.asarray(value)
    if array.dtype == np.float64:
        return torch.tensor(array, dtype=torch.get_default_dtype())
    return torch.tensor(array, dtype=torch.int64 if array.dtype.kind in "iu" else None)
