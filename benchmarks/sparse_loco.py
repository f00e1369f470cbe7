"""Size and time of SparseLoCo frames, with two-bit values of 64 of every 4,096 coordinates, compared with packed 12-bit indices in torch.

    python benchmarks/sparse_loco.py [--numel 10_000_000] [--repeats 5]

The torch implementation selects with torch.topk, assigns each value to one of four bins by the standard deviation of its chunk, and packs a
12-bit index and a 2-bit bin for each value. fedcomp and torch send the mean values of the bins as scales, whose bytes are counted
separately. The vectors have normal or heavy-tailed values. Times are minima over repeats.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from fedcomp import codec

SIZE, K = 4096, 64
SPEC = f"topk:density={K}/{SIZE},values=2bit@chunk={SIZE}"


def encode(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Encode a vector as packed 12-bit indices, packed 2-bit bins, and the means of the bins [chunks, 4]."""
    chunks = x.view(-1, SIZE)
    index = chunks.abs().topk(K, dim=1).indices.sort(dim=1).values
    values = chunks.gather(1, index).double()
    centered = values - values.mean(1, keepdim=True)
    deviation = centered.square().sum(1, keepdim=True).div(K - 1).sqrt()
    bins = (centered / (1.5 * deviation)).round().add(2).clamp(0, 3).long()
    counts, sums = (torch.zeros(len(chunks), 4, dtype=torch.float64) for _ in range(2))
    counts.scatter_add_(1, bins, torch.ones_like(values))
    sums.scatter_add_(1, bins, values)
    means = (sums / counts.clamp(min=1)).float().bfloat16()
    pairs = index.view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 12
    packed = torch.stack([words >> shift & 255 for shift in (0, 8, 16)], 1).to(torch.uint8)
    quads = bins.view(-1, 4)
    return packed, (quads << torch.tensor([0, 2, 4, 6])).sum(1).to(torch.uint8), means


def decode(packed: Tensor, bins: Tensor, means: Tensor, numel: int) -> Tensor:
    low, middle, high = packed.long().unbind(1)
    word = low | middle << 8 | high << 16
    index = torch.stack([word & 4095, word >> 12], 1).view(-1, K)
    bin_index = (bins.long()[:, None] >> torch.tensor([0, 2, 4, 6]) & 3).view(-1, K)
    out = torch.zeros(numel // SIZE, SIZE)
    return out.scatter_(1, index, means.float().gather(1, bin_index)).view(-1)


def min_ms(repeats: int, run: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--numel", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    numel, c = args.numel // SIZE * SIZE, codec(SPEC)
    print(f"{SPEC}, n = {numel:,}")
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    for name, x in {"normal": normal, "heavy tails": normal**3}.items():
        frame, parts = c.encode(x), encode(x)
        y = c.decode(frame, numel=numel)
        assert torch.equal(y, decode(*parts, numel)), (
            "fedcomp and torch decode to different tensors"
        )
        values = numel // SIZE * K
        scales = 2 * int(sum(len(chunk.unique()) - 1 for chunk in y.view(-1, SIZE)))
        bits = 8 * (len(frame) - scales) / values
        other = 8 * (parts[0].numel() + parts[1].numel()) / values
        print(f"{name}: bits per sent value, without the scales")
        print(f"  frame                      {bits:6.3f}   scales {8 * scales / values:5.3f}")
        print(
            f"  12-bit indices, torch      {other:6.3f}   scales {16 * parts[2].numel() / values:5.3f}"
        )
        print(
            f"  compression of float32     ×{32 * numel / values / bits:.0f} and ×{32 * numel / values / other:.0f}"
        )
    print("milliseconds   encode   decode")
    codec_ms = (
        min_ms(args.repeats, lambda: c.encode(x)),
        min_ms(args.repeats, lambda: c.decode(frame, numel=numel)),
    )
    torch_ms = (
        min_ms(args.repeats, lambda: encode(x)),
        min_ms(args.repeats, lambda: decode(*parts, numel)),
    )
    print(f"  frame       {codec_ms[0]:9.1f}{codec_ms[1]:9.1f}")
    print(f"  torch       {torch_ms[0]:9.1f}{torch_ms[1]:9.1f}")


if __name__ == "__main__":
    main()
