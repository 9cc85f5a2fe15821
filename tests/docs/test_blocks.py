"""
Every block of code in the documents is checked: run, compiled, or compared with what exists. A program that the tests cannot have is in a list, with the
reason.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from dlrover.cli.help.tree import CommandEntry, all_commands
from dlrover.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
COMMANDS = {command.words: command for command in all_commands(app)}
OUTPUT = {"text", "mermaid"}
"""What a program shows, and pictures: nothing to run."""
NOT_OURS = {
    "kill": "the tutorial that has it runs it",
    "seq": "the tutorial that has it runs it",
    "curl": "needs a running job; tests/master/web asks the same questions",
    "kubectl": "needs a cluster; tests/kubernetes plays its part",
    "helm": "needs a cluster; tests/operator renders the chart",
    "docker": "needs a container runtime",
    "sed": "an edit of a file by its reader",
    "make-script": "stands for a program of the reader",
    "source": "set-up of a shell",
    "ray": "needs a cluster; `make test-ray` starts one",
}
"""First words of lines that no test runs from the page, and why."""
PLACE = re.compile(r"\b(?:[A-Z]{2,}|\.\.\.|…)")


class Block(NamedTuple):
    page: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    name = str(page.relative_to(ROOT))
    for language, text in re.findall(r"^ *```([^\n]*)\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield Block(name, language, textwrap.dedent(text))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def by_page(language: str) -> list[object]:
    pages: dict[str, list[Block]] = {}
    for block in BLOCKS:
        if block.language == language:
            pages.setdefault(block.page, []).append(block)
    return [pytest.param(found, id=page) for page, found in pages.items()]


def test_every_block_says_what_it_is() -> None:
    known = {"python", "bash", "json", "yaml", "toml"} | OUTPUT
    assert len(BLOCKS) > 100
    assert [(block.page, block.text[:60]) for block in BLOCKS if block.language not in known] == []


# Python.


@pytest.mark.parametrize("blocks", by_page("python"))
def test_python_compiles_its_imports_work_and_calls_of_ours_take_what_is_given(blocks: list[Block]) -> None:
    for block in blocks:
        tree = ast.parse(block.text)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names: dict[str, object] = {}
        exec(compile(ast.Module(imports, []), block.page, "exec"), names)
        assert list(wrong_calls(tree, names)) == []


def wrong_calls(tree: ast.Module, names: dict[str, object]) -> Iterator[str]:
    """Calls of functions and classes of ours, by their imported name, with arguments that they do not take."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _found(node.func, names)
        if called is None or not getattr(called, "__module__", "").startswith("dlrover"):
            continue
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            continue
        try:
            inspect.signature(called).bind(*node.args, **{str(each.arg): each.value for each in node.keywords})  # type: ignore[arg-type]
        except TypeError as error:
            if not any(isinstance(each, ast.Constant) and each.value is ... for each in node.args):
                yield f"{ast.unparse(node)}: {error}"


def _found(node: ast.expr, names: dict[str, object]) -> object | None:
    match node:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _found(value, names)
            if owner is None:
                return None
            if inspect.ismodule(owner) and owner.__name__.startswith("dlrover"):
                return getattr(owner, attribute)  # an AttributeError names what does not exist
            return getattr(owner, attribute, None) if inspect.isclass(owner) else None
    return None


def test_a_wrong_argument_and_a_wrong_name_are_noticed() -> None:
    import dlrover

    names: dict[str, object] = {"dlrover": dlrover}
    assert list(wrong_calls(ast.parse("dlrover.report(3, loss=1.0)"), names)) == []
    assert len(list(wrong_calls(ast.parse("dlrover.barrier(patience=1)"), names))) == 1
    with pytest.raises(AttributeError, match="sve"):
        list(wrong_calls(ast.parse("dlrover.sve(3)"), names))


# Commands.


def lines_of(text: str) -> Iterator[str]:
    """Commands of a block: without prompts and comments, continued lines in one."""
    for line in text.replace("\\\n", " ").splitlines():
        bare = line.strip().removeprefix("$ ")
        if bare and not bare.startswith("#"):
            yield from (part.strip() for part in re.split(r"\s&&\s|;\s|\s\|\s", re.sub(r"\s+#\s.*$", "", bare)))


