"""Build a release from a clean checkout and test it. Run `python scripts/release.py`, then run it again with --tag.

The script checks that the working tree is clean and that CHANGELOG.md has a heading with the version and a date. It builds sdist and wheel
into dist/, installs the wheel into an empty environment, and simulates two rounds there. With `--tag`, the script also tags the commit. It
never pushes or uploads.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "(\d+\.\d+\.\d+)"$', re.MULTILINE)


def version(source: str) -> str:
    """Return the version in `source`, the text of fedcomp/__init__.py. Raises ValueError if the version does not have the form 1.2.3."""
    if not (found := VERSION.search(source)):
        raise ValueError(
            'fedcomp/__init__.py has no version; add a line such as __version__ = "1.2.3"'
        )
    return found[1]


def check_changelog(text: str, version: str) -> None:
    """Raise ValueError unless the newest heading of the changelog `text` is this version with a date, and entries follow it."""
    newest, _, entries = (text.partition("\n## ")[2].partition("\n## ")[0]).partition("\n")
    if not re.fullmatch(rf"\[?{re.escape(version)}\]? - \d{{4}}-\d\d-\d\d", newest):
        raise ValueError(
            f"CHANGELOG.md: the newest heading is '{newest}'; write '## {version} - YYYY-MM-DD'"
        )
    if not re.search(r"^- ", entries, re.MULTILINE):
        raise ValueError(
            f"CHANGELOG.md: '{newest}' has no entries; add a line that begins with '- '"
        )


def check_tree(root: Path, tag: str) -> None:
    """Raise ValueError if the working tree has uncommitted changes or the tag exists."""
    if changed := _output("git", "status", "--porcelain", cwd=root):
        raise ValueError(f"the working tree is not clean; commit or remove these files:\n{changed}")
    if _output("git", "tag", "--list", tag, cwd=root):
        raise ValueError(f"the tag {tag} exists; increase __version__ in fedcomp/__init__.py")


def build(root: Path, out: Path) -> Path:
    """Delete the folder `out`, build sdist and wheel into it, and return the wheel's path."""
    shutil.rmtree(out, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", out, root)
    (wheel,) = out.glob("*.whl")
    return wheel


def try_wheel(wheel: Path, expected: str, constraints: Path) -> None:
    """Install a wheel into an empty environment, check its version, and simulate two rounds."""
    with tempfile.TemporaryDirectory(prefix="fedcomp-release-") as folder:
        home = Path(folder)
        venv.create(home / "env", with_pip=True)
        bin = home / "env" / ("Scripts" if os.name == "nt" else "bin")
        _run(bin / "python", "-m", "pip", "install", "-c", constraints, f"{wheel}[sim]", cwd=home)
        found = _output(bin / "fedcomp", "--version", cwd=home)
        if found != f"fedcomp {expected}":
            raise ValueError(f"the installed wheel prints '{found}', not 'fedcomp {expected}'")
        small = ("--rounds", "2", "--clients", "20", "--plain", "--out", home / "run")
        _run(bin / "fedcomp", "sim", *small, cwd=home)
        if not (home / "run" / "summary.json").is_file():
            raise ValueError("the simulation wrote no summary.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", action="store_true", help="tag the commit if all checks pass")
    tag_it = parser.parse_args().tag
    try:
        wanted = version((ROOT / "fedcomp" / "__init__.py").read_text(encoding="utf-8"))
        check_changelog((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), wanted)
        check_tree(ROOT, f"v{wanted}")
        try_wheel(build(ROOT, ROOT / "dist"), wanted, ROOT / "constraints.txt")
        if tag_it:
            _run("git", "tag", "--annotate", f"v{wanted}", "--message", f"fedcomp {wanted}")
    except ValueError as error:
        sys.exit(f"release: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"release: {error.cmd[0]} ended with status {error.returncode}")
    print(f"fedcomp {wanted} is in dist/" + (f", tagged v{wanted}" if tag_it else ""))


def _environment() -> dict[str, str]:
    """Return the environment variables without PYTHON*, so that programs do not import modules of this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _run(*words: object, cwd: Path = ROOT) -> None:
    subprocess.run(list(map(str, words)), cwd=cwd, env=_environment(), check=True)


def _output(*words: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, words)),
        cwd=cwd,
        env=_environment(),
        check=True,
        text=True,
        capture_output=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
