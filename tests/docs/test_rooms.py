"""A house in which a newcomer finds the way: few files to a folder, and one word for one thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.referees.recordings import PUBLIC, PUBLIC_ROOMS
from tools.measure_style import (
    Module,
    apply_one_failure,
    class_names_twice,
    cycles_of,
    files_in_folders,
    imports_of,
    modules_visited,
    read_package,
)

PACKAGE = Path(__file__).parents[2] / "dlrover"
MOST_FILES = 16
MOST_VOCABULARY = 20
"""Of `protocol/messages`, which is one vocabulary."""
MOST_SWITCHES = 25
"""Between modules of the core, for one report of a failure in a job of two nodes."""


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return read_package(PACKAGE)


def test_a_folder_has_few_files(modules: list[Module]) -> None:
    allowed = {"dlrover.protocol.messages": MOST_VOCABULARY}
    counts = files_in_folders(modules)
    assert {folder: count for folder, count in counts.items() if count > allowed.get(folder, MOST_FILES)} == {}


def test_a_class_name_means_one_thing(modules: list[Module]) -> None:
    assert class_names_twice(modules) == set()


def test_no_modules_import_each_other_in_a_circle(modules: list[Module]) -> None:
    """Nor for a type, nor within a function: whoever reads a module needs to read only what is below it."""
    assert cycles_of(imports_of(modules)) == []


def test_a_command_goes_through_few_modules() -> None:
    visited = modules_visited(apply_one_failure, prefix="dlrover.core.")
    assert visited[0] == "dlrover.core.job"
    assert len(visited) - 1 <= MOST_SWITCHES, visited


def test_only_paths_that_scripts_import_forward_to_another_module(modules: list[Module]) -> None:
    forwarding = {module.name for module in modules if is_forwarding(module.tree)}
    assert forwarding
    assert forwarding - set(PUBLIC) - set(PUBLIC_ROOMS) == set()


def is_forwarding(tree: ast.Module) -> bool:
    """Whether it does nothing but import, for those who import it."""
    own = [node for node in tree.body if not isinstance(node, ast.Expr)]
    imports = [node for node in own if isinstance(node, ast.Import | ast.ImportFrom)]
    listed = [node for node in own if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    takes = [node for node in imports if isinstance(node, ast.ImportFrom) and node.module != "__future__"]
    return bool(takes) and len(own) == len(imports) + len(listed)


def test_only_the_stand_in_for_a_master_takes_decisions_in_a_worker(modules: list[Module]) -> None:
    deciding = {
        module
        for module, targets in imports_of(modules).items()
        if module.startswith(("dlrover.agent.", "dlrover.trainer."))
        and any(target.startswith("dlrover.core.") for target in targets)
    }
    assert deciding == {"dlrover.trainer.stand_in"}
