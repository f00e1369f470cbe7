"""The tree of errors in the docstring of errors.py is correct, and errors about unknown names suggest similar names."""

import re

from cases import for_each

from fedcomp import errors
from fedcomp.config import RunConfig
from fedcomp.errors import FedcompError, closest, nearest

DRAWN = [
    m.groups()
    for line in errors.__doc__.splitlines()
    if (m := re.match(r"    ([│├└─ ]*)(\w+Error)(?:\s+(\d+))?", line))
]


def subclasses(cls: type) -> set[type]:
    return {cls}.union(
        *(subclasses(c) for c in cls.__subclasses__() if c.__module__ == errors.__name__)
    )


def test_the_tree_has_every_error_and_no_others():
    assert {name for _, name, _ in DRAWN} == {cls.__name__ for cls in subclasses(FedcompError)}


@for_each("branch, name, status", DRAWN, ids=[name for _, name, _ in DRAWN])
def test_parents_and_exit_statuses_are_those_of_the_tree(branch, name, status):
    cls = getattr(errors, name)
    parent = {0: Exception, 4: FedcompError, 8: errors.UserError, 12: errors.ConfigError}[
        len(branch)
    ]
    assert cls.__bases__ == (parent,)
    assert cls.exit_status == (int(status) if status else parent.exit_status)


def test_a_missing_extra_names_the_command_that_installs_it():
    error = errors.MissingExtraError("pyarrow", "sim", "--task mnist-cnn")
    assert (
        str(error)
        == "--task mnist-cnn needs the package pyarrow; install it with: pip install 'fedcomp[sim]'"
    )


@for_each("name, hint", [("stcc", "did you mean 'stc'? "), ("plain", "")])
def test_nearest_suggests_only_what_is_close_and_lists_all(name, hint):
    assert nearest(name, ["topk", "stc"]) == f"{hint}known: stc, topk"


def test_nearest_without_known_names_suggests_nothing():
    assert nearest("stc", []) == "known: "


@for_each(
    "name, meant",
    [
        ("learning_rate", "lr"),
        ("epochs", "local_epochs"),
        ("num_clients", "clients"),
        ("n_clients", "clients"),
        ("num_rounds", "rounds"),
        ("batchsize", "batch_size"),
        ("batch", "batch_size"),
        ("compression", "uplink"),
        ("codec", "uplink"),
        ("clinets", "clients"),
        ("num_workers", None),
        ("xyzzy", None),
    ],
)
def test_names_of_other_libraries_are_recognized_and_distant_names_are_not_suggested(name, meant):
    assert closest(name, RunConfig.__dataclass_fields__) == meant
