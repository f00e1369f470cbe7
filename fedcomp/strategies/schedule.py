"""The settings of a round that clients are told: how dense their frames may be, their learning rate, steps and batch size.

Lin, Han, Mao, Wang, Dally: Deep gradient compression. ICLR 2018: the density falls from 25 % to its own, geometrically; with four rounds
and 0.1 % these are the paper's 25, 6.25, 1.56, 0.39, 0.1 %. Goyal et al.: Accurate, large minibatch SGD. 2017: the learning rate grows
linearly. What comes after a warm-up is schedules.py's. A budget is kept whatever the updates hold: a client's density is the largest whose
longest frame fits in its share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .. import schedules
from ..codecs import Codec, at_density, longest_frame
from ..errors import ConfigError
from ..layout import Layout
from ..messages import ClientRoundConfig
from ..schedules import OptionSchedule

if TYPE_CHECKING:
    from .base import StrategyConfig

FIRST_DENSITY = 0.25  # of a warm-up
STEPS = 40  # of the search for a density
DENSITY_SCHEDULE = "--density-schedule"


class Schedule:
    """The ClientRoundConfig of each round and client.

    Raises SpecError or ConfigError for a schedule that cannot be, and for a codec without a density that is to be changed.
    """

    def __init__(self, config: "StrategyConfig", codec: Codec, layout: Layout):
        self.config, self.codec, self.layout = config, codec, layout
        self.budget = config.budget_bytes or config.budget_s
        horizon = config.horizon or config.rounds
        asked = [
            option
            for option, given in (
                (DENSITY_SCHEDULE, config.density_schedule),
                ("--density-warmup", config.density_warmup),
                ("--budget", self.budget),
            )
            if given
        ]
        if self.budget and len(asked) > 1:
            raise ConfigError(f"{asked[0]} and --budget both decide the density; give one of them")
        if asked:
            _check_density(codec, asked[0])
        if self.budget:
            self._min_frame_bytes()
        every = schedules.of_options(config, horizon)
        self.local = {name: values for name, values in every.items() if values.text}
        self.density: OptionSchedule | None = None  # of the uplink; None = the codec's own
        if text := config.density_schedule:
            self.density = OptionSchedule(
                DENSITY_SCHEDULE,
                text,
                schedules.FRACTION,
                codec.density,
                config.density_warmup,
                horizon,
            )
        for values in (*self.local.values(), *([self.density] if self.density else [])):
            values.check(config.rounds or horizon or 1)

    def for_clients(
        self, round: int, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, ClientRoundConfig]:
        """Return the configs of a cohort by client. `bandwidths`: in bytes a second, where known; an unknown one counts as their mean."""
        own = ClientRoundConfig(
            0.0, self.rate(round), self.count("local_steps", round), self.count("batch_size", round)
        )
        if not self.budget:
            return dict.fromkeys(cohort, replace(own, density=self._density(round)))
        share = self._byte_budgets if self.config.budget_bytes else self._byte_budgets_in_time
        shares = share(cohort, bandwidths)
        found = {share: self._max_density(share) for share in set(shares.values())}
        return {client: replace(own, density=found[shares[client]]) for client in cohort}

    def rate(self, round: int) -> float:
        """Return the learning rate of a round as a multiple of the run's."""
        warmup, scheduled = self.config.lr_warmup, self.local.get("lr")
        grown = min(1.0, round / warmup) if warmup else 1.0
        return grown * scheduled.at(round) / scheduled.own if scheduled else grown

    def count(self, name: str, round: int) -> int:
        """Return `local_steps` or `batch_size` of a round, 0 for the clients' own."""
        return int(self.local[name].at(round)) if name in self.local else 0

    def densities(self, rounds: int) -> set[float]:
        """Return densities that a schedule reaches in so many rounds, the least and the largest among them; none without a schedule."""
        return set() if self.density is None else self.density.values(rounds)

    def _density(self, round: int) -> float:
        """Return the density of a round, 0 for the codec's own."""
        warmup = self.config.density_warmup
        scheduled = self.density.at(max(round, warmup + 1)) if self.density else 0.0
        if round > warmup or (last := scheduled or self.codec.density) >= FIRST_DENSITY:
            return scheduled
        return FIRST_DENSITY * (last / FIRST_DENSITY) ** ((round - 1) / warmup)

    def _byte_budgets(
        self, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, int]:
        """Return bytes for each client: one coordinate a tensor for all, the rest by bandwidth. Raises ConfigError if they are too few."""
        least = self._min_frame_bytes()
        rest = self.config.budget_bytes - least * len(cohort)
        if rest < 0:
            raise ConfigError(
                f"--budget of {self.config.budget_bytes} bytes is too small for {len(cohort)} clients; give at least "
                f"{least * len(cohort)}, or a smaller --participation"
            )
        known = [bandwidths[client] for client in cohort if client in bandwidths]
        mean = sum(known) / len(known) if known else 1.0
        asked = [bandwidths.get(client, mean) for client in cohort]
        total = sum(asked)
        return {
            client: least + int(rest * mine / total)
            for client, mine in zip(cohort, asked, strict=True)
        }

    def _byte_budgets_in_time(
        self, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, int]:
        """Return the bytes that each client sends in its time. Raises ConfigError for one that has no time for the shortest frame."""
        least = self._min_frame_bytes()
        shares = {client: int(self.config.budget_s * bandwidths[client]) for client in cohort}
        slowest = min(shares, key=bandwidths.__getitem__, default=None)
        if slowest is not None and shares[slowest] < least:
            needed_s = least / bandwidths[slowest]
            enough = (
                f"{math.ceil(needed_s)}s" if needed_s > 1 else f"{math.ceil(1000 * needed_s)}ms"
            )
            raise ConfigError(
                f"--budget of {self.config.budget_s:g} s is too short for client {slowest}, which sends {shares[slowest]} bytes in "
                f"that time and needs {least}; give at least {enough}"
            )
        return shares

    def _min_frame_bytes(self) -> int:
        return self._max_frame_bytes(1 / max(self.layout.numel, 1))

    def _max_density(self, share: int) -> float:
        """Return the largest density whose longest frame has at most `share` bytes."""
        low, high = 1 / max(self.layout.numel, 1), 1.0
        if self._max_frame_bytes(high) <= share:
            return high
        for _ in range(STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._max_frame_bytes(middle) <= share else (low, middle)
        return low

    def _max_frame_bytes(self, density: float) -> int:
        longest = longest_frame(at_density(self.codec, density), self.layout)
        if longest is None:
            raise ConfigError(
                f"--budget needs a codec whose frames have a largest size, which {self.codec} has not; use --uplink stc"
            )
        return longest


def _check_density(codec: Codec, asked: str) -> None:
    """Raise ConfigError for a codec without a density, which the option `asked` is to change."""
    try:
        at_density(codec, FIRST_DENSITY)
    except ConfigError:
        raise ConfigError(
            f"{asked} changes the density of the uplink, and {codec} has none; leave {asked} out, "
            "or use --uplink stc"
        ) from None
