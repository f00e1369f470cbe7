"""Build the documentation site, and check its pages against the code: links, frames, codecs, tasks, commands."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import for_each
from every_codec import built_in_codecs, vectors
from typer.testing import CliRunner

import fedcomp
from fedcomp import FrameError, Layout, codec
from fedcomp.cli.main import app
from fedcomp.codecs import longest_frame, overwrite
from fedcomp.codecs.base import Codec
from fedcomp.codecs.frame import wrap_decay
from fedcomp.errors import TaskError
from fedcomp.messages import Assignment, Report
from fedcomp.tasks import load
from fedcomp.tasks.check import check

pytestmark = pytest.mark.timeout(
    300
)  # the build imports all documented modules, which is slow on a busy machine

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LOADS = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
}
FETCHED = {
    "stylesheet",
    "preload",
    "modulepreload",
    "icon",
    "preconnect",
    "dns-prefetch",
    "prefetch",
}  # values of `rel` for which a browser loads the target of a <link>


# The site.


class Page(HTMLParser):
    """The anchors, the links and the loaded files of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.names, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.names |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loads += [value for name, value in given.items() if (tag, name) in LOADS]
        if tag == "link" and FETCHED & set(given.get("rel", "").split()):
            self.loads.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site").resolve()
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out], cwd=ROOT, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


@pytest.mark.slow
@pytest.mark.deploy
def test_every_page_is_in_the_site(site):
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file(), page.name


@pytest.mark.slow
@pytest.mark.deploy
def test_every_link_leads_somewhere(site, pages):
    for path, page in pages.items():
        for link in page.links if path.name != "404.html" else []:
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", target):
                assert target.startswith(("https:", "mailto:")), (path.name, link)
                continue
            found = (path.parent / target).resolve() if target else path.resolve()
            assert found.is_file() and found.is_relative_to(site), (path.name, link)
            assert not anchor or found.suffix != ".html" or anchor in pages[found].names, (
                path.name,
                link,
            )


@pytest.mark.slow
@pytest.mark.deploy
def test_no_page_loads_anything_from_another_host(site, pages):
    for path, page in pages.items():
        for loaded in page.loads:
            assert not re.match(r"(?:[a-z]+:)?//", loaded), (path.name, loaded)
            assert path.name == "404.html" or (path.parent / loaded).is_file(), (path.name, loaded)
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert "@import" not in text, sheet.name
        assert all(
            re.match(r"data:|\.{1,2}/|#", url) for url in re.findall(r"url\([\"']?([^)]*)\)", text)
        ), sheet.name


@pytest.mark.slow
@pytest.mark.deploy
def test_the_reference_has_every_public_name_codec_memory_and_strategy(site):
    text = {
        path.stem: path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")
    }
    for name in fedcomp.__all__:
        assert name == "__version__" or name in "".join(text.values()), name
    listed = {
        "codecs": fedcomp.available_codecs(),
        "memories": fedcomp.available_memories(),
        "strategies": fedcomp.available_strategies(),
    }
    for page, known in listed.items():
        for name, cls in known.items():
            assert f'id="{name}"' in text[page], name
            assert cls.__module__ in text[page], name
    for field in fedcomp.RunConfig.__dataclass_fields__:
        assert f"<code>--{field.replace('_', '-')}</code>" in text["options"], field


def test_the_figures_page_names_every_benchmark():
    page = (DOCS / "figures.md").read_text(encoding="utf-8")
    # Modules that are parts of other benchmarks.
    parts = {
        "flower_fedavg_app",
        "rival_flower_ray",
        "rival_models",
        "rival_pfl",
        "rival_tasks",
        "timing",
    }
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - parts == set(
        re.findall(r"benchmarks/(\w+)\.py", page)
    )


def test_the_table_of_codecs_to_choose_from_has_rows_of_the_benchmark():
    page = (DOCS / "how-to" / "choose-a-codec.md").read_text(encoding="utf-8")
    tables = [
        re.findall(r"^\| `([^`]+)`.*×.*%.*\|$", part, re.MULTILINE)
        for part in page.split("## Downlink")
    ]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import choosing
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    for shown, measured in zip(tables, (choosing.UPLINKS, choosing.DOWNLINKS), strict=True):
        specs = iter([row.codec for row in measured])
        assert shown and all(row in specs for row in shown)  # in the order of the benchmark
    rows = tables[0] + tables[1]
    named = {part.partition(":")[0].partition("@")[0] for row in rows for part in row.split("+")}
    assert named <= set(fedcomp.available_codecs())


# The frame format.


