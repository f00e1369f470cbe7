"""Parts of byzfl, the reference implementation of attacks and robust rules, without its benchmark and the benchmark's dependencies."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest


def byzfl_part(name: str) -> ModuleType:
    """Return the module `byzfl.attacks` or `byzfl.aggregators`. Skips the test if byzfl is not installed."""
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
