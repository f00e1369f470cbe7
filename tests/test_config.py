"""Every option: its default is valid, its limits are enforced, and TOML restores the options that a run stored."""

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tomli_w
from cases import for_each

from fedcomp import config
from fedcomp.config import RunConfig
from fedcomp.errors import ConfigError, DataError, RunFolderError

FIELDS = fields(RunConfig)
# For each option a valid value that is not its default.
OTHER = {
    "task": "mnist-cnn",
    "data": "somewhere",
    "partition": "dirichlet:0.1",
    "clients": 7,
    "rounds": 3,
    "participation": 0.25,
    "quorum": 0.5,
    "deadline": 30.0,
    "network": "mobile",
    "local_steps": 2,
    "local_epochs": 1,
    "batch_size": 8,
    "optimizer": "sgd:lr=0.5",
    "optimizer_state": "kept",
    "step_schedule": "cosine",
    "accumulate": 2,
    "lr": 0.5,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "clip": 2.0,
    "proximal": 0.01,
    "strategy": "vote",
    "weights": "examples",
    "weight_cap": 3.0,
    "uplink": "topk:density=1%,values=fp16",
    "init": "start.safetensors",
    "downlink": "identity",
    "memory": "none",
    "downlink_memory": "none",
    "server_lr": 0.1,
    "server_optimizer": "adam:tau=1%",
    "clip_update": 0.5,
    "cache": 2.5,
    "attack": "signflip:3",
    "engine": "serial",
    "cohort_batch": 16,
    "device": "cpu",
    "seed": 42,
    "evaluate": "both",
    "eval_every": 5,
    "holdout": 0.3,
    "checkpoint_every": "10",
    "out": "runs/mine",
    "resume": True,
    "plain": True,
    "density_warmup": 4,
    "lr_warmup": 5,
    "budget": "200kB",
    "bandwidths": "10kB,1MiB",
    "keep_momentum": True,
    "lr_schedule": "cosine:to=0.001",
    "local_steps_schedule": "1,8@21",
    "batch_size_schedule": "8,16@3",
    "density_schedule": "10%,1%@3",
    "horizon": 4,
    "augment": True,
    "residuals": "file",
    "precision": "bfloat16",
    "relays": 8,
    "log_json": "log.jsonl",
    "metrics_port": 9464,
    "tensorboard": True,
}


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "options.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_table_above_names_every_option():
    assert set(OTHER) == {f.name for f in FIELDS}
    assert all(OTHER[f.name] != f.default for f in FIELDS)


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_every_option_has_a_help_text(f):
    assert f.metadata["help"]
    assert set(f.metadata) <= {
        "help",
        "changeable",
        "low",
        "high",
        "above",
        "choices",
        "parse",
        "example",
    }


@pytest.mark.parametrize(
    "f", [f for f in FIELDS if {"low", "high", "above"} & set(f.metadata)], ids=lambda f: f.name
)
def test_the_limits_of_a_range_are_valid_and_values_beyond_are_refused(f):
    whole = isinstance(f.default, int)
    for end in ("low", "high"):
        if end in f.metadata:
            limit = (int if whole else float)(f.metadata[end])
            assert getattr(RunConfig(**{f.name: limit}), f.name) == limit
            beyond = -1 if end == "low" else 1
            outside = limit + beyond if whole else math.nextafter(limit, beyond * math.inf)
            with pytest.raises(
                ConfigError,
                match=f"^{config.flag(f.name)} is .*; give at {'least' if end == 'low' else 'most'} ",
            ):
                RunConfig(**{f.name: outside})
    if "above" in f.metadata:
        with pytest.raises(ConfigError, match=f"^{config.flag(f.name)} is .*; give more than "):
            RunConfig(**{f.name: f.metadata["above"]})


@for_each("text", ["200", "200kB", "1.5MB", "64KiB", "1/2MB"])
def test_sizes_are_accepted(text):
    assert RunConfig(budget=text).budget == text


@for_each(
    "text",
    ["x", "-1", "0", "1e400", "kB", "10 kilobytes", "1,2", "1/0MB", "1kiB", "1BB", "0s", "nans"],
)
def test_an_invalid_size_is_refused_with_the_flag_and_an_example(text):
    with pytest.raises(
        ConfigError, match="^--budget is '.*'; give bytes, such as 200kB, or a time, such as 30s$"
    ):
        RunConfig(budget=text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "f", [f for f in FIELDS if isinstance(f.default, float)], ids=lambda f: f.name
)
def test_numbers_are_finite(f, value):
    with pytest.raises(ConfigError, match=config.flag(f.name)):
        RunConfig(**{f.name: value})


