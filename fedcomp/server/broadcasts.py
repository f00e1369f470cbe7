"""The downlink: versions of the model, a cache of broadcasts, and downloads for clients that missed rounds.

A broadcast is the change of the model in one round, encoded as a frame. A client that missed s broadcasts needs the last s of them (Sattler
et al. 2019, section V). It gets the smallest of three downloads:

    frames:      the missed broadcasts, one by one;
    overwrite:   the current values of the coordinates that the missed broadcasts changed;
    dense:       the whole model.

If the cache, whose size --cache limits, lacks a missed broadcast, the client gets the whole model.
"""

import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from ..clients.replica import DENSE_CODEC
from ..codecs import Codec, overwrite
from ..codecs.frame import unwrap_decay, wrap_decay
from ..errors import ConfigError, MismatchError
from ..layout import Layout
from ..memories import Memory, memory
from ..messages import (
    DENSE,
    FRAMES,
    OVERWRITE,
    UP_TO_DATE,
    fingerprint,
    initial_version,
    next_version,
)
from ..strategies import RoundStrategy

# Number of recent model versions for which the server can tell how many versions a client has missed. A larger cache raises this number.
MAX_NUMBERED_VERSIONS = 10_000


@dataclass(frozen=True)
class Broadcast:
    """The change of the model in a round."""

    round: int
    base: str  # model version before the broadcast
    version: str  # model version after the broadcast
    frame: bytes  # the encoded change


@dataclass(frozen=True)
class Download:
    """The frames that update a client's model to the current version."""

    form: str  # UP_TO_DATE, FRAMES, OVERWRITE or DENSE
    base: str  # model version to which the download is applied, or "" for DENSE
    frames: list[bytes]

    @property
    def bytes(self) -> int:
        return sum(map(len, self.frames))


