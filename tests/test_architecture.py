"""Arrows point one way, flwr stays in four rooms, nothing that is read from outside can run code."""

import ast
import re
from functools import cache
from pathlib import Path
from types import FunctionType

import pytest
from cases import for_each

import fedcomp
from fedcomp.strategies import RoundStrategy

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    path.relative_to(ROOT / "fedcomp").as_posix(): path
    for path in sorted((ROOT / "fedcomp").rglob("*.py"))
}

FOUNDATION = {
    "baseline",
    "by_round",
    "compact_json",
    "formatting",
    "errors",
    "spec",
    "layout",
    "seeds",
    "config",
    "observe",
    "messages",
    "profiling",
    "registry",
    "state_folder",
}
# Each imports from those before it; "__init__" is what users import.
ORDER = (
    "kernels",
    "codecs",
    "memories",
    "tasks",
    "training",
    "keys",
    "privacy",
    "strategies",
    "clients",
    "server",
    "transports",
    "deployment",
    "runs",
    "sim",
    "reproductions",
    "__init__",
    "cli",
    "interactive",
    "__main__",
)
NARROWER = {"tasks": {"errors", "spec", "layout", "seeds", "observe", "registry", "tasks"}} | {
    place: FOUNDATION for place in FOUNDATION
}

FLOWER_ROOMS = {"clients", "transports", "deployment", "sim"}
FLOWER_EXCHANGE = "server/exchange.py"  # the round loop speaks to a Flower Grid through it
FLOWER_PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}
FLOWER_PRIVATE = "clients/flower.py"  # the one module that may reach further into flwr

RUNS_CODE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch.load"}


@cache
def syntax(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> set[str]:
    """The full names of the modules that a file imports, inside functions too; a version alone is no import."""
    package = MODULES[name].parent.relative_to(ROOT).parts
    found = set()
    for node in ast.walk(syntax(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*above, *([node.module] if node.module else [])])
            items = [alias.name for alias in node.names if alias.name != "__version__"]
            found |= {full if is_ours(full := f"{source}.{item}") else source for item in items}
    return found


@cache
def is_ours(module: str) -> bool:
    path = ROOT / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def place(name: str) -> str:
    """`codecs` for codecs/stc.py, `errors` for errors.py."""
    return name.split("/")[0].removesuffix(".py")


def reached(name: str) -> set[str]:
    """The places that a file imports from."""
    return {
        (module.split(".") + ["__init__"])[1]
        for module in imports(name)
        if module.split(".")[0] == "fedcomp"
    }


@pytest.mark.slow
def test_imports_point_one_way():
    allowed = {p: FOUNDATION | set(ORDER[: i + 1]) for i, p in enumerate(ORDER)} | NARROWER
    assert {place(name) for name in MODULES} <= set(allowed), "a new room needs its place in ORDER"
    assert {name: up for name in MODULES if (up := reached(name) - allowed[place(name)])} == {}


def test_flower_stays_in_its_rooms():
    found = {name: {m for m in imports(name) if m.split(".")[0] == "flwr"} for name in MODULES}
    assert {
        name: used
        for name, used in found.items()
        if used and place(name) not in FLOWER_ROOMS and name != FLOWER_EXCHANGE
    } == {}
    assert {
        name: private
        for name, used in found.items()
        if name != FLOWER_PRIVATE and (private := used - FLOWER_PUBLIC)
    } == {}


def test_a_strategy_has_at_most_15_public_methods():
    methods = [
        name
        for name, value in vars(RoundStrategy).items()
        if not name.startswith("_") and isinstance(value, FunctionType | classmethod | staticmethod)
    ]
    assert len(methods) <= 15


def test_nothing_that_is_read_can_run_code():
    found = {}
    for name in MODULES:
        nodes = list(ast.walk(syntax(name)))
        used = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        used |= {module.split(".")[0] for module in imports(name)}
        pickles = {
            ast.unparse(node)
            for node in nodes
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
        }
        if unsafe := used & RUNS_CODE | pickles - {"allow_pickle=False"}:
            found[name] = unsafe
    assert found == {}


def test_all_is_sorted():
    unsorted = []
    for name in MODULES:
        for node in syntax(name).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                if isinstance(node.value, ast.List | ast.Tuple):
                    exported = list(ast.literal_eval(node.value))
                    unsorted += [name] * (exported != sorted(set(exported)))
    assert unsorted == []


def test_what_users_import_is_there_and_sorted():
    assert fedcomp.__all__ == sorted(set(fedcomp.__all__))
    assert all(hasattr(fedcomp, name) for name in fedcomp.__all__)


@pytest.mark.skipif(
    (ROOT / "PKG-INFO").exists(), reason="a source distribution leaves the links out"
)
@for_each("door", ["clients", "server", "strategies", "sim"])
def test_links_at_the_root_open_the_doors(door):
    link = ROOT / door
    assert link.is_symlink() and link.readlink() == Path("fedcomp") / door
    assert (link / "__init__.py").is_file()


def test_no_path_of_a_home_directory():
    home = re.compile(rb"(?<![\w.])/(?:home|Users|root)/\w+")
    kept = [
        path
        for folder in (".ci", "benchmarks", "deploy", "docs", "fedcomp", "tests")
        for path in (ROOT / folder).rglob("*")
    ]
    kept += [
        path
        for path in ROOT.iterdir()
        if path.suffix in {".md", ".toml", ".txt"} or path.name == "Makefile"
    ]
    text = {
        path.relative_to(ROOT): path.read_bytes()
        for path in kept
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {
        path: match.group() for path, content in text.items() if (match := home.search(content))
    } == {}
