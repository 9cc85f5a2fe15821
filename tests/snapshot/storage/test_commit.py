"""Commits: the tracker always names a whole checkpoint, wherever the power is cut."""

from __future__ import annotations

import errno
import os
import random
import zlib
from pathlib import Path

import pytest

from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.checkpoint import digest_of_shards
from dlrover.snapshot.storage.commit import (
    TRACKER,
    Attempt,
    Committed,
    Tracker,
    abandon,
    commit,
    committed_checkpoints,
    find_damage,
    finish_rank,
    latest_step,
    locate,
    stage,
    staged_manifests,
)
from dlrover.snapshot.storage.manifest import (
    FileRecord,
    GlobalManifest,
    ManifestInvalid,
    RankManifest,
    RankSummary,
    TensorRecord,
    Topology,
    decode_global_manifest,
    decode_rank_manifest,
    digest_of,
    encode_manifest,
    join_manifests,
)
from dlrover.snapshot.storage.persist import SaveRequest, finish
from dlrover.snapshot.storage.retention import (
    KEEP,
    KeepBest,
    KeepBytes,
    KeepFor,
    KeepInterval,
    KeepLatest,
    KeepTotal,
    apply_retention,
)
from dlrover.snapshot.storage.storage import LocalStorage, Renaming, Storage, StoredName, join, storage_for
from tests.snapshot.storage.power_cut import Disk, PowerCut

NATIVE = "latest_checkpointed_iteration.txt"


def attempt_at(step: int, attempt: str, directory: str = "/ckpt") -> Attempt:
    return Attempt(directory=directory, target=str(step), step=step, attempt=attempt)


def content_of(step: int, rank: int, attempt: str) -> bytes:
    return f"step {step} rank {rank} attempt {attempt}".encode() * 5


def write_rank(
    storage: Storage, attempt: Attempt, rank: int, world_size: int = 2, replaces: str | None = None
) -> RankManifest:
    path = stage(storage, attempt)
    content = content_of(attempt.step, rank, attempt.attempt)
    name = f"sub/rank_{rank}.pt"
    storage.make_directory(join(path, "sub"))
    storage.write(join(path, name), [content[:20], content[20:]])
    manifest = RankManifest(
        step=attempt.step,
        round=3,
        attempt=attempt.attempt,
        topology=Topology(world_size, rank, {"data": world_size}),
        files=(FileRecord(name, len(content), zlib.crc32(content)),),
        tensors=(TensorRecord("w", "float32", (2, 3), name, (4, 3), (2 * rank, 0)),),
        replaces=replaces,
    )
    finish_rank(storage, attempt, manifest)
    return manifest


def save(storage: Storage, attempt: Attempt, ranks: tuple[int, ...] = (0, 1)) -> None:
    for rank in ranks:
        write_rank(storage, attempt, rank)
    commit(storage, attempt, ranks, [Tracker(NATIVE, str(attempt.step))], data_state="cursor 5")


def check_whole(storage: Storage, directory: str, step: int | None = None) -> int:
    """Read a checkpoint as a restore does, compare every byte, return its step."""
    found = locate(storage, directory, step)
    assert found is not None
    manifest = found.manifest
    assert [rank.global_rank for rank in manifest.ranks] == [0, 1]
    for rank in manifest.ranks:
        (file,) = rank.files
        content = storage.read(join(found.path, file.path))
        assert content == content_of(manifest.step, rank.global_rank, manifest.attempt)
        assert zlib.crc32(content) == file.crc32
    assert manifest.data_state == "cursor 5"
    return manifest.step


def scenario(disk: Disk) -> None:
    """Two new steps, one of them saved twice, and the deletion of what is no longer wanted."""
    save(disk, attempt_at(20, "a"))
    save(disk, attempt_at(20, "b"))
    save(disk, attempt_at(30, "c"))
    apply_retention(disk, "/ckpt", KeepLatest(1))