class Broadcasts:
    """The server's model and its most recent broadcasts. Only `publish`, `start_from` and `restore` change the model, `weights` [numel]."""

    def __init__(
        self, weights: Tensor, layout: Layout, codec: Codec, memory: Memory, cache_bytes: int
    ):
        self.weights, self.layout, self.codec = weights, layout, codec
        self.memory, self.cache_bytes = memory, cache_bytes
        self.cache: deque[Broadcast] = deque()
        self.newest_bytes = 0  # size of the newest broadcast; 0 before the first
        self.version = initial_version(weights, layout.fingerprint)
        self.first = self.version  # model version with which clients begin
        self.fingerprint = fingerprint(weights)
        self._dense_bytes = len(DENSE_CODEC.encode(weights[:0])) + 4 * weights.numel()
        self._downloads: dict[str, Download] = {}
        # For each weight [numel], the last broadcast that changed it: 1 = the newest, 2 = the one before, …; 0 = none of those that were
        # decoded so far. A broadcast that many clients missed is therefore decoded only once. None if no broadcast was decoded.
        self._last_change: np.ndarray | None = None
        # Element i is the number of weights that the newest i broadcasts changed, or sys.maxsize if one of them changed all weights.
        self._n_changed = [0]
        self._numbers = {self.version: 0}  # model version → number of broadcasts before it

    def start_from(self, weights: Tensor) -> None:
        """Replace the initial weights by `weights` [numel]. Clients begin with the old weights, and download the new ones."""
        self.weights.copy_(weights)
        self.version = initial_version(weights, self.layout.fingerprint)
        self.fingerprint, self._numbers = fingerprint(weights), {self.version: 0}

    @classmethod
    def of(cls, strategy: RoundStrategy, weights: Tensor) -> Self:
        """Return the Broadcasts of a run that starts from `weights`, float32 [n] on the CPU. They are not copied.

        Raises ConfigError if --downlink-memory cannot be used on the downlink.
        """
        config, layout = strategy.config, strategy.layout
        name, codec, numel = config.downlink_memory, strategy.downlink, layout.numel
        try:
            downlink_memory = memory(name, codec, numel, layout)
        except MismatchError as error:
            error.memory, error.uplink = "--downlink-memory", "--downlink"
            raise
        if downlink_memory.counterpart is not None:
            raise ConfigError(
                f"--downlink-memory {downlink_memory.name} needs state on the server and on clients, but clients store only the model; "
                "use --downlink-memory residual"
            )
        if downlink_memory.required_strategy:
            raise ConfigError(
                f"--downlink-memory {downlink_memory.name} sends an update in several frames, but a broadcast has one frame; use "
                "--downlink-memory residual"
            )
        if downlink_memory.name == "residual" and codec.unscoped.lossless:
            # A lossless codec leaves no residual to store.
            downlink_memory = memory("none", codec, numel, layout)
        first = strategy.client_algorithm.initial_global_state(weights)
        return cls(first, layout, codec, downlink_memory, int(config.cache * 4 * numel))

    def prepare(
        self, round: int, update: Tensor, seed: int, factor: float = 1.0
    ) -> Broadcast | None:
        """Return a broadcast that multiplies the model by `factor`, a float32 from 0 to 1, and then adds `update` [numel].

        The downlink codec encodes the update with the seed `seed`. Return None if there is nothing to send. The model does not change until
        `publish` is called. Raises NonFiniteError, and leaves the downlink memory unchanged, if the update is not finite.
        """
        step = self.memory.propose(update, seed=seed)
        if step is None:
            return None
        frame = wrap_decay(factor, step, update.numel())
        return Broadcast(round, self.version, next_version(self.version, frame), frame)

    def publish(self, broadcast: Broadcast) -> None:
        """Apply a broadcast from `prepare` to the model, and cache it for clients that miss it."""
        factor, step = unwrap_decay(broadcast.frame, self.weights.numel())
        if factor != 1:
            self.weights.mul_(factor)
        self.codec.accumulate(step, self.weights, layout=self.layout)
        self.memory.commit()
        self.newest_bytes = len(broadcast.frame)
        self.version, self.fingerprint = broadcast.version, fingerprint(self.weights)
        self._numbers[self.version] = self._numbers[broadcast.base] + 1
        self.cache.append(broadcast)
        while sum(len(b.frame) for b in self.cache) > self.cache_bytes:
            self.cache.popleft()
        if len(self._numbers) > max(MAX_NUMBERED_VERSIONS, len(self.cache) + 1):
            del self._numbers[next(iter(self._numbers))]
        self._downloads.clear()
        self._last_change, self._n_changed = None, [0]

    def restore(
        self,
        weights: Tensor,
        memory_state: dict[str, Any],
        cache: list[Broadcast],
        version: str,
        newest_bytes: int,
    ) -> None:
        """Restore the model and the cached broadcasts from a checkpoint. The arguments are the attributes at the time of the checkpoint."""
        self.weights.copy_(weights)
        self.memory.load_state_dict(memory_state)
        self.cache = deque(cache)
        self.newest_bytes = newest_bytes
        self.version, self.fingerprint = version, fingerprint(self.weights)
        versions = [*(broadcast.base for broadcast in cache), version]
        self._numbers = {name: number for number, name in enumerate(versions)}
        self._downloads.clear()
        self._last_change, self._n_changed = None, [0]

    def versions_behind(self, version: str) -> int | None:
        """Return how many versions `version` is behind the current one, or None if the server does not know `version`."""
        if version not in self._numbers:
            return None
        return self._numbers[self.version] - self._numbers[version]

    def download(self, version: str) -> Download:
        """Return the smallest download from `version` to the current version, or the whole model if the server does not know `version`."""
        if version == self.version:
            return Download(UP_TO_DATE, version, [])
        if version not in self._downloads:
            self._downloads[version] = self._cheapest(version)
        return self._downloads[version]

    def _cheapest(self, version: str) -> Download:
        behind = self.versions_behind(version)
        if behind is None or behind > len(self.cache):
            return self.dense()
        missed = list(self.cache)[-behind:]
        frames = Download(FRAMES, version, [b.frame for b in missed])
        frames_bytes, dense_bytes = frames.bytes, self._dense_bytes
        shorter = min(frames_bytes, dense_bytes)
        positions = self._changed_positions(len(missed), below=shorter)
        if positions is not None:
            frame = overwrite.encode(self.weights, positions)
            if len(frame) < shorter:
                return Download(OVERWRITE, version, [frame])
        return frames if frames_bytes <= dense_bytes else self.dense()

    def release_downloads(self) -> None:
        """Free the memory of downloads that are made again if needed."""
        self._downloads.clear()

    def dense(self) -> Download:
        """Return the download of the whole model."""
        if DENSE not in self._downloads:
            self._downloads[DENSE] = Download(DENSE, "", [DENSE_CODEC.encode(self.weights)])
        return self._downloads[DENSE]

    def _changed_positions(self, missed: int, below: int) -> np.ndarray | None:
        """Return the indices of the weights that the last `missed` broadcasts changed, int64, ascending.

        Return None if a download of these weights would have at least `below` bytes.
        """
        if self._last_change is None:
            self._last_change = np.zeros(self.weights.numel(), np.int32)
        counts, last = self._n_changed, self._last_change
        while len(counts) <= missed and overwrite.min_bytes(counts[-1]) < below:
            positions = self._positions(self.cache[-len(counts)])
            if positions is None:
                counts.append(sys.maxsize)
                break
            new = positions[last[positions] == 0]
            last[new] = len(counts)
            counts.append(counts[-1] + len(new))
        if len(counts) <= missed or overwrite.min_bytes(counts[missed]) >= below:
            return None
        return np.flatnonzero((last > 0) & (last <= missed))

    def _positions(self, broadcast: Broadcast) -> np.ndarray | None:
        """Return the indices of the weights that a broadcast changed, or None if it changed all weights."""
        factor, step = unwrap_decay(broadcast.frame, self.weights.numel())
        if factor != 1:
            return None
        return self.codec.open(step, self.weights.numel(), self.layout).positions
