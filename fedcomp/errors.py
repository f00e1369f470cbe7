"""Every error that fedcomp raises on purpose, and the exit status that the command line gives it.

    FedcompError                    1
    ├── UserError                   2   the user's mistake; one sentence that names the fix
    │   ├── SpecError                   an unknown name or option in `stc:density=1%`
    │   ├── ConfigError                 a value out of range, options that exclude each other
    │   ├── DataError                   a missing or malformed data set
    │   ├── TaskError                   a task file that does not import or breaks its contract
    │   ├── RunFolderError              a folder in the way, not writable, or of another configuration
    │   ├── KeysError                   a key, certificate or registry that is missing, malformed, expired or in the way
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
    pass


class ConfigError(UserError):
    pass


class DataError(UserError):
    pass


class TaskError(UserError):
    pass


class RunFolderError(UserError):
    pass


class KeysError(UserError):
    pass


class UnreachableError(UserError):
    """`cause` is a word for programs; those of `passing` may mend themselves, so that trying again makes sense."""

    passing = frozenset({"closed", "network", "silent", "starting", "unknown host"})

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


class ProtocolError(FedcompError):
    exit_status = 5


class CheckpointError(FedcompError):
    exit_status = 6


INTERRUPTED = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: its nearest known one, and all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"{hint}known: {', '.join(known)}"
