"""The commands: every option has a flag, flags have precedence over files, errors are one sentence, and help does not import torch."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from command_line import error_message, fedcomp

from fedcomp import __version__, errors
from fedcomp.callbacks import Callback
from fedcomp.cli import flags
from fedcomp.config import RunConfig, flag, settings

ROOT = Path(__file__).resolve().parents[2]
FIELDS = fields(RunConfig)


def process(
    *words: Any,
    code: str = "from fedcomp.cli.main import main; main()",
    cwd: Path = ROOT,
    **variables: str,
):
    """Run `code` with these command-line words in a real process."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.fixture
def runs(monkeypatch) -> list[RunConfig]:
    """Return the list of configs that `fedcomp sim` would run."""
    seen: list[RunConfig] = []
    monkeypatch.setattr(
        "fedcomp.sim.simulate", lambda config, callback: seen.append(config), raising=False
    )
    return seen


@pytest.fixture
def simulation(monkeypatch) -> Callable[[Callable[[RunConfig, Callback], None]], None]:
    return lambda act: monkeypatch.setattr("fedcomp.sim.simulate", act, raising=False)


# Options whose text is parsed.
EXAMPLES = {
    "optimizer": "adamw:lr=3e-4",
    "step_schedule": "cosine",
    "lr_schedule": "cosine",
    "local_steps_schedule": "1,8@21",
    "batch_size_schedule": "20,40@21",
    "density_schedule": "10%,1%@10",
    "budget": "200kB",
    "bandwidths": "10kB,1MB",
}


def other(f: Any) -> Any:
    """Return a valid value of an option that is not its default."""
    if "choices" in f.metadata:
        return next(choice for choice in f.metadata["choices"] if choice != f.default)
    if f.name in EXAMPLES:
        return EXAMPLES[f.name]
    if isinstance(f.default, bool):
        return not f.default
    if isinstance(f.default, int):
        return f.default + 1
    if isinstance(f.default, float):
        return f.default / 2 + 0.25
    return {"lr": 0.25, "checkpoint_every": "7"}.get(f.name, "a word")


def words(f: Any, value: Any) -> list[str]:
    return [flag(f.name)] if value is True else [flag(f.name), str(value)]


# Flags.


def test_every_option_is_in_one_panel():
    named = [name for names in flags.PANELS.values() for name in names.split()]
    assert sorted(named) == sorted(f.name for f in FIELDS)


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_every_flag_sets_its_option(f, runs):
    value = other(f)
    assert fedcomp("sim", *words(f, value)).exit_code == 0
    assert runs == [replace(RunConfig(), **{f.name: value})]
    assert type(getattr(runs[0], f.name)) is type(value)


def test_options_without_a_flag_have_their_defaults(runs):
    assert fedcomp("sim").exit_code == 0
    assert runs == [RunConfig()]


@pytest.mark.parametrize("text", ["0.125", "12.5%", "1/8"])
def test_a_fraction_may_be_written_as_a_percentage_or_quotient(text, runs):
    fedcomp("sim", "--participation", text)
    assert runs[0].participation == 0.125


def test_help_describes_arguments():
    for command, text in {"report": "Folders of runs", "keys renew": "Id of a client"}.items():
        assert text in fedcomp(*command.split(), "--help").stdout, command


def test_help_shows_flags_defaults_and_descriptions():
    help = " ".join(fedcomp("sim", "--help").stdout.replace("│", " ").split())
    for f in FIELDS:
        assert f"{flag(f.name)} " in help or f"{flag(f.name)}," in help, f.name
        assert f.metadata["help"].split()[0] in help, f.name
        if isinstance(f.default, str):
            assert f"[default: {f.default}]" in help, f.name
    for panel in flags.PANELS:
        assert f"─ {panel} ─" in help


def test_a_server_has_no_options_of_virtual_clients(tmp_path):
    simulation, deployment = (
        fedcomp(*command, "--help").stdout for command in (["sim"], ["server", "start"])
    )
    for name in ("--network", "--attack", "--residuals", "--cohort-batch"):
        assert name in simulation and name not in deployment
    assert "default: None" not in simulation + deployment
    path, out = options(tmp_path, 'network = "mobile"\n'), tmp_path / "run"
    done = fedcomp("server", "start", "--insecure", "--config", path, "--out", out)
    assert error_message(done) == (
        "--network simulates the network of a simulation's clients; leave --network out, or use fedcomp sim"
    )
    assert not out.exists()