X = torch.tensor([1.0, -3.0, 0.5, 0.0, 2.0, -0.25, 0.0, -4.0])
LAYOUT = Layout.from_shapes({"w": (3, 2), "b": (2,)})
FORMAT = (DOCS / "reference" / "frame-format.md").read_text(encoding="utf-8")
FRAMES = {
    text.splitlines()[0]: bytes.fromhex(
        "".join(re.match(r"(?:[0-9a-f]{2}(?: |$))*", line)[0] for line in text.splitlines()[1:])
    )
    for text in re.findall(r"^```hex\n(.*?)^```", FORMAT, re.DOTALL | re.MULTILINE)
}


@for_each("spec", FRAMES)
def test_frames_in_the_page_are_those_that_the_code_encodes(spec):
    if spec == "overwrite":
        assert FRAMES[spec] == overwrite.encode(X, np.array([1, 4, 7]))
        return
    if spec == "decay":
        assert FRAMES[spec] == wrap_decay(0.75, codec("efsign").encode(X), 8)
        return
    c = codec(spec)
    made = c.encode(X, seed=7, layout=LAYOUT)
    if c.portable:
        assert FRAMES[spec].hex(" ") == made.hex(" ")
    there, here = (c.decode(data, numel=8, layout=LAYOUT) for data in (FRAMES[spec], made))
    assert len(FRAMES[spec]) == len(made) and torch.allclose(there, here, atol=1e-6)


def test_the_page_lists_the_ids_of_codecs():
    cells = dict((name, int(number)) for number, name in re.findall(r"\| (\d+) \| `(\w+)`", FORMAT))
    ids = {name: cls.id for name, cls in built_in_codecs().items()}
    assert cells == ids, "the table in docs/reference/frame-format.md has other ids"


