"""Fill in the parts of the documentation that follow from the code, and add the files of deploy/ that pages link to."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

from griffe import Docstring, Extension
from mkdocs.structure.files import File
from typer.main import get_command

from fedcomp import available_codecs, available_memories, available_strategies
from fedcomp.callbacks import ClientRecord, Rejection, RoundRecord, Summary
from fedcomp.cli.main import app
from fedcomp.config import RunConfig, flag
from fedcomp.messages import Assignment, Farewell, Invitation, Presence, Report
from fedcomp.sim.attacks import available_attacks

ROOT = Path(__file__).parents[1]
DEPLOY = re.compile(
    r"\]\(\.\./\.\./(deploy/[\w.-]+)\)"
)  # a link of a page in a folder of docs/ that leads out of docs/
# Note for readers of the Markdown files, which lack the generated parts. It is left out of the site.
CHECKOUT_NOTE = re.compile(r"^> This Markdown file lacks .*\n(?:> .*\n)*\n", re.MULTILINE)
BEHIND = re.compile(r"\s{2}# (.+)$")
ABOVE = re.compile(r"\s*# (.+)$")
WITH_OPTIONS_OF_RUNS = (
    ["sim"],
    ["bench", "sim"],
    ["server", "start"],
)  # commands that also take the options of a run


def on_files(files, config):
    for name in DEPLOY.findall(
        "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    ):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=ROOT / name))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = CHECKOUT_NOTE.sub("", DEPLOY.sub(r"](../\1)", markdown))
    for make in (options, commands, codecs, memories, strategies, attacks, messages, records):
        if (place := f"<!-- {make.__name__} -->") in markdown:
            markdown = markdown.replace(place, make())
    return markdown


def options() -> str:
    """Return a table of every option that `fedcomp sim` and `fedcomp server start` share."""
    rows = ["| option | default | effect |", "|---|---|---|"]
    for f in dataclasses.fields(RunConfig):
        default = {True: "on", False: "off", None: "–"}.get(
            f.default if f.default is None or f.type is bool else "", f"`{f.default}`"
        )
        choices = f.metadata.get("choices", ())
        text = f.metadata["help"]
        if choices:
            text += f" One of {', '.join(f'`{choice}`' for choice in choices)}."
        rows.append(f"| `{flag(f.name)}` | {default} | {text} |")
    return "\n".join(rows)


def codecs() -> str:
    return "".join(_entry(name, cls, cls) for name, cls in available_codecs().items())


def memories() -> str:
    return "".join(_entry(name, cls, cls.Options) for name, cls in available_memories().items())


def strategies() -> str:
    return "".join(_entry(name, cls, cls.Options) for name, cls in available_strategies().items())


def attacks() -> str:
    return "".join(_entry(name, cls, cls) for name, cls in available_attacks().items())


def commands() -> str:
    """Return a section for each command, with its options."""
    sections = []

    def describe(command, path):
        if not hasattr(command, "commands"):
            own = [p for p in command.params if "--help" not in p.opts]
            own = [
                p
                for p in own
                if p.name not in RunConfig.__dataclass_fields__
                or path[1:] not in WITH_OPTIONS_OF_RUNS
            ]
            rows = [f"| {', '.join(f'`{o}`' for o in p.opts) if p.param_type_name == 'option' else f'`{p.human_readable_name}`'} | "
                    f"{_cell(_help(command, p))} |" for p in own]  # fmt: skip
            text = [f"## {' '.join(path)}", (command.help or "").strip()]
            if path[1:] in WITH_OPTIONS_OF_RUNS:
                text.append("The command also takes the [options of a run](options.md).")
            if rows:
                text.append("\n".join(["| option | effect |", "|---|---|", *rows]))
            sections.append("\n\n".join(text))
        for name, below in getattr(command, "commands", {}).items():
            describe(below, [*path, name])

    for name, command in get_command(app).commands.items():
        describe(command, ["fedcomp", name])
    return "\n\n".join(sections)


def _help(command, parameter) -> str:
    """Return the help text of an option or argument. click 8.5 drops that of the arguments of typer 0.20."""
    default = inspect.signature(command.callback).parameters[parameter.name].default
    return getattr(parameter, "help", None) or getattr(default, "help", None) or ""


def messages() -> str:
    """Return a table of the fields of each message between server and client."""
    ways = {
        Invitation: "server to client",
        Presence: "client to server",
        Assignment: "server to client",
        Report: "client to server",
        Farewell: "server to client",
    }
    return "\n\n".join(f"### {cls.__name__}, {way}\n\n{_fields(cls)}" for cls, way in ways.items())


def records() -> str:
    """Return a table of the keys of each JSON object in the files of a run folder."""
    titles = {
        RoundRecord: "metrics.jsonl: one object per round",
        Rejection: "rejections in metrics.jsonl: one object per rejected client",
        ClientRecord: "by_client in metrics.jsonl: one object per client",
        Summary: "summary.json: one object",
    }
    return "\n\n".join(f"## {title}\n\n{_fields(cls)}" for cls, title in titles.items())


def _fields(cls: type) -> str:
    """Return a table of a dataclass: its fields, their types, and the comments behind or above them."""
    source = inspect.getsource(cls)
    lines = source.splitlines()
    comments = {
        node.target.id: _comment(lines, node.lineno, node.end_lineno)
        for node in ast.parse(source).body[0].body
        if isinstance(node, ast.AnnAssign)
    }
    rows = [
        f"| `{f.name}` | {_type(f.type)} | {_cell(comments.get(f.name, ''))} |"
        for f in dataclasses.fields(cls)
    ]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _comment(lines: list[str], first: int, last: int) -> str:
    """Return the comment behind the field in the lines `first` to `last`, counted from 1, or else the comment above it."""
    if behind := [found[1] for line in lines[first - 1 : last] if (found := BEHIND.search(line))]:
        return " ".join(behind)
    above: list[str] = []
    while first > 1 and (found := ABOVE.match(lines[first - 2])):
        above.insert(0, found[1])
        first -= 1
    return " ".join(above)


def _type(annotation: object) -> str:
    plain = {list[bytes]: "list of bytes", int: "int", float: "float", str: "text", bytes: "bytes"}
    if annotation in plain:
        return plain[annotation]
    text = str(annotation)
    nullable = " or null" if "None" in text else ""
    base = (
        "object"
        if "Mapping" in text
        else "list"
        if "Sequence" in text
        else "int"
        if "int" in text
        else "float"
        if "float" in text
        else "text"
    )
    return base + nullable


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _entry(name: str, cls: type, options: type) -> str:
    """Return a heading, the docstring of the module, and the options of the spec string."""
    fields = [f.name for f in dataclasses.fields(options) if f.init]
    shown = f"::: {options.__module__}.{options.__qualname__}\n    options: {{show_root_heading: false, show_root_toc_entry: false, members: [{', '.join(fields)}]}}\n"
    module = f"::: {cls.__module__}\n    options: {{show_root_heading: false, show_root_toc_entry: false, members: false}}\n"
    head = f"\n### `{name}`\n\nModule `{cls.__module__}`\n\n{module}\n"
    return head + (f"Options:\n\n{shown}" if fields else "")


class Comments(Extension):
    """Use the comment behind or above a field as its docstring."""

    def on_attribute_instance(self, *, attr, **told):
        if attr.docstring is None and attr.lineno and attr.filepath:
            lines = attr.lines_collection[attr.filepath]
            if comment := _comment(lines, attr.lineno, attr.endlineno):
                attr.docstring = Docstring(comment, lineno=attr.lineno, parent=attr)
