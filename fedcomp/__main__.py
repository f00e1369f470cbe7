"""The command `fedcomp`, which can also be called as `python -m fedcomp`."""

import sys

from .errors import INTERRUPTED


def main() -> None:
    """Run the command line. Ctrl-C exits with status 130, even while modules are being imported."""
    try:
        from .cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
