"""What the documentation site makes of the pages when it is built (mkdocs.yml): what follows from the code, and files of deploy/."""

import dataclasses
import inspect
import re
from pathlib import Path

from griffe import Docstring, Extension
from mkdocs.structure.files import File

from fedcomp import available_codecs, available_memories, available_strategies
from fedcomp.config import RunConfig, flag
from fedcomp.messages import Assignment, Report

ROOT = Path(__file__).parents[1]
DEPLOY = re.compile(r"\]\(\.\./(deploy/[\w.-]+)\)")  # a link that leads out of docs/
COMMENT = re.compile(r"\s{2}# (.+)$")
FIELD = re.compile(r"^    (\w+): [^#\n]*?(?:  # (.*))?$", re.MULTILINE)


def on_files(files, config):
    for name in DEPLOY.findall("".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=ROOT / name))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = DEPLOY.sub(r"](\1)", markdown)
    for mark, made in {"options": options, "codecs": codecs, "memories": memories, "strategies": strategies, "messages": messages}.items():
        if (place := f"<!-- {mark} -->") in markdown:
            markdown = markdown.replace(place, made())
    return markdown


def options() -> str:
    """A table of every option that `fedcomp sim` and `fedcomp server start` share."""
    rows = ["| option | default | what it does |", "|---|---|---|"]
    for f in dataclasses.fields(RunConfig):
        default = {True: "on", False: "off", None: "–"}.get(f.default if f.default is None or f.type is bool else "", f"`{f.default}`")
        choices = f.metadata.get("choices", ())
        text = f.metadata["help"] + "".join(f"{', ' if i else '; one of '}`{choice}`" for i, choice in enumerate(choices))
        rows.append(f"| `{flag(f.name)}` | {default} | {text} |")
    return "\n".join(rows)


def codecs() -> str:
    return "".join(_entry(name, cls, cls) for name, cls in available_codecs().items())


def memories() -> str:
    return "".join(_entry(name, cls, cls.Options) for name, cls in available_memories().items())


def strategies() -> str:
    return "".join(_entry(name, cls, cls.Options) for name, cls in available_strategies().items())


def messages() -> str:
    """What a server and a client say, field by field."""
    tables = []
    for cls in (Assignment, Report):
        comments = {name: said for name, said in FIELD.findall(inspect.getsource(cls))}
        rows = [f"| `{f.name}` | {getattr(f.type, '__name__', f.type) if f.type in (str, int, float, bytes) else 'list of bytes'} | "
                f"{comments.get(f.name, '').strip()} |" for f in dataclasses.fields(cls)]  # fmt: skip
        way = "server to client" if cls is Assignment else "client to server"
        tables.append("\n".join([f"### {cls.__name__}, {way}", "", "| field | type | what it is |", "|---|---|---|", *rows]))
    return "\n\n".join(tables)


def _entry(name: str, cls: type, options: type) -> str:
    """A heading, what the module says, the class, and the options that a spec string may give."""
    fields = [f.name for f in dataclasses.fields(options) if f.init]
    shown = f"::: {options.__module__}.{options.__qualname__}\n    options: {{show_root_heading: false, members: [{', '.join(fields)}]}}\n"
    module = f"::: {cls.__module__}\n    options: {{show_root_heading: false, members: false}}\n"
    return f"\n### `{name}`\n\n{module}\n" + (f"Options:\n\n{shown}" if fields else "")


class Comments(Extension):
    """A field's trailing comment, which says what it does, is its docstring."""

    def on_attribute_instance(self, *, attr, **told):
        if attr.docstring is None and attr.lineno and attr.filepath:
            found = COMMENT.search(attr.lines_collection[attr.filepath][attr.endlineno - 1])
            if found:
                attr.docstring = Docstring(found[1], lineno=attr.lineno, parent=attr)
