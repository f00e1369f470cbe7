"""A client's copy of the model. Only downloads change it, so it equals a version of the server's model bit by bit."""

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
    """A download cannot be applied to the client's version of the model, so the client needs a download with all weights."""


class Replica:
    """A client's copy of the model: the weights [numel], and their version. Only `apply` and `restore` change `weights`, in place."""

    def __init__(self, weights: Tensor, layout: Layout, downlink: Codec):
        self.weights, self.layout, self.downlink = weights, layout, downlink
        self.version = initial_version(weights, layout.fingerprint)
        self.fingerprint = fingerprint(weights)
        # The model versions that this copy has had, oldest first.
        self.past_versions = {self.version: None}

    def apply(self, assignment: Assignment) -> None:
        """Apply the download in an assignment, except frames (encoded updates) that this copy has already applied.

        Raises NeedDense, and leaves the weights unchanged, if the download cannot be applied to the current version. Raises NeedDense also
        if the hash of the new weights differs from the server's hash; the copy then has no version until it receives all weights. Raises
        FrameError for a damaged frame.
        """
        if assignment.version != self.version:
            self._change_weights(assignment)
            checked = not skips_checksums()
            self.fingerprint = fingerprint(self.weights) if checked else assignment.fingerprint
            self.version = assignment.version if self.fingerprint == assignment.fingerprint else ""
            self.past_versions[self.version] = None
        if self.fingerprint != assignment.fingerprint:
            self.version, self.past_versions = "", {}
            raise NeedDense(
                f"after the download of model version {assignment.version[:8]}, the hash of the client's weights "
                "differs from the server's; the client needs all weights"
            )

    def restore(self, weights: Tensor, version: str, past_versions: Iterable[str] = ()) -> None:
        """Restore stored weights [numel] of model version `version`. `past_versions` are the earlier versions, oldest first."""
        self.weights.copy_(weights)
        self.version = version
        self.fingerprint = fingerprint(self.weights)
        self.past_versions = dict.fromkeys([*past_versions, version])

    def check_applicable(self, assignment: Assignment, version: str) -> None:
        """Raise NeedDense if the download in an assignment cannot be applied to model version `version`.

        A download of several frames can be applied to the version `base`, and to the version that results from any of the frames; frames
        that the client has already applied are skipped. The server sends such frames if it has not received the client's last report.
        """
        a = assignment
        if a.form == DENSE or version == a.base:
            return
        if a.form == OVERWRITE:
            # The download contains new values of weights, not differences, so it can be applied to every version from `base` on.
            applicable = {a.base, version} <= self.past_versions.keys()
        else:
            applicable = version in _versions(a)
        if not applicable:
            raise NeedDense(
                f"the download starts from model version {a.base[:8]}, but this client has "
                f"version {version[:8]}; the client needs all weights"
            )

    def _change_weights(self, assignment: Assignment) -> None:
        self.check_applicable(assignment, self.version)
        numel = self.weights.numel()
        if assignment.form == DENSE:
            DENSE_CODEC.open(self._single_frame(assignment), numel).copy_to(self.weights)
        elif assignment.form == OVERWRITE:
            overwrite.apply(self._single_frame(assignment), self.weights)
        else:
            versions, steps = _versions(assignment), []
            if versions[-1] != assignment.version:
                raise FrameError(
                    "the frames of the download do not result in the model version that the server announced"
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
    """Return the model versions before and after each frame of a download."""
    return [*itertools.accumulate(assignment.frames, next_version, initial=assignment.base)]