def test_an_unknown_choice_is_refused_with_a_similar_one():
    with pytest.raises(
        ConfigError, match="^--weights cannot be 'example'; did you mean 'examples'"
    ):
        RunConfig(weights="example")


@pytest.mark.parametrize("spelling", [lambda name: name, lambda name: name.replace("_", "-")])
def test_toml_restores_stored_options(tmp_path, spelling):
    stored = config.settings(RunConfig(**OTHER))
    path = toml(tmp_path, tomli_w.dumps({spelling(name): value for name, value in stored.items()}))
    read = config.read_toml(path)
    assert read == OTHER
    assert {name: type(value) for name, value in read.items()} == {
        name: type(value) for name, value in OTHER.items()
    }


def test_the_config_of_a_run_folder_can_be_used_for_another_run(tmp_path):
    stored = config.settings(RunConfig(clients=7)) | {
        "resolved": {"device": "cpu", "engine": "serial", "at_once": 1}
    }
    assert RunConfig(**config.read_toml(toml(tmp_path, tomli_w.dumps(stored)))) == RunConfig(
        clients=7
    )


def test_numbers_in_toml_may_be_fractions_or_percentages(tmp_path):
    path = toml(tmp_path, 'participation = "1/8"\nlr = "5%"\nclip = 1\n')
    assert config.read_toml(path) == {"participation": 0.125, "lr": 0.05, "clip": 1.0}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("clinets = 3", "unknown option 'clinets'; did you mean 'clients'?"),
        ("[sim]\nclients = 3", "unknown option 'sim'; "),
        ("clients = 2.5", "'clients' cannot be '2.5'; give a whole number"),
        ("resume = 3", "'resume' cannot be '3'; give true or false"),
        ('lr = "fast"', "'lr' cannot be 'fast'; give a number such as"),
        ("lr = nan", "'lr' cannot be 'nan'; give a number such as"),
        ('uplink = ["stc"]', "'uplink' has more than one value; give one"),
        ("[task]\nname = 'digits'", "'task' has more than one value; give one"),
        ("clients = ", "is not TOML"),
        ("clients = 3\nclients = 4", "is not TOML"),
        ("local-steps = 3\nlocal_steps = 4", "'local_steps' is given twice; keep one"),
        ("clients = '1_0'", "'clients' cannot be '1_0'; give a whole number"),
        (f"clients = {'9' * 5000}", "is not TOML"),
        ("lr = " + "[" * 100_000, "is not TOML"),
    ],
)
def test_a_mistake_in_toml_names_the_file_and_the_fix(tmp_path, text, sentence):
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        config.read_toml(path)
    assert str(path) in str(raised.value) and sentence in str(raised.value)


def test_bytes_that_are_not_utf8_are_refused_as_toml(tmp_path):
    path = tmp_path / "options.toml"
    path.write_bytes(b"task = '\xff'")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.read_toml(path)


@pytest.mark.parametrize("path", ["absent.toml", "."])
def test_a_config_file_that_cannot_be_read_is_refused(tmp_path, path):
    with pytest.raises(ConfigError, match="^--config .*; give a TOML file that can be read$"):
        config.read_toml(tmp_path / path)


def test_settings_leave_out_options_that_are_not_set():
    unset = {
        "data",
        "init",
        "attack",
        "network",
        "out",
        "budget",
        "bandwidths",
        "log_json",
        "lr",
        "lr_schedule",
        "step_schedule",
        "local_steps_schedule",
        "batch_size_schedule",
        "density_schedule",
    }
    assert {f.name for f in FIELDS} - set(config.settings(RunConfig())) == unset


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_a_resumed_run_may_change_only_local_options(f):
    stored = config.settings(RunConfig())
    changed = replace(RunConfig(), **{f.name: OTHER[f.name]})
    assert config.first_difference(changed, stored) == (
        None if f.metadata["changeable"] else f.name
    )
    assert config.first_difference(RunConfig(), config.settings(changed)) == (
        None if f.metadata["changeable"] else f.name
    )


def test_an_option_that_a_stored_run_lacks_has_its_default():
    stored = {
        name: value for name, value in config.settings(RunConfig()).items() if name != "proximal"
    }
    assert config.first_difference(RunConfig(), stored) is None
    assert config.first_difference(RunConfig(proximal=0.1), stored) == "proximal"