def first_checkpoint(*, can_exchange: bool) -> Disk:
    disk = Disk(can_exchange=can_exchange)
    save(disk, attempt_at(10, "first"))
    disk = disk.after_cut(True)
    assert check_whole(disk, "/ckpt") == 10
    return disk


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_cut_before_any_step_leaves_a_tracker_that_names_a_whole_checkpoint(can_exchange: bool) -> None:
    """Every write, fsync, mkdir, rename, unlink and directory sync of the whole story is a cut, with several fates each."""
    rehearsal = first_checkpoint(can_exchange=can_exchange)
    scenario(rehearsal)
    num_steps = len(rehearsal.steps)
    assert num_steps > 120
    reached = set()
    for cut in range(num_steps):
        disk = first_checkpoint(can_exchange=can_exchange)
        disk.cut_before = cut
        with pytest.raises(PowerCut):
            scenario(disk)
        for fate in (True, False, *(random.Random(seed * 10_000 + cut) for seed in range(4))):
            survivor = disk.after_cut(fate)
            what = f"cut {cut} before {rehearsal.steps[cut]}, fate {fate}"
            step = check_whole(survivor, "/ckpt")
            reached.add(step)
            native = int(survivor.read(f"/ckpt/{NATIVE}"))
            assert check_whole(survivor, "/ckpt", native) == native, what
            assert native <= step, what
            for named in (
                (step, native) if can_exchange else ()
            ):  # whoever reads a tracker without us looks nowhere else
                found = locate(survivor, "/ckpt", named)
                assert found is not None
                assert found.path == f"/ckpt/{named}", what
            for checkpoint in committed_checkpoints(survivor, "/ckpt"):
                check_whole(survivor, "/ckpt", checkpoint.manifest.step)
            save(survivor, attempt_at(40, "next"))
            assert check_whole(survivor, "/ckpt") == 40, what
    assert reached == {10, 20, 30}


def test_a_committer_that_died_is_followed_by_one_that_finishes() -> None:
    rehearsal = first_checkpoint(can_exchange=True)
    attempt = attempt_at(20, "a")
    for rank in (0, 1):
        write_rank(rehearsal, attempt, rank)
    start = len(rehearsal.steps)
    commit(rehearsal, attempt, (0, 1))
    for cut in range(start, len(rehearsal.steps)):
        disk = first_checkpoint(can_exchange=True)
        for rank in (0, 1):
            write_rank(disk, attempt, rank)
        disk.cut_before = cut
        with pytest.raises(PowerCut):
            commit(disk, attempt, (0, 1), data_state="cursor 5")
        survivor = disk.after_cut(True)
        commit(survivor, attempt, (0, 1), data_state="cursor 5")
        assert check_whole(survivor, "/ckpt") == 20


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Storage, str]:
    """The same behaviour on a directory and on an object store."""
    if request.param == "local":
        return LocalStorage(), str(tmp_path / "ckpt")
    pytest.importorskip("fsspec")
    directory = f"memory://{tmp_path.name}/ckpt"
    return storage_for(directory), directory


def test_commits_on_real_storages(place: tuple[Storage, str]) -> None:
    storage, directory = place
    assert locate(storage, directory) is None
    save(storage, attempt_at(0, "a", directory))
    assert check_whole(storage, directory) == 0, "step 0 is a step"
    save(storage, attempt_at(5, "b", directory))
    assert check_whole(storage, directory) == 5
    assert storage.read(join(directory, NATIVE)) == b"5"
    names = [entry.name for entry in storage.list(directory) if entry.is_directory]
    assert names == ["0", "5"]


