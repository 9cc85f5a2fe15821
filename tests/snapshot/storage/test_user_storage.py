"""Storages of the user's: the interface, the two that come with it, and commits through one that promises very little."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import pytest

from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.snapshot.storage.class_meta import ClassMeta, build, describe
from dlrover.snapshot.storage.commit import Attempt, Tracker, commit, committed_checkpoints, find_damage, latest_step
from dlrover.snapshot.storage.storage import FsspecStorage, LocalStorage, Renaming, storage_for
from dlrover.snapshot.storage.user_deletion import CheckpointDeletionStrategy
from dlrover.snapshot.storage.user_storage import (
    CheckpointStorage,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
    PosixDiskStorage,
    PosixStorageWithDeletion,
    UserStorage,
    UserStorageFailed,
    get_checkpoint_storage,
    meta_for,
    storage_of,
)
from tests.snapshot.storage.test_commit import attempt_at, save, write_rank
from tests.snapshot.storage.user_classes import DrawerStorage, FailingStorage, KeepEven, TakingAnything

TRACKER = "dlrover_latest.txt"


def committed_with(storage: PosixStorageWithDeletion, directory: Path, step: int) -> None:
    """As the original's saver does it: files, the tracker, then the word to the storage."""
    (directory / str(step)).mkdir(parents=True)
    storage.write(str(step), directory / TRACKER)
    storage.commit(step, True)


def steps_in(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.iterdir() if path.is_dir())


@pytest.mark.parametrize(
    ("make", "steps", "left"),
    [
        (lambda path: KeepLatestStepStrategy(3, path), [1, 2, 3, 4], [2, 3, 4]),
        (lambda path: KeepLatestStepStrategy(0, path), [1, 2, 3], [3]),
        (lambda path: KeepStepIntervalStrategy(4, path), range(1, 9), [4, 8]),
        (lambda path: KeepStepIntervalStrategy(4, path), [2, 4, 6, 8, 10], [4, 8, 10]),
    ],
)
def test_the_built_in_strategies_leave_what_they_always_left(tmp_path, make, steps, left):
    storage = get_checkpoint_storage(make(str(tmp_path)))
    assert isinstance(storage, PosixStorageWithDeletion)
    for step in steps:
        committed_with(storage, tmp_path, step)
    assert steps_in(tmp_path) == left


def test_keeping_the_latest_goes_on_where_a_former_process_stopped(tmp_path):
    for step in (1, 2, 3):
        committed_with(get_checkpoint_storage(KeepLatestStepStrategy(2, str(tmp_path))), tmp_path, step)
    assert steps_in(tmp_path) == [2, 3]


def test_a_failed_commit_deletes_nothing(tmp_path):
    storage = get_checkpoint_storage(KeepLatestStepStrategy(1, str(tmp_path)))
    committed_with(storage, tmp_path, 1)
    (tmp_path / "2").mkdir()
    storage.write("2", tmp_path / TRACKER)
    storage.commit(2, False)
    assert steps_in(tmp_path) == [1, 2]


def test_the_posix_storage_does_what_its_interface_says(tmp_path):
    storage = PosixDiskStorage()
    with pytest.raises(FileNotFoundError):
        storage.write("text", tmp_path / "a" / "b.txt")
    storage.safe_makedirs(tmp_path / "a")
    storage.write("text", tmp_path / "a" / "b.txt")
    assert storage.read(tmp_path / "a" / "b.txt") == "text"
    storage.write(memoryview(b"\x00\xff"), str(tmp_path / "raw"))
    assert storage.read(tmp_path / "raw", "rb") == b"\x00\xff"
    assert storage.read(tmp_path / "none") == ""
    storage.write_state_dict(
        {"w": 1}, tmp_path / "deep" / "s.json", lambda state, path: Path(path).write_text(json.dumps(state))
    )
    assert storage.read_state_dict(tmp_path / "deep" / "s.json", lambda path: json.loads(Path(path).read_text())) == {
        "w": 1
    }
    assert storage.read_state_dict(tmp_path / "none", json.loads) == {}
    storage.write_state_dict({"w": 1}, tmp_path / "deep" / "nothing")
    assert storage.listdir(tmp_path / "deep") == ["s.json"]
    storage.safe_move(tmp_path / "raw", tmp_path / "moved")
    storage.safe_move(tmp_path / "a", tmp_path / "moved")  # the target exists: nothing happens
    assert storage.exists(tmp_path / "a")
    assert storage.exists(tmp_path / "moved")
    storage.safe_rmtree(tmp_path / "a")
    storage.safe_rmtree(tmp_path / "a")
    storage.safe_remove(tmp_path / "moved")
    storage.safe_remove(tmp_path / "moved")
    assert storage.listdir(tmp_path) == ["deep"]


