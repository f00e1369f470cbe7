"""The command `fedcomp`, also as `python -m fedcomp`."""

import sys

from .errors import INTERRUPTED


def main() -> None:
    """Run the command line. Ctrl-C while the command is imported exits with the same status as Ctrl-C later."""
    try:
        from .cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
