"""Plugins of another package or of a user's file: they are found, imported when they are used, and replace no built-in ones."""

import os
import subprocess
import sys

import pytest
from plugins import install

import fedcomp
from fedcomp.errors import ConfigError

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedcomp import Data, Task
from fedcomp.codecs.identity import Identity
from fedcomp.memories.residual import Residual
from fedcomp.sim.attacks.blind import Inverted
from fedcomp.strategies.average import Average


@dataclass(frozen=True)
class Plain(Identity):
    name: ClassVar[str] = "plain"
    id: ClassVar[int] = 200


class Takes4(Plain):
    name: ClassVar[str] = "takes4"
    id: ClassVar[int] = 4


class Kept(Residual):
    name: ClassVar[str] = "kept"


class Mean(Average):
    name: ClassVar[str] = "mean-of-all"


@dataclass(frozen=True)
class Turned(Inverted):
    name: ClassVar[str] = "turned"


def points():
    data = Data(torch.randn(40, 3), torch.arange(40) % 2)
    return Task("points", torch.nn.Linear(3, 2), train=data, test=data)
"""
PACKAGE = {
    "codecs": ["plain = theirs:Plain", "stc = theirs:Plain", "takes4 = theirs:Takes4"]
    + ["gone = theirs:Gone", "other-kind = theirs:points", "twice = theirs:Plain"],
    "memories": ["kept = theirs:Kept"],
    "strategies": ["mean-of-all = theirs:Mean"],
    "tasks": ["points = theirs:points"],
    "attacks": ["turned = theirs:Turned"],
}


USES = """
import sys, fedcomp
from fedcomp.sim.attacks import attacks
fedcomp.codec("stc"), fedcomp.available_tasks(), attacks("inverted:1")
print("theirs" in sys.modules)
run = fedcomp.simulate("points", uplink="plain", memory="kept", strategy="mean-of-all", attack="turned:1",
    rounds=1, clients=4, participation=1.0, engine="serial", plain=True, out="run")
print(run.config.uplink, run.config.memory, run.config.strategy, run.config.attack)
"""
ERRORS = """
import warnings, fedcomp
from fedcomp.codecs.stc import STC
print(type(fedcomp.codec("stc")) is STC)
for name in ("takes4", "gone", "other-kind", "twice", "plane"):
    try:
        fedcomp.codec(name)
    except fedcomp.UserError as error:
        print(error)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    listed = fedcomp.available_codecs()
print("plain" in listed, "gone" in listed, len(heard))
print(next(str(w.message) for w in heard if "'stc' of" in str(w.message)))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> tuple[list[str], list[str]]:
    """Return the lines printed by USES and by ERRORS. One Python with the installed package `theirs` runs both."""
    folder = install(tmp_path_factory.mktemp("site"), "theirs", **PACKAGE)
    install(folder, "copy", codecs=["plain = theirs:Plain", "twice = theirs:Takes4"])
    (folder / "theirs.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-c", f"{USES}\nprint('errors:')\n{ERRORS}"],
        cwd=tmp_path_factory.mktemp("runs"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    middle = lines.index("errors:")
    return lines[:middle], lines[middle + 1 :]


@pytest.mark.deploy
def test_a_run_can_use_plugins_of_each_kind(printed):
    early, *_, last = printed[0]
    assert early == "False" and last == "plain kept mean-of-all turned:1"


@pytest.mark.deploy
def test_a_plugin_replaces_no_builtin_and_errors_name_a_broken_plugin(printed):
    builtin, takes4, gone, other, twice, unknown, listed, warned = printed[1]
    assert builtin == "True" and listed == "True False 5"
    assert twice == (
        "twice: the entry point 'twice' of fedcomp.codecs is provided by the package copy and the package theirs; uninstall one of them"
    )
    assert warned == (
        "the entry point 'stc' of fedcomp.codecs in the package theirs is not used, because a built-in plugin has the same name"
    )
    own_number = "the codecs 'stc' and 'takes4' have the same id 4; give the new codec another id"
    assert takes4 == f"takes4: {own_number}"
    assert gone.startswith(
        "gone: the entry point 'gone' of fedcomp.codecs cannot be imported (AttributeError: "
    )
    assert gone.endswith("; repair or uninstall the package theirs")
    assert other.endswith(
        "which is not a plugin of this kind; repair or uninstall the package theirs"
    )
    assert unknown.startswith("plane: unknown codec 'plane'; did you mean 'plain'?")


CODEC = """
from dataclasses import dataclass
from typing import ClassVar

from fedcomp.codecs.identity import Identity


@dataclass(frozen=True)
class Mine(Identity):
    name: ClassVar[str] = "{name}"
    id: ClassVar[int] = {id}
"""


@pytest.fixture
def plugin_file(tmp_path, monkeypatch):
    """Return a function that writes files with plugins and names them in FEDCOMP_PLUGINS."""

    def write(**files: str) -> None:
        for stem, text in files.items():
            (tmp_path / f"{stem}.py").write_text(text)
        paths = [str(tmp_path / f"{stem}.py") for stem in files]
        monkeypatch.setenv("FEDCOMP_PLUGINS", os.pathsep.join(paths))

    return write


@pytest.mark.deploy
def test_worker_processes_use_the_codec_of_a_users_file(plugin_file, tmp_path):
    plugin_file(a_codec=CODEC.format(name="filed", id=210))
    options = {"clients": 4, "participation": 1.0, "rounds": 1, "plain": True}
    run = fedcomp.simulate(
        "digits", uplink="filed", engine="processes", out=str(tmp_path / "run"), **options
    )
    assert run.config.uplink == "filed" and "filed" in fedcomp.available_codecs()
    assert "filed" not in fedcomp.available_tasks()


def test_a_plugin_of_a_file_is_unknown_without_the_variable(plugin_file, monkeypatch):
    plugin_file(b_codec=CODEC.format(name="filed-b", id=211))
    assert fedcomp.codec("filed-b").name == "filed-b"
    monkeypatch.delenv("FEDCOMP_PLUGINS")
    with pytest.raises(fedcomp.UserError, match="unknown codec 'filed-b'"):
        fedcomp.codec("filed-b")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"c_codec": "x = 1 / 0"},
            r"c_codec\.py cannot be imported \(ZeroDivisionError: .*correct",
        ),
        ({"d_codec": CODEC.format(name="stc", id=212)}, "defines 'stc', but another"),
        (
            {"e": CODEC.format(name="same", id=213), "f": CODEC.format(name="same", id=213)},
            "defines 'same', but another plugin in fedcomp.codecs has this name; choose another name",
        ),
    ],
)
def test_errors_name_a_users_file(plugin_file, files, message):
    plugin_file(**files)
    with pytest.raises(ConfigError, match=message):
        fedcomp.codec("identity")


@pytest.mark.parametrize("path", ["gone.py", "notes.txt", "."])
def test_a_path_without_a_python_file_is_an_error(path, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.setenv("FEDCOMP_PLUGINS", str(tmp_path / path))
    with pytest.raises(ConfigError, match="is not a Python file; give the paths of .py files"):
        fedcomp.codec("identity")
