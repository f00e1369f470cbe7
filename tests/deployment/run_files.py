"""The files in a run folder."""

import json
from pathlib import Path

# Fields of a round's record that are equal in a deployment and its simulation.
SAME = (
    "round accuracy loss train_loss cohort accepted rejected uplink_bytes uplink_nonzeros".split()
)


def records(folder: Path) -> list[dict]:
    """Return the records of the rounds."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def outcome(folder: Path, names: list[str] = SAME) -> tuple[list[dict], bytes]:
    """Return the named fields of all records, and the model."""
    return [{name: record[name] for name in names} for record in records(folder)], model(folder)


def flags(options: dict[str, object]) -> list[str]:
    """Return options of a RunConfig as command-line words."""
    pairs = [("--" + name.replace("_", "-"), str(value)) for name, value in options.items()]
    return [word for pair in pairs for word in pair]
