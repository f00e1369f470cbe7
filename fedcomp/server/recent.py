"""What the last checkpoints changed: a row of the database for each of them, and all of it in memory.

The rows of 200 clients of 20,000 lie in hundreds of pages, of which a database writes each as a whole. Here a checkpoint writes what it
changed side by side, as a log-structured store does (O'Neil, Cheng, Gawlick, O'Neil: The log-structured merge-tree. Acta Informatica
1996), so that it costs what changed, wherever that lies; from time to time what is newest is put in its place.
"""

import itertools
import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence

from ..compact_json import compact

RECENT_BYTES = 16 << 20  # of rows, from which their content is put in its place
REPEATED_BYTES, REPEATS = (
    1 << 20,
    16,
)  # or from so many, where rows name the same so often that little of them is left to be put there
SMALL = 4096  # bytes of a value that is written here; others go to their place at once

SCHEMA = "CREATE TABLE IF NOT EXISTS recent (number INTEGER PRIMARY KEY, crc INTEGER NOT NULL, data BLOB NOT NULL);"

Place = tuple[str, int, int]  # name of a vector, its slot and its CRC


class Recent:
    """The newest vectors' places and values by name. Those that it has not are in the tables `vector` and `value`.

    What is written counts for readers from `learn` on, when the transaction is over. Raises ValueError or TypeError for rows that are not
    what was written.
    """

    def __init__(self, state: sqlite3.Connection):
        state.executescript(SCHEMA)
        self.state = state
        self.places: dict[str, tuple[int, int]] = {}
        self.values: dict[str, bytes] = {}
        self.bytes = self.named = 0  # of rows, and names in them
        for crc, row in state.execute("SELECT crc, data FROM recent ORDER BY number"):
            if zlib.crc32(row) != crc:
                raise ValueError("a row of recent changes has another checksum")
            self.learn(row)

    def row(
        self, places: Sequence[Place], values: Mapping[str, bytes], elsewhere: Iterable[str]
    ) -> bytes:
        """What a checkpoint changed, to be written; `elsewhere`: values that were put in their places, or forgotten."""
        head = [*map(list, zip(*places, strict=True))] or [[], [], []]
        lengths = [len(data) for data in values.values()]
        return b"\n".join(
            [compact([*head, [*values], lengths, [*elsewhere]]).encode(), b"".join(values.values())]
        )

    def write(self, row: bytes) -> None:
        self.state.execute("INSERT INTO recent (crc, data) VALUES (?, ?)", (zlib.crc32(row), row))

    def put_away(self) -> None:
        """Put all in its place, and forget the rows."""
        self.state.executemany(
            "INSERT OR REPLACE INTO vector VALUES (?, ?, ?)",
            sorted((name, *at) for name, at in self.places.items()),
        )
        self.state.executemany(
            "INSERT OR REPLACE INTO value VALUES (?, ?)", sorted(self.values.items())
        )
        self.state.execute("DELETE FROM recent")

    def learn(self, row: bytes) -> None:
        """A row was written."""
        head, _, rest = row.partition(b"\n")
        names, slots, crcs, valued, lengths, elsewhere = json.loads(head)
        for name in elsewhere:
            self.values.pop(name, None)
        self.places |= zip(names, zip(slots, crcs, strict=True), strict=True)
        ends = itertools.accumulate(lengths, initial=0)
        self.values |= {
            name: rest[a:b] for name, (a, b) in zip(valued, itertools.pairwise(ends), strict=True)
        }
        self.bytes += len(row)
        self.named += len(names) + len(valued)

    def is_full(self, row: bytes) -> bool:
        """Whether all is to be put in its place before another row is written."""
        size, distinct = self.bytes + len(row), len(self.places) + len(self.values)
        return size > RECENT_BYTES or (size > REPEATED_BYTES and self.named > REPEATS * distinct)

    def clear(self) -> None:
        """All was put away."""
        self.places, self.values, self.bytes, self.named = {}, {}, 0, 0
