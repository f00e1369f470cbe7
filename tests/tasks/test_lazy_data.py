"""Forms of data that a task accepts: several inputs, torch Datasets, Hugging Face Datasets, and the data of each client."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from fedcomp import Data, LazyData, Task
from fedcomp.errors import SpecError, TaskError
from fedcomp.tasks.check import check
from fedcomp.tasks.data import data_from
from fedcomp.tasks.partition import partition
from fedcomp.training.evaluation import evaluate

ROWS = torch.tensor([3, 0])
NUMBERS = torch.arange(8.0).reshape(4, 2)
LABELS = torch.tensor([0, 1, 1, 0])


class Pairs(Dataset):
    """A dataset that records which items are read."""

    def __init__(self):
        self.read = []

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, row):
        self.read.append(row)
        return NUMBERS[row], LABELS[row]


class Listed(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


def from_dict(columns: dict):
    """Return a Hugging Face Dataset. The import is in this function because it takes a second."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


def columns():
    return from_dict(
        {"words": NUMBERS.long().tolist(), "labels": LABELS.tolist(), "user": [7, 7, 5, 9]}
    )


def test_items_of_a_dataset_are_read_only_when_a_batch_needs_them():
    dataset = Pairs()
    data = data_from(dataset)
    assert isinstance(data, LazyData) and dataset.read == [] and len(data) == 4
    batch = data.batch(ROWS)
    assert dataset.read == [3, 0]
    assert torch.equal(batch.inputs, NUMBERS[ROWS]) and torch.equal(batch.targets, LABELS[ROWS])


def test_collate_converts_items_to_a_batch():
    def collate(items):
        inputs, targets = zip(*items, strict=True)
        return {"x": torch.stack(inputs) + 1, "labels": torch.stack(targets)}

    batch = data_from(Pairs(), collate).batch(ROWS)
    assert torch.equal(batch.inputs["x"], NUMBERS[ROWS] + 1)
    assert torch.equal(batch.targets, LABELS[ROWS])


def test_an_item_with_more_than_two_values_has_several_inputs():
    class Triples(Pairs):
        def __getitem__(self, row):
            return NUMBERS[row], NUMBERS[row] * 2, LABELS[row]

    batch = data_from(Triples()).batch(ROWS)
    assert isinstance(batch.inputs, tuple) and torch.equal(batch.inputs[1], NUMBERS[ROWS] * 2)


def test_columns_of_a_hugging_face_dataset_are_keyword_arguments():
    data = data_from(columns())
    batch = data.batch(ROWS)
    assert torch.equal(batch.inputs["words"], NUMBERS.long()[ROWS])
    assert torch.equal(batch.targets, LABELS[ROWS])
    assert torch.equal(data.labels(), LABELS)
    assert [int(item["user"]) for item in data.subset(np.array([2, 3]))] == [5, 9]


def test_a_column_that_cannot_be_stacked_is_named():
    uneven = from_dict({"words": [[1], [1, 2]], "labels": [0, 1]})
    with pytest.raises(ValueError, match="column 'words' cannot be stacked"):
        data_from(uneven).batch(torch.tensor([0, 1]))


@pytest.mark.parametrize(
    "given",
    [
        lambda part: (NUMBERS[part], LABELS[part]),
        lambda part: from_dict({"words": NUMBERS[part].tolist(), "labels": LABELS[part].tolist()}),
    ],
    ids=["tensors", "hugging-face"],
)
def test_data_of_each_client_is_concatenated_and_partitioned_by_client(given):
    data = data_from({"anna": given(slice(0, 1)), "bert": given(slice(1, 4))})
    assert [list(rows) for rows in partition("natural", data, 2, 0)] == [[0], [1, 2, 3]]
    assert torch.equal(data.batch(torch.tensor([3])).targets, LABELS[[3]])


def test_arrays_in_a_tuple_or_dict_are_several_inputs():
    as_tuple = data_from((NUMBERS.numpy(), 2 * NUMBERS, LABELS.numpy()))
    assert torch.equal(as_tuple.inputs[1], 2 * NUMBERS) and torch.equal(as_tuple.targets, LABELS)
    as_dict = data_from({"words": NUMBERS, "labels": LABELS.numpy()})
    assert list(as_dict.inputs) == ["words", "labels"] and torch.equal(as_dict.targets, LABELS)
    of_clients = data_from([as_tuple, as_tuple])
    batch = of_clients.batch(torch.tensor([0, 5]))
    assert torch.equal(batch.inputs[1], 2 * NUMBERS[[0, 1]])
    assert list(of_clients.groups) == [0] * 4 + [1] * 4


