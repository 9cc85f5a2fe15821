"""Deletion strategies of the user's own: asked in a child process, and never believed about the last good checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.class_meta import ClassMeta, describe
from dlrover.snapshot.storage.commit import committed_checkpoints
from dlrover.snapshot.storage.retention import KeepInterval, KeepLatest, apply_retention
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.snapshot.storage.user_deletion import (
    CheckpointDeletionStrategy,
    DeletionRule,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    UserDeletion,
    rule_for,
)
from tests.snapshot.storage.test_commit import attempt_at, save
from tests.snapshot.storage.user_classes import DeleteEverything, KeepEven, Raising


def committed(directory: Path) -> list[int]:
    return [each.manifest.step for each in committed_checkpoints(LocalStorage(), str(directory))]


def fill(directory: Path, *steps: int) -> LocalStorage:
    storage = LocalStorage()
    directory.mkdir(exist_ok=True)
    for step in steps:
        save(storage, attempt_at(step, f"a{step}", str(directory)))
    return storage


def test_strategies_become_the_rules_of_a_save_request(tmp_path):
    assert rule_for(None) == DeletionRule()
    assert rule_for(KeepLatest(3)) == rule_for(KeepLatestStepStrategy(3, "x")) == DeletionRule(keep_latest=3)
    assert rule_for(KeepInterval(4)) == rule_for(KeepStepIntervalStrategy(4, "x")) == DeletionRule(keep_interval=4)
    custom = rule_for(KeepEven(str(tmp_path))).custom
    assert custom is not None
    assert custom.kwargs == {"checkpoint_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="CheckpointDeletionStrategy"):
        rule_for("keep 3")


def test_a_users_strategy_decides_in_a_child_process(tmp_path):
    storage = fill(tmp_path / "c", 1, 2, 3, 4, 5)
    strategy = UserDeletion(describe(KeepEven(str(tmp_path / "c")), CheckpointDeletionStrategy), str(tmp_path / "c"))
    assert apply_retention(storage, str(tmp_path / "c"), strategy) == [1, 3]
    assert committed(tmp_path / "c") == [2, 4, 5]  # the newest is not even asked about


def test_a_users_strategy_gets_neither_the_newest_nor_what_is_not_ours(tmp_path, caplog):
    directory = tmp_path / "c"
    storage = fill(directory, 1, 2)
    (directory / "notes").mkdir()
    (tmp_path / "elsewhere" / "7").mkdir(parents=True)
    apply_retention(
        storage,
        str(directory),
        UserDeletion(describe(DeleteEverything(str(directory)), CheckpointDeletionStrategy), str(directory)),
    )
    assert committed(directory) == [2]
    assert (directory / "notes").is_dir()
    assert (tmp_path / "elsewhere" / "7").is_dir()
    assert "not a checkpoint of this job" in caplog.text


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        (describe(Raising(), CheckpointDeletionStrategy), "cannot decide"),
        (ClassMeta("subprocess", "Popen", {"args": ["false"]}), "subprocess.Popen is not a CheckpointDeletionStrategy"),
        (ClassMeta("no_such_module", "Thing"), "cannot be imported here"),
    ],
)
def test_a_strategy_that_fails_deletes_nothing_and_says_why(tmp_path, caplog, meta, said):
    storage = fill(tmp_path / "c", 1, 2, 3)
    assert apply_retention(storage, str(tmp_path / "c"), UserDeletion(meta, str(tmp_path / "c"))) == []
    assert committed(tmp_path / "c") == [1, 2, 3]
    assert said in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_directories_of_other_layouts_are_found_by_their_number(tmp_path):
    strategy = UserDeletion(
        describe(KeepEven(str(tmp_path), pattern="iter_{:07d}"), CheckpointDeletionStrategy), str(tmp_path)
    )
    assert strategy.expendable([1, 2, 3, 4]) == [1, 3]


def test_a_strategy_beside_modules_that_have_the_names_of_standard_ones(tmp_path, monkeypatch, caplog):
    """What it imports from the working directory is found; what we import comes from elsewhere."""
    (tmp_path / "logging.py").write_text("raise SystemExit('the training script keeps its own module here')")
    (tmp_path / "even_steps.py").write_text("from tests.snapshot.storage.user_classes import KeepEven")
    monkeypatch.chdir(tmp_path)
    meta = ClassMeta("even_steps", "KeepEven", {"checkpoint_dir": str(tmp_path)})
    assert UserDeletion(meta, str(tmp_path)).expendable([1, 2, 3, 4]) == [1, 3], caplog.text
