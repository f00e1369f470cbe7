"""How long `fedcomp --help` takes beside `import torch`: medians of interleaved repeats.

python benchmarks/startup.py [--repeats 11]
"""

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "fedcomp --help": ["-m", "fedcomp", "--help"],
    "fedcomp sim --help": ["-m", "fedcomp", "sim", "--help"],
    "python -c 'import torch'": ["-c", "import torch"],
    "python -c pass": ["-c", "pass"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
        for name, arguments in COMMANDS.items():
            begin = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - begin)
    torch = statistics.median(seconds["python -c 'import torch'"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:28}{median * 1e3:8.0f} ms{median / torch:8.3f} of import torch")


if __name__ == "__main__":
    main()