def test_a_storage_that_fails_after_the_tracker_was_written_has_the_checkpoint_all_the_same(
    place: tuple[Storage, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither what was left of others nor what the rule gives up can be removed then; the next commit does it."""
    storage, directory = place
    save(storage, attempt_at(1, "a", directory))
    for rank in (0, 1):
        write_rank(storage, attempt_at(2, "b", directory), rank)
    listed = type(storage).list

    def list_until_committed(self: Storage, path: str) -> object:
        if path == directory and latest_step(storage, directory) == 2:
            raise OSError(errno.EIO, "the store went away")
        return listed(self, path)

    request = SaveRequest(
        directory=directory,
        target="2",
        step=2,
        attempt="b",
        shard=0,
        num_shards=2,
        world_size=2,
        is_storage=True,
        is_writer=True,
        is_committer=True,
        keep_latest=1,
    )
    with monkeypatch.context() as failing:
        failing.setattr(type(storage), "list", list_until_committed)
        assert finish(request).manifest.step == 2
    assert "could not be deleted, and the next save tries again: [Errno 5] the store went away" in caplog.text
    assert [each.manifest.step for each in committed_checkpoints(storage, directory)] == [1, 2]
    finish(request)
    assert [each.manifest.step for each in committed_checkpoints(storage, directory)] == [2]


def test_a_step_saved_again_replaces_the_old_one_or_is_refused(place: tuple[Storage, str]) -> None:
    storage, directory = place
    save(storage, attempt_at(5, "a", directory))
    if isinstance(storage, Renaming):
        save(storage, attempt_at(5, "b", directory))
        found = locate(storage, directory)
        assert found is not None
        assert found.manifest.attempt == "b"
    else:
        with pytest.raises(Rejected, match="already committed"):
            stage(storage, attempt_at(5, "b", directory))
    assert check_whole(storage, directory) == 5
    assert [entry.name for entry in storage.list(directory) if entry.is_directory] == ["5"]


def test_a_missing_rank_a_wrong_size_and_a_foreign_rank_stop_the_commit(place: tuple[Storage, str]) -> None:
    storage, directory = place
    attempt = attempt_at(5, "a", directory)
    write_rank(storage, attempt, 0)
    with pytest.raises(ManifestInvalid, match="no manifest from ranks 1, 2"):
        commit(storage, attempt, (0, 1, 2))
    with pytest.raises(ManifestInvalid, match="also has manifests from ranks 0, which did not take part"):
        commit(storage, attempt, ())
    manifest = write_rank(storage, attempt, 1)
    path = join(attempt.staging_path(storage), manifest.files[0].path)
    storage.write(path, [b"short"])
    with pytest.raises(ManifestInvalid, match="has 5 bytes; its manifest says"):
        commit(storage, attempt, (0, 1))
    storage.remove_file(path)
    with pytest.raises(ManifestInvalid, match="is missing"):
        commit(storage, attempt, (0, 1))
    assert latest_step(storage, directory) is None
    abandon(storage, attempt)
    assert not [entry for entry in storage.list(directory) if entry.is_directory]


def test_what_a_former_attempt_left_is_not_taken_for_this_one(place: tuple[Storage, str]) -> None:
    storage, directory = place
    write_rank(storage, attempt_at(5, "dead", directory), 0)
    write_rank(storage, attempt_at(5, "dead", directory), 1)
    attempt = attempt_at(5, "alive", directory)
    write_rank(storage, attempt, 0)
    assert [manifest.global_rank for manifest in staged_manifests(storage, attempt)] == [0]
    with pytest.raises(ManifestInvalid, match="no manifest from ranks 1"):
        commit(storage, attempt, (0, 1))
    write_rank(storage, attempt, 1)
    if isinstance(storage, LocalStorage):
        for path in [*Path(directory).rglob("5.tmp-dead"), *Path(directory, "5.tmp-dead").rglob("*")]:
            os.utime(path, (0, 0))
    commit(storage, attempt, (0, 1), data_state="cursor 5")
    assert check_whole(storage, directory) == 5
    assert [entry.name for entry in storage.list(directory) if entry.is_directory] == ["5"]


def test_what_another_job_is_writing_is_not_removed_and_what_it_has_committed_not_replaced(tmp_path: Path) -> None:
    storage, directory = LocalStorage(), str(tmp_path)
    ours, theirs = attempt_at(5, "ours-1", directory), attempt_at(5, "theirs-1", directory)
    for attempt in (ours, theirs):
        for rank in (0, 1):
            write_rank(storage, attempt, rank, replaces="")
    commit(storage, theirs, (0, 1), data_state="cursor 5")
    assert (tmp_path / "5.tmp-ours-1").is_dir()
    with pytest.raises(Rejected, match="another job writes to the same directory"):
        commit(storage, ours, (0, 1), data_state="cursor 5")
    found = locate(storage, directory)
    assert found is not None
    assert found.manifest.attempt == "theirs-1"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["5", TRACKER]
    for rank in (0, 1):  # whoever has seen what is there replaces it
        write_rank(storage, attempt_at(5, "ours-2", directory), rank, replaces="theirs-1")
    commit(storage, attempt_at(5, "ours-2", directory), (0, 1), data_state="cursor 5")
    assert check_whole(storage, directory) == 5


def test_what_dead_attempts_of_other_steps_left_goes_with_the_next_commit(tmp_path: Path) -> None:
    storage, directory = LocalStorage(), str(tmp_path)
    write_rank(storage, attempt_at(3, "dead-1", directory), 0)
    (tmp_path / "my.old-notes").mkdir()
    dead_tracker, young_tracker = tmp_path / f"{TRACKER}.new-00000000", tmp_path / f"{TRACKER}.new-11111111"
    dead_tracker.write_text("3")
    young_tracker.write_text("4")
    for path in [dead_tracker, tmp_path / "my.old-notes", *tmp_path.rglob("3.tmp*"), *tmp_path.rglob("3.tmp*/**/*")]:
        os.utime(path, (0, 0))
    write_rank(storage, attempt_at(4, "alive-1", directory), 0)
    save(storage, attempt_at(5, "a", directory))
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "4.tmp-alive-1", "5", TRACKER, young_tracker.name, NATIVE, "my.old-notes",
    ]  # fmt: skip


def test_a_slow_committer_does_not_take_the_tracker_back(place: tuple[Storage, str]) -> None:
    storage, directory = place
    slow, quick = attempt_at(10, "life-1", directory), attempt_at(20, "life-2", directory)
    for rank in (0, 1):
        write_rank(storage, slow, rank)
    save(storage, quick)
    commit(storage, slow, (0, 1), [Tracker(NATIVE, "10")])
    assert latest_step(storage, directory) == 20
    assert storage.read(join(directory, NATIVE)) == b"20"
    assert [each.manifest.step for each in committed_checkpoints(storage, directory)] == [10, 20]


def test_a_training_that_was_taken_back_takes_the_tracker_with_it(place: tuple[Storage, str]) -> None:
    storage, directory = place
    save(storage, attempt_at(20, "life-2", directory))
    save(storage, attempt_at(10, "other-1", directory))
    assert latest_step(storage, directory) == 10


def test_one_that_is_not_the_newest_leaves_the_trackers_alone(place: tuple[Storage, str]) -> None:
    storage, directory = place
    save(storage, attempt_at(20, "b", directory))
    late = attempt_at(10, "a", directory)
    for rank in (0, 1):
        write_rank(storage, late, rank)
    commit(storage, late, (0, 1), [Tracker(NATIVE, "10")], is_newest=False)
    assert latest_step(storage, directory) == 20
    assert locate(storage, directory, 10) is not None


def test_manifests_that_nobody_reported_are_not_committed(place: tuple[Storage, str]) -> None:
    storage, directory = place
    attempt = attempt_at(10, "a", directory)
    digests = {rank: digest_of(encode_manifest(write_rank(storage, attempt, rank))) for rank in (0, 1)}
    with pytest.raises(ManifestInvalid, match="If another job writes there"):
        commit(storage, attempt, (0, 1), digest=digest_of_shards({**digests, 1: "other"}))
    assert latest_step(storage, directory) is None
    commit(storage, attempt, (0, 1), digest=digest_of_shards(digests))
    assert latest_step(storage, directory) == 10


class OvertakenStorage(LocalStorage):
    """Another committer commits just when this one begins to look at the staged files."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__()
        self.attempt = attempt
        self.is_overtaken = False

    def list(self, path: str) -> list[StoredName]:
        if not self.is_overtaken and path.startswith(self.attempt.staging_path(self)):
            self.is_overtaken = True
            commit(LocalStorage(), self.attempt, (0, 1))
        return super().list(path)


def test_a_second_committer_finds_the_work_done_under_its_hands(tmp_path: Path) -> None:
    storage, directory = storage_for(str(tmp_path)), str(tmp_path)
    attempt = attempt_at(10, "life-1", directory)
    for rank in (0, 1):
        write_rank(storage, attempt, rank)
    overtaken = OvertakenStorage(attempt)
    committed = commit(overtaken, attempt, (0, 1))
    assert overtaken.is_overtaken
    assert committed.manifest.attempt == "life-1"
    assert latest_step(storage, directory) == 10


def test_a_tracker_without_its_checkpoint_is_an_error_not_a_start_from_scratch(tmp_path: Path) -> None:
    storage = LocalStorage()
    (tmp_path / TRACKER).write_text("7")
    with pytest.raises(ManifestInvalid, match="has no complete checkpoint of step 7"):
        locate(storage, str(tmp_path))
    (tmp_path / TRACKER).write_text("")
    with pytest.raises(ManifestInvalid, match="must contain the number of a step"):
        locate(storage, str(tmp_path))


def test_every_flipped_bit_of_a_checkpoint_is_found(place: tuple[Storage, str]) -> None:
    storage, directory = place
    save(storage, attempt_at(5, "a", directory))
    checkpoint = locate(storage, directory)
    assert checkpoint is not None
    assert find_damage(storage, checkpoint) == []
    for name in ("sub/rank_1.pt", ".dlrover/rank-00000.json"):
        path = join(checkpoint.path, name)
        content = storage.read(path)
        for place_of_flip in range(len(content)):
            storage.write(
                path, [content[:place_of_flip], bytes([content[place_of_flip] ^ 4]), content[place_of_flip + 1 :]]
            )
            assert len(find_damage(storage, checkpoint)) == 1
        storage.write(path, [content[:-1]])
        assert len(find_damage(storage, checkpoint)) == 1
        storage.remove_file(path)
        (sentence,) = find_damage(storage, checkpoint)
        assert sentence == f"{path} is missing"
        storage.write(path, [content])
    assert find_damage(storage, checkpoint) == []


def test_two_ranks_with_one_path_and_two_attempts_do_not_join() -> None:
    def manifest(rank: int, attempt: str, path: str) -> RankManifest:
        files = (FileRecord(path, 1, 1),)
        return RankManifest(step=1, round=1, attempt=attempt, topology=Topology(2, rank), files=files)

    with pytest.raises(ManifestInvalid, match="Ranks 0 and 1 both wrote"):
        join_manifests([manifest(0, "a", "x.pt"), manifest(1, "a", "x.pt")], {0, 1})
    with pytest.raises(ManifestInvalid, match="do not belong together"):
        join_manifests([manifest(0, "a", "x.pt"), manifest(1, "b", "y.pt")], {0, 1})


def test_a_damaged_manifest_hides_its_checkpoint_and_no_other(place: tuple[Storage, str]) -> None:
    storage, directory = place
    save(storage, attempt_at(5, "a", directory))
    save(storage, attempt_at(6, "b", directory))
    storage.write(join(directory, "5/.dlrover/manifest.json"), [b"{ damaged"])
    assert check_whole(storage, directory) == 6
    storage.write(join(directory, "6/.dlrover/manifest.json"), [b""])
    with pytest.raises(ManifestInvalid, match="Its complete steps are none"):
        locate(storage, directory)


@pytest.mark.parametrize("name", ["", "a/b", "5.tmp-x", "5.old-x"])
def test_names_that_could_be_taken_for_others_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="plain file name"):
        Attempt(directory="/ckpt", target=name, step=1, attempt="a")
    with pytest.raises(ValueError, match="plain file name"):
        Attempt(directory="/ckpt", target="1", step=1, attempt=name)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/x.pt", "a/../../x", ""])
def test_a_manifest_cannot_point_outside(path: str) -> None:
    topology = Topology(1, 0)
    content = encode_manifest(
        RankManifest(step=1, round=1, attempt="a", topology=topology, files=(FileRecord(path, 1, 1),))
    )
    with pytest.raises(ManifestInvalid, match="lies outside the checkpoint"):
        decode_rank_manifest(content)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"version": 9}'])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(ManifestInvalid):
        decode_global_manifest(content)


