"""The base class of simulations and deployments, with the parts of a run on the server that they share."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..callbacks import Callback, ClientRecord, Header, RoundRecord, Summary
from ..config import RunConfig, data_folder
from ..strategies.base import cohort_size
from ..tasks import Task, load
from ..tasks.check import layout_of
from ..tasks.data import Examples
from .evaluation import Evaluator
from .recovery import Recovery, Stateful
from .results import (
    WarningLog,
    check_loss,
    make_strategy,
    refuse_unused_options,
    summarize_client_metrics,
    summarize_run,
)
from .round_loop import RoundLoop, RoundResult
from .run_folder import RunFolder

NOTHING_ACCEPTED = "no client's update was accepted in any round; metrics.jsonl has the reasons"
UNCHANGED = "the trained model has its initial weights; the train_fn must change the parameters of the model that it receives"


class ServerRun(ABC):
    """Base class of simulations and deployments. The constructors of subclasses set `loop` and `evaluator`.

    `task`: the task of the run, or None to load the task that `config.task` names. Raises UserError for options that cannot work.
    """

    loop: RoundLoop
    evaluator: Evaluator
    recovery: Recovery  # set by `open`

    def __init__(self, config: RunConfig, callback: Callback, task: Task | None = None):
        self.config, self.callback = config, callback
        self.warnings = WarningLog(lambda sentence: self.callback.on_warning(sentence))
        self.folder = RunFolder(config)
        self.task = load(config.task, data_folder(config.data)) if task is None else task
        self.strategy = make_strategy(config, layout_of(self.task), warn=self.warnings)
        refuse_unused_options(config, self.task, self.strategy)

    @abstractmethod
    def write_config(self) -> None:
        """Write the options, and the choices for this machine such as the device, to config.toml."""

    def open(
        self, exit_stack: ExitStack, data: Examples | None, others: Mapping[str, Stateful]
    ) -> int:
        """Open the run folder until `exit_stack` ends, and restore a resumed run. Return the last saved round.

        For `data` and `others`, see the constructor of Recovery.
        """
        self.folder.open()
        exit_stack.callback(self.folder.close)
        if not self.folder.resumed:
            self.write_config()
        others = {**others, "warnings/": self.warnings}
        self.recovery = Recovery(self.folder, self.loop, data, self.config.rounds, others)
        exit_stack.callback(self.recovery.checkpoint.close)
        done = self.recovery.restore()
        if self.folder.resumed:
            self.write_config()
        return done

    def make_header(self, first_round: int, **others: Any) -> Header:
        """Return the description of the run. `others`: fields of Header that differ between simulations and deployments."""
        config, strategy, task = self.config, self.strategy, self.task
        return Header(
            task=task.name,
            clients=config.clients,
            cohort=cohort_size(config.participation, config.clients),
            parameters=strategy.model_layout.numel,
            strategy=config.strategy,
            uplink=str(strategy.uplink),
            downlink=str(strategy.downlink),
            memory=config.memory,
            partition=config.partition,
            first_round=first_round,
            rounds=config.rounds,
            out=str(self.folder.path),
            relays=config.relays,
            notice=strategy.notice,
            judged="loss" if task.accuracy is None else "accuracy",
            measures=tuple(task.metrics),
            evaluate=config.evaluate,
            **others,
        )

    def record(self, result: RoundResult, began: float) -> RoundRecord:
        """Evaluate the model after a round. Return the record of the round, with a record of each client that reported metrics.

        `began`: `time.perf_counter()` at the start of the round.
        """
        evaluation = self.evaluator.evaluate(result.round, self.loop.model)
        check_loss(self.warnings, result.round, evaluation.loss, self.evaluator.test)
        summaries, values = summarize_client_metrics(result.round, result.accepted, self.warnings)
        traffic, dense = result.traffic, 4 * self.evaluator.layout.numel
        return RoundRecord(
            round=result.round,
            accuracy=evaluation.accuracy,
            loss=evaluation.loss,
            train_loss=result.train_loss,
            cohort=len(result.cohort),
            accepted=len(result.accepted),
            rejected=len(result.rejections),
            uplink_bytes=sum(traffic.uplink.values()),
            downlink_bytes=sum(traffic.downlink.values()),
            dense_uplink_bytes=dense * len(result.cohort),
            dense_downlink_bytes=dense * len(traffic.downlink),
            seconds=time.perf_counter() - began,
            catch_up_bytes=traffic.catch_up_bytes,
            first_download_bytes=traffic.first_download_bytes,
            # Clients that had nothing to send. A client with a ticket (hash of its update) but no update is not one of them: a relay has
            # added its update to that of another client.
            skipped=sum(a.update is None and not a.ticket for a in result.accepted),
            uplink_nonzeros=sum(a.update.nonzeros for a in result.accepted if a.update is not None),
            rejections=tuple(result.rejections),
            suspicion=result.suspicion,
            clipped=result.clipped,
            metrics=evaluation.metrics,
            simulated_s=result.simulated_s,
            client_metrics=summaries,
            by_client=tuple(
                ClientRecord(
                    client,
                    uplink_bytes=traffic.uplink.get(client, 0),
                    downlink_bytes=traffic.downlink.get(client, 0),
                    versions_behind=traffic.versions_behind.get(client),
                    staleness=traffic.staleness.get(client, 0),
                    metrics=numbers,
                )
                for client, numbers in values.items()
            ),
        )

    def finish(self, device: str) -> Summary:
        """Write the trained model and the summary of the run to its folder, and return the summary. `device`: training device."""
        weights, evaluator, folder = self.loop.model, self.evaluator, self.folder
        folder.write_model(evaluator.export(weights))
        records, warnings = folder.records(), list[str]()
        if not sum(record.accepted for record in records):
            warnings.append(NOTHING_ACCEPTED)
        elif self.task.train_fn is not None and evaluator.is_initial(weights):
            warnings.append(UNCHANGED)
        summary = summarize_run(records, self.config, device, warnings)
        folder.write_summary(summary)
        for warning in warnings:
            self.callback.on_warning(warning)
        self.callback.on_run_end(summary, str(folder.path))
        return summary
