"""A text classifier in the style of Hugging Face, of which only low-rank adapters and the head are trained, and only they travel.

    python examples/adapters.py

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: LoRA: low-rank adaptation of large language models. ICLR 2022.

    y = Wx + (α/r)·BAx    W frozen, A [r, i] drawn at random, B [o, r] zero at first

The base is trained here, on sentences of one register, in place of a checkpoint that you would download; clients then adapt it to another
one. A model that `transformers` loads goes the same way: freeze it, put adapters into it, wrap it in `Scores`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcomp

WORDS, LENGTH, TOPICS, PAD = 200, 12, 4, 0


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Classifier(nn.Module):
    """forward(input_ids [B, T], attention_mask [B, T], labels [B]) → .logits [B, 4], and .loss where labels are given."""

    def __init__(self, width: int = 48, layers: int = 2):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, padding_idx=PAD)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, TOPICS)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Output:
        there = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x, there.bool())
        weight = there[..., None].to(x.dtype)
        logits = self.head((x * weight).sum(1) / weight.sum(1))
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


class Block(nn.Module):
    """Self-attention and two layers, around which the input passes: [B, T, d] → [B, T, d]."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        h = self.first(x)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / h.shape[-1] ** 0.5
        attention = scores.masked_fill(~there[:, None, :], -1e9).softmax(-1)
        x = x + self.out(attention @ self.value(h))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.layer, self.scale = layer.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.scale * (x @ self.a.T @ self.b.T)


def with_adapters(model: nn.Module, names: tuple[str, ...] = ("query", "value", "up")) -> nn.Module:
    """The model, frozen but for its head, with adapters in place of the layers of these names."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if name in names:
                setattr(module, name, Adapted(child))
    return model


class Scores(nn.Module):
    """What fedcomp asks of a model: a tensor of inputs in, a tensor of outputs out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=(input_ids != PAD).long()).logits


def sentences(count: int, register: int, seed: int) -> tuple[Tensor, Tensor]:
    """Word numbers [count, 12], padded, and topics [count]. A third of the words tell the topic, others in register 1."""
    draw = torch.Generator().manual_seed(seed)
    topics = torch.randint(TOPICS, (count,), generator=draw)
    telling = 1 + (topics + register) % TOPICS * 20
    words = 81 + torch.randint(WORDS - 81, (count, LENGTH), generator=draw)
    tells = torch.rand(count, LENGTH, generator=draw) < 1 / 3
    words = torch.where(
        tells, telling[:, None] + torch.randint(20, (count, LENGTH), generator=draw), words
    )
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=draw)
    return torch.where(torch.arange(LENGTH) < lengths, words, PAD), topics


def pretrained() -> Classifier:
    """A base that knows the first register."""
    torch.manual_seed(0)
    model, (words, topics) = Classifier(), sentences(2000, register=0, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for batch in torch.randperm(2000).repeat(3).split(50):
        optimizer.zero_grad()
        model(words[batch], (words[batch] != PAD).long(), topics[batch]).loss.backward()
        optimizer.step()
    return model


def main() -> None:
    base = pretrained()
    total = sum(p.numel() for p in base.parameters())
    torch.manual_seed(1)
    model = Scores(with_adapters(base))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    test = sentences(500, register=1, seed=3)
    with torch.no_grad():
        before = (model(test[0]).argmax(1) == test[1]).float().mean().item()
    task = fedcomp.Task("adapters", model, train=sentences(2000, register=1, seed=2), test=test)
    run = fedcomp.simulate(
        task,
        clients=20,
        participation=0.25,
        rounds=30,
        local_steps=5,
        lr=0.3,
        uplink="stc:density=5%",
        downlink="stc:density=5%",
        progress=False,
    )

    update = run.sent_bytes / 2 / (5 * run.config.rounds)
    print(f"{'parameters of the model':<44}{total:>10,}")
    print(f"{'of adapters and head, which are trained':<44}{trained:>10,}")
    print(f"{'bytes of the whole model, float32':<44}{4 * total:>10,}")
    print(f"{'of adapters and head':<44}{4 * trained:>10,}")
    print(f"{'sent by a client in a round, each way':<44}{update:>10,.0f}")
    print(f"{'accuracy in the other register, before':<44}{before:>10.1%}")
    print(f"{'after ' + str(run.config.rounds) + ' rounds':<44}{run.accuracy:>10.1%}")
    adapted = run.model()  # Scores, with the base as it was, adapters and head as they are now
    same = torch.equal(adapted.model.embedding.weight, base.embedding.weight)
    print(
        f"{'frozen layers are as they were':<44}{'yes' if same and run.parameters == trained else 'no':>10}"
    )


if __name__ == "__main__":
    main()