def test_commits_work_on_a_storage_that_knows_neither_sizes_nor_renames(tmp_path):
    inner = DrawerStorage(str(tmp_path / "drawer"))
    storage = UserStorage(inner)
    assert not isinstance(storage, Renaming)
    for step in (3, 5):
        save(storage, attempt_at(step, "a", "/job"))
    assert latest_step(storage, "/job") == 5
    found = committed_checkpoints(storage, "/job")
    assert [each.manifest.step for each in found] == [3, 5]
    assert find_damage(storage, found[1]) == []
    inner._place("/job/5/sub/rank_1.pt").write_bytes(b"other")
    assert "its CRC is" in "".join(find_damage(storage, found[1])) or "instead of" in "".join(
        find_damage(storage, found[1])
    )


def test_a_missing_file_is_found_out_at_the_commit_even_without_sizes(tmp_path):
    storage = UserStorage(DrawerStorage(str(tmp_path / "drawer")))
    attempt = attempt_at(1, "a", "/job")
    for rank in (0, 1):
        write_rank(storage, attempt, rank)
    storage.remove_file("/job/1/sub/rank_1.pt")
    with pytest.raises(Exception, match=r"rank_1\.pt is missing"):
        commit(storage, attempt, (0, 1), [Tracker("latest", "1")])
    assert latest_step(storage, "/job") is None


def test_what_the_users_code_raises_is_told_as_the_storages_failure(tmp_path):
    with pytest.raises(
        UserStorageFailed, match="FailingStorage failed in write_state_dict: KeyError: 'no credentials'"
    ):
        UserStorage(FailingStorage()).write(str(tmp_path / "x"), [b"1"])


def test_a_storage_that_calls_exit_fails_and_takes_nobody_along(tmp_path, monkeypatch):
    class Leaving(PosixDiskStorage):
        def exists(self, path):
            sys.exit("no token")

    with pytest.raises(UserStorageFailed, match="Leaving failed in exists: SystemExit: no token"):
        UserStorage(Leaving()).list(str(tmp_path))
    (tmp_path / "leaving_storage.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported here: SystemExit: 3"):
        build(ClassMeta("leaving_storage", "Mine"), CheckpointStorage)


def test_the_state_dict_of_a_users_storage_cannot_be_pickled_by_mistake(tmp_path):
    import pickle

    class Pickling(PosixDiskStorage):
        def write_state_dict(self, state_dict, path, write_func):
            pickle.dumps(state_dict)

    with pytest.raises(UserStorageFailed, match="Call write_func"):
        UserStorage(Pickling()).write(str(tmp_path / "x"), [b"1"])


# From the trainer to the agent.


def test_a_storage_travels_as_words(tmp_path):
    meta, strategy = meta_for(DrawerStorage(str(tmp_path / "d"), label="mine"))
    assert strategy is None
    assert meta is not None
    assert (meta.module_path, meta.class_name) == ("tests.snapshot.storage.user_classes", "DrawerStorage")
    assert meta.kwargs == {"drawer": str(tmp_path / "d"), "label": "mine"}
    again = build(meta, CheckpointStorage)
    assert (type(again), again.label) == (DrawerStorage, "mine")


def test_a_storage_is_built_once_and_remembers(tmp_path):
    meta, _ = meta_for(DrawerStorage(str(tmp_path / "d"), label="mine"))
    other, _ = meta_for(DrawerStorage(str(tmp_path / "d"), label="yours"))
    assert storage_of("/x", meta) is storage_of("/y", meta)
    assert storage_of("/x", meta) is not storage_of("/x", other)


