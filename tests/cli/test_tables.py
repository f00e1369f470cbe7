"""Tables on a terminal and in a pipe."""

import io
import sys

from fedcomp.cli.tables import print_table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROWS = [["one", "1", "the first of all numbers", "–"], ["two", "2", "the next", "Peano 1889"]]
HEAD = ["name", "value", "text", "source"]


def printed(monkeypatch, stream: io.StringIO) -> str:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")  # a terminal without colours
    monkeypatch.setattr(sys, "stdout", stream)
    texts = {"title": "a title", "legend": "a legend"}
    print_table(HEAD, ROWS, {"name"}, **texts, below=("text", "source"))
    return stream.getvalue()


def test_a_terminal_shows_long_columns_below_the_first_cell(monkeypatch):
    lines = [line.split() for line in printed(monkeypatch, Terminal()).splitlines()]
    assert lines == [
        ["a", "title"],
        ["name", "value"],
        ["one", "1"],
        "the first of all numbers".split(),
        ["two", "2"],
        "the next; Peano 1889".split(),
        ["a", "legend"],
    ]


def test_a_pipe_gets_lines_with_tabs_and_standard_error_the_legend(monkeypatch, capsys):
    lines = printed(monkeypatch, io.StringIO()).splitlines()
    assert [line.split("\t") for line in lines] == [HEAD, *ROWS]
    assert capsys.readouterr().err == "a title\na legend\n"
