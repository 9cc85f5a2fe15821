"""
Whether the texts that people meet are plain: a part of `make lint`.

    python -m tools.plain_english           # exit code 1 and a list of what is not
    python -m tools.plain_english --wrap    # wrap paragraphs of the documents that have lines over 120 characters

Four rules, each of which a machine can judge:

* the actor is named: no "nobody", "somebody", "whoever", "anybody" and their like, in texts, docstrings and documents;
* an error says the rule and the value, and never "cannot be.";
* a sentence of a text that a program shows has at most 30 words, and so has one of a document. What stands in parentheses is
  not counted;
* a line of a document has at most 120 characters. Tables, code and generated pages are not wrapped.

Comments are not looked at, nor are names of the original's that scripts have to find.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_WORDS = 30
LINE_LENGTH = 120
PRONOUNS = re.compile(
    r"\b(?:no ?body|some ?body|any ?body|every ?body|no one|someone|anyone|everyone|whoever|whomever)\b", re.IGNORECASE
)
CANNOT_BE = re.compile(r"\bcannot be\.(?=\s|$)")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/**/*.md", "news/*.md")
GENERATED = "writes this page"
"""Pages that say so are made from the code: what they hold is judged there."""
_QUOTED = re.compile(r"`[^`]*`")
_END = re.compile(r"(?<=[.!?])[)\"'*_]*\s+|\n\s*\n")
_ITEM = re.compile(r"^(\s*)(?:[-*+]|\d+[.)])\s+")
_ASIDE = re.compile(r"\([^()]*\)")
_ABBREVIATED = re.compile(r"\b(?:e\.g|i\.e|etc|vs|Fig|No)\.\s")


@dataclass(frozen=True)
class Finding:
    """One text that breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {textwrap.shorten(self.text, 160, placeholder=' ...')}"


def findings(root: Path = ROOT) -> list[Finding]:
    """All of a checkout, in the order of the files."""
    found = [each for path in sorted((root / "dlrover").rglob("*.py")) for each in of_source(path)]
    for pattern in DOCUMENTS:
        found += [each for path in sorted(root.glob(pattern)) for each in of_document(path)]
    return [Finding(each.path.relative_to(root), each.line, each.rule, each.text) for each in found]