# Precedence.


def options(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "options.toml"
    path.write_text(text)
    return path


def test_flags_have_precedence_over_the_file_and_the_file_over_defaults(tmp_path, runs):
    path = options(tmp_path, "clients = 40\nlr = 0.2\nplain = true\nresume = true\n")
    fedcomp("sim", "--config", path, "--lr", "0.3", "--no-resume")
    assert runs == [RunConfig(clients=40, lr=0.3, plain=True, resume=False)]


@pytest.mark.parametrize("f", FIELDS, ids=lambda f: f.name)
def test_a_flag_with_the_default_value_has_precedence(f, tmp_path, runs):
    if f.default is None:
        expected = 0.75 if f.name == "lr" else "1" if f.name in EXAMPLES else "word"
        given = words(f, expected)
    else:
        given, expected = (
            ["--no-" + flag(f.name)[2:]] if f.default is False else words(f, f.default),
            f.default,
        )
    value = other(f)
    path = options(
        tmp_path, f"{f.name} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
    )
    fedcomp("sim", "--config", path)
    fedcomp("sim", "--config", path, *given)
    assert [getattr(config, f.name) for config in runs] == [value, expected]


@pytest.mark.parametrize("by_file", [False, True])
def test_a_resumed_run_keeps_options_that_are_not_given(by_file, tmp_path, runs):
    out = tmp_path / "run"
    store(out, RunConfig(clients=40, lr=0.2, momentum=0.5, rounds=30, plain=True))
    where = f"out = '{out}'\nresume = true\n" if by_file else ""
    path = options(tmp_path, f"{where}lr = 0.3\nmomentum = 0.6\n")
    given = [] if by_file else ["--out", out, "--resume"]
    fedcomp("sim", "--config", path, "--momentum", "0.7", *given)
    assert runs == [
        RunConfig(clients=40, lr=0.3, momentum=0.7, rounds=30, out=str(out), resume=True)
    ]


# User errors.


@pytest.mark.parametrize(
    ("given", "output"),
    [
        (["sim", "--rouds", "3"], "no such option '--rouds'; did you mean --rounds"),
        (["sim", "--learning-rate", "1"], "no such option '--learning-rate'; did you mean --lr?"),
        (["server", "start", "--codec", "stc"], "no such option '--codec'; did you mean --uplink?"),
        (["client", "--lr", "1"], "no such option '--lr'; see fedcomp client --help"),
        (
            ["sim", "--optimizer", "adamv"],
            "--optimizer adamv: unknown optimizer 'adamv'; did you mean 'adam'? known: adadelta, ",
        ),
        (
            ["sim", "--optimizer", "adamw:lr=1e-3", "--lr", "0.1"],
            "--optimizer adamw:lr=1e-3 and --lr 0.1 give different learning rates; leave one of them out",
        ),
        (
            ["sim", "--optimizer", "adamw", "--momentum", "0.9"],
            "--momentum: the optimizer adamw has no momentum option; leave --momentum out",
        ),
        (["sim", "--zzz"], "no such option '--zzz'; see fedcomp sim --help"),
        (["smi"], "no such command 'smi'; did you mean sim?"),
        (["sim", "extra"], "got unexpected extra argument (extra); see fedcomp sim --help"),
        (["sim", "--lr"], "option '--lr' requires an argument"),
        (["sim", "--lr", "fast"], "--lr cannot be 'fast'; give a number such as 0.01, 1% or 1/100"),
        (["sim", "--clients", "1.5"], "--clients cannot be '1.5'; give a whole number"),
        (["sim", "--clients", "0"], "--clients is 0; give at least 1"),
        (["sim", "--participation", "120%"], "--participation is 1.2; give at most 1"),
        (
            ["server", "start", "--quorum", "80"],
            "--quorum is 80.0; give at most 1 (did you mean 80%?)",
        ),
        (
            ["sim", "--weights", "exampels"],
            "--weights cannot be 'exampels'; did you mean 'examples'? known: examples, uniform",
        ),
        (["sim", "--seed", str(2**63)], f"--seed is {2**63}; give at most {2**63 - 1}"),
        (["sim", "--clients", "1_0"], "--clients cannot be '1_0'; give a whole number"),
        (["sim", "--clients", "a\nb\x1b[2J"], "--clients cannot be 'a b [2J'; give a whole number"),
        (["sim", "--task", ""], "--task is ''"),
        (["sim", "--out", "a\nb"], r"--out is 'a\nb'"),
        (["sim", "--out", "\udcff"], r"--out is '\udcff'"),
        (["sim", "--out", "~nosuch/x"], "--out ~nosuch/x: "),
        (["sim", "--data", "~nosuch/x"], "--data ~nosuch/x: "),
        (["sim", "--device", "cpu:"], "--device cpu: is not known"),
        (
            ["sim", "--local-steps", "3", "--local-epochs", "2"],
            "--local-steps and --local-epochs exclude each other; give one of them",
        ),
        (["init", "a b.txt"], "'a b.txt' does not end in .py or is not printable"),
        (["init", "a\nb.py"], "'a b.py' does not end in .py or is not printable"),
        (
            ["sim", "--config", "absent.toml"],
            "--config absent.toml: No such file or directory; give a TOML file that can be read",
        ),
        (["init", "a", "b"], "got unexpected extra argument (b); see fedcomp init --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_sentence_with_exit_status_2(given, output):
    assert error_message(fedcomp(*given)).startswith(output)


def test_an_unknown_key_in_the_file_is_refused_with_a_similar_one(tmp_path):
    path = options(tmp_path, "clinets = 3")
    assert error_message(fedcomp("sim", "--config", path)).startswith(
        f"{path}: unknown option 'clinets'; did you mean 'clients'?"
    )


def test_resume_needs_a_run(tmp_path):
    output = error_message(fedcomp("sim", "--resume", "--out", tmp_path))
    assert (
        output == f"--out {tmp_path} contains no run to continue; leave --resume out to start a run"
    )


ERRORS = [
    getattr(errors, name)
    for name in dir(errors)
    if name.endswith("Error") and name != "MissingExtraError"
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_every_fedcomp_error_is_one_sentence_with_its_exit_status(error, simulation):
    def fail(config, callback):
        raise error("something [bold]was[/] wrong; mend it")

    simulation(fail)
    assert (
        error_message(fedcomp("sim"), error.exit_status) == "something [bold]was[/] wrong; mend it"
    )


def test_a_missing_extra_is_reported_in_one_error_message(simulation):
    def fail(config, callback):
        raise errors.MissingExtraError("pyarrow", "sim", "--task mnist-cnn")

    simulation(fail)
    assert error_message(fedcomp("sim")).endswith("pip install 'fedcomp[sim]'")


def test_an_error_is_not_wrapped_on_a_narrow_terminal():
    done = process("sim", "--weights", "nothing-of-the-kind-that-is-known", COLUMNS="30")
    assert (
        error_message(done)
        == "--weights cannot be 'nothing-of-the-kind-that-is-known'; known: examples, uniform"
    )


@pytest.mark.deploy
def test_an_ascii_terminal_gets_question_marks():
    assert error_message(
        process("sim", "--task", "ü:", "--weights", "ü", PYTHONIOENCODING="ascii")
    ).startswith("--weights cannot be '?'")


def test_an_unexpected_error_keeps_its_traceback():
    code = (
        "import sys, types; sys.modules['fedcomp.sim'] = types.SimpleNamespace(simulate=lambda config, callback: 1 / 0)\n"
        "from fedcomp.cli.main import main; main()"
    )
    done = process("sim", code=code)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback") and done.stderr.rstrip().endswith(
        "ZeroDivisionError: division by zero"
    )


def test_zero_epochs_do_not_exclude_steps(runs, tmp_path):
    assert fedcomp("sim", "--local-steps", 3, "--local-epochs", 0).exit_code == 0
    both = fedcomp("sim", "--config", options(tmp_path, "local_epochs = 2"), "--local-steps", 3)
    assert (
        error_message(both)
        == "--local-steps and --local-epochs exclude each other; give one of them"
    )
    assert [(config.local_steps, config.local_epochs) for config in runs] == [(3, 0)]


# Streams.


def shell(line: str, **variables: str):
    """Run `line` in a shell in which $F is the fedcomp command."""
    variables = {"F": f"{sys.executable} -m fedcomp", "PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        ["bash", "-c", line], env=os.environ | variables, capture_output=True, encoding="utf-8"
    )


@pytest.mark.deploy
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_output_streams_cause_no_traceback(closed):
    assert shell(f"$F --version {closed}").returncode == 0
    done = shell(f"$F sim --lr 0 {closed}")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("given", "unbuffered"), [("--version", ""), ("sim --help", "1"), ("reproduce", "")]
)
def test_a_full_disk_is_one_sentence_with_exit_status_1(given, unbuffered):
    output = error_message(shell(f"$F {given} >/dev/full", PYTHONUNBUFFERED=unbuffered), 1)
    assert output == "standard output cannot be written (No space left on device)"


def test_an_os_error_other_than_of_the_output_is_not_hidden(simulation):
    def act(config, callback):
        raise OSError("something else")

    simulation(act)
    assert str(fedcomp("sim").exception) == "something else"


@pytest.mark.parametrize("term", ["", "dumb", "unknown"])
def test_a_terminal_without_capabilities_gets_plain_lines(term, monkeypatch):
    from fedcomp.cli.main import _display
    from fedcomp.run_display import LineDisplay

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    assert isinstance(_display(RunConfig()), LineDisplay)


# Interruption.


@pytest.mark.parametrize(
    "words", [["-m", "fedcomp"], ["-c", "from fedcomp.__main__ import main; main()"]]
)
def test_control_c_during_imports_prints_nothing(words, tmp_path):
    # In place of typer, whose import is slow.
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *words], env=variables, cwd=tmp_path, capture_output=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def interrupted(fake_run, out: Path, rounds: int, first: int = 1):
    """Return a simulation that makes its folder, reports `rounds` rounds and is interrupted."""

    def act(config: RunConfig, callback: Callback) -> None:
        store(out, config)
        run = fake_run(20, first)
        run.header, run.records = replace(run.header, out=str(out)), run.records[:rounds]
        run.to(callback, end=False)
        raise KeyboardInterrupt

    return act


def store(folder: Path, config: RunConfig) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        tomli_w.dumps(settings(config) | {"out": str(folder), "resolved": {"engine": "serial"}})
    )


def test_an_interrupted_run_prints_the_command_to_continue(fake_run, simulation, tmp_path, runs):
    path, out = options(tmp_path, "lr = 0.2"), tmp_path / "its run"
    simulation(interrupted(fake_run, out, 7))
    words = ["--config", path, "--participation", "1/8", "--task", "my task.py:task"]
    done = fedcomp("sim", *words, "--no-plain", "--out", "elsewhere")
    assert done.exit_code == errors.INTERRUPTED == 130
    output, command = done.stderr.removeprefix("fedcomp: ").strip().split("; continue with: ")
    assert output == "interrupted after round 7 of 20"
    assert shlex.split(command)[:2] == ["fedcomp", "sim"]

    simulation(lambda config, callback: runs.append(config))
    assert fedcomp(*shlex.split(command)[1:]).exit_code == 0
    assert runs == [
        RunConfig(lr=0.2, participation=0.125, task="my task.py:task", out=str(out), resume=True)
    ]


@pytest.mark.parametrize(
    ("first", "when"), [(1, "before the end of round 1"), (6, "after round 5 of 20")]
)
def test_an_interruption_before_the_end_of_a_round_prints_the_command_to_continue(
    fake_run, simulation, tmp_path, first, when
):
    simulation(interrupted(fake_run, tmp_path / "run", 0, first))
    done = fedcomp("sim", "--clients", 30)
    assert done.exit_code == 130
    assert (
        done.stderr
        == f"fedcomp: interrupted {when}; continue with: fedcomp sim --clients 30 --out {tmp_path / 'run'} --resume\n"
    )


def test_an_interruption_before_the_run_folder_exists_is_reported(simulation):
    def act(config, callback):
        raise KeyboardInterrupt

    simulation(act)
    assert error_message(fedcomp("sim"), 130) == "interrupted before the run began"


# The other commands.


def test_version_prints_the_version():
    assert fedcomp("--version").stdout == f"fedcomp {__version__}\n"


def test_fedcomp_without_a_command_shows_its_help():
    done = fedcomp()
    assert done.exit_code == 0 and done.stdout == fedcomp("--help").stdout
    commands = "sim init codecs tasks report doctor reproduce client relay bench keys server"
    assert re.findall(r"│ (\w+)  ", done.stdout) == commands.split()


@pytest.mark.deploy
@pytest.mark.parametrize(
    "given",
    [["--help"], ["sim", "--help"], ["--version"], ["sim", "--lr", "0"], ["init", "task.py"]],
    ids=lambda given: " ".join(given),
)
def test_commands_that_need_no_torch_do_not_import_it(given, tmp_path):
    code = (
        "import atexit, sys\n"
        "heavy = {'torch', 'numpy', 'numba', 'flwr'}\n"
        "atexit.register(lambda: print('imported:', sorted(heavy & set(sys.modules))))\n"
        "from fedcomp.cli.main import main; main()"
    )
    assert process(*given, code=code, cwd=tmp_path).stdout.splitlines()[-1] == "imported: []"


def test_python_m_fedcomp_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "fedcomp", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"fedcomp {__version__}\n")


