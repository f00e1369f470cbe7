"""The public interface that users import."""

import inspect
import os
import subprocess
import sys

import pytest

import fedcomp
import fedcomp.codecs
import fedcomp.memories


def test_every_public_name_exists_and_names_are_sorted():
    assert fedcomp.__all__ == sorted(fedcomp.__all__)
    assert all(getattr(fedcomp, name) is not None for name in fedcomp.__all__)
    assert dir(fedcomp) == fedcomp.__all__


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'codek'"):
        _ = fedcomp.codek


def test_base_classes_have_at_most_ten_public_methods():
    for cls in (fedcomp.codecs.Codec, fedcomp.memories.Memory):
        methods = [
            name
            for name, value in vars(cls).items()
            if not name.startswith("_")
            and (inspect.isfunction(value) or isinstance(value, classmethod | staticmethod))
        ]
        assert len(methods) <= 10, methods


def test_importing_fedcomp_imports_nothing_heavy():
    program = "import fedcomp, sys; print([m for m in ('torch', 'numpy', 'numba', 'flwr', 'grpc', 'matplotlib') if m in sys.modules])"
    assert (
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.slow
def test_simulations_and_parts_run_without_flower_and_do_not_import_the_command_line(tmp_path):
    program = """
import sys
sys.modules["flwr"] = None
import torch, fedcomp
from fedcomp.sim.batched import BatchedEngine
from small_runs import TINY
codec = fedcomp.codec("stc")
memory = fedcomp.memory("residual", codec, numel=1000)
frame = memory.propose(torch.randn(1000))
memory.commit()
print(len(codec.decode(frame, numel=1000)))
run = fedcomp.simulate(TINY.task, rounds=1, clients=2, participation=1.0, engine="serial", out="run", progress=False)
fedcomp.load("run")
print([name for name in sys.modules if name.split(".")[:2] == ["fedcomp", "cli"]])
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["1000", "[]"], done.stderr
