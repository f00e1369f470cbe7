"""Every error that fedcomp raises on purpose, and the exit status that the command line gives it.

    FedcompError                    1
    ├── UserError                   2   the user's mistake; one sentence that names the fix
    │   ├── SpecError                   an unknown name or option in `stc:density=1%`
    │   ├── ConfigError                 a value out of range, options that exclude each other
    │   │   └── MismatchError               a memory that does not suit its codec
    │   ├── DataError                   a missing or malformed data set
    │   ├── TaskError                   a task file that does not import or breaks its contract
    │   ├── RunFolderError              a folder in the way, not writable, or of another configuration
    │   ├── KeysError                   a key, certificate or registry that is missing, malformed, expired or in the way
    │   ├── OutOfMemoryError            memory of the device ran out; names flags that need less
    │   └── UnreachableError            a server that does not answer, or is not the one that its certificate should be for
    ├── MissingExtraError           2   an optional dependency is absent; names the extra to install
    ├── FrameError                  3   bytes that are not a whole valid frame of this codec and size
    ├── NonFiniteError              4   NaN or infinity where a finite number is needed
    ├── ProtocolError               5   a message that the other side should not have sent
    └── CheckpointError             6   a checkpoint that cannot be read back

Ctrl-C exits with 130.
"""

import difflib
from collections.abc import Iterable


class FedcompError(Exception):
    exit_status = 1


class UserError(FedcompError):
    exit_status = 2


class SpecError(UserError):
    """`flag` is the option, and `spec` the text, in which the mistake was found; "" where the sentence alone says it."""

    flag = spec = ""

    def __str__(self) -> str:
        place = f"{self.flag} {self.spec}".strip()
        return f"{place}: {super().__str__()}" if place else super().__str__()


class ConfigError(UserError):
    pass


class MismatchError(ConfigError):
    """A memory that does not suit its codec. `{memory}` and `{uplink}` in the sentence stand for the options that named them."""

    memory, uplink = "--memory", "--uplink"

    def __str__(self) -> str:
        return super().__str__().format(memory=self.memory, uplink=self.uplink)


class DataError(UserError):
    pass


class TaskError(UserError):
    pass


class RunFolderError(UserError):
    pass


class KeysError(UserError):
    pass


class OutOfMemoryError(UserError):
    pass


class UnreachableError(UserError):
    """`cause` is a word for programs; those of `transient` may mend themselves, so that trying again makes sense."""

    transient = frozenset({"closed", "network", "silent", "starting", "unknown host"})

    def __init__(self, sentence: str, cause: str = ""):
        super().__init__(sentence)
        self.cause = cause


class MissingExtraError(FedcompError):
    exit_status = 2

    def __init__(self, package: str, extra: str, purpose: str):
        super().__init__(
            f"{purpose} needs the package {package}; install it with: pip install 'fedcomp[{extra}]'"
        )


class FrameError(FedcompError):
    exit_status = 3


class NonFiniteError(FedcompError):
    exit_status = 4
    position: int  # of the value in its vector, where a codec raised the error


class ProtocolError(FedcompError):
    exit_status = 5


class CheckpointError(FedcompError):
    exit_status = 6


INTERRUPTED = 130


SIMILAR = 0.7  # lowest difflib ratio of a suggested name
SIMILAR_SHORT = 0.6  # likewise, for names of up to 4 characters
PREFIX = 3  # shortest beginning of a name that is completed, in characters
SYNONYMS = {  # names that other libraries use, by ours
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
    """Return the known name closest to an unknown one: a synonym, a similar name or one that begins with it; None for none."""
    known = sorted(known)
    spelled = name.lower().replace("-", "_")
    for ours, theirs in SYNONYMS.items():
        if spelled in theirs and ours in known:
            return ours
    cutoff = SIMILAR if len(name) > 4 else SIMILAR_SHORT
    similar = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    swapped = [one for one in known if sorted(one) == sorted(name)]
    begun = [one for one in known if len(name) >= PREFIX and one.startswith(name)]
    return next(iter([*similar, *swapped, *begun]), None)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the closest known name, if any, and all known names."""
    known = list(known)
    close = closest(name, known)
    hint = f"did you mean '{close}'? " if close else ""
    return f"{hint}known: {', '.join(sorted(known))}"
