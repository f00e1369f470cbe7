"""The client half of the strategy `fetchsgd`: sketches that add over rounds as well as over clients."""

from .. import seeds
from ..codecs import Codec
from ..messages import Assignment
from .work import Work


class OneHash(Work):
    """Encodes every frame of a run with one seed, which the server knows as well."""

    def seed(self, codec: Codec, run_seed: int, assignment: Assignment) -> int:
        return hash_seed(run_seed)


def hash_seed(run_seed: int) -> int:
    """The seed of all sketches of a run."""
    return seeds.key(run_seed, "sketch")