@pytest.mark.parametrize("blocks", by_page("bash"))
def test_commands_have_the_options_that_are_shown(blocks: list[Block]) -> None:
    wrong = [problem for block in blocks for line in lines_of(block.text) if (problem := wrong_with(line))]
    assert wrong == []


def wrong_with(line: str) -> str:
    """Empty if the command of a line can be given like that, as far as words tell."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        return f"{line}: {error}"
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if not words:
        return ""
    first = words[0].rpartition("/")[2]
    if first in ("dlrover", "dlrover-run"):
        return _wrong_with_ours([first, *words[1:]], line)
    if first == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        return "" if set(words[1:2]) <= targets else f"{line}: no such target"
    if first in ("python", "python3", "pytest"):
        return _wrong_with_python(words, line)
    if first == "pip":
        extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
        named = {name for word in words for group in re.findall(r"\[([\w,-]+)\]", word) for name in group.split(",")}
        return "" if named <= extras | {"default"} else f"{line}: no extra {named - extras}"
    return "" if first in NOT_OURS else f"{line}: check {first}, or say in NOT_OURS why not"


def _wrong_with_ours(words: list[str], line: str) -> str:
    choices = [each.split("|") for each in words]
    path = [words[0]]
    while len(path) < len(words) and _command((*path, choices[len(path)][0])) is not None:
        path.append(choices[len(path)][0])
    command = _command(tuple(path))
    assert command is not None, "its first word is one of ours"
    missing = [name for name in choices[len(path) - 1] if _command((*path[:-1], name)) is None]
    if missing:
        return f"{line}: no command {missing}"
    if (
        command.commands
        and words[len(path) :][:1]
        and not words[len(path)].startswith("-")
        and not PLACE.match(words[len(path)])
    ):
        return f"{line}: no command {words[len(path)]}"
    known = _options(command)
    if path[-1] in ("local", "run", "submit", "dlrover-run"):
        known = known | _options(COMMANDS[("dlrover-run",)])  # options of the nodes follow behind `--`
    for word in words[len(path) :]:
        if word.endswith((".py", ".sh")) or word in ("...", "SCRIPT", "ARGS", "/dev/stdin", "-m"):
            break
        name = word.strip("[]").partition("=")[0].split("|")[0]
        if name.startswith("--") and name != "--" and name.replace("_", "-") not in known:
            return f"{line}: no option {name}"
    return ""


def _command(words: tuple[str, ...]) -> CommandEntry | None:
    return COMMANDS.get(words)


def _options(command: CommandEntry) -> set[str]:
    return {name.replace("_", "-") for option in command.options for name in option.names} | {"--help"}


def _wrong_with_python(words: list[str], line: str) -> str:
    named = [
        word for word in words[1:] if "/" in word and word.split(":")[0].endswith(".py") and not PLACE.search(word)
    ]
    missing = [word for word in named if not (ROOT / word.split(":")[0]).exists()]
    if "-m" in words and words[0] != "pytest":
        module = words[words.index("-m") + 1]
        place = ROOT / Path(*module.split("."))
        if module.startswith(("dlrover", "tests", "tools", "examples")) and not (
            place.with_suffix(".py").exists() or (place / "__init__.py").exists() or module.startswith("dlrover.python")
        ):
            missing.append(module)
    return f"{line}: {missing} does not exist" if missing else ""


@pytest.mark.parametrize(
    "line",
    [
        "dlrover-run --nproc 2 train.py",
        "dlrover scale JOB --wy",
        "dlrover chekpoint ls DIR",
        "dlrover job sumbit job.yaml",
        "make demo-nothing",
        "python benchmarks/nothing.py",
        "python -m dlrover.nothing",
        "pip install '.[nothing]'",
        "frobnicate now",
    ],
)
def test_a_line_that_cannot_work_is_noticed(line: str) -> None:
    assert wrong_with(line)


# Data.


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in ("json", "yaml", "toml")], ids=str)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        yaml = pytest.importorskip("yaml")
        assert list(yaml.safe_load_all(block.text))
