"""Each rule of the lint for texts finds what breaks it, and leaves the rest alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from tools import plain_english
from tools.plain_english import Finding, of_document, of_source, wrap

Rules = Callable[..., list[tuple[int, str]]]
LONG = "The master waits " + "for one more node " * 8 + "now."
WIDE = "A word " * 20 + "end.\n"


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    """What is wrong with a source or a document, as pairs of line and rule."""

    def judge(text: str, name: str = "page.md") -> list[tuple[int, str]]:
        path = tmp_path / name
        path.write_text(dedent(text))
        found: list[Finding] = list(of_source(path) if name.endswith(".py") else of_document(path))
        return [(each.line, each.rule) for each in found]

    return judge


def test_a_docstring_and_a_text_name_the_actor(rules: Rules) -> None:
    text = '''
        """Nobody knows."""
        # somebody may stand in a comment
        def f(who: str) -> None:
            raise ValueError(f"{who} was told by somebody else")
    '''
    assert rules(text, "module.py") == [(2, '"Nobody" names no actor'), (5, '"somebody" names no actor')]


def test_an_error_says_the_rule(rules: Rules) -> None:
    assert rules('raise ValueError(f"A size of {size} cannot be.")', "module.py") == [
        (1, '"cannot be." says neither the rule nor the value')
    ]
    assert rules('raise ValueError("The file cannot be read.")', "module.py") == []


def test_a_sentence_that_is_shown_has_thirty_words_at_most(rules: Rules) -> None:
    found = "a sentence of more than 30 words"
    assert rules(f'text = "{LONG}"', "module.py") == [(1, found)]
    assert rules(f'def f():\n    """{LONG}"""\n', "module.py") == [], "docstrings are not counted"
    assert rules(wrap(LONG)) == [(1, found)]
    assert rules(wrap(LONG.replace("node for one", "node. For one", 1))) == [], "two sentences"
    assert rules(wrap("One (" + "and so on " * 15 + ") and two.\n")) == [], "what stands in parentheses is not counted"


def test_the_parts_of_a_formatted_text_are_one_sentence(rules: Rules) -> None:
    half = "word " * 16
    assert rules(f'text = f"{half}{{x}} {half}"', "module.py") == [(1, "a sentence of more than 30 words")]
    assert rules(f'text = f"{half}end.{{x}} {half}"', "module.py") == [], "a sentence may end before a value"


def test_lines_of_documents_are_measured_but_tables_code_and_headings_are_not(rules: Rules) -> None:
    found = "a line of more than 120 characters"
    assert rules(WIDE.replace("A word A", "A word. A")) == [(1, found)]
    for line in (f"| {WIDE.strip()} |\n", f"# {WIDE}", f"```text\n{WIDE}```\n", f"Text.\n\n    {WIDE}"):
        assert rules(line) == [], line


def test_generated_pages_are_judged_where_they_are_made(rules: Rules) -> None:
    assert rules("`make reference` writes this page.\n\nNobody reads it.\n") == []
    assert rules("Nobody reads it.\n") == [(1, '"Nobody" names no actor')]
    assert rules("The user `nobody` exists.\n") == [], "a name in backticks"


def test_wrapping_keeps_every_word_and_touches_what_is_too_long_only() -> None:
    text = (
        "# " + WIDE + "\nshort\nlines stay\n\n"
        "* " + WIDE + "  and more\n"
        "* [a link that stays whole](page.md) " + WIDE + "\n"
        "| " + WIDE.strip() + " |\n\n"
        "```text\n" + WIDE + "```\n"
    )
    wrapped = wrap(text)
    assert wrapped.split() == text.split()
    assert "short\nlines stay\n" in wrapped
    assert "[a link that stays whole](page.md)" in wrapped
    assert wrap(wrapped) == wrapped
    outside = wrapped.replace("# " + WIDE, "").replace("| " + WIDE.strip() + " |", "").replace(WIDE, "")
    assert max(map(len, outside.splitlines())) <= plain_english.LINE_LENGTH


def test_a_wrapped_line_never_begins_a_list_or_a_heading() -> None:
    words = "x" * 60 + " " + "y" * 57 + " - " + "z" * 60 + " 1. " + "w" * 60
    assert not any(line.startswith(("- ", "1. ")) for line in wrap(words).splitlines())


def test_our_own_texts_are_plain() -> None:
    assert plain_english.findings() == []
