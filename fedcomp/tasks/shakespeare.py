"""Tiny Shakespeare: predict the next character in 40,000 lines of Shakespeare's plays, spoken by about 300 roles.

The task is from McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of deep networks from decentralized
data", AISTATS 2017. The benchmark LEAF (Caldas et al. 2018) contains a similar task, with a client for each role. The model has an
embedding of 8 dimensions and two LSTM layers of 256 units. At each of the 80 positions of a window, it predicts the next character, as in
McMahan et al. and Reddi et al. 2021. In LEAF, the model predicts only the character after the window.

The text, shakespeare/input.txt or input.txt in the folder of --data, has speeches with a blank line between them. The first line of a
speech is its role and a colon:

    First Citizen:
    Before we proceed any further, hear me speak.

    All:
    Speak, speak.

The speeches of a role are concatenated in order and split into windows of 80 characters that do not overlap. The last tenth of a role's
windows, at least one, is test data. Characters after the last window are omitted. Roles with fewer than two windows are omitted as well,
and 232 roles remain. Unlike in LEAF, roles with the same name in two plays, such as First Citizen, are one role, since the text does not
name the plays.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import DataError
from .base import Task, builtin_task, find_files, read_errors, splits
from .data import Data

WINDOW = 80  # characters
TEST_FRACTION = 10  # 1 in 10 windows of a role is test data
# Newline and printable ASCII. The alphabet is fixed, so that the index of a character does not depend on the text.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
UNKNOWN = len(ALPHABET)  # the index of every character that is not in ALPHABET
_NUMBERS = {character: number for number, character in enumerate(ALPHABET)}


class CharacterLSTM(nn.Module):
    """An LSTM with 824,425 parameters. It maps characters (int64 [batch, length]) to scores of the next characters (float32 [batch, length,
    97]).
    """

    def __init__(self, embedded: int = 8, hidden: int = 256, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(UNKNOWN + 1, embedded)
        self.lstm = nn.LSTM(embedded, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, UNKNOWN + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions of outputs [batch, length, characters] and targets [batch, length]."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Text:
    """The Shakespeare text in the data folder, read on first use.

    Methods raise DataError, which names --data, if the file cannot be read.
    """

    folder: Path | None  # the folder of --data

    def read(self, split: str) -> Data:
        """Return the "train" or "test" data: characters (int64 [N, 80]), the characters after them as targets, and roles as groups."""
        parts = {role: _split_windows(windows, split) for role, windows in self._windows.items()}
        windows = torch.from_numpy(np.concatenate(list(parts.values())))
        groups = np.repeat(list(parts), [len(part) for part in parts.values()])
        return Data(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), groups)

    def count(self, split: str) -> int:
        """Return the number of windows in the "train" or "test" data."""
        return sum(len(_split_windows(windows, split)) for windows in self._windows.values())

    def data_folder(self) -> Path:
        """Return the folder that contains the text."""
        return self._path().parent

    @cached_property
    def _windows(self) -> dict[str, np.ndarray]:
        """The windows of each role by its name, int64 [N, 81]: 80 characters and the character after them."""
        path = self._path()
        with read_errors(path, "a complete copy, a text in UTF-8", UnicodeError):
            text = path.read_text(encoding="utf-8-sig")
        by_role = {
            role: encode(lines) for role, lines in speeches(text).items() if len(lines) > 2 * WINDOW
        }
        if not by_role:
            raise DataError(
                f"--data {path} has no role with more than {2 * WINDOW} characters; give speeches with a blank line "
                "between them, each after a line with its role and a colon"
            )
        return {
            role: np.lib.stride_tricks.sliding_window_view(characters, WINDOW + 1)[::WINDOW]
            for role, characters in by_role.items()
        }

    def _path(self) -> Path:
        def find(folder: Path) -> list[Path]:
            return [path for path in (folder / "input.txt",) if path.is_file()]

        file = "shakespeare/input.txt"
        contents = f"{file} (Tiny Shakespeare of char-rnn)"
        return find_files(self.folder, "shakespeare", file, contents, find)[0]


def speeches(text: str) -> dict[str, str]:
    """Return the text of all speeches of each role, by the name of the role, in the order of their first speeches."""
    lines_of: dict[str, list[str]] = {}
    before, role = "", ""
    for line in text.split("\n"):
        if not before.strip() and line.rstrip().endswith(":"):
            role = " ".join(line.split())[:-1]
        elif role and line.strip():
            lines_of.setdefault(role, []).append(line)
        before = line
    return {role: "\n".join(lines) for role, lines in lines_of.items()}


def encode(text: str) -> np.ndarray:
    """Return each character's index in ALPHABET, or UNKNOWN, as int64 [len(text)]."""
    return np.array([_NUMBERS.get(character, UNKNOWN) for character in text], np.int64)


def _split_windows(windows: np.ndarray, split: str) -> np.ndarray:
    n_test = max(1, len(windows) // TEST_FRACTION)
    return windows[-n_test:] if split == "test" else windows[:-n_test]


@builtin_task("shakespeare-lstm")
def lstm(data: Path | None) -> Task:
    """Return the task to predict the next character in the speeches of each role."""
    return Task("shakespeare-lstm", CharacterLSTM, *splits(Text(data).read), loss)
