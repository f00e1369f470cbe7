"""Federated averaging of LoRA adapters: loss and bytes of 20 clients, with compressed and with dense messages.

    FEDCOMP_DATA=... python benchmarks/lora.py [--seeds 1 2] [--rounds N] [--uplink CODEC] [--downlink CODEC] [--freeze-a]

A small character-level Llama model is pre-trained on the speech of one half of the roles in Shakespeare's plays. Then 20 clients, each with
some roles of the other half, train and send LoRA adapters. Each seed runs twice with the same batches: once uncompressed, and once with
`stc` and error feedback in both directions. The loss is measured on test windows of the second half of the roles, before training and after
the last round. `--freeze-a` trains only the matrix B of each adapter (FFA-LoRA, Sun et al. 2024).

If `import transformers` fails because torchvision belongs to another build of torch, uninstall torchvision.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import fedcomp
from fedcomp.runs import Run
from fedcomp.tasks.shakespeare import UNKNOWN, WINDOW, Text

CLIENTS, BATCH, STEPS = 20, 8, 2
BASE = "LORA_BASE"  # environment variable that tells worker processes the folder of the base model
CONFIG = LlamaConfig(
    vocab_size=UNKNOWN + 1,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=WINDOW + 1,
)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


def windows(folder: Path | None, split: str, half: int) -> fedcomp.Data:
    """Return the text windows of one half of the roles (0 or 1). The targets equal the inputs, since the model itself shifts the
    targets.
    """
    whole = Text(folder)
    data, roles = whole.read(split), whole.read("train").groups
    ordered = dict.fromkeys(roles)
    first = set(
        np.array(list(ordered))[np.cumsum([np.sum(roles == r) for r in ordered]) <= len(roles) // 2]
    )
    rows = np.flatnonzero(np.array([(role not in first) == bool(half) for role in data.groups]))
    text = torch.cat([data.inputs, data.targets[:, -1:]], dim=1)[rows]
    return fedcomp.Data({"input_ids": text, "labels": text}, text, data.groups[rows])


def pretrain(folder: Path | None, steps: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model, data = LlamaForCausalLM(CONFIG), windows(folder, "train", half=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        rows = torch.randint(len(data), (32,))
        model(**data.batch(rows).inputs).loss.backward()
        optimizer.step()
        schedule.step()
    return model


def adapted() -> PeftModel:
    return get_peft_model(LlamaForCausalLM.from_pretrained(os.environ[BASE]), LORA)


def adapted_ffa() -> PeftModel:
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            parameter.requires_grad_(False)
    return model


def task(folder: Path | None, model=adapted) -> fedcomp.Task:
    train, test = (lambda: windows(folder, "train", 1)), (lambda: windows(folder, "test", 1))
    return fedcomp.Task("lora", model, train, test, accuracy=None)


def ffa(folder: Path | None) -> fedcomp.Task:
    return task(folder, adapted_ffa)


def test_loss(model: LlamaForCausalLM, folder: Path | None) -> float:
    test = windows(folder, "test", half=1)
    with torch.no_grad():
        losses = [model(**b.inputs).loss.item() * len(b) for b in test.batches(250)]
    return sum(losses) / len(test)


def simulated(options: argparse.Namespace, link: dict[str, str], seed: int, folder: str) -> Run:
    return fedcomp.simulate(
        f"{__file__}:{'ffa' if options.freeze_a else 'task'}",
        data=options.data,
        clients=CLIENTS,
        participation=1.0,
        partition="natural",
        rounds=options.rounds,
        local_steps=STEPS,
        batch_size=BATCH,
        optimizer=f"adamw:lr={options.lr:g}",
        optimizer_state="kept",
        lr_schedule="cosine",
        eval_every=options.rounds,
        seed=seed,
        out=f"{folder}/{link['uplink'].partition(':')[0]}-{seed}",
        progress=False,
        **link,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("FEDCOMP_DATA"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--uplink", default="stc:density=1/60")
    parser.add_argument("--downlink", default="stc:density=1/25")
    parser.add_argument("--pretraining", type=int, default=1500, metavar="STEPS")
    parser.add_argument(
        "--base", type=Path, help="folder of the pre-trained base model; default: pre-train one"
    )
    parser.add_argument(
        "--freeze-a", action="store_true", help="train only the matrix B of each adapter"
    )
    options = parser.parse_args()
    links = {
        "dense": {"uplink": "identity", "downlink": "identity"},
        "compressed": {"uplink": options.uplink, "downlink": options.downlink},
    }
    with tempfile.TemporaryDirectory() as folder:
        if options.base is None:
            options.base = Path(folder, "base")
            pretrain(options.data, options.pretraining).save_pretrained(options.base)
        os.environ[BASE] = str(options.base)
        base = LlamaForCausalLM.from_pretrained(options.base)
        before = test_loss(base, options.data)
        runs = [
            (seed, [simulated(options, link, seed, folder) for link in links.values()])
            for seed in options.seeds
        ]
    adapters, whole = runs[0][1][0].parameters, base.num_parameters()
    print(
        f"{adapters:,} parameters in the adapters, {whole:,} in the model; test loss before training {before:.4f}"
    )
    print(
        f"{'seed':>4} {'':10} {'loss':>8} {'above':>7} {'gain':>6} {'bytes up':>13} {'down':>13} {'adapters':>9} {'model':>8}"
    )
    for seed, found in runs:
        dense, dense_loss = found[0], found[0].metrics["loss"][-1]
        for name, run in zip(links, found, strict=True):
            loss, up = run.metrics["loss"][-1], run.metrics["uplink_bytes"].sum()
            fewer = dense.sent_bytes / run.sent_bytes
            print(
                f"{seed:4} {name:10} {loss:8.4f} {loss / dense_loss - 1:7.2%} {(before - loss) / (before - dense_loss):6.0%} "
                f"{up:13,.0f} {run.sent_bytes - up:13,.0f} {fewer:8,.0f}× {fewer * whole / adapters:7,.0f}×"
            )
    print(
        "above: loss above that of dense adapters; gain: decrease of the loss, as a fraction of that of dense adapters; adapters, "
        "model: bytes of dense adapters, and of the dense model, divided by the bytes that were sent, in both directions"
    )


if __name__ == "__main__":
    main()
