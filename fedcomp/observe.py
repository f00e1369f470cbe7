"""What a run tells those who watch it: the header, a record a round, a summary. Watchers are dashboards, files, tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Header:
    """What runs, said once before the first round."""

    task: str
    clients: int
    cohort: int  # clients in a round
    parameters: int
    strategy: str
    uplink: str
    downlink: str
    memory: str
    partition: str
    device: str
    engine: str  # "serial" or "batched", with the batch of clients
    first_round: int  # 1, or the round after the checkpoint
    rounds: int
    out: str  # run folder
    relays: int = 0  # between clients and server


@dataclass(frozen=True)
class Rejection:
    client: int
    stage: str  # "phase", "download", "train", "encode", "relay", "send", "reply", "aggregate"
    reason: str


@dataclass(frozen=True)
class RoundRecord:
    """A line of metrics.jsonl. Bytes are lengths of frames that were made; dense_* is what float32 models would have cost."""

    round: int
    accuracy: float | None  # share of the test set, 0..1; None when the round was not evaluated
    loss: float | None  # mean loss on the test set
    train_loss: float | None  # mean over the accepted clients of the loss before each local step
    cohort: int
    accepted: int
    rejected: int
    uplink_bytes: int
    downlink_bytes: int
    dense_uplink_bytes: int
    dense_downlink_bytes: int
    seconds: float
    catch_up_bytes: int = 0  # of downlink_bytes: broadcasts older than the newest
    first_download_bytes: int = 0  # of downlink_bytes: what clients without a state needed
    uplink_nonzeros: int = 0  # coordinates in the accepted updates
    skipped: int = 0  # of the accepted: clients that had nothing to send
    relayed_bytes: int = 0  # that relays sent to the server in place of uplink_bytes, which reached them
    wire_bytes_in: int = 0  # that a deployment's port received since the round before, headers, polls and TLS with them
    wire_bytes_out: int = 0  # that it sent
    rejections: Sequence[Rejection] = field(default_factory=tuple)
    warnings: Sequence[str] = field(default_factory=tuple)  # what was found in this round, each once a run


@dataclass(frozen=True)
class Summary:
    """summary.json."""

    accuracy: float | None
    loss: float | None
    uplink_bytes: int
    downlink_bytes: int
    dense_uplink_bytes: int
    dense_downlink_bytes: int
    rounds: int
    clients: int
    client_updates: int
    seconds: float
    client_updates_per_s: float
    device: str
    seed: int
    version: str
    warnings: Sequence[str] = field(default_factory=tuple)


class Observer:
    """Hears of everything and does nothing. Watchers override what they care for."""

    def started(self, header: Header) -> None: ...

    def waiting(self, here: Sequence[int], wanted: int) -> None:
        """A round waits for clients: the logical ids of those that are here, whenever that changes."""

    def progress(self, round: int, answered: int, cohort: int) -> None: ...

    def round_done(self, record: RoundRecord) -> None: ...

    def warning(self, sentence: str) -> None: ...

    def finished(self, summary: Summary, out: str) -> None: ...
