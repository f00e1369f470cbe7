"""Tiny Shakespeare: what comes next in forty thousand lines of the plays, said by some three hundred roles.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-efficient learning of deep networks from decentralized data. AISTATS
2017; as a benchmark by role, Caldas et al.: LEAF. 2018. Characters are embedded in 8 dimensions and read by two LSTM layers of 256; the
next one is predicted after each of 80 characters, as in McMahan et al. and Reddi et al. 2021; LEAF predicts the 81st alone.

    DIR/shakespeare/input.txt, or DIR/input.txt        First Citizen:
    speeches, a blank line between them;               Before we proceed any further, hear me speak.
    the first line of each is its role and a colon
                                                       All:
                                                       Speak, speak.

A role's speeches, in their order, are cut into windows of 80 characters, none of which is predicted twice. The last tenth of a role's
windows, at least one, is for testing. What is left over at a role's end is left out, and so is a role with fewer than two windows: of
Tiny Shakespeare's roles, 232 stay. A role is its name: unlike in LEAF, the First Citizens of two plays are one, since the text names no
plays.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import DataError
from .base import Task, named
from .data import Data

WINDOW = 80  # characters
TEST = 10  # one in so many windows of a role, the last ones
ALPHABET = "\n" + "".join(
    map(chr, range(32, 127))
)  # one table for all parties, whatever text they have: printable ASCII
UNKNOWN = len(ALPHABET)  # stands for every other character
_NUMBERS = {character: number for number, character in enumerate(ALPHABET)}


class CharacterLSTM(nn.Module):
    """Characters int64 [B, t] → scores of the next one after each [B, t, 97]; 824,425 parameters."""

    def __init__(self, embedded: int = 8, hidden: int = 256, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(UNKNOWN + 1, embedded)
        self.lstm = nn.LSTM(embedded, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, UNKNOWN + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, the mean over all positions: outputs [B, t, v], targets [B, t]."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Text:
    """The text in a folder. Read once, when it is first asked for; raises DataError, naming --data, where that fails."""

    folder: Path | None  # what --data names

    def read(self, split: str) -> Data:
        """Characters int64 [N, 80] of "train" or "test", those that follow them as targets, and the role of each window as its group."""
        parts = {role: _part(windows, split) for role, windows in self._windows.items()}
        windows = torch.from_numpy(np.concatenate(list(parts.values())))
        groups = np.repeat(list(parts), [len(part) for part in parts.values()])
        return Data(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), groups)

    def count(self, split: str) -> int:
        """Windows of "train" or "test"."""
        return sum(len(_part(windows, split)) for windows in self._windows.values())

    def place(self) -> Path:
        """The folder that the text is in. Raises DataError."""
        return self._path().parent

    @cached_property
    def _windows(self) -> dict[str, np.ndarray]:
        """Those of each role that says enough for both splits, int64 [N, 81]: the last character of one is the first of the next."""
        path = self._path()
        try:
            text = path.read_text(encoding="utf-8-sig")
        except PermissionError as error:
            raise DataError(
                f"--data {path}: no permission to read it; change its permissions"
            ) from error
        except (OSError, ValueError) as error:
            raise DataError(
                f"--data {path} cannot be read as text in UTF-8; replace it by a whole copy"
            ) from error
        said = {
            role: encoded(words)
            for role, words in speeches(text).items()
            if len(words) > 2 * WINDOW
        }
        if not said:
            raise DataError(
                f"--data {path} has no role that says more than {2 * WINDOW} characters; give speeches with a blank line "
                "between them, each under a line with its role and a colon"
            )
        return {
            role: np.lib.stride_tricks.sliding_window_view(words, WINDOW + 1)[::WINDOW]
            for role, words in said.items()
        }

    def _path(self) -> Path:
        wanted = "a folder that holds shakespeare/input.txt"
        if self.folder is None:
            raise DataError(
                f"shakespeare needs its data; give --data DIR, {wanted}, or set FEDCOMP_DATA"
            )
        try:
            if not self.folder.is_dir():
                raise DataError(
                    f"--data {self.folder} is not a folder; give one that holds shakespeare/input.txt"
                )
            found = [
                path
                for path in (self.folder / "shakespeare" / "input.txt", self.folder / "input.txt")
                if path.is_file()
            ]
            state = "holds no shakespeare/input.txt" if any(self.folder.iterdir()) else "is empty"
        except PermissionError as error:
            raise DataError(
                f"--data {self.folder}: no permission to read {error.filename}; change its permissions"
            ) from error
        if not found:
            raise DataError(
                f"--data {self.folder} {state}; give {wanted}, such as Tiny Shakespeare of char-rnn"
            )
        return found[0]


def speeches(text: str) -> dict[str, str]:
    """The lines that each role says in all its speeches; roles in the order in which they enter."""
    said: dict[str, list[str]] = {}
    before, role = "", ""
    for line in text.split("\n"):
        if not before.strip() and line.rstrip().endswith(":"):
            role = " ".join(line.split())[:-1]
        elif role and line.strip():
            said.setdefault(role, []).append(line)
        before = line
    return {role: "\n".join(lines) for role, lines in said.items()}


def encoded(text: str) -> np.ndarray:
    """The number of each character in the alphabet, int64 [len(text)]."""
    return np.array([_NUMBERS.get(character, UNKNOWN) for character in text], np.int64)


def _part(windows: np.ndarray, split: str) -> np.ndarray:
    test = max(1, len(windows) // TEST)
    return windows[-test:] if split == "test" else windows[:-test]


@named("shakespeare-lstm")
def lstm(data: Path | None) -> Task:
    """The next character of each role's speeches."""
    read = Text(data).read
    return Task(
        "shakespeare-lstm", CharacterLSTM, partial(read, "train"), partial(read, "test"), loss
    )
