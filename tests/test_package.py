"""The published archives: an sdist, and the wheel built from it, whose declared dependencies are sufficient.

pip installs the wheel into a new environment. Its dependencies are not downloaded again: the distributions that the wheel's metadata
requires, directly or indirectly, are linked from the environment that runs the tests. Nothing else can be imported in the new environment.
This shows that the declared dependencies suffice and that their versions match. The installation at the start of `make test` shows that
a package index has them.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fedcomp

pytestmark = [pytest.mark.slow, pytest.mark.deploy, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME = f"fedcomp-{fedcomp.__version__}"
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "fedcomp").rglob("*.py")
    if path.name != "__main__.py"
)
# Imports every module, then simulates a task that needs an extra.
IMPORTS_ALL = """
import importlib, runpy, sys
for name in {modules}:
    importlib.import_module(name)
print("imported")
sys.argv[1:] = ["sim", "--task", "digits", "--plain", "--out", "missing"]
runpy.run_module("fedcomp", run_name="__main__", alter_sys=True)
"""


def command(*words, cwd: Path, status: int = 0) -> subprocess.CompletedProcess:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PYTHON")
    } | {"COLUMNS": "500"}
    done = subprocess.run(
        [str(w) for w in words], cwd=cwd, env=environment, text=True, capture_output=True
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> Path:
    """Return the folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def required(
    requirements: list[str], extras: frozenset[str], seen: set
) -> dict[str, metadata.Distribution]:
    """Return name → installed distribution for requirements with these extras, including indirect requirements."""
    found = {}
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}
        )
        step = (requirement.name, frozenset(requirement.extras))
        if applies and step not in seen:
            seen.add(step)
            found[requirement.name] = distribution = metadata.distribution(requirement.name)
            found |= required(distribution.requires or [], step[1], seen)
    return found


def test_sdist_holds_the_sources_and_no_links(archives):
    with tarfile.open(archives / f"{NAME}.tar.gz") as sdist:
        members = sdist.getmembers()
    assert all(m.isfile() or m.isdir() for m in members)
    files = {m.name.removeprefix(f"{NAME}/") for m in members if m.isfile()}
    assert not {name.split("/")[0] for name in files} & {
        "clients",
        "server",
        "strategies",
        "sim",
        ".venv",
        "runs",
    }
    assert files >= {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        "tests/test_package.py",
    }
    assert files >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedcomp").rglob("*.py")}


def test_wheel_holds_all_of_fedcomp_and_nothing_else(archives):
    with zipfile.ZipFile(archives / f"{NAME}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
    assert {name.split("/")[0] for name in names} == {"fedcomp", f"{NAME}.dist-info"}
    assert names >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedcomp").rglob("*.py")}
    assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "fedcomp/py.typed" in names


def test_the_wheel_needs_only_its_declared_dependencies_and_imports_without_extras(
    archives, tmp_path
):
    folder = tmp_path / "environment"
    command(sys.executable, "-m", "venv", "--without-pip", folder, cwd=tmp_path)
    (site,) = folder.glob("lib/python3*/site-packages")
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    install = ("install", "--quiet", "--no-index", "--no-deps")
    command(*pip, *install, *archives.glob("*.whl"), cwd=tmp_path)
    assert {path.name for path in site.iterdir()} == {"fedcomp", f"{NAME}.dist-info"}

    def link(*extras: str) -> None:
        (wheel,) = metadata.distributions(name="fedcomp", path=[str(site)])
        for distribution in required(wheel.requires, frozenset(extras), set()).values():
            for entry in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (site / entry).exists():
                    (site / entry).symlink_to(distribution.locate_file(entry))
        command(*pip, "check", cwd=tmp_path)

    link()
    done = command(
        folder / "bin" / "python", "-c", IMPORTS_ALL.format(modules=MODULES), cwd=tmp_path, status=2
    )
    assert done.stdout == "imported\n" and "pip install 'fedcomp[sim]'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, (
        "a missing extra must be reported in one line"
    )

    link("sim")
    small = ("--clients", 20, "--rounds", 2, "--plain", "--out", tmp_path / "run")
    command(folder / "bin" / "fedcomp", "sim", *small, cwd=tmp_path)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["clients"], summary["rounds"]) == (20, 2)
    assert summary["version"] == fedcomp.__version__
    assert 0 < summary["uplink_bytes"] < summary["dense_uplink_bytes"]
    assert (tmp_path / "run" / "report.html").is_file()


def test_no_dependency_is_bounded_above():
    """Upper bounds would conflict with other packages: Flower's own examples pin torch 2.8.0 and 2.9.1."""
    ranges = {r.name: r.specifier for r in map(Requirement, PROJECT["dependencies"])}
    assert {s.operator for specifier in ranges.values() for s in specifier} == {">="}
    assert PROJECT["requires-python"] == ">=3.11"
    assert all(version in ranges["torch"] for version in ("2.4.0", "2.8.0", "2.9.1", "2.15.0"))
    assert all(version in ranges["flwr"] for version in ("1.29.0", "1.43.0"))


def test_constraints_pin_every_package_once():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = [Requirement(line) for line in lines]
    assert all([s.operator for s in pin.specifier] == ["=="] and pin.url is None for pin in pins)
    assert len({pin.name for pin in pins}) == len(pins)
    assert "torch==2.13.0" in lines
    declared = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    installed = required(
        [line for line in declared if not line.startswith("fedcomp")], frozenset(), set()
    )
    assert {re.sub(r"[-_.]+", "-", d.name).lower() for d in installed.values()} <= {
        pin.name for pin in pins
    }
