"""A client's copy of the model. Only downloads change this copy, so that it stays bit-identical to the server's model."""

import itertools
from collections.abc import Iterable

from torch import Tensor

from ..codecs import Codec, codec, overwrite
from ..codecs.frame import unwrap_decay
from ..errors import FrameError, ProtocolError
from ..layout import Layout
from ..messages import (
    DENSE,
    OVERWRITE,
    Assignment,
    fingerprint,
    initial_version,
    next_version,
    skips_checksums,
)

DENSE_CODEC = codec("identity")


class NeedDense(ProtocolError):
    """Raised if a download does not lead from the client's model version to the server's, so that the client needs all weights."""


class Replica:
    """A client's copy of the model: weights [numel] and their version. Only `move` and `restore` change `weights`, in place."""

    def __init__(self, weights: Tensor, layout: Layout, downlink: Codec):
        self.weights, self.layout, self.downlink = weights, layout, downlink
        self.version = initial_version(weights, layout.fingerprint)
        self.fingerprint = fingerprint(weights)
        self.past_versions = {self.version: None}  # all versions of this copy so far, in order

    def move(self, assignment: Assignment) -> None:
        """Update the weights to the assignment's model version. Frames of the download that this copy has applied before are skipped.

        Raises NeedDense, with the weights unchanged, if the download cannot be applied to this copy's version. Raises FrameError for a
        damaged frame. Raises NeedDense also if the fingerprint (hash) of the resulting weights is wrong; the copy then has no version until
        it receives all weights.
        """
        if assignment.version != self.version:
            self._apply(assignment)
            checked = not skips_checksums()
            self.fingerprint = fingerprint(self.weights) if checked else assignment.fingerprint
            self.version = assignment.version if self.fingerprint == assignment.fingerprint else ""
            self.past_versions[self.version] = None
        if self.fingerprint != assignment.fingerprint:
            self.version, self.past_versions = "", {}
            raise NeedDense(
                f"after the download to version {assignment.version[:8]}, the fingerprint of the weights is wrong; all weights are needed"
            )

    def restore(self, weights: Tensor, version: str, past_versions: Iterable[str] = ()) -> None:
        """Restore stored weights [numel] of the model version `version`. `past_versions`: the versions that this copy had before."""
        self.weights.copy_(weights)
        self.version = version
        self.fingerprint = fingerprint(self.weights)
        self.past_versions = dict.fromkeys([*past_versions, version])

    def check_path(self, assignment: Assignment, version: str) -> None:
        """Raise NeedDense unless `version` is the start of the assignment's download, or a version that the download leads through.

        The download starts from an older version than the client's if the server did not receive the client's last report.
        """
        a = assignment
        if a.form == DENSE or version == a.base:
            return
        if a.form == OVERWRITE:
            passes = {a.base, version} <= self.past_versions.keys()
        else:
            passes = version in _versions(a)
        if not passes:
            raise NeedDense(
                f"the download starts from version {a.base[:8]}, but this client is at version {version[:8]}; it needs all weights"
            )

    def _apply(self, assignment: Assignment) -> None:
        self.check_path(assignment, self.version)
        numel = self.weights.numel()
        if assignment.form == DENSE:
            DENSE_CODEC.open(self._single_frame(assignment), numel).copy_to(self.weights)
        elif assignment.form == OVERWRITE:
            overwrite.apply(self._single_frame(assignment), self.weights)
        else:
            versions, steps = _versions(assignment), []
            if versions[-1] != assignment.version:
                raise FrameError(
                    "the frames of the download do not lead to the model version that the download names"
                )
            for frame in assignment.frames[versions.index(self.version) :]:
                factor, step = unwrap_decay(frame, numel)
                steps.append((factor, self.downlink.open(step, numel, self.layout)))
            for factor, update in steps:
                if factor != 1:
                    self.weights.mul_(factor)
                update.add_to(self.weights)

    def _single_frame(self, assignment: Assignment) -> bytes:
        if len(assignment.frames) != 1:
            raise FrameError(
                f"a download of the form '{assignment.form}' has {len(assignment.frames)} frames; expected 1"
            )
        return assignment.frames[0]


def _versions(assignment: Assignment) -> list[str]:
    """Return the versions that the frames of a download lead through, starting with the base version."""
    return [*itertools.accumulate(assignment.frames, next_version, initial=assignment.base)]
