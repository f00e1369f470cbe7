"""SparseLoCo compared with DiLoCo: a causal transformer on the characters of Shakespeare, 4 clients, 30 AdamW steps per round.

    FEDCOMP_DATA=DIR python benchmarks/char_transformer.py [--rounds 8] [--seeds 3] [--outer-lr 7]
        [--pretraining 300] [--minutes 8] [--out runs/char-transformer]

Sarfi, Thérien, Lidin, Belilovsky: Communication efficient LLM pre-training with SparseLoCo. arXiv:2508.15706, 2025. Douillard et al.:
DiLoCo. arXiv:2311.08105, 2023. The text is cut into windows of 80 characters, which are divided at random among the clients. For each seed,
SparseLoCo and DiLoCo start from the same pre-trained weights, as in the DiLoCo paper, and have the same batches; with `--pretraining 0`,
they start from random weights. SparseLoCo has no outer momentum. Its default outer learning rate 7 is the effective rate 0.7 / (1 − 0.9) of
DiLoCo with momentum 0.9. The program prints the loss on part of the test windows after pre-training and after each round, and the bytes
that a client sends. After `--minutes` minutes, it stops at a checkpoint, from which it continues if it is started again.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F

import fedcomp
from fedcomp.config import data_folder
from fedcomp.tasks import shakespeare

TEST_WINDOWS = 256  # approximate number of test windows in an evaluation
OPTIONS = {
    "clients": 4,
    "participation": 1.0,
    "strategy": "average",
    "optimizer": "adamw:lr=3e-4",
    "optimizer_state": "kept",
    "local_steps": 30,
    "batch_size": 4,
    "downlink": "identity",
}
METHODS = {
    "SparseLoCo": {
        "uplink": "topk:density=64/4096,values=2bit@chunk=4096",
        "memory": "residual:decay=0.95",
    },
    "DiLoCo": {
        "uplink": "identity",
        "memory": "none",
        "server_optimizer": "sgd:momentum=0.9,nesterov=true",
        "server_lr": 0.7,
    },
}


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a layer norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        B, t, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(B, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, t, width))
        return x + self.mlp(self.norms[1](x))


class CharacterTransformer(nn.Module):
    """A transformer with 5,423,233 parameters, from characters [B, t] to logits of the next characters [B, t, 97]."""

    def __init__(self, width: int = 272, layers: int = 6, heads: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(shakespeare.UNKNOWN + 1, width)
        self.place = nn.Parameter(0.02 * torch.randn(shakespeare.WINDOW, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shakespeare.UNKNOWN + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(x) + self.place[: x.shape[1]])))


def windows(split: str) -> tuple[Tensor, Tensor]:
    """Return the windows of text in a split ("train" or "test"), and the next characters as their targets."""
    data = shakespeare.Text(data_folder(None)).read(split)
    step = max(1, len(data) // TEST_WINDOWS) if split == "test" else 1
    return data.inputs[::step], data.targets[::step]


def pretrained(file: Path, steps: int) -> CharacterTransformer:
    """Return a pre-trained model, loaded from `file`. If `file` does not exist, train the model and save it first."""
    torch.manual_seed(0)
    model = CharacterTransformer()
    if not file.exists():
        inputs, targets = windows("train")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
        for _ in range(steps):
            rows = torch.randint(len(inputs), (8,))
            optimizer.zero_grad()
            shakespeare.loss(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
            schedule.step()
        file.parent.mkdir(parents=True, exist_ok=True)
        save_model(model, str(file))
    load_model(model, file)
    return model


@torch.no_grad()
def test_loss(model: nn.Module) -> float:
    inputs, targets = windows("test")
    return shakespeare.loss(model.eval()(inputs), targets).item()


def trained(
    task: fedcomp.Task, out: Path, rounds: int, stop: float, options: dict[str, object]
) -> fedcomp.Run:
    """Start or continue the run in the folder `out`, up to `rounds` rounds or the time `stop`."""
    done = len(fedcomp.load(out).records) if out.exists() else 0
    while done < rounds and time.monotonic() < stop:
        begin, done = time.monotonic(), done + 1
        if done == 1:
            fedcomp.simulate(task, out=out, rounds=done, progress=False, **OPTIONS, **options)
        else:
            fedcomp.simulate(task, out=out, rounds=done, progress=False, resume=True)
        loss = losses(fedcomp.load(out))[-1]
        print(
            f"{out.name} round {done}: loss {loss:.3f}, {time.monotonic() - begin:.0f} s",
            flush=True,
        )
    return fedcomp.load(out)


def losses(run: fedcomp.Run) -> list[float]:
    return [record.loss for record in run.records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--outer-lr", type=float, default=7.0, help="outer learning rate of SparseLoCo"
    )
    parser.add_argument("--pretraining", type=int, default=300, metavar="STEPS")
    parser.add_argument(
        "--minutes", type=float, default=0, help="stop after this many minutes; 0 = run to the end"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/char-transformer"))
    args = parser.parse_args()
    stop = time.monotonic() + 60 * args.minutes if args.minutes else float("inf")
    task = fedcomp.Task(
        "char-transformer",
        model=CharacterTransformer,
        train=partial(windows, "train"),
        test=partial(windows, "test"),
        loss=shakespeare.loss,
    )
    METHODS["SparseLoCo"]["server_lr"] = args.outer_lr
    start = {}
    if args.pretraining:
        file = args.out / f"pretrained-{args.pretraining}.safetensors"
        begin, loss = time.monotonic(), test_loss(pretrained(file, args.pretraining))
        start = {"init": str(file)}
        print(f"pre-trained in {time.monotonic() - begin:.0f} s: test loss {loss:.3f}", flush=True)
    print(
        f"the model has {sum(p.numel() for p in CharacterTransformer().parameters()):,} parameters"
    )
    runs: dict[tuple[str, int], fedcomp.Run] = {}
    for seed in range(args.seeds):
        for name, options in METHODS.items():
            folder, options = args.out / f"{name}-{seed}", options | start | {"seed": seed}
            runs[name, seed] = trained(task, folder, args.rounds, stop, options)
            if len(runs[name, seed].records) < args.rounds:
                print(f"stopped after {args.minutes:g} minutes; run again to continue")
                return
    for seed in range(args.seeds):
        print(f"seed {seed}: test loss after each round")
        for name in METHODS:
            print(f"  {name:<12}" + "".join(f"{loss:7.3f}" for loss in losses(runs[name, seed])))
    print(
        "mean over seeds: test loss after the last round, and bytes that a client sends in a round"
    )
    for name in METHODS:
        last = statistics.mean(losses(runs[name, seed])[-1] for seed in range(args.seeds))
        sent = runs[name, 0].metrics["uplink_bytes"].sum() / args.rounds / OPTIONS["clients"]
        print(f"  {name:<12}{last:7.3f}{sent:14,.0f} B")


if __name__ == "__main__":
    main()
