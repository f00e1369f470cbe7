"""Install fedcomp, editable and with an extra, into the environment that runs this script: `python scripts/install.py dev`.

The script installs with uv, which takes a tenth of pip's time. uv does not read pip's configuration, so the script passes it pip's package
indexes. If uv cannot be installed or fails, pip installs the packages.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# pip's options, and the options of uv with the same meaning.
UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}


def pip_settings() -> dict[str, str]:
    """Return pip's settings by option. An environment variable such as PIP_INDEX_URL replaces the value in a file."""
    settings = {}
    output = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True)
    for line in output.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in ("global", "install", ":env:"):
            settings[option] = ast.literal_eval(value)
    return settings


def install_with_uv(arguments: list[str]) -> bool:
    """Install the packages with uv. Return whether this succeeded."""
    if subprocess.run([*PIP, "install", "--quiet", "uv"]).returncode != 0:
        return False
    settings = pip_settings()
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet"]
    command += ["--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    for option, uv_option in UV_OPTIONS.items():
        for value in settings.get(option, "").split():
            command += [uv_option, value]
    certificates = {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}
    done = subprocess.run([*command, *arguments], env=os.environ | certificates)
    return done.returncode == 0


def main() -> int:
    arguments = [
        "--constraint",
        f"{ROOT / 'constraints.txt'}",
        "--editable",
        f"{ROOT}[{sys.argv[1]}]",
    ]
    if install_with_uv(arguments):
        return 0
    print("uv failed, so pip installs the packages", file=sys.stderr)
    return subprocess.run([*PIP, "install", "--quiet", "--no-compile", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