def test_a_decoder_written_from_the_page_decodes_a_frame():
    """Decodes a frame of stc by the description of the page only."""
    import zlib

    numel, data = 1000, codec("stc:density=1/50").encode(vectors(1000)["normal"])
    assert data[:5] == b"fc\x01\x04\x00"
    assert int.from_bytes(data[5:9], "little") == zlib.crc32(
        data[9:], zlib.crc32(numel.to_bytes(8, "little"), zlib.crc32(data[:5]))
    )
    count, form, mu = data[9], data[10], np.frombuffer(data[11:15], "<f4")[0]
    signs = np.unpackbits(np.frombuffer(data[15 : 15 + (count + 7) // 8], np.uint8))[:count]
    bits = "".join(f"{byte:08b}" for byte in data[15 + (count + 7) // 8 :])
    assert count == 20 and form <= 40
    gaps, at = [], 0
    for _ in range(count):
        stop = bits.index("1", at)
        gaps.append(stop - at << form)
        at = stop + 1
    gaps = [
        gap + int(bits[at + i * form : at + (i + 1) * form] or "0", 2) + 1
        for i, gap in enumerate(gaps)
    ]
    decoded = np.zeros(numel, np.float32)
    decoded[np.cumsum(gaps) - 1] = np.where(signs, mu, -mu)
    assert np.array_equal(decoded, codec("stc").decode(data, numel=numel).numpy())


def test_messages_are_laid_out_as_the_page_says():
    told = Assignment(
        3, "train", 1, "frames", "a", "b", "c", [b"12", b"345"], "t", [b"name", b"value"], 0.5
    )
    for message in (
        told,
        Report(3, "train", 1, "update", "b", "c", b"frame", "t", 20, 0.5, "", ""),
    ):
        data = message.pack()
        head = json.loads(data[4 : 4 + int.from_bytes(data[:4], "little")])
        values = [getattr(message, name) for name in message.__dataclass_fields__]
        lengths = [
            len(v)
            if isinstance(v, bytes)
            else [len(part) for part in v]
            if isinstance(v, list)
            else v
            for v in values
        ]
        assert head == [type(message).__name__, *lengths]
        blobs = b"".join(
            v if isinstance(v, bytes) else b"".join(v)
            for v in values
            if isinstance(v, bytes | list)
        )
        assert data.endswith(blobs) and len(data) == 4 + int.from_bytes(data[:4], "little") + len(
            blobs
        )
        assert type(message).unpack(data) == message


# Code and commands for beginners.


def python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```",
        (DOCS / page).read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )


@pytest.fixture(scope="module")
def block_max(tmp_path_factory) -> type[Codec]:
    """Return the codec that the page defines, imported like a file of fedcomp/codecs."""
    path = tmp_path_factory.mktemp("codecs") / "blockmax.py"
    path.write_text(python_blocks("how-to/write-a-codec.md")[0], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("fedcomp.codecs.blockmax", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up types there
    try:
        spec.loader.exec_module(module)
        yield module.BlockMax
    finally:
        del sys.modules[spec.name]


def test_the_id_of_the_new_codec_is_free(block_max):
    taken = {cls.id: name for name, cls in fedcomp.available_codecs().items()}
    assert taken.get(block_max.id, "blockmax") == "blockmax"


@for_each("size", [1, 64, 256])
@for_each("numel", [0, 1, 7, 401])
def test_the_new_codec_has_the_properties_of_codecs(block_max, size, numel):
    c, layout = block_max(size), Layout.from_shapes({"w": (numel,)})
    for name, x in vectors(numel).items():
        data = c.encode(x, seed=3, layout=layout)
        assert data == c.encode(x.clone(), seed=3, layout=layout) and len(data) <= longest_frame(
            c, layout
        )
        assert c.encode_batch(torch.stack([x, x]), [3, 3], layout=layout) == [data, data]
        y, into = block_max().decode(data, numel=numel), torch.ones(numel)
        lost, whole = (v.double().square().sum() for v in (x - y, x))
        assert y.isfinite().all() and lost <= (1 + 1e-12 - c.contraction(numel)) * whole, name
        c.accumulate(data, into, 0.5)
        assert torch.equal(into, torch.ones(numel) + np.float32(0.5) * y)
        for other in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1])):
            with pytest.raises(FrameError):
                c.decode(other, numel=numel)
    with pytest.raises(fedcomp.UserError, match="give a number from 1 to 256"):
        block_max(257)


def test_the_new_codec_passes_the_test_in_the_page(block_max):
    names: dict = {}
    exec(python_blocks("how-to/write-a-codec.md")[1], names)
    names["codec"] = lambda spec: block_max(int(spec.partition("=")[2]))
    names["test_the_largest_of_each_block_is_sent"]()


def test_the_code_in_the_page_is_formatted():
    files = ("fedcomp/codecs/blockmax.py", "tests/codecs/test_blockmax.py")
    for file, code in zip(files, python_blocks("how-to/write-a-codec.md"), strict=True):
        for command in (("check",), ("format", "--diff")):
            words = [sys.executable, "-m", "ruff", *command, "--stdin-filename", file, "-"]
            done = subprocess.run(words, cwd=ROOT, input=code, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_tasks_in_the_tutorials_are_valid(tmp_path, monkeypatch):
    (waves,) = python_blocks("tutorials/your-model.md")
    (tmp_path / "waves.py").write_text(waves, encoding="utf-8")
    assert check(load(f"{tmp_path}/waves.py:task"), 20).numel == 64 * 32 + 32 + 2 * 32 + 2
    (tmp_path / "broken.py").write_text(
        waves.replace("torch.randint(2,", "torch.randint(3,"), encoding="utf-8"
    )
    page = (DOCS / "tutorials" / "your-model.md").read_text(encoding="utf-8")
    with pytest.raises(TaskError) as caught:
        check(load(f"{tmp_path}/broken.py:task"), 20)
    assert f"fedcomp: {caught.value}\n" in page
    spirals, example_data = python_blocks("tutorials/three-devices.md")
    (tmp_path / "spirals.py").write_text(spirals, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(example_data, {})
    (tmp_path / "device0" / "data" / "train.csv").rename("server/data/train.csv")
    checked = check(load("spirals.py:task", Path("server/data")), 4)
    assert checked.numel == 3 * 32 + 33 * 32 + 33 * 3


@pytest.mark.slow
def test_the_python_of_the_readme_prints_what_the_readme_shows(tmp_path, monkeypatch, capsys):
    """Compares the output without its numbers, whose last digits depend on the machine."""
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program, shown = re.search(
        r"```python\n(.*?)```\n\n```output\n(.*?)```", readme, re.DOTALL
    ).groups()
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.sub(r"[\d.,]+", "#", printed) == re.sub(r"[\d.,]+", "#", shown)


@pytest.mark.slow
def test_the_commands_of_the_readme_run_in_the_order_printed(tmp_path, monkeypatch):
    """Uses fewer clients and rounds. `reproduce` only lists, and comparisons are dry runs."""
    monkeypatch.chdir(tmp_path)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## From the command line\n")[2].partition("On real devices")[0]
    lines = re.findall(r"^    (fedcomp .*)$", section, re.MULTILINE)
    commands = [part for line in lines for part in line.partition("#")[0].split("&&")]
    assert len(commands) > 6
    for command in commands:
        short = command.replace("--clients 200", "").replace("--rounds 100", "--rounds 3")
        _, name, *words = shlex.split(short)
        if name == "sim":
            words += (
                ["--plain"] if "--resume" in words else ["--plain", "--rounds=2", "--clients=5"]
            )
            words += ["--dry-run"] if words.count("--uplink") > 1 else []
        elif name == "reproduce":
            words = []
        result = CliRunner().invoke(app, [name, *words])
        assert result.exit_code == 0, (command, result.output)