def test_the_options_of_a_run_are_inherited(tmp_path):
    stored = config.settings(RunConfig(**OTHER)) | {"resolved": {"device": "cpu"}}
    (tmp_path / config.RUN_FILE).write_text(tomli_w.dumps(stored), encoding="utf-8")
    assert config.read_run(tmp_path) == stored
    belongs_to_an_invocation = {"out", "resume", "plain", "log_json", "metrics_port", "tensorboard"}
    assert config.inherited_options(tmp_path) == {
        name: value for name, value in OTHER.items() if name not in belongs_to_an_invocation
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "contains no run to continue; leave --resume out to start a run"),
        (b"task = ", "cannot be read"),
        (b"task = '\xff'", "cannot be read"),
        (b"task = " + b"[" * 100_000, "cannot be read"),
    ],
)
def test_a_folder_without_a_valid_run_is_refused(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / config.RUN_FILE).write_bytes(content)
    with pytest.raises(RunFolderError, match=sentence):
        config.inherited_options(tmp_path)


@for_each("name", [f.name for f in FIELDS])
def test_a_value_of_another_type_is_refused(name):
    default = getattr(RunConfig(), name)
    wrong = (
        ["word", True, 2.5]
        if type(default) is int
        else ["0.1", True]
        if isinstance(default, float) or name == "lr"
        else [1]
    )
    if name == "checkpoint_every":
        wrong = [True, 2.5]  # a whole number is valid: it is converted to text
    for value in [*wrong, b"bytes", *([] if default is None else [None])]:
        with pytest.raises(ConfigError, match=f"^{config.flag(name)} "):
            RunConfig(**{name: value})


def test_whole_numbers_are_accepted_for_options_with_fractions():
    assert RunConfig(lr=1, participation=1, momentum=0).lr == 1


@for_each("value", ["", " ", "a\nb", "a\x1b[2J", "a\0b", "\udcff"])
@for_each(
    "name", [f.name for f in FIELDS if f.type in (str, str | None) and "choices" not in f.metadata]
)
def test_empty_and_unprintable_texts_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"^{config.flag(name)} ") as raised:
        RunConfig(**{name: value})
    assert str(raised.value).isprintable()


@for_each(
    "name, value, most",
    [
        ("seed", 2**63, "9223372036854775807"),
        ("cache", 1e308, "1e+06"),
        ("local_steps", 10**12, "1000000"),
        ("local_epochs", 10**12, "10000"),
        ("batch_size", 10**12, "1000000"),
        ("cohort_batch", 10**12, "1000000"),
        *(
            (name, 1e39, "3e+38")
            for name in ("lr", "server_lr", "weight_decay", "proximal", "clip", "clip_update")
        ),
    ],
)
def test_values_that_would_fill_the_memory_or_overflow_are_refused(name, value, most):
    with pytest.raises(ConfigError) as raised:
        RunConfig(**{name: value})
    assert str(raised.value) == f"{config.flag(name)} is {value}; give at most {most}"


def test_the_home_folder_of_an_unknown_user_is_refused_with_the_option(monkeypatch):
    with pytest.raises(ConfigError, match="^--out ~nosuch/x: "):
        config.inherited_options("~nosuch/x")
    with pytest.raises(ConfigError, match="^--data ~nosuch/x: "):
        config.data_folder("~nosuch/x")
    monkeypatch.setenv("FEDCOMP_DATA", "~nosuch/x")
    with pytest.raises(ConfigError, match="^FEDCOMP_DATA ~nosuch/x: "):
        config.data_folder(None)


def test_data_comes_from_the_flag_or_the_environment(monkeypatch):
    monkeypatch.delenv("FEDCOMP_DATA", raising=False)
    assert config.data_folder(None) is None
    monkeypatch.setenv("FEDCOMP_DATA", "~/sets")
    assert config.data_folder(None) == Path("~/sets").expanduser()
    assert config.data_folder(".") == Path(".")
    with pytest.raises(DataError, match="^--data elsewhere is not a folder"):
        config.data_folder("elsewhere")


@for_each(
    "values, says",
    [
        ({"clients": "x"}, "--clients is 'x', of type str; give a value of type int"),
        ({"clients": None}, "--clients is None"),
        ({"clients": 2.5}, "--clients is 2.5, of type float"),
        ({"clients": True}, "--clients is True, of type bool"),
        ({"lr": "0.1"}, "--lr is '0.1'"),
    ],
)
def test_an_invalid_value_is_refused_with_its_flag(values, says):
    with pytest.raises(ConfigError) as error:
        RunConfig(**values)
    assert says in str(error.value) and "\n" not in str(error.value)
