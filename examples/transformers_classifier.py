"""Train a Hugging Face text classifier with AdamW. The batches of this model are dicts, and the model computes its own loss.

    pip install transformers datasets
    python examples/transformers_classifier.py

The model is created from a configuration. `AutoModelForSequenceClassification.from_pretrained(…)` works as well.
"""

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification

import fedcomp

WORDS, LENGTH = 100, 16
CONFIG = BertConfig(
    vocab_size=WORDS,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=LENGTH,
)


def sentences(count: int, seed: int) -> datasets.Dataset:
    """Return sentences of random token ids, with labels that depend on the first token, and a column `user` that names the client."""
    words = torch.randint(1, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    columns = {
        "input_ids": words.tolist(),
        "labels": (words[:, 0] < WORDS // 2).long().tolist(),
        "user": (torch.arange(count) % 20).tolist(),
    }
    return datasets.Dataset.from_dict(columns).with_format("torch", ["input_ids", "labels"])


task = fedcomp.Task(
    "bert-classifier",
    model=lambda: BertForSequenceClassification(CONFIG),
    train=lambda: sentences(2000, seed=1),
    test=lambda: sentences(500, seed=2),
)


if __name__ == "__main__":
    run = fedcomp.simulate(
        task,
        clients=20,
        participation=0.25,
        partition="natural:column=user",
        rounds=15,
        local_steps=10,
        optimizer="adamw:lr=2e-3",
        uplink="topk:density=2%",
        progress=False,
    )
    print(f"accuracy {run.accuracy:.1%}, {run.metrics['uplink_bytes'].sum():,.0f} bytes up")