def test_the_storages_that_come_with_the_interface_become_our_own(tmp_path):
    strategy = KeepLatestStepStrategy(2, str(tmp_path))
    assert meta_for(None) == (None, None)
    assert meta_for(PosixDiskStorage()) == (None, None)
    assert meta_for(get_checkpoint_storage(strategy)) == (None, strategy)
    assert isinstance(storage_of(str(tmp_path), None), LocalStorage)


def test_a_strategy_inside_a_storages_arguments_travels_too(tmp_path):
    class_meta = describe(PosixStorageWithDeletion(TRACKER, KeepEven(str(tmp_path))), CheckpointStorage)
    again = build(class_meta, CheckpointStorage)
    assert type(again.deletion_strategy) is KeepEven


def test_what_the_agent_could_not_build_is_refused_in_the_trainer(tmp_path):
    with pytest.raises(ConfigError, match="lacks commit, exists"):
        meta_for(object())
    with pytest.raises(ConfigError, match="cannot be handed to the agent as JSON"):
        meta_for(DrawerStorage(str(tmp_path / "d"), label=object()))
    with pytest.raises(ConfigError, match="positional arguments"):
        describe(TakingAnything(1, 2), CheckpointDeletionStrategy)

    class Local(PosixDiskStorage): ...

    with pytest.raises(ConfigError, match="at the top level"):
        meta_for(Local())
    Local.__module__ = "__main__"
    with pytest.raises(ConfigError, match="defined in the script itself"):
        meta_for(Local())


def test_a_class_beside_the_script_is_found_in_a_process_that_does_not_know_the_directory(tmp_path, monkeypatch):
    (tmp_path / "beside_the_script.py").write_text(
        "from dlrover.snapshot.storage.user_storage import PosixDiskStorage\nclass Mine(PosixDiskStorage): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside_the_script

    meta = describe(beside_the_script.Mine(), CheckpointStorage)
    assert meta.search_path == str(tmp_path)
    monkeypatch.undo()
    del sys.modules["beside_the_script"]
    assert type(build(meta, CheckpointStorage)).__name__ == "Mine"
    sys.path.remove(str(tmp_path))
    del sys.modules["beside_the_script"]


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no_such_module\.Thing cannot be imported here"):
        build(ClassMeta("no_such_module", "Thing"), CheckpointStorage)
    with pytest.raises(ConfigError, match="cannot be built with"):
        build(ClassMeta("tests.snapshot.storage.user_classes", "KeepEven", {"wrong": 1}), CheckpointDeletionStrategy)


def test_only_a_storage_is_called_as_one(tmp_path):
    mark = tmp_path / "mark"
    with pytest.raises(ConfigError, match=r"subprocess\.Popen is not a CheckpointStorage\. It lacks commit"):
        storage_of(str(tmp_path), ClassMeta("subprocess", "Popen", {"args": ["touch", str(mark)]}))
    with pytest.raises(ConfigError, match=r"os\.system is not a class"):
        storage_of(str(tmp_path), ClassMeta("os", "system", {"command": f"touch {mark}"}))
    nested = {
        "tracker_file": "x",
        "deletion_strategy": {"$class": ClassMeta("subprocess", "Popen", {"args": ["touch"]})},
    }
    with pytest.raises(ConfigError, match=r"subprocess\.Popen is not a Rebuildable"):
        build(ClassMeta("dlrover.snapshot.storage.user_storage", "PosixStorageWithDeletion", nested), CheckpointStorage)
    assert not mark.exists()


# URLs.


def test_an_object_store_is_no_renaming_storage_and_refuses_a_second_commit_of_a_step():
    storage = storage_for("memory://user-storage-test/job")
    assert isinstance(storage, FsspecStorage)
    assert not isinstance(storage, Renaming)
    attempt = Attempt(directory="memory://user-storage-test/job", target="1", step=1, attempt="a")
    save(storage, attempt)
    assert storage.load("memory://user-storage-test/job/1/sub/rank_0.pt", lambda file: zlib.crc32(file.read()))
    with pytest.raises(Rejected):
        save(storage, attempt_at(1, "b", "memory://user-storage-test/job"))
