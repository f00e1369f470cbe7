"""The strategy, the round records and the summary of a run, simulated or deployed, from its options and results."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import __version__, spec
from ..callbacks import ClientRecord, Rejection, RejectionSummary, RoundRecord, Summary
from ..config import RunConfig
from ..errors import ConfigError
from ..layout import Layout
from ..strategies import RoundStrategy, StrategyConfig, strategy
from ..strategies.base import cohort_size
from .client_metrics import summarize_client_metrics
from .round_loop import RoundResult

MAX_REASONS, MAX_CLIENTS = 16, 16  # in a summary; metrics.jsonl has all
NUMBER = re.compile(r"\d+(\.\d+)?")
NOTHING_ACCEPTED = "no client's update was accepted in any round: metrics.jsonl has the reasons"


def make_strategy(config: RunConfig, layout: Layout, **settings: Any) -> RoundStrategy:
    """Return the strategy of resolved options for a model. Raises SpecError or ConfigError."""
    if config.local_steps_schedule and config.local_epochs:
        raise ConfigError(
            "--local-steps-schedule and --local-epochs both set how long clients train; give one of them"
        )
    if config.holdout != RunConfig.holdout and not config.clients_evaluate:
        raise ConfigError(
            f"--holdout {config.holdout:g} has no effect unless clients evaluate; give --evaluate clients or both, or leave --holdout out"
        )
    budget_bytes, budget_s = spec.parse_budget(config.budget) if config.budget else (0, 0.0)
    options = {field.name for field in dataclasses.fields(config)}
    shared = [f.name for f in dataclasses.fields(StrategyConfig) if f.name in options]
    strategy_config = StrategyConfig(
        **{name: getattr(config, name) for name in shared} | {"lr": config.learning_rate},
        budget_bytes=budget_bytes,
        budget_s=budget_s,
        timeout_s=config.deadline or None,
    )
    return strategy(config.strategy, strategy_config, layout, **settings)


def client_config(config: RunConfig, strategy: RoundStrategy) -> RunConfig:
    """Return the options that clients train with."""
    return (
        dataclasses.replace(config, weight_decay=0.0) if strategy.decays_in_server_step else config
    )


def bandwidths_of(
    strategy: RoundStrategy, config: RunConfig, uplinks: Sequence[float] | None = None
) -> dict[int, float]:
    """Return the uplink bandwidth of each client in bytes per second, from --bandwidths or the virtual network; {} without a budget.

    Raises ConfigError for a budget that is not enough for any cohort.
    """
    c = config
    if c.bandwidths and not c.budget:
        raise ConfigError("--bandwidths divide a budget among the clients; give --budget as well")
    if c.bandwidths and uplinks is not None:
        raise ConfigError(
            "--bandwidths and --network both set the speed of uplinks; leave --bandwidths out"
        )
    if not c.budget:
        return {}
    speeds = spec.parse_byte_list(c.bandwidths) if c.bandwidths else uplinks
    bandwidths = {}
    if speeds is not None:
        bandwidths = {client: float(speeds[client % len(speeds)]) for client in range(c.clients)}
    if strategy.config.budget_s and not bandwidths:
        raise ConfigError(
            f"--budget {c.budget} is a time and needs the speed of each uplink; give --bandwidths or --network"
        )
    n_clients = c.clients if strategy.config.budget_s else cohort_size(c.participation, c.clients)
    strategy.schedule.for_clients(1, range(n_clients), bandwidths)
    return bandwidths


def round_record(
    result: RoundResult,
    layout: Layout,
    loss: float | None,
    accuracy: float | None,
    metrics: Mapping[str, float],
    seconds: float,
    warn: Callable[..., None],
) -> RoundRecord:
    """Return the record of a round, a line of metrics.jsonl, with a record for each client that reported metrics."""
    spreads, values = summarize_client_metrics(result.round, result.accepted, warn)
    traffic, dense = result.traffic, 4 * layout.numel
    return RoundRecord(
        round=result.round,
        accuracy=accuracy,
        loss=loss,
        train_loss=result.train_loss,
        cohort=len(result.cohort),
        accepted=len(result.accepted),
        rejected=len(result.rejections),
        uplink_bytes=sum(traffic.uplink.values()),
        downlink_bytes=sum(traffic.downlink.values()),
        dense_uplink_bytes=dense * len(result.cohort),
        dense_downlink_bytes=dense * len(traffic.downlink),
        seconds=seconds,
        catch_up_bytes=traffic.catch_up,
        first_download_bytes=traffic.first_download,
        # A client whose relay has added its frame has a ticket.
        skipped=sum(a.update is None and not a.ticket for a in result.accepted),
        uplink_nonzeros=sum(a.update.nonzeros for a in result.accepted if a.update is not None),
        rejections=tuple(result.rejections),
        suspicion=result.suspicion,
        clipped=result.clipped,
        metrics=metrics,
        simulated_s=result.simulated_s,
        client_metrics=spreads,
        by_client=tuple(
            ClientRecord(
                client,
                traffic.uplink.get(client, 0),
                traffic.downlink.get(client, 0),
                None,
                None,
                None,
                traffic.behind.get(client),
                traffic.staleness.get(client, 0),
                metrics=numbers,
            )
            for client, numbers in values.items()
        ),
    )


def summarize_run(records: Sequence[RoundRecord], config: RunConfig, device: str) -> Summary:
    """Return the summary of all rounds."""

    def total(field: str) -> Any:
        """Return the sum over all rounds, None if it is not known for one of them."""
        values = [getattr(record, field) for record in records]
        return None if None in values else sum(values)

    seconds = total("seconds")
    last = [] if total("accepted") else [NOTHING_ACCEPTED]
    return Summary(
        accuracy=records[-1].accuracy,
        loss=records[-1].loss,
        uplink_bytes=total("uplink_bytes"),
        downlink_bytes=total("downlink_bytes"),
        dense_uplink_bytes=total("dense_uplink_bytes"),
        dense_downlink_bytes=total("dense_downlink_bytes"),
        wire_bytes_in=total("wire_bytes_in"),
        wire_bytes_out=total("wire_bytes_out"),
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
                [*(sentence for record in records for sentence in record.warnings), *last]
            )
        ),
        rejections=summarize_rejections(records),
        simulated_hours=records[-1].simulated_hours,
        metrics=records[-1].metrics,
        client_metrics=records[-1].client_metrics,
    )


def summarize_rejections(records: Iterable[RoundRecord]) -> tuple[RejectionSummary, ...]:
    """Return a run's rejections by reason, the most frequent first. Reasons that differ only in their numbers are combined."""
    by_reason: dict[tuple[str, str], list[Rejection]] = {}
    for rejection in (rejection for record in records for rejection in record.rejections):
        reason = NUMBER.sub("#", rejection.reason)
        by_reason.setdefault((rejection.stage, reason), []).append(rejection)
    summaries = []
    for alike in sorted(by_reason.values(), key=lambda alike: -len(alike))[:MAX_REASONS]:
        clients = sorted({rejection.client for rejection in alike})
        named, more = tuple(clients[:MAX_CLIENTS]), max(0, len(clients) - MAX_CLIENTS)
        summaries.append(RejectionSummary(alike[0].stage, alike[0].reason, len(alike), named, more))
    return tuple(summaries)
