"""The checks of scripts/release.py. test_package.py tests building and installing the wheel."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

import fedcomp

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tmp_path) -> Path:
    def git(*words: str) -> None:
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "--message", "one")
    git("tag", "v0.1.0")
    return tmp_path


def test_the_version_is_that_of_the_package(release):
    source = (ROOT / "fedcomp" / "__init__.py").read_text(encoding="utf-8")
    assert release.version(source) == fedcomp.__version__
    with pytest.raises(ValueError, match="has no version; add a line"):
        release.version('__version__ = "0.2.dev0"\n')


@pytest.mark.parametrize("heading", ["0.2.0 - 2026-11-30", "[0.2.0] - 2026-11-30"])
def test_a_changelog_with_the_version_its_date_and_entries_is_accepted(release, heading):
    release.check_changelog(f"# Changelog\n\n## {heading}\n\n### Added\n\n- This.\n", "0.2.0")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "## Unreleased\n\n- This.\n\n## 0.2.0 - 2026-11-30\n\n- That.\n",
            "newest heading is 'Unreleased'",
        ),
        ("## 0.2.0\n\n- This.\n", "newest heading is '0.2.0'"),
        ("## 0.2.01 - 2026-11-30\n\n- This.\n", "newest heading is '0.2.01"),
        ("## 0.2.0 - 2026-11-30\n\n## 0.1.0 - 2026-11-01\n\n- That.\n", "has no entries"),
        ("No headings.\n", "newest heading is ''"),
    ],
)
def test_a_changelog_without_this_version_date_or_entries_is_refused(release, text, why):
    with pytest.raises(ValueError, match=why):
        release.check_changelog(f"# Changelog\n\n{text}", "0.2.0")


def test_a_clean_tree_without_the_tag_is_accepted(release, repository):
    release.check_tree(repository, "v0.2.0")


def test_an_existing_tag_is_refused(release, repository):
    with pytest.raises(ValueError, match="v0.1.0 exists"):
        release.check_tree(repository, "v0.1.0")


@pytest.mark.parametrize("name", ["file", "new"])
def test_uncommitted_changes_are_refused(release, repository, name):
    (repository / name).write_text("two\n")
    with pytest.raises(ValueError, match=name):
        release.check_tree(repository, "v0.2.0")
