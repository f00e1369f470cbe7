"""The virtual network of a simulation: each client's link to the server, and each client's speed of training.

    duration = latency + (bytes received) / down + (local steps) · step · slowdown + (bytes sent) / up + latency

This is the time in which a client downloads an assignment, trains, and uploads its answer. `up` and `down` are in bytes per second. `step`,
the duration of a local step, and `latency` are in seconds. The slowdown is 1, unless the options `swing` and `stall` make a client's speed
differ between rounds.

`--network NAME:option=value,...` draws the clients' values (up, down, latency, step) at random from the run's seed. `--network FILE` reads
the values from a CSV file (`read_profiles`). The network `uniform` gives all clients the values of the options. In the network `lognormal`,
the options are the medians of the clients' values. For each client, these medians are multiplied by random factors e^(spread·z), with
standard normal z: one factor for up and down, one for latency, and one for step. The following networks are `lognormal` with other
defaults:

    fixed           Speedtest Global Index of September 2020 (means, used as medians): 85.73 Mbit/s down, 45.74 up, round trip 21 ms
    mobile          mobile tests of the same index: 35.96 Mbit/s down, 11.22 up, round trip 40 ms
    lte-m           the peak rate of 3GPP category M1 (release 13), 1 Mbit/s both ways
    lora            the rate of LoRaWAN's data rate 5 in Europe (LoRaWAN regional parameters, EU868), 5,470 bit/s both ways

Defaults for which no source is given, such as those of `step` and `spread`, are assumptions. Set your own values if they matter to you.
"""

import csv
import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import seeds, spec
from ..config import expand_home
from ..errors import ConfigError, SpecError, nearest, os_errors
from ..kernels import philox

CHUNK = 1024  # number of periods for which a client's absences are drawn together
# Smallest value of the option `stretch`, the time between possible changes from absent to present. It equals the time that a server waits
# for a client to reconnect (GRACE_S in server/transport.py).
MIN_PERIOD_S = 5.0
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
    """A rate in bytes per second, such as `100kB`."""

    wanted = "bytes per second, such as 100kB or 1MB, without /s"

    def __new__(cls, raw: str | float) -> "Rate":
        return super().__new__(cls, spec.parse_bytes(raw) if isinstance(raw, str) else raw)


class Seconds(float):
    """A duration in seconds, given as `50ms`, `20s`, `10min` or `2h`."""

    wanted = "a time, such as 50ms or 10min"

    def __new__(cls, raw: str | float) -> "Seconds":
        return super().__new__(cls, spec.parse_duration(raw) if isinstance(raw, str) else raw)


@dataclass(frozen=True)
class Uniform:
    """A network whose clients all have the same values, unless `spread` or `slow` is set. Raises SpecError for a value out of range."""

    up: Rate = Rate(1e5)  # from a client to the server
    down: Rate = Rate(1e6)  # from the server to a client
    latency: Seconds = Seconds(0.05)  # delay of a message in one direction
    step: Seconds = Seconds(0.02)  # duration of a step of local SGD
    # Each client's up, down, latency and step are multiplied by random factors, whose logarithms have this standard deviation.
    spread: float = 0.0
    absent: float = 0.0  # fraction of the time in which a client is absent
    # Time is divided into periods of this length. A client is absent or present for a whole period.
    stretch: Seconds = Seconds(600.0)
    slow: float = 0.0  # probability that a client's steps take `factor` times as long in all rounds
    # Probability that a client's steps take `factor` times as long in a round.
    stall: float = 0.0
    factor: float = 4.0
    swing: float = 0.0  # a round's step time differs from `step` by at most this fraction of `step`

    def __post_init__(self) -> None:
        spec.check_ranges(self, **LIMITS)


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


@dataclass(frozen=True)
class Profiles:
    """The network values of each client, as float64 arrays [clients]. The arrays have the names and units of the options of `Uniform`."""

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
        """A hash of all values, as 16 hexadecimal digits."""
        return hashlib.sha256(
            b"".join(getattr(self, f.name).tobytes() for f in dataclasses.fields(self))
        ).hexdigest()[:16]


COLUMNS = tuple(f.name for f in dataclasses.fields(Profiles))


def draw_profiles(kind: Uniform, clients: int, seed: int) -> Profiles:
    z = seeds.generator(seed, "network").standard_normal((3, clients))
    link, latency, compute = np.exp(kind.spread * z)
    slow = seeds.generator(seed, "slow").random(clients) < kind.slow
    same = {name: np.full(clients, float(getattr(kind, name))) for name in COLUMNS}
    drawn = {
        "up": kind.up * link,
        "down": kind.down * link,
        "latency": kind.latency * latency,
        "step": kind.step * compute * np.where(slow, kind.factor, 1.0),
    }
    return Profiles(**same | drawn)


