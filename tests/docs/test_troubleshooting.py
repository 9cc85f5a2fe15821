"""Every text that the page of symptoms quotes is one that the code can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/troubleshooting.md").read_text()
GAP = "…"


def texts(source: str) -> Iterator[str]:
    """All strings of a module, with a gap for each value."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.JoinedStr(values=values):
                yield "".join(each.value if isinstance(each, ast.Constant) else GAP for each in values)
            case ast.Constant(value=str(text)):
                yield re.sub(r"%[-\d.]*[a-z]", GAP, text)


def can_say(quoted: str, text: str) -> bool:
    """Whether the parts of the quotation between the gaps come in the text, in their order."""
    place = 0
    for part in filter(None, (each.strip() for each in quoted.split(GAP))):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_every_quoted_message_exists() -> None:
    quoted = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
    assert len(quoted) > 30
    # A message that another text is put into, and one that is made of an exit status, are two strings.
    said = [
        text for path in sorted((ROOT / "dlrover").rglob("*.py")) for text in texts(path.read_text()) if len(text) > 6
    ]
    assert [each for each in quoted if not any(can_say(each, text) for text in said)] == []


def test_every_symptom_says_what_to_do() -> None:
    for entry in PAGE.split("\n### ")[1:]:
        title, _, text = entry.partition("\n")
        text = text.partition("\n## ")[0].strip()
        assert len(re.findall(r"[.:](?=\s|$)", text)) >= 1, title
        sentences = re.split(r"(?<=[.?])\s+", " ".join(text.split()))
        assert [each for each in sentences if len(each.split()) > 30] == [], title


def test_a_gap_stands_for_any_value_and_the_order_counts() -> None:
    said = next(texts("f'step {step} of {total} is lost'"))
    assert can_say("step … is lost", said)
    assert not can_say("is lost … step", said)
    assert not can_say("step … is found", said)