@pytest.mark.parametrize(
    ("strategy", "steps", "left"),
    [
        (KeepLatest(3), [1, 2, 3, 4], [2, 3, 4]),
        (KeepLatest(0), [1, 2], [2]),
        (KeepInterval(4), [1, 2, 3, 4, 5, 6, 7, 8], [4, 8]),
        (KeepInterval(4), [2, 4, 6, 8, 10], [4, 8, 10]),
    ],
)
def test_retention_after_each_commit(
    place: tuple[Storage, str], strategy: KeepLatest | KeepInterval, steps: list[int], left: list[int]
) -> None:
    storage, directory = place
    for step in steps:
        save(storage, attempt_at(step, f"a{step}", directory))
        apply_retention(storage, directory, strategy)
    assert [checkpoint.manifest.step for checkpoint in committed_checkpoints(storage, directory)] == left


def checkpoint(step: int, *, metric: float | None = None, saved_at: float = 0.0, size_bytes: int = 10) -> Committed:
    files = (FileRecord("f", size_bytes, 0),)
    manifest = GlobalManifest(
        step=step,
        round=1,
        attempt="a",
        world_size=1,
        ranks=(RankSummary(global_rank=0, digest="", files=files),),
        saved_at=saved_at,
        metric=metric,
    )
    return Committed(f"/ckpt/{step}", manifest)


