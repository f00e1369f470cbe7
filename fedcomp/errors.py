"""The errors that fedcomp raises, and the exit status of the command line for each error.

    FedcompError                    1
    ├── UserError                   2
    │   ├── SpecError
    │   ├── ConfigError
    │   │   └── MismatchError
    │   ├── DataError
    │   ├── TaskError
    │   ├── RunFolderError
    │   ├── KeysError
    │   ├── OutOfMemoryError
    │   └── UnreachableError
    ├── MissingExtraError           2
    ├── FrameError                  3
    ├── NonFiniteError              4
    ├── ProtocolError               5
    └── CheckpointError             6

Ctrl-C exits with 130.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class FedcompError(Exception):
    """Base class of all errors that fedcomp raises."""

    exit_status = 1


class UserError(FedcompError):
    """A mistake of the user. The error message is one sentence that says how to fix the mistake."""

    exit_status = 2


class SpecError(UserError):
    """An invalid spec string, which gives a name and options (see spec.py), such as "stc:density=0".

    If `flag` (a command-line flag) and `spec` (its value) are set, the message starts with them.
    """

    flag = spec = ""

    def __str__(self) -> str:
        place = f"{self.flag} {self.spec}".strip()
        return f"{place}: {super().__str__()}" if place else super().__str__()


class ConfigError(UserError):
    """An option whose value or type is not allowed, or options that cannot be combined."""


class MismatchError(ConfigError):
    """An error-feedback memory that does not suit the codec.

    In the message, the placeholders `{memory}` and `{uplink}` stand for the flags of the memory and of the codec. If the error is about the
    downlink, the caller sets the attributes `memory` and `uplink` to the flags of the downlink.
    """

    memory, uplink = "--memory", "--uplink"

    def __str__(self) -> str:
        return super().__str__().format(memory=self.memory, uplink=self.uplink)


class DataError(UserError):
    """A missing or malformed data set."""


class TaskError(UserError):
    """A task file that cannot be imported, or a task that violates the interface of tasks."""


class RunFolderError(UserError):
    """A run folder that is in use, cannot be read or written, contains no run, or contains a run with other options."""


class KeysError(UserError):
    """A key, certificate, enrolment file or registry of keys that is missing, malformed or expired, or exists already."""


class OutOfMemoryError(UserError):
    """The training device (GPU or CPU) is out of memory. The error message names options that reduce memory use."""


class UnreachableError(UserError):
    """A server that cannot be reached.

    `cause` names the kind of failure, such as "closed" or another key of ERRORS in keys/connection.py. After the causes in `transient`,
    connecting again may succeed.
    """

    transient = frozenset({"closed", "network", "silent", "starting", "unknown host"})

    def __init__(self, message: str, cause: str = ""):
        super().__init__(message)
        self.cause = cause


class MissingExtraError(FedcompError):
    """An optional dependency that is not installed. The error message names the pip extra to install."""

    exit_status = 2

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package}; install it with: pip install 'fedcomp[{extra}]'"
        )


class FrameError(FedcompError):
    """Bytes that are not a complete, valid frame (encoded vector) of the expected codec and size."""

    exit_status = 3


class NonFiniteError(FedcompError):
    """NaN or infinity where a finite number is needed."""

    exit_status = 4
    position: int  # index of the NaN or infinity in the vector; set only by codecs


class ProtocolError(FedcompError):
    """A message between server and client that violates the protocol."""

    exit_status = 5


class CheckpointError(FedcompError):
    """A checkpoint that cannot be read or written."""

    exit_status = 6


INTERRUPTED = 130  # exit status after Ctrl-C


@contextmanager
def os_errors(error_class: type[FedcompError], found: str, advice: str) -> Iterator[None]:
    """Raise `error_class` if the `with` block raises an OSError. The message is `found` (what failed), the system's reason and `advice`."""
    try:
        yield
    except OSError as error:
        raise error_class(f"{found} ({error.strerror}); {advice}") from error


SIMILAR = 0.7  # minimum similarity (difflib) of a suggested name to the given name
SIMILAR_SHORT = 0.6  # minimum similarity for given names of up to 4 characters
MIN_PREFIX = 3  # minimum length of a given name that is compared with the beginnings of known names
SYNONYMS = {  # name in fedcomp → names of the same thing in other libraries
    "lr": ("learning_rate", "eta"),
    "local_epochs": ("epochs", "num_epochs"),
    "local_steps": ("steps",),
    "clients": ("num_clients", "n_clients", "nodes"),
    "rounds": ("num_rounds", "n_rounds"),
    "batch_size": ("batchsize", "batch"),
    "uplink": ("compression", "compressor", "codec"),
    "participation": ("fraction_fit",),
    "strategy": ("algorithm", "aggregation"),
    "out": ("output",),
    "task": ("dataset", "model"),
    "seed": ("random_seed",),
    "weight_decay": ("wd",),
    "average": ("fedavg", "mean"),
    "residual": ("error_feedback", "ef"),
    "identity": ("none", "dense"),
}


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`: a synonym, a similar name, or a name with a similar beginning, or None if there is none."""
    known = sorted(known)
    spelled = name.lower().replace("-", "_")
    for ours, theirs in SYNONYMS.items():
        if spelled in theirs and ours in known:
            return ours
    cutoff = SIMILAR if len(name) > 4 else SIMILAR_SHORT
    similar = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    same = [other for other in known if other.lower() == name.lower()]
    transposed = [other for other in known if sorted(other) == sorted(name)]
    starts = {other[: len(name)]: other for other in reversed(known) if len(name) >= MIN_PREFIX}
    completed = [starts[start] for start in difflib.get_close_matches(name, starts, cutoff=SIMILAR)]
    return next(iter([*same, *similar, *transposed, *completed]), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known name, and a list of all known names."""
    known = list(known)
    close = closest(name, known)
    hint = f"did you mean '{close}'? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"