def of_source(path: Path) -> Iterator[Finding]:
    """Docstrings name the actor; texts keep all rules."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for line, text, is_docstring in _texts_of(tree, alone):
        for rule in _broken_words(text):
            yield Finding(path, line, rule, text)
        if not is_docstring:
            for sentence in _long_sentences(re.split(r"\n", text)):
                yield Finding(path, line, f"a sentence of more than {MOST_WORDS} words", sentence)


def _texts_of(tree: ast.Module, alone: set[int]) -> Iterator[tuple[int, str, bool]]:
    """Constants, and the parts of each formatted text as one; a value that is put in counts as one word."""
    inside: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr():
                inside |= {id(part) for part in node.values}
                yield node.lineno, _joined(node.values), False
            case ast.Constant(value=str(text)) if id(node) not in inside:
                yield node.lineno, text, id(node) in alone


def _joined(parts: Iterable[ast.expr]) -> str:
    """A value that follows the end of a sentence may be the next one."""
    text = ""
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text += part.value
        else:
            text += " x" if text.endswith((".", "!", "?")) else "x"
    return text


def of_document(path: Path) -> Iterator[Finding]:
    """Prose; what stands in tables names its actors, too."""
    text = path.read_text(encoding="utf-8")
    if GENERATED in text[:600]:
        return
    for number, line, is_prose in _lines_of(text):
        for rule in _broken_words(_QUOTED.sub("x", line)):
            yield Finding(path, number, rule, line)
        if is_prose and len(line) > LINE_LENGTH and " " in _kept_whole(line).strip():
            yield Finding(path, number, f"a line of more than {LINE_LENGTH} characters", line)
    for number, paragraph in _paragraphs_of(text):
        for sentence in _long_sentences([_without_links(" ".join(paragraph))]):
            yield Finding(path, number, f"a sentence of more than {MOST_WORDS} words", sentence)


def _lines_of(text: str) -> Iterator[tuple[int, str, bool]]:
    """Without blocks of code; prose is what is neither a heading nor a part of a table."""
    fence = last = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark:
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        elif not fence and not (line.startswith("    ") and not last.strip()):
            yield number, line, not re.match(r"\s*(?:[|#<]|!\[|\[[^\]]+\]:)", line)
        last = "" if line.startswith("    ") and not last.strip() else line


def _paragraphs_of(text: str) -> Iterator[tuple[int, list[str]]]:
    """Lines that belong together: a paragraph, or one item of a list."""
    gathered: list[str] = []
    first = last = 0
    for number, line, is_prose in _lines_of(text):
        begins = not is_prose or not line.strip() or number != last + 1 or _ITEM.match(line)
        if begins and gathered:
            yield first, gathered
            gathered = []
        if is_prose and line.strip():
            first = first if gathered else number
            gathered.append(_ITEM.sub("", line).strip())
        last = number
    if gathered:
        yield first, gathered


def _without_links(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", _QUOTED.sub("x", text))


def _broken_words(text: str) -> Iterator[str]:
    for found in PRONOUNS.finditer(text):
        yield f'"{found[0]}" names no actor'
    if CANNOT_BE.search(text):
        yield '"cannot be." says neither the rule nor the value'


def _long_sentences(paragraphs: Iterable[str]) -> Iterator[str]:
    """A list of names is none: most words of a sentence begin small."""
    for paragraph in paragraphs:
        for sentence in _END.split(_ABBREVIATED.sub(" ", paragraph)):
            words = _ASIDE.sub("", sentence).split()
            if len(words) > MOST_WORDS and sum(word[0].islower() for word in words) > len(words) / 2:
                yield sentence.strip()


def wrap(text: str) -> str:
    """The same document; each paragraph that has a line too long is wrapped anew, and its words stay the same."""
    lines = text.splitlines()
    prose = {number: is_prose for number, _, is_prose in _lines_of(text)}
    written: list[str] = []
    block: list[str] = []

    def flush() -> None:
        if any(len(line) > LINE_LENGTH for line in block):
            item = _ITEM.match(block[0])
            first = item[0] if item else re.match(r"\s*", block[0])[0]  # type: ignore[index]
            words = " ".join([block[0][len(first) :], *(line.strip() for line in block[1:])])
            rest = " " * len(first)
            written.extend(_wrapped(words, first, rest))
        else:
            written.extend(block)
        block.clear()

    for number, line in enumerate(lines, 1):
        is_text = prose.get(number, False) and bool(line.strip())
        if not is_text or _ITEM.match(line) or line.endswith(("  ", "\\")) or line.lstrip().startswith((">", ":")):
            flush()
        if is_text and not line.lstrip().startswith((">", ":")):
            block.append(line)
        else:
            written.append(line)
    flush()
    return "\n".join(written) + "\n"


def _wrapped(words: str, first: str, rest: str) -> list[str]:
    """Code in backticks and links stay whole, and no line begins with what would be a list or a heading there."""
    wrapped = textwrap.wrap(
        re.sub(r" (?=(?:[-+*#>|]|\d+[.)])\s)", "\0", _kept_whole(words)),
        LINE_LENGTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in wrapped]


def _kept_whole(words: str) -> str:
    return re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda found: found[0].replace(" ", "\0"), words)


def wrap_documents(root: Path = ROOT) -> None:
    for pattern in DOCUMENTS:
        for path in sorted(root.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            if GENERATED not in text[:600] and (anew := wrap(text)) != text:
                path.write_text(anew, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.plain_english", description="Are the texts plain?")
    parser.add_argument("--wrap", action="store_true", help="wrap the long lines of documents first")
    if parser.parse_args().wrap:
        wrap_documents()
    found = findings()
    print("\n".join(map(str, found)) or "Texts, docstrings and documents are plain.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