def test_the_best_are_kept_and_what_was_not_measured_is_worst() -> None:
    measured = [checkpoint(1), checkpoint(2, metric=0.5), checkpoint(3, metric=0.0), checkpoint(4, metric=0.9)]
    assert sorted(KeepBest(2).choose(measured)) == [1, 3]
    assert sorted(KeepBest(2, is_higher_better=False).choose(measured)) == [1, 4]


def test_a_limit_of_bytes_and_a_limit_of_time() -> None:
    stored = [checkpoint(step, saved_at=100.0 * step, size_bytes=10 * step) for step in (1, 2, 3)]
    assert KeepBytes(50).choose(stored) == [1]
    assert KeepBytes(1).choose(stored) == [3, 2, 1]
    assert KeepFor(150.0).choose(stored) == [1]


def test_a_total_counts_the_best_and_the_newest() -> None:
    stored = [checkpoint(step) for step in (2, 4, 6, 8)]
    assert KeepTotal(1).choose(stored) == [2, 4, 6]
    assert KeepTotal(2).choose(stored) == [2, 4]
    assert KeepTotal(1, best="2").choose(stored) == [4, 6], (
        "the best stays beside the newest, also where the limit is 1"
    )
    assert KeepTotal(2, best="2").choose(stored) == [4, 6]
    assert KeepTotal(3, best="2").choose(stored) == [4]
    assert KeepTotal(9).choose(stored) == []


