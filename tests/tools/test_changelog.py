"""Fragments become one section of the changelog, and nothing else does."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tools.changelog import MARK, ROOT, fragments, problems, release


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "news").mkdir()
    (tmp_path / "news" / "README.md").write_text("the rule\n")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{MARK}\n## 1.0.0 (2026-01-01)\n\n### Fixed\n\n* Old.\n")
    return tmp_path


def test_the_fragments_of_this_project_can_be_released() -> None:
    assert problems(ROOT / "news") == []
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert MARK in changelog
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert fragments(ROOT / "news") or f"\n## {version} " in changelog, "what changed since the newest release?"


def test_a_release_gathers_fragments_by_kind_above_the_older_versions(root: Path) -> None:
    (root / "news" / "b.fixed.md").write_text("A leak\nis gone.\n")
    (root / "news" / "a.added.md").write_text("A door.\n")
    release(root, "1.1.0", "2026-02-02")
    assert (root / "CHANGELOG.md").read_text() == (
        f"# Changelog\n\n{MARK}\n## 1.1.0 (2026-02-02)\n\n### Added\n\n* A door.\n\n### Fixed\n\n* A leak is gone.\n"
        "\n## 1.0.0 (2026-01-01)\n\n### Fixed\n\n* Old.\n"
    )
    assert [path.name for path in (root / "news").iterdir()] == ["README.md"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.mended.md", "x", "one of the kinds added"),
        ("A b.added.md", "x", "SUBJECT.KIND.md"),
        ("a.added.md", " \n", "holds no text"),
    ],
)
def test_a_fragment_that_breaks_the_rule_stops_the_release(root: Path, name: str, text: str, said: str) -> None:
    (root / "news" / name).write_text(text)
    with pytest.raises(SystemExit, match=said):
        release(root, "1.1.0", "2026-02-02")
    assert (root / "news" / name).exists()
    assert "1.1.0" not in (root / "CHANGELOG.md").read_text()


def test_a_version_is_released_once_and_with_news(root: Path) -> None:
    with pytest.raises(SystemExit, match="no fragments"):
        release(root, "1.1.0", "2026-02-02")
    (root / "news" / "a.added.md").write_text("A door.\n")
    with pytest.raises(SystemExit, match=r"section of version 1\.0\.0"):
        release(root, "1.0.0", "2026-02-02")
