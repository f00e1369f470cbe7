"""The strategy, the round records and the summary of a run, simulated or deployed, from its options and results."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .. import __version__, spec
from ..callbacks import RoundRecord, Summary
from ..config import RunConfig
from ..errors import ConfigError
from ..layout import Layout
from ..strategies import RoundStrategy, StrategyConfig, strategy
from ..strategies.cohort import size as cohort_size
from ..tasks import Data
from .rejected import rejections_of
from .round_loop import RoundResult

SCHEDULED = (
    "lr_schedule",
    "local_steps_schedule",
    "batch_size_schedule",
    "density_schedule",
    "local_steps",
    "batch_size",
    "horizon",
    "rounds",
)  # of a run's options, those that schedules are made of
NOTHING_ACCEPTED = "no client's update was accepted in any round: metrics.jsonl has the reasons"  # warned of at the end


def strategy_of(config: RunConfig, layout: Layout, **settings: Any) -> RoundStrategy:
    """Return the strategy of resolved options for a model. Raises SpecError or ConfigError."""
    c = config
    if c.local_steps_schedule and c.local_epochs:
        raise ConfigError(
            "--local-steps-schedule and --local-epochs both say how long clients train; give one of them"
        )
    budget, budget_s = spec.budget(c.budget) if c.budget else (0, 0.0)
    strategy_config = StrategyConfig(
        c.participation,
        c.uplink,
        c.downlink,
        c.downlink_memory,
        c.weights,
        c.weight_cap,
        c.server_lr,
        c.cache,
        c.seed,
        c.density_warmup,
        c.lr_warmup,
        budget,
        c.memory,
        c.quorum,
        c.deadline or None,
        c.lr,
        c.keep_momentum,
        budget_s,
        server_optimizer=c.server_optimizer,
        clip_update=c.clip_update,
        clients=c.clients,
        momentum=c.momentum,
        weight_decay=c.weight_decay,
        **{name: getattr(c, name) for name in SCHEDULED},
    )
    return strategy(c.strategy, strategy_config, layout, **settings)


def client_config(config: RunConfig, strategy: RoundStrategy) -> RunConfig:
    """Return the options that clients train with."""
    return dataclasses.replace(config, weight_decay=0.0) if strategy.decays else config


def bandwidths_of(
    strategy: RoundStrategy, config: RunConfig, uplinks: Sequence[float] | None = None
) -> dict[int, float]:
    """Return the uplink bandwidth of each client in bytes a second: dealt out, or those of a virtual network; {} if they do not count.

    Raises ConfigError for a budget that is not enough for any cohort.
    """
    c = config
    if c.bandwidths and not c.budget:
        raise ConfigError("--bandwidths are shares of a budget; give --budget as well")
    if c.bandwidths and uplinks is not None:
        raise ConfigError(
            "--bandwidths and --network both say how fast uplinks are; leave --bandwidths out"
        )
    dealt = (
        spec.sizes(c.bandwidths)
        if c.bandwidths
        else list(uplinks)
        if uplinks is not None and c.budget
        else []
    )
    bandwidths = (
        {client: float(dealt[client % len(dealt)]) for client in range(c.clients)} if dealt else {}
    )
    if strategy.config.budget_s and not bandwidths:
        raise ConfigError(
            f"--budget {c.budget} is a time, in which uplinks send what they can; give --bandwidths, or a --network"
        )
    asked = (
        range(c.clients)
        if strategy.config.budget_s
        else range(cohort_size(c.participation, c.clients))
    )
    strategy.schedule.for_clients(1, asked, bandwidths)
    return bandwidths


def on(data: Data, device: torch.device) -> Data:
    """Return the data on a device."""
    return data.to(device)


def record_of(
    outcome: RoundResult,
    layout: Layout,
    loss: float | None,
    accuracy: float | None,
    metrics: Mapping[str, float],
    seconds: float,
) -> RoundRecord:
    """Return the record of a round, a line of metrics.jsonl."""
    traffic, dense = outcome.traffic, 4 * layout.numel
    return RoundRecord(
        round=outcome.round,
        accuracy=accuracy,
        loss=loss,
        train_loss=outcome.train_loss,
        cohort=len(outcome.cohort),
        accepted=len(outcome.accepted),
        rejected=len(outcome.rejections),
        uplink_bytes=sum(traffic.uplink.values()),
        downlink_bytes=sum(traffic.downlink.values()),
        dense_uplink_bytes=dense * len(outcome.cohort),
        dense_downlink_bytes=dense * len(traffic.downlink),
        seconds=seconds,
        catch_up_bytes=traffic.catch_up,
        first_download_bytes=traffic.first_download,
        # A client whose relay has added its frame has a ticket.
        skipped=sum(a.update is None and not a.ticket for a in outcome.accepted),
        uplink_nonzeros=sum(a.update.nonzeros for a in outcome.accepted if a.update is not None),
        rejections=tuple(outcome.rejections),
        suspicion=outcome.suspicion,
        clipped=outcome.clipped,
        metrics=metrics,
        simulated_s=outcome.simulated_s,
    )


def summary_of(records: Sequence[RoundRecord], config: RunConfig, device: str) -> Summary:
    """Return the summary of all rounds."""

    def total(field: str) -> Any:
        return sum(getattr(record, field) for record in records)

    def counted(field: str) -> int | None:
        values = [getattr(record, field) for record in records]
        return None if None in values else sum(values)

    seconds = total("seconds")
    nothing = [] if total("accepted") else [NOTHING_ACCEPTED]
    return Summary(
        accuracy=records[-1].accuracy,
        loss=records[-1].loss,
        uplink_bytes=total("uplink_bytes"),
        downlink_bytes=total("downlink_bytes"),
        dense_uplink_bytes=total("dense_uplink_bytes"),
        dense_downlink_bytes=total("dense_downlink_bytes"),
        wire_bytes_in=counted("wire_bytes_in"),
        wire_bytes_out=counted("wire_bytes_out"),
        rounds=len(records),
        clients=config.clients,
        client_updates=total("accepted"),
        seconds=seconds,
        client_updates_per_s=total("accepted") / seconds if seconds else 0.0,
        device=device,
        seed=config.seed,
        version=__version__,
        warnings=tuple(
            dict.fromkeys(
                [*(sentence for record in records for sentence in record.warnings), *nothing]
            )
        ),
        rejections=rejections_of(records),
        simulated_hours=records[-1].simulated_hours,
        metrics=records[-1].metrics,
    )
