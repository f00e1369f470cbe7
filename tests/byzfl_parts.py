"""Parts of byzfl, the oracle for attacks and robust rules, without its benchmark and what that needs."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest


def byzfl_part(name: str) -> ModuleType:
    """`attacks` or `aggregators`. Skips the test where byzfl is not installed."""
    found = importlib.util.find_spec("byzfl")
    if found is None:
        pytest.skip("byzfl is not installed; it is in the extra dev")
    before = {
        module: sys.modules.pop(module)
        for module in list(sys.modules)
        if module.split(".")[0] == "byzfl"
    }
    bare = ModuleType("byzfl")
    bare.__path__ = list(found.submodule_search_locations or ())
    sys.modules["byzfl"] = bare
    try:
        return importlib.import_module(f"byzfl.{name}")
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == "byzfl"]:
            del sys.modules[module]
        sys.modules.update(before)
