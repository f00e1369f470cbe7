from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedcomp.errors import DataError
from fedcomp.layout import Layout
from fedcomp.sim.attacks import attacks
from fedcomp.tasks import Data, Task, initial_model, load
from fedcomp.tasks.check import check
from fedcomp.tasks.partition import partition
from fedcomp.tasks.shakespeare import (
    ALPHABET,
    UNKNOWN,
    WINDOW,
    CharacterLSTM,
    Text,
    encode,
    loss,
    speeches,
)
from fedcomp.training.engine import SerialEngine
from fedcomp.training.evaluation import evaluate
from fedcomp.training.local_sgd import LocalSGD, plan_batches

PLAY = """First  Citizen:
Before we proceed any further,

All:
Speak, speak.

First Citizen:
hear me:
speak.

and again.


All:
Resolved.
"""


def long(words: str, characters: int) -> str:
    """Return lines of `words` with at least `characters` characters."""
    return "\n".join([words] * -(-characters // (len(words) + 1)))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with shakespeare/input.txt, in which ROMEO speaks 25 windows, JULIET 2, and NURSE less than one."""
    said = [
        ("ROMEO", long("But, soft! what light?", 1000)),
        ("JULIET", long("O Romeo, Romeo!", 2 * WINDOW + 1)),
        ("NURSE", "Madam!"),
        ("ROMEO", long("It is the east.", 1000)),
    ]
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text(
        "\n\n".join(f"{role}:\n{words}" for role, words in said) + "\n"
    )
    return tmp_path


def decoded(characters: torch.Tensor) -> str:
    return "".join(ALPHABET[number] for number in characters.tolist())


def test_lines_are_assigned_to_the_role_whose_name_precedes_them():
    citizen = "Before we proceed any further,\nhear me:\nspeak.\nand again."
    assert speeches(PLAY) == {"First Citizen": citizen, "All": "Speak, speak.\nResolved."}
    assert speeches("no role\nsays this:\n\nHe goes.") == {}


def test_the_number_of_a_character_does_not_depend_on_the_text():
    assert len(set(ALPHABET)) == UNKNOWN == 96
    assert encode(ALPHABET).tolist() == list(range(96))
    assert encode("a\u00e9\t\U0001f600b").tolist() == [
        *encode("a"),
        UNKNOWN,
        UNKNOWN,
        UNKNOWN,
        *encode("b"),
    ]


@pytest.mark.parametrize("inside", ["", "shakespeare"])
def test_the_text_of_a_role_is_split_into_windows_with_the_next_characters_as_targets(
    folder, inside
):
    train, test = Text(folder / inside).read("train"), Text(folder / inside).read("test")
    assert (
        train.inputs.dtype == train.targets.dtype == torch.int64
        and train.inputs.shape == train.targets.shape == (len(train), WINDOW)
    )
    assert torch.equal(train.inputs[:, 1:], train.targets[:, :-1])
    whole = speeches((folder / "shakespeare" / "input.txt").read_text())
    for role, learned, asked in (("ROMEO", 23, 2), ("JULIET", 1, 1)):
        mine = [data.targets[torch.from_numpy(data.groups == role)] for data in (train, test)]
        assert [len(part) for part in mine] == [learned, asked]
        assert whole[role][1:].startswith(
            decoded(torch.cat(mine).flatten())
        )  # the last tenth is test data, and no character occurs twice
    assert set(train.groups) == set(test.groups) == {"ROMEO", "JULIET"}


def test_each_client_has_one_or_more_roles(folder):
    train = load("shakespeare-lstm", folder).train()
    shards = partition("natural", train, 2, 0)
    assert [set(train.groups[shard]) for shard in shards] == [{"JULIET"}, {"ROMEO"}]
    assert len(partition("natural", train, 1, 0)[0]) == len(train)


def test_line_endings_and_a_byte_order_mark_do_not_change_the_data(folder):
    path, before = folder / "shakespeare" / "input.txt", Text(folder).read("train")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    after = Text(folder).read("train")
    assert torch.equal(before.inputs, after.inputs) and np.array_equal(before.groups, after.groups)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda path: None,
            "shakespeare needs its data; give --data DIR, a folder that contains shakespeare/input.txt .*, or set FEDCOMP_DATA",
        ),
        (
            lambda path: path / "absent",
            "is not a folder; give a folder that contains shakespeare/input.txt",
        ),
        (
            lambda path: path,
            "does not contain shakespeare/input.txt; give a folder that contains",
        ),
        (
            lambda path: (path / "input.txt").write_bytes(b"ROMEO:\n\xff\xfe") and path,
            "cannot be read: 'utf-8' codec can't decode byte .*; give a complete copy, a text in UTF-8",
        ),
        (
            lambda path: (path / "input.txt").write_text("No plays here.") and path,
            "has no role with more than 160 characters; give",
        ),
        (
            lambda path: (path / "input.txt").write_text("ROMEO:\nO!") and path,
            "has no role with more than 160 characters; give",
        ),
    ],
)
def test_missing_or_invalid_text_is_refused_with_the_fix(tmp_path, make, says):
    with pytest.raises(DataError, match=says) as caught:
        load("shakespeare-lstm", make(tmp_path)).train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("closed", [".", "input.txt"])
