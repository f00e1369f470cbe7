"""Imports point one way, only transports and deployment import flwr and grpc, and data that is read from outside cannot run code."""

import ast
import re
from functools import cache
from pathlib import Path
from types import FunctionType

from fedcomp.strategies import RoundStrategy

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fedcomp"
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}

# A package imports only from itself, from the packages before it in this list, and from modules at the top level.
ORDER = (
    "kernels codecs memories tasks training keys privacy strategies clients server transports deployment runs sim interactive cli "
    "__main__"
).split()
# Library → the only folders that may import it.
CARRIERS = {"flwr": ("transports/flower/", "deployment/flower/"), "grpc": ("transports/grpc/",)}
FLOWER_PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}

RUNS_CODE = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "torch.load"}


def place(name: str) -> str:
    """Return the package or top-level module of a file: `codecs` for codecs/stc.py, `errors` for errors.py."""
    return name.split("/")[0].removesuffix(".py")


@cache
def nodes(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


@cache
def imports(name: str) -> set[str]:
    """Return the full names that a file imports, also inside functions."""
    package, found = ["fedcomp", *name.split("/")[:-1]], set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def test_imports_point_one_way():
    places = {place(name) for name in MODULES}
    foundation = places - set(ORDER)
    allowed = {p: foundation | set(ORDER[: i + 1]) for i, p in enumerate(ORDER)}
    for name in MODULES:
        ours = {module.split(".")[1] for module in imports(name) if module.startswith("fedcomp.")}
        assert ours & places <= allowed.get(place(name), foundation), name


def test_only_transports_and_deployment_import_flwr_and_grpc():
    for name in MODULES:
        for package, folders in CARRIERS.items():
            used = {module for module in imports(name) if module.split(".")[0] == package}
            assert not used or name.startswith(folders), (name, used)
        flower = {module for module in imports(name) if module.split(".")[0] == "flwr"}
        assert {module.rpartition(".")[0] for module in flower} <= FLOWER_PUBLIC, (name, flower)


def test_a_strategy_has_at_most_15_public_methods():
    kinds = FunctionType | classmethod | staticmethod
    methods = [name for name, value in vars(RoundStrategy).items() if isinstance(value, kinds)]
    assert len([name for name in methods if not name.startswith("_")]) <= 15


def test_no_module_loads_data_that_can_run_code():
    for name in MODULES:
        used = {ast.unparse(node) for node in nodes(name) if isinstance(node, ast.Attribute)}
        used |= {part for module in imports(name) for part in (module, module.split(".")[0])}
        assert not used & RUNS_CODE, name
        pickled = [n for n in nodes(name) if isinstance(n, ast.keyword) and n.arg == "allow_pickle"]
        assert all(ast.unparse(node.value) == "False" for node in pickled), name


def test_links_at_the_root_lead_to_packages():
    for door in ("clients", "server", "strategies", "sim"):
        link = ROOT / door
        if not (ROOT / "PKG-INFO").exists():  # a source distribution has no links
            assert link.is_symlink() and link.readlink() == Path("fedcomp") / door


def test_no_file_names_a_home_directory():
    home = re.compile(rb"(?<![\w.])/(?:home|Users|root)/\w+")
    folders = (".ci", "benchmarks", "deploy", "docs", "fedcomp", "reproductions", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files += [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "Makefile"]
    for path in files:
        if path.is_file() and "__pycache__" not in path.parts:
            assert not home.search(path.read_bytes()), path
