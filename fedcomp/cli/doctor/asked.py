"""The options of `fedcomp doctor`."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KeysError

if TYPE_CHECKING:
    from ...keys.enrolment import Enrolment


@dataclass(frozen=True)
class Asked:
    """The things to check. A field is None if it was not given."""

    server: str | None = None  # host:port
    client: Path | None = None  # an enrolment file
    keys: Path | None = None
    data: Path | None = None
    port: int | None = None

    @cached_property
    def enrolment(self) -> "Enrolment | None":
        """The content of the enrolment file; None if there is none or it cannot be read, and `unreadable` is the error."""
        return self._read if not self.unreadable else None

    @cached_property
    def unreadable(self) -> KeysError | None:
        return self._read if isinstance(self._read, KeysError) else None

    @cached_property
    def _read(self) -> "Enrolment | KeysError | None":
        from ...keys.enrolment import Enrolment

        try:
            return Enrolment.read(self.client) if self.client else None
        except KeysError as error:
            return error

    def address(self) -> tuple[str, int] | None:
        """Return host and port of the given server, or else of the enrolment's; None without either. Raises ConfigError if malformed."""
        from ...keys.connection import address

        if self.server:
            return address(self.server)
        if self.enrolment and self.enrolment.server:
            return address(self.enrolment.server, f"'server' in {self.client}")
        return None

    @cached_property
    def trust(self) -> "Enrolment | str | None":
        """The enrolment to connect with, or else the CA of the folder of keys as PEM; None without either."""
        if self.enrolment is not None:
            return self.enrolment
        with suppress(OSError, ValueError):
            return (self.keys / "ca.crt").read_text(encoding="ascii") if self.keys else None
        return None