class TwoDeleters(LocalStorage):
    """Another commit deletes step 1 at the same time, a little quicker; and step 2 cannot be deleted at all."""

    def remove_file(self, path: str) -> None:
        if "/1/" in path:
            super().remove_tree(path.split("/.dlrover")[0])
        super().remove_file(path)

    def remove_tree(self, path: str) -> None:
        if path.endswith("/2"):
            raise PermissionError(13, "not yours", path)
        super().remove_tree(path)


def test_what_cannot_be_deleted_keeps_nothing_else_from_being_deleted(tmp_path: Path) -> None:
    """The last commit of a job has no later one that could do the rest."""
    storage, directory = TwoDeleters(), str(tmp_path)
    for step in (1, 2, 3, 4):
        save(storage, attempt_at(step, "a", directory))
    with pytest.raises(PermissionError, match="not yours"):
        apply_retention(storage, directory, KeepLatest(1))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["2", "4"]


def test_a_pinned_checkpoint_stays_whatever_the_rule(place: tuple[Storage, str]) -> None:
    storage, directory = place
    for step in (1, 2, 3):
        save(storage, attempt_at(step, "a", directory))
    storage.write_atomic(join(directory, f"1/.dlrover/{KEEP}"), b"for the paper")
    assert apply_retention(storage, directory, KeepBytes(1)) == [2]
    assert [each.manifest.step for each in committed_checkpoints(storage, directory)] == [1, 3]


class Reckless:
    def expendable(self, steps: object) -> list[int]:
        return list(steps)  # type: ignore[call-overload]


def test_no_strategy_can_delete_the_last_good_one_nor_what_the_tracker_names(tmp_path: Path) -> None:
    storage, directory = LocalStorage(), str(tmp_path)
    (tmp_path / "my notes").mkdir()
    for step in (1, 2, 3):
        save(storage, attempt_at(step, "a", directory))
    storage.write_atomic(join(directory, TRACKER), b"2")  # somebody went back
    assert apply_retention(storage, directory, Reckless()) == [1]
    assert (tmp_path / "my notes").exists()
    assert check_whole(storage, directory) == 2


def test_urls_without_their_package_and_file_urls_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="as a plain path: /tmp/x"):
        storage_for("file:///tmp/x")
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="cannot be reached"):
        storage_for("nosuchprotocol://x")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ConfigError, match="dlrover\\[storage\\]"):
        storage_for("s3://bucket/x")


def test_a_link_that_leads_nowhere_hides_no_checkpoint(tmp_path: Path) -> None:
    storage, directory = LocalStorage(), str(tmp_path)
    save(storage, attempt_at(5, "a", directory))
    (tmp_path / "0-latest").symlink_to(tmp_path / "gone")
    assert check_whole(storage, directory) == 5
    save(storage, attempt_at(5, "b", directory))
    assert check_whole(storage, directory) == 5
