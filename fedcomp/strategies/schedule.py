"""The settings of clients in each round: density, learning rate, local steps and batch size.

The density is the fraction of the coordinates that a client sends.

Density warm-up. Lin, Han, Mao, Wang, Dally: Deep gradient compression. ICLR 2018. The density falls geometrically from 25 % to its final
value. With a warm-up of four rounds to 0.1 %, the densities of rounds 1 to 5 are 25, 6.29, 1.58, 0.40 and 0.1 %, nearly as in the paper.

Learning rate warm-up. Goyal et al.: Accurate, large minibatch SGD. 2017. The learning rate grows linearly in the first --lr-warmup rounds,
and then follows its schedule (schedules.py).

Budget. A budget in bytes is divided among the clients of a round. With a budget in seconds, the bytes of a client are its
bandwidth times this time. A client gets the largest density at which no frame (encoded update) is longer than the client's bytes.
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

FIRST_DENSITY = 0.25  # density in the first round of a warm-up
SEARCH_STEPS = 40  # number of bisections in the search for a density
DENSITY_SCHEDULE = "--density-schedule"


class Schedule:
    """The settings of each client in each round. Raises SpecError or ConfigError for settings that are invalid or do not suit the codec."""

    def __init__(self, config: "StrategyConfig", codec: Codec, layout: Layout):
        self.config, self.codec, self.layout = config, codec, layout
        self.budget = config.budget_bytes or config.budget_s
        horizon = config.horizon or config.rounds
        options = {
            DENSITY_SCHEDULE: config.density_schedule,
            "--density-warmup": config.density_warmup,
            "--budget": self.budget,
        }
        given = [option for option, value in options.items() if value]
        if self.budget and len(given) > 1:
            raise ConfigError(f"{given[0]} and --budget both set the density; give one of them")
        if given:
            try:
                at_density(codec, FIRST_DENSITY)
            except ConfigError:
                raise ConfigError(
                    f"{given[0]} changes the density of the uplink codec, but --uplink {codec} has no density; leave {given[0]} out, "
                    "or use --uplink stc"
                ) from None
        if self.budget:
            self._min_frame_bytes()  # raises ConfigError if frames have no maximum size
        every = schedules.of_options(config, horizon)
        self.local = {name: values for name, values in every.items() if values.text}
        # Schedule of the uplink codec's density, or None for a constant density
        self.density: OptionSchedule | None = None
        if text := config.density_schedule:
            kind, warmup = schedules.FRACTION, config.density_warmup
            self.density = OptionSchedule(
                DENSITY_SCHEDULE, text, kind, codec.density, warmup, horizon
            )
        for values in (*self.local.values(), *([self.density] if self.density else [])):
            values.check(config.rounds or horizon or 1)

    def for_clients(
        self, round: int, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, ClientRoundConfig]:
        """Return each client's settings in a round, by client id. `bandwidths`: uplink bandwidth of each client in bytes/s."""
        own = ClientRoundConfig(
            0.0, self.rate(round), self.count("local_steps", round), self.count("batch_size", round)
        )
        if not self.budget:
            return dict.fromkeys(cohort, replace(own, density=self._density(round)))
        divide = self._byte_budgets if self.config.budget_bytes else self._byte_budgets_in_time
        budgets = divide(cohort, bandwidths)
        densities = {n_bytes: self._max_density(n_bytes) for n_bytes in set(budgets.values())}
        return {client: replace(own, density=densities[budgets[client]]) for client in cohort}

    def rate(self, round: int) -> float:
        """Return the learning rate of a round, divided by --lr."""
        warmup, scheduled = self.config.lr_warmup, self.local.get("lr")
        grown = min(1.0, round / warmup) if warmup else 1.0
        return grown * scheduled.at(round) / scheduled.default if scheduled else grown

    def count(self, name: str, round: int) -> int:
        """Return the scheduled value of "local_steps" or "batch_size" (`name`) in a round; 0 without a schedule."""
        return int(self.local[name].at(round)) if name in self.local else 0

    def _density(self, round: int) -> float:
        """Return the density of the uplink codec in a round, or 0 if the density in the spec string of --uplink applies."""
        warmup = self.config.density_warmup
        scheduled = self.density.at(max(round, warmup + 1)) if self.density else 0.0
        if round > warmup or (last := scheduled or self.codec.density) >= FIRST_DENSITY:
            return scheduled
        return FIRST_DENSITY * (last / FIRST_DENSITY) ** ((round - 1) / warmup)

    def _byte_budgets(
        self, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, int]:
        """Return each client's part of `budget_bytes`: the size of the smallest frame, plus bytes in proportion to the client's bandwidth.

        A client of unknown bandwidth is assumed to have the mean of the known bandwidths. Raises ConfigError if the budget is too small.
        """
        smallest = self._min_frame_bytes()
        rest = self.config.budget_bytes - smallest * len(cohort)
        if rest < 0:
            raise ConfigError(
                f"--budget of {self.config.budget_bytes} bytes is too small for {len(cohort)} clients in a round; give at least "
                f"{smallest * len(cohort)}, or a smaller --participation"
            )
        known = [bandwidths[client] for client in cohort if client in bandwidths]
        mean = sum(known) / len(known) if known else 1.0
        rates = {client: bandwidths.get(client, mean) for client in cohort}
        total = sum(rates.values())
        return {client: smallest + int(rest * rate / total) for client, rate in rates.items()}

    def _byte_budgets_in_time(
        self, cohort: Sequence[int], bandwidths: Mapping[int, float]
    ) -> dict[int, int]:
        """Return how many bytes each client can send in `budget_s` seconds. Raises ConfigError if no frame is that small."""
        smallest = self._min_frame_bytes()
        budgets = {client: int(self.config.budget_s * bandwidths[client]) for client in cohort}
        slowest = min(budgets, key=bandwidths.__getitem__, default=None)
        if slowest is not None and budgets[slowest] < smallest:
            needed_s = smallest / bandwidths[slowest]
            number, unit = (needed_s, "s") if needed_s > 1 else (1000 * needed_s, "ms")
            enough = f"{math.ceil(number)}{unit}"
            raise ConfigError(
                f"--budget of {self.config.budget_s:g} s is too short for client {slowest}: it can send {budgets[slowest]} bytes in this "
                f"time, but the smallest update has {smallest} bytes; give at least {enough}"
            )
        return budgets

    def _min_frame_bytes(self) -> int:
        return self._max_frame_bytes(1 / max(self.layout.numel, 1))

    def _max_density(self, n_bytes: int) -> float:
        """Return the largest density at which no frame is longer than `n_bytes`."""
        low, high = 1 / max(self.layout.numel, 1), 1.0
        if self._max_frame_bytes(high) <= n_bytes:
            return high
        for _ in range(SEARCH_STEPS):
            middle = (low + high) / 2
            if self._max_frame_bytes(middle) <= n_bytes:
                low = middle
            else:
                high = middle
        return low

    def _max_frame_bytes(self, density: float) -> int:
        longest = longest_frame(at_density(self.codec, density), self.layout)
        if longest is None:
            raise ConfigError(
                f"--budget does not work with --uplink {self.codec}, whose frames have no maximum size; use --uplink stc"
            )
        return longest