class Pair(nn.Module):
    """A model with two outputs, for two targets."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x), x.sum(1)


def test_metrics_receive_all_outputs_and_targets_if_a_model_has_several(monkeypatch):
    items = [(x, (label, x.sum())) for x, label in zip(NUMBERS, LABELS, strict=True)]
    data, seen = data_from(Listed(items)), []

    def measure(outputs, targets):
        seen.append([len(part) for part in (*outputs, *targets)])
        return (outputs[1] - targets[1]).abs().max()

    def loss(outputs, targets):
        return F.cross_entropy(outputs[0], targets[0])

    task = Task("pair", Pair, data, data, loss, accuracy=None, metrics={"error": measure})
    assert len(data.batch(ROWS).split(1)[0].targets[0]) == 1
    layout, model = check(task, 2), Pair()
    weights = layout.gather(model)
    monkeypatch.setattr("fedcomp.training.evaluation.CPU_BATCH", 3)
    found = evaluate(task, model, layout, weights, data, "cpu")
    assert found.metrics == {"error": 0.0} and seen[-1] == [4] * 4


def test_natural_partition_by_a_column():
    chosen = columns().with_format("torch", ["words", "labels"])
    assert list(data_from(chosen).batch(ROWS).inputs) == ["words", "labels"]
    shards = partition("natural:column=user", data_from(chosen), 3, 0)
    assert [list(rows) for rows in shards] == [[2], [0, 1], [3]]
    with pytest.raises(
        SpecError,
        match="^--partition natural:column=person: the task's data has no column 'person'",
    ):
        partition("natural:column=person", data_from(columns()), 3, 0)
    with pytest.raises(SpecError, match="--clients 4 exceeds the 3 groups"):
        partition("natural:column=user", data_from(columns()), 4, 0)


def test_classes_are_read_from_the_labels():
    for data in (data_from(columns()), data_from(Pairs())):
        shards = partition("classes:1", data, 2, 0)
        assert {len(set(LABELS[torch.from_numpy(rows)].tolist())) for rows in shards} == {1}


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Words(nn.Module):
    """A model that returns its own loss, like the models of the library transformers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 2)

    def forward(self, words, labels=None):
        logits = self.table(words).sum(1)
        return Output(logits, None if labels is None else 3 * F.cross_entropy(logits, labels))


def test_a_model_may_return_its_own_loss():
    data = data_from(columns().remove_columns("user"))
    task = Task("words", Words, data, data)
    model, batch = Words(), data.batch(ROWS)
    outputs = task.outputs(model, batch)
    assert torch.equal(task.loss_of(outputs, batch.targets), outputs.loss)
    own = Task("words", Words, data, data, loss=lambda outputs, targets: outputs.sum())
    outputs = own.outputs(model, batch)
    assert outputs.loss is None
    assert torch.equal(own.loss_of(outputs, batch.targets), outputs.logits.sum())
    assert check(task, 2).numel == 16


def test_an_explicit_cross_entropy_replaces_the_loss_of_the_model():
    data = data_from(columns().remove_columns("user"))
    task = Task("words", Words, data, data, loss=F.cross_entropy)
    model, batch = Words(), data.batch(ROWS)
    outputs = task.outputs(model, batch)
    assert outputs.loss is None
    expected = F.cross_entropy(outputs.logits, batch.targets)
    assert torch.equal(task.loss_of(Output(outputs.logits, expected + 1), batch.targets), expected)
    assert check(task, 2).numel == 16


def test_several_inputs_are_passed_to_the_model_by_position_or_keyword():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, left, right):
            return self.layer(left - right)

    model = Two()
    wanted = model(NUMBERS, 2 * NUMBERS)
    for inputs in ((NUMBERS, 2 * NUMBERS), {"right": 2 * NUMBERS, "left": NUMBERS}):
        data = Data(inputs, LABELS)
        task = Task("two", Two, data, data)
        assert torch.equal(task.outputs(model, data.batch(torch.arange(4))), wanted)
        assert check(task, 2).numel == 6


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ((NUMBERS, NUMBERS[:3]), r"3 inputs\[1\] and 4 targets"),
        ({"a": NUMBERS, "b": [1, 2, 3, 4]}, r"train\(\).inputs\['b'\]: got list"),
    ],
)
def test_the_error_for_an_invalid_input_names_the_input(inputs, said):
    task = Task("two", lambda: nn.Linear(2, 2), Data(inputs, LABELS), Data(NUMBERS, LABELS))
    with pytest.raises(TaskError, match=said):
        check(task, 2)
