"""Time of whole rounds of larger models, compared with a lean PyTorch loop that only trains the same clients.

    FEDCOMP_DATA=... python benchmarks/large_models.py [--rows embedding …] [--rounds 5]

    cifar-identity, cifar-stc   the CNN of pfl's CIFAR-10 benchmark without dropout, 1.63 M parameters; 50 of 1,000 clients per round, 5
                                steps of 10 images
    embedding                   an embedding of 80,000 words and an MLP, 10.3 M parameters; 20 of 100 clients per round, 1 step of 20
                                sequences of 16 words
    transformer                 nn.TransformerEncoder with 8 layers of width 1,024, 101 M parameters; 4 clients, 2 steps of 4 sequences of
                                32 vectors

Whole rounds and lean loops alternate in one process, and the times are medians. STC sends 1/400 of the coordinates, and `identity` sends
all of them. Uplink and downlink use the same codec. Rounds between the first and the last are not evaluated. The models `embedding` and
`transformer` train on random examples.
"""

import argparse
import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # idle threads sleep early

import torch
from rival_models import cifar10_plain_cnn
from torch import Tensor, nn
from torch.nn import functional as F

import fedcomp
from fedcomp import Data, RunConfig, Task, config, tasks
from fedcomp.cli.bench_sim import LEAN, LOCAL, WHOLE, largest_costs, measure

STC = "stc:density=1/400"
WORDS, LENGTH = 80_000, 16
WIDTH, LAYERS, VECTORS = 1024, 8, 32


class Bag(nn.Module):
    """An MLP on the mean embedding of 16 words [B, 16], with 10,323,978 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 600), nn.ReLU(), nn.Linear(600, 10))

    def forward(self, words: Tensor) -> Tensor:
        return self.mlp(self.embedding(words).mean(1))


class Encoder(nn.Module):
    """An nn.TransformerEncoder and a linear classifier on inputs [B, 32, 1024], with 100,790,282 parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, vectors: Tensor) -> Tensor:
        return self.classifier(self.encoder(vectors).mean(1))


def random_data(inputs: Tensor) -> Data:
    return Data(inputs, torch.randint(10, inputs.shape[:1]))


def words() -> Data:
    torch.manual_seed(0)
    return random_data(torch.randint(WORDS, (4_000, LENGTH)))


def vectors() -> Data:
    torch.manual_seed(0)
    return random_data(torch.randn(64, VECTORS, WIDTH))


def images(part: str) -> Data:
    loaded = tasks.load("cifar10-vgg11s", config.data_folder(None))
    return getattr(loaded, part)()


cifar = Task(
    "cifar10-cnn",
    model=cifar10_plain_cnn,
    train=lambda: images("train"),
    test=lambda: images("test"),
    loss=F.cross_entropy,
)
embedding = Task("embedding", model=Bag, train=words, test=words, loss=F.cross_entropy)
transformer = Task("transformer", model=Encoder, train=vectors, test=vectors, loss=F.cross_entropy)

CIFAR = {"clients": 1000, "participation": 0.05, "local_steps": 5, "batch_size": 10}
ROWS = {
    "cifar-identity": ("cifar", CIFAR, "identity"),
    "cifar-stc": ("cifar", CIFAR, STC),
    "embedding": (
        "embedding",
        {"clients": 100, "participation": 0.2, "local_steps": 1, "batch_size": 20},
        STC,
    ),
    "transformer": (
        "transformer",
        {"clients": 4, "participation": 1.0, "local_steps": 2, "batch_size": 4},
        STC,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=[*ROWS])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print(
        f"fedcomp {fedcomp.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(f"{'row':>15} {'parameters':>12} {'lean loop':>10} {'training':>10} {'round':>10}  ratio")
    for name in given.rows:
        task, options, codec = ROWS[name]
        run = RunConfig(
            task=f"{__file__}:{task}", uplink=codec, downlink=codec, eval_every=1_000_000, **options
        )
        found = measure(run, given.rounds, ["lean"])
        s = {way["name"]: way["seconds"] for way in found["ways"]}
        print(
            f"{name:>15} {found['parameters']:12,} {s[LEAN]:8.3f} s {s[LOCAL]:8.3f} s {s[WHOLE]:8.3f} s  {s[LEAN] / s[WHOLE]:.2f}"
            f"   {found['engine']}\n                {largest_costs(found['parts'])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
