"""
News fragments become a section of the changelog.

    python -m tools.changelog 1.0.0    # news/*.md -> CHANGELOG.md, and the fragments are removed

A fragment is `news/SUBJECT.KIND.md` with a sentence or two for users. Two changes never edit the same lines that way, and a release needs no memory.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = {"added": "Added", "changed": "Changed", "fixed": "Fixed", "removed": "Removed"}
MARK = "<!-- releases -->\n"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*\.(\w+)\.md")


def fragments(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.md") if path.name != "README.md")


def problems(folder: Path) -> list[str]:
    """What is wrong with the fragments, a sentence each."""
    found = []
    for path in fragments(folder):
        name = _NAME.fullmatch(path.name)
        if name is None or name[1] not in KINDS:
            found.append(f"{path.name}: name it SUBJECT.KIND.md with one of the kinds {', '.join(KINDS)}.")
        if not path.read_text(encoding="utf-8").strip():
            found.append(f"{path.name}: it holds no text.")
    return found


def section(version: str, date: str, given: Sequence[Path]) -> str:
    """The part of the changelog about one version."""
    text = f"\n## {version} ({date})\n"
    for kind, title in KINDS.items():
        lines = [
            " ".join(path.read_text(encoding="utf-8").split()) for path in given if path.name.endswith(f".{kind}.md")
        ]
        if lines:
            text += f"\n### {title}\n\n" + "".join(f"* {line}\n" for line in lines)
    return text


def release(root: Path, version: str, date: str) -> None:
    """Write the section on top of the older ones, and remove its fragments. Raises `SystemExit` with a sentence."""
    folder, changelog = root / "news", root / "CHANGELOG.md"
    if wrong := problems(folder):
        raise SystemExit("\n".join(wrong))
    given = fragments(folder)
    if not given:
        raise SystemExit("news/ has no fragments: there is nothing to release.")
    old = changelog.read_text(encoding="utf-8")
    if f"\n## {version} " in old:
        raise SystemExit(f"CHANGELOG.md has a section of version {version} already.")
    before, mark, after = old.partition(MARK)
    if not mark:
        raise SystemExit(f"CHANGELOG.md has no line {MARK.strip()}: put it above the newest version.")
    changelog.write_text(before + mark + section(version, date, given) + after, encoding="utf-8")
    for path in given:
        path.unlink()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tools.changelog VERSION")
    release(ROOT, sys.argv[1], time.strftime("%Y-%m-%d"))
