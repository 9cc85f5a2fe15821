"""What the documents name exists: files, options, targets, and Python code that at least compiles and imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dlrover.cli.options.table import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
KNOWN_OPTIONS = {"--help", "--help-all", "--check-env"} | {name for option in OPTIONS for name in option.names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page):
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    named = re.findall(r"`((?:dlrover|tests|benchmarks|examples|docs)/[\w./-]+\.(?:py|md))`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_of_dlrover_run_exist(page):
    for line in re.findall(r"dlrover-run[^\n`|]*", page.read_text()):
        for option in re.findall(r"(?<![\w-])--[a-z][a-z_-]+", line.split(" train.py")[0].split(".py ")[0]):
            assert option in KNOWN_OPTIONS, f"{option} in: {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert named <= targets


def test_every_option_of_dlrover_run_is_described():
    page = (ROOT / "docs/reference/dlrover-run.md").read_text()
    assert [option.names for option in OPTIONS if not any(f"`{name}`" in page for name in option.names)] == []


def test_every_command_of_dlrover_is_described():
    from dlrover.cli.main import app

    text = "".join(page.read_text() for page in PAGES)
    commands = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]
    missing = [name for name in commands if not re.search(rf"dlrover (?:[a-z]+\|)*{name}\b", text)]
    assert missing == []


def test_what_is_too_slow_for_every_change_is_explained():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    slow = [
        name for name in targets if name.startswith("bench") or name in ("chaos", "simulate", "false-alarms", "mutate")
    ]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(slow) >= 5
    assert [name for name in slow if f"`make {name}`" not in page] == []


def test_the_docs_have_four_folders_and_an_index_of_all_pages():
    docs = ROOT / "docs"
    assert {path.parent.name for path in docs.glob("*/*.md")} == {"tutorials", "how-to", "reference", "explanation"}
    index = (docs / "index.md").read_text()
    assert [str(page) for page in docs.glob("*/*.md") if f"({page.relative_to(docs)})" not in index] == []
    assert "(docs/index.md)" in (ROOT / "README.md").read_text()
