"""The virtual network: each client's link to the server, and the client's speed.

    seconds of an exchange = latency + bytes down / down + steps · step · swing + bytes up / up + latency

`--network NAME:option=value,...` draws the clients' values from the seed; a CSV file lists them for each client (network_file.py).
`uniform` gives all clients the same values. `lognormal` takes the values as medians and draws three factors e^(spread·z) for each client, z
standard normal: one for its link (up and down), one for its latency, one for its compute speed. The other networks are `lognormal` with
other defaults:

    fixed, mobile   means of all tests in the Speedtest Global Index of September 2020, used as medians: 85.73 and 35.96 Mbit/s down,
                    45.74 and 11.22 Mbit/s up, round trips of 21 and 40 ms
    lte-m           the peak rate of 3GPP category M1 (release 13), 1 Mbit/s both ways
    lora            the rate of LoRaWAN's data rate 5 in Europe (LoRaWAN regional parameters, EU868), 5,470 bit/s both ways

Steps, spreads, and the latencies of the last two are assumptions; set your own values where they matter.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .. import seeds, spec
from ..errors import SpecError
from .absences import AbsenceModel

MIN_PERIOD_S = 5.0  # of `stretch`; a server waits this long for a client to reconnect
LIMITS: Mapping[str, tuple[float, float]] = {  # lowest and highest value of each option
    "up": (1, 1e15),
    "down": (1, 1e15),
    "latency": (0, 1e6),
    "step": (0, 1e6),
    "absent": (0, 0.9),
    "stretch": (MIN_PERIOD_S, 1e9),
    "swing": (0, 1),
    "stall": (0, 1),
    "slow": (0, 1),
    "factor": (1, 1e6),
    "spread": (0, 4),
}


class Rate(float):
    """Bytes a second, `100kB`."""

    wanted = "bytes a second, such as 100kB or 1MB, without /s"

    def __new__(cls, raw: str | float) -> "Rate":
        return super().__new__(cls, spec.parse_bytes(raw) if isinstance(raw, str) else raw)


class Seconds(float):
    """`50ms`, `20s`, `10min`, `2h`."""

    wanted = "a time, such as 50ms or 10min"

    def __new__(cls, raw: str | float) -> "Seconds":
        return super().__new__(cls, spec.parse_duration(raw) if isinstance(raw, str) else raw)


@dataclass(frozen=True)
class Uniform:
    """The same values for all clients, except for slow ones. Raises SpecError for a value out of range."""

    up: Rate = Rate(1e5)
    down: Rate = Rate(1e6)
    latency: Seconds = Seconds(0.05)  # one way
    step: Seconds = Seconds(0.02)  # a step of local SGD
    spread: float = 0.0  # standard deviation of the logarithms
    absent: float = 0.0  # fraction of the time in which a client is absent
    stretch: Seconds = Seconds(600.0)  # period in which a client is either absent or present
    slow: float = 0.0  # fraction of the clients whose steps always take `factor` times as long
    stall: float = (
        0.0  # fraction of its rounds in which a client's steps take `factor` times as long
    )
    factor: float = 4.0
    swing: float = 0.0  # maximum relative change of a client's step time from round to round

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            if why := out_of_range(f.name, getattr(self, f.name)):
                raise SpecError(f"{f.name} {why}")


@dataclass(frozen=True)
class LogNormal(Uniform):
    spread: float = 1.0


@dataclass(frozen=True)
class Fixed(LogNormal):
    up: Rate = Rate(45.74e6 / 8)
    down: Rate = Rate(85.73e6 / 8)
    latency: Seconds = Seconds(0.0105)
    spread: float = 0.5


@dataclass(frozen=True)
class Mobile(LogNormal):
    up: Rate = Rate(11.22e6 / 8)
    down: Rate = Rate(35.96e6 / 8)
    latency: Seconds = Seconds(0.02)
    absent: float = 0.05
    swing: float = 0.5


@dataclass(frozen=True)
class LTEM(LogNormal):
    up: Rate = Rate(1e6 / 8)
    down: Rate = Rate(1e6 / 8)
    latency: Seconds = Seconds(0.05)
    step: Seconds = Seconds(0.2)
    spread: float = 0.5


@dataclass(frozen=True)
class LoRa(LogNormal):
    up: Rate = Rate(5470 / 8)
    down: Rate = Rate(5470 / 8)
    latency: Seconds = Seconds(1.0)
    step: Seconds = Seconds(1.0)
    spread: float = 0.5


NETWORKS: Mapping[str, type[Uniform]] = {
    "fixed": Fixed,
    "lognormal": LogNormal,
    "lora": LoRa,
    "lte-m": LTEM,
    "mobile": Mobile,
    "uniform": Uniform,
}


def out_of_range(name: str, value: float) -> str:
    """Return the end of an error message for a value out of range; "" for a valid value."""
    low, high = LIMITS[name]
    return "" if low <= value <= high else f"is {value:g}; give {low:g} to {high:g}"


@dataclass(frozen=True)
class Profiles:
    """The values of each client, float64 [clients], in bytes a second, seconds or fractions; named as the options of `Uniform`."""

    up: np.ndarray
    down: np.ndarray
    latency: np.ndarray
    step: np.ndarray
    absent: np.ndarray
    stretch: np.ndarray
    stall: np.ndarray
    factor: np.ndarray
    swing: np.ndarray

    def __len__(self) -> int:
        return len(self.up)

    @property
    def fingerprint(self) -> str:
        """Hash of all values, 16 hex digits."""
        return hashlib.sha256(
            b"".join(getattr(self, f.name).tobytes() for f in dataclasses.fields(self))
        ).hexdigest()[:16]


COLUMNS = tuple(f.name for f in dataclasses.fields(Profiles))


def draw_profiles(kind: Uniform, clients: int, seed: int) -> Profiles:
    """Draw the profiles of clients from the seed."""
    link, latency, compute = np.exp(
        kind.spread * seeds.generator(seed, "network").standard_normal((3, clients))
    )
    slow = seeds.generator(seed, "slow").random(clients) < kind.slow
    same = {name: np.full(clients, float(getattr(kind, name))) for name in COLUMNS}
    return Profiles(
        **same
        | {
            "up": kind.up * link,
            "down": kind.down * link,
            "latency": kind.latency * latency,
            "step": kind.step * compute * np.where(slow, kind.factor, 1.0),
        }
    )


def parse_network(text: str) -> Uniform:
    """Return the network of a spec string such as `mobile` or `uniform:up=100kB`. Raises SpecError."""
    with spec.error_context(text, "--network"):
        return spec.build(spec.parse_part(text, "network"), NETWORKS, "network")


class Network:
    """The duration of exchanges, and the availability of clients."""

    def __init__(self, profiles: Profiles, seed: int):
        self.profiles, self.seed = profiles, seed
        self.absences = AbsenceModel(profiles.absent, profiles.stretch, seed)
        # The last round, and its draws.
        self._draws: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    def exchange_s(
        self, client: int, round: int, bytes_down: int, steps: int, bytes_up: int
    ) -> float:
        """Return the duration of an exchange with an idle client."""
        p = self.profiles
        down, up = bytes_down / float(p.down[client]), bytes_up / float(p.up[client])
        latency = float(p.latency[client])
        return latency + down + self.compute_s(client, round, steps) + up + latency

    def compute_s(self, client: int, round: int, steps: int) -> float:
        """Return the duration of local steps."""
        p = self.profiles
        swing, stall = float(p.swing[client]), float(p.stall[client])
        duration_s = steps * float(p.step[client])
        if not steps or not (swing or stall):
            return duration_s
        swings, stalls = self._draw(round)
        duration_s *= 1.0 + swing * float(swings[client])
        return duration_s * float(p.factor[client]) if stalls[client] < stall else duration_s

    def _draw(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the draws of a round for the clients' swings, -1..1, and stalls, 0..1: float64 [clients] each."""
        if self._draws[0] != round:
            generator, n = seeds.generator(self.seed, "pace", round), len(self.profiles)
            self._draws = round, generator.uniform(-1.0, 1.0, n), generator.random(n)
        return self._draws[1:]
