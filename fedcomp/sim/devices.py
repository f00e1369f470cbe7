"""Where a simulation computes: as clients do."""

from ..clients.devices import choose, keep_freed_memory, name

__all__ = ["choose", "keep_freed_memory", "name"]