def parse_network(text: str) -> Uniform:
    """Return the network that a text such as `mobile` or `uniform:up=100kB` describes. Raises SpecError."""
    with spec.error_context(text, "--network"):
        return spec.build(spec.parse_part(text, "network"), NETWORKS, "network")


class Network:
    """A virtual network: how long clients need for downloads, training and uploads, and when clients are absent."""

    def __init__(self, profiles: Profiles, seed: int):
        self.profiles, self.seed = profiles, seed
        self.absences = AbsenceModel(profiles.absent, profiles.stretch, seed)
        # The last round for which `_draw` was called, and the two arrays that it returned.
        self._draws: tuple[int, np.ndarray, np.ndarray] = (-1, np.empty(0), np.empty(0))

    @classmethod
    def of(cls, text: str, clients: int, seed: int) -> "Network":
        """Return the network for a value of --network. Raises UserError if the value or the CSV file is invalid."""
        if is_file(text):
            return cls(read_profiles(text, clients), seed)
        return cls(draw_profiles(parse_network(text), clients, seed), seed)

    def exchange_s(
        self, client: int, round: int, bytes_down: int, steps: int, bytes_up: int
    ) -> float:
        """Return how many seconds an idle client needs for an exchange: download, local steps, upload and latencies."""
        p = self.profiles
        down, up = bytes_down / float(p.down[client]), bytes_up / float(p.up[client])
        latency = float(p.latency[client])
        return latency + down + self.compute_s(client, round, steps) + up + latency

    def compute_s(self, client: int, round: int, steps: int) -> float:
        p = self.profiles
        swing, stall = float(p.swing[client]), float(p.stall[client])
        duration_s = steps * float(p.step[client])
        if not steps or not (swing or stall):
            return duration_s
        swings, stalls = self._draw(round)
        duration_s *= 1.0 + swing * float(swings[client])
        return duration_s * float(p.factor[client]) if stalls[client] < stall else duration_s

    def _draw(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays with a uniform random value for each client: from -1 to 1 for `swing`, and from 0 to 1 for `stall`."""
        if self._draws[0] != round:
            generator, n = seeds.generator(self.seed, "pace", round), len(self.profiles)
            self._draws = round, generator.uniform(-1.0, 1.0, n), generator.random(n)
        return self._draws[1:]


TYPES: dict[str, Any] = {"client": int, **{f.name: f.type for f in dataclasses.fields(Uniform)}}
DEFAULTS = {"stretch": 600.0, "factor": 4.0}
REQUIRED = "client", "up", "down"


def is_file(text: str) -> bool:
    """Return whether --network names a file. A slash in an option, as in `lognormal:spread=1/2`, does not mean a file."""
    name, colon, _ = text.partition(":")
    return (text.endswith(".csv") or "/" in text) and not (colon and name.strip() in NETWORKS)


def read_profiles(text: str, clients: int) -> Profiles:
    """Read the network values of the clients 0 to `clients` − 1 from a CSV file: a line of column names, then a line for each client.

        client,up,down,latency,step,absent
        0,250kB,2MB,40ms,15ms,5%
        1,30kB,500kB,0.2,20ms,0

    The columns `client`, `up` and `down` are required. The optional columns are latency, step, absent, stretch, stall, factor and swing,
    with the meanings of the options of `Uniform`. Missing columns default to 0, except for stretch (10 min) and factor (4). Numbers without
    a unit are in bytes per second (up, down) or in seconds (latency, step, stretch). Lines and columns may be in any order. Lines for
    clients that the run does not have are ignored.

    Raises ConfigError, which names the line and the column of an error.
    """
    path = expand_home(text, "--network")
    unreadable = os_errors(
        ConfigError, f"--network {text} cannot be read", "give a readable CSV file"
    )
    try:
        with unreadable, path.open(encoding="utf-8-sig", newline="") as file:
            return _profiles(f"--network {text}", csv.reader(file, strict=True), clients)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--network {text} is not a CSV file in UTF-8 ({error}); save the file as comma-separated lines in UTF-8"
        ) from error


def _profiles(flag: str, lines: Any, clients: int) -> Profiles:
    rows = (
        [cell.strip() for cell in cells] for cells in lines if any(cell.strip() for cell in cells)
    )
    names = next(rows, [])
    _check_columns(f"{flag}, line {lines.line_num}", names)
    values = {name: np.full(clients, DEFAULTS.get(name, 0.0)) for name in COLUMNS}
    line_of: dict[int, int] = {}  # maps a client to its line number
    for cells in rows:
        where = f"{flag}, line {lines.line_num}"
        if len(cells) != len(names):
            raise ConfigError(
                f"{where} has {len(cells)} cells; give {len(names)}, one for each of {', '.join(names)}"
            )
        row = {
            name: _value(f"{where}, column {name}:", name, cell)
            for name, cell in zip(names, cells, strict=True)
        }
        client = int(row.pop("client"))
        if client in line_of:
            raise ConfigError(
                f"{where}, column client: client {client} is in line {line_of[client]} already; remove one of the lines"
            )
        line_of[client] = lines.line_num
        if client < clients:
            for name, value in row.items():
                values[name][client] = value
    missing = [client for client in range(clients) if client not in line_of]
    if missing:
        raise ConfigError(
            f"{flag} has no line for client {missing[0]}, but the clients are 0 to {clients - 1}; add the line, or give fewer --clients"
        )
    return Profiles(**values)


def _check_columns(where: str, names: list[str]) -> None:
    for name in names:
        if name not in ("client", *COLUMNS):
            raise ConfigError(
                f"{where}: unknown column '{name}'; {nearest(name, ('client', *COLUMNS))}"
            )
        if names.count(name) > 1:
            raise ConfigError(f"{where} has {names.count(name)} columns '{name}'; keep one")
    for name in REQUIRED:
        if name not in names:
            raise ConfigError(
                f"{where} has no column '{name}'; add it, as in client,up,down,latency,step"
            )


def _value(where: str, name: str, cell: str) -> float:
    try:
        value = spec.convert(cell, TYPES[name], where)
    except SpecError as error:
        raise ConfigError(str(error)) from None
    if name == "client":
        if value < 0:
            raise ConfigError(f"{where} the id is {value}; give a whole number of at least 0")
    elif problem := spec.out_of_range(value, *LIMITS[name]):
        raise ConfigError(f"{where} the value {problem}")
    return value


class AbsenceModel:
    """A random model of the times at which clients are absent.

    `absent` [clients] has each client's probability of being absent, from 0 to 0.9. For client i, time is divided into periods of
    `period_s[i]` seconds. The start of the first period is random. In each period, the client is either absent or present all the time.
    The random draws depend only on the seed, the client and the period, so that no state must be saved.
    """

    def __init__(self, absent: np.ndarray, period_s: np.ndarray, seed: int):
        self.absent, self.period_s = absent, period_s
        self._key = seeds.key(seed, "away")
        self._offset_s = seeds.generator(seed, "away").random(len(absent)) * period_s

    def absent_at(self, time_s: float) -> np.ndarray:
        clients = np.arange(len(self.absent))
        periods = np.floor((time_s + self._offset_s) / self.period_s).astype(np.int64)
        return self._is_absent(clients, periods)

    def is_absent(self, client: int, time_s: float) -> bool:
        period = self._period(client, time_s)
        return bool(self._is_absent(np.array([client]), np.array([period]))[0])

    def first_absence_s(self, client: int, since_s: float, until_s: float) -> float | None:
        """Return the first time from `since_s` to `until_s` at which a client is absent, or None if it is present all the time."""
        if not self.absent[client]:
            return None
        first, last = self._period(client, since_s), self._period(client, until_s)
        for start in range(first, last + 1, CHUNK):
            periods = np.arange(start, min(start + CHUNK, last + 1))
            absent = np.flatnonzero(self._is_absent(np.full(len(periods), client), periods))
            if len(absent):
                start_s = periods[absent[0]] * self.period_s[client] - self._offset_s[client]
                return max(since_s, float(start_s))
        return None

    def lost_at_s(
        self, client: int, since_s: float, until_s: float, grace_s: float
    ) -> float | None:
        """Return the time at which a client counts as lost, or None if the client is not lost.

        A client counts as lost if it leaves between `since_s` and `until_s` and is still absent `grace_s` seconds later.
        """
        while (left_s := self.first_absence_s(client, since_s, until_s)) is not None:
            if self.is_absent(client, since_s := left_s + grace_s):
                return since_s
        return None

    def next_change_s(self, time_s: float) -> float:
        """Return the first time after `time_s` at which a client may leave or return, or infinity if no client is ever absent."""
        clients = np.flatnonzero(self.absent)
        period_s, offset_s = self.period_s[clients], self._offset_s[clients]
        ends = (np.floor((time_s + offset_s) / period_s) + 1) * period_s - offset_s
        return float(np.maximum(ends, np.nextafter(time_s, math.inf)).min(initial=math.inf))

    def _period(self, client: int, time_s: float) -> int:
        return math.floor((time_s + self._offset_s[client]) / self.period_s[client])

    def _is_absent(self, clients: np.ndarray, periods: np.ndarray) -> np.ndarray:
        """Return, for each i, whether client `clients[i]` is absent in period `periods[i]`."""
        words = philox.words_at(self._key, periods.astype(np.int64) << 32 | clients)
        return words < self.absent[clients] * 2.0**32