def test_a_text_without_read_permission_is_refused(unprivileged, closed):
    (unprivileged / "input.txt").write_text("ROMEO:\nO!")
    (unprivileged / closed).chmod(0)
    try:
        with pytest.raises(DataError, match="no permission to read .*change its permissions"):
            Text(unprivileged).read("train")
    finally:
        (unprivileged / closed).chmod(0o700)


def small(folder: Path) -> Task:
    text = Text(folder)
    return Task(
        "small",
        lambda: CharacterLSTM(8, 32),
        lambda: text.read("train"),
        lambda: text.read("test"),
        loss,
    )


def test_the_loss_is_the_mean_over_all_positions():
    outputs, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    each = [F.cross_entropy(outputs[:, i], targets[:, i]) for i in range(5)]
    torch.testing.assert_close(loss(outputs, targets), torch.stack(each).mean())


def test_an_output_depends_only_on_earlier_characters():
    model, inputs = CharacterLSTM(8, 16), torch.randint(0, 97, (2, 12))
    changed = inputs.clone()
    changed[:, 7:] = 0
    assert torch.equal(model(inputs)[:, :7], model(changed)[:, :7]) and not torch.equal(
        model(inputs)[:, 7:], model(changed)[:, 7:]
    )


def test_a_small_model_learns_the_text_of_a_role(folder, one_thread):
    task = small(folder)
    train, test, model = task.train(), task.test(), initial_model(task, 0)
    layout, sgd = check(task, 10, train, test), LocalSGD(steps=60, batch_size=10, lr=4.0, clip=1.0)
    plan = plan_batches(sgd, np.arange(len(train)), 0, 1, 0)
    start = layout.gather(model)
    learned = start + SerialEngine(task, model, layout, "cpu").train(start, train, plan, sgd).update
    most_frequent = torch.bincount(test.targets.flatten()).max() / test.targets.numel()
    assert evaluate(task, model, layout, learned, test, "cpu")[1] > 1.5 * most_frequent


def test_byzantine_clients_may_flip_characters(folder):
    train = Text(folder).read("train")
    (attack,) = attacks("label-flip:1")
    flipped = attack.data(Data(train.inputs, train.targets, train.groups))
    assert flipped.targets.shape == train.targets.shape and not torch.equal(
        flipped.targets, train.targets
    )


def test_the_real_text_has_the_documented_numbers_of_windows_and_roles(data_folder):
    task = load("shakespeare-lstm", data_folder)
    train, test = task.train(), task.test()
    assert (len(train), len(test), len(set(train.groups))) == (11_422, 1_247, 232)
    assert UNKNOWN not in train.inputs and UNKNOWN not in test.targets
    assert check(task, 10, train, test).numel == Layout.of(initial_model(task, 0)).numel == 824_425
    assert all(
        len(set(train.groups[shard])) in (4, 5) for shard in partition("natural", train, 50, 0)
    )