@pytest.mark.parametrize("name", [None, "other name.py"])
def test_init_writes_the_example_and_prints_its_command(name, tmp_path, monkeypatch, runs):
    monkeypatch.chdir(tmp_path)
    done = fedcomp("init", *([name] if name else []))
    written = Path(name or "my_task.py")
    assert done.exit_code == 0
    assert written.read_text() == (ROOT / "fedcomp" / "tasks" / "example_task.py").read_text()
    command = next(
        line.strip() for line in done.stdout.splitlines() if line.strip().startswith("fedcomp sim")
    )
    assert name or command in written.read_text()
    assert fedcomp(*shlex.split(command)[1:]).exit_code == 0

    from fedcomp.tasks import load

    assert load(runs[0].task).name == "spirals"


def test_init_overwrites_nothing(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("mine")
    assert (
        error_message(fedcomp("init", path))
        == f"{path} exists and is not overwritten; name another file: fedcomp init PATH"
    )
    assert path.read_text() == "mine"


def test_init_into_a_missing_folder_is_refused(tmp_path):
    path = tmp_path / "absent" / "task.py"
    assert (
        error_message(fedcomp("init", path))
        == f"{path} cannot be written: No such file or directory; name another file: fedcomp init PATH"
    )


def test_codecs_lists_every_codec_with_a_valid_spec():
    from fedcomp.cli.bench_codecs import normal
    from fedcomp.cli.listing import NUMEL
    from fedcomp.codecs import available_codecs, codec

    done = fedcomp("codecs")
    assert "bits: bits per parameter" in done.stderr
    head, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert {row[0].partition(":")[0] for row in rows} == set(available_codecs())
    for row in rows:
        c, cells = codec(row[0]), dict(zip(head, row, strict=True))
        assert str(c) == row[0] and cells["source"] == c.source
        assert cells["what it does"].startswith(("sends ", "quantizes ", "rotates "))
        frame = c.encode(normal(NUMEL).values, seed=1, layout=normal(NUMEL).layout)
        assert float(cells["bits"]) == pytest.approx(8 * len(frame) / NUMEL, rel=0.01)
        assert (cells["linear"] == "yes", cells["portable"] == "yes") == (c.linear, c.portable)
        assert (cells["unbiased"] == "–", cells["contracts"] == "–") == (
            c.variance(NUMEL) is None,
            c.contraction(NUMEL) is None,
        )


def test_a_run_without_an_accepted_update_exits_with_status_1(tmp_path):
    task = f"{ROOT / 'tests' / 'tiny_task.py'}:task"
    words = ["sim", "--task", task, "--clients=4", "--rounds=1", "--plain"]
    result = fedcomp(*words, "--out", tmp_path / "run", "--attack", "malformed:4")
    assert result.exit_code == 1 and "no client's update was accepted in any round" in result.output
    assert (tmp_path / "run" / "summary.json").is_file()
