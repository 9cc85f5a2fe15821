"""Room: what is too small is named before anything is reserved, and a small /dev/shm still works."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.files.direct_io import WriteOptions
from dlrover.snapshot.files.torch_file import write_torch_file
from dlrover.snapshot.memory.room import find_room
from dlrover.snapshot.memory.segment import SegmentWriter, segment_paths
from tests.snapshot.conftest import owner_of
from tests.snapshot.memory.states import newest_step, save

MIB = 1 << 20


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 MiB, as containers have it."""
    mount = tmp_path / "shm"
    mount.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_what_fits_goes_into_shared_memory(home: Path) -> None:
    room = find_room(MIB, home)
    assert room.is_shared_memory
    assert room.directory == str(home)


def test_too_small_a_memory_is_named_with_the_remedy(small_memory: Path) -> None:
    with pytest.raises(ConfigError, match=r"100\.0 MiB.*--shm-size.*Or set DLROVER_SNAPSHOT_DIR"):
        find_room(100 * MIB, small_memory)


def test_what_does_not_fit_goes_to_a_file_and_works_the_same(small_memory: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    writer = SegmentWriter(small_memory, owner_of(0), fallback=disk)
    assert save(writer, 1, MIB) is not None
    assert not list(disk.glob("*")) if disk.exists() else True
    assert save(writer, 2, 40 * MIB) is not None, "two slots of 40 MiB do not fit into 64 MiB"
    (path,) = segment_paths(small_memory)
    assert path.is_symlink()
    assert path.resolve().parent == disk
    assert newest_step(small_memory) == 2
    writer.close()
    successor = SegmentWriter(small_memory, owner_of(0), fallback=disk)
    assert save(successor, 3, 40 * MIB) is not None
    assert newest_step(small_memory) == 3


def test_without_a_fallback_the_last_snapshot_stays(small_memory: Path) -> None:
    writer = SegmentWriter(small_memory, owner_of(0))
    save(writer, 1, MIB)
    with pytest.raises(ConfigError, match="still held by the previous segment"):
        save(writer, 2, 40 * MIB)
    assert newest_step(small_memory) == 1
    assert save(writer, 2, MIB) is not None


def test_a_full_disk_is_an_error_before_the_first_byte(small_memory: Path) -> None:
    content = memoryview(bytearray(80 * MIB))
    with pytest.raises(OSError, match="No space left"):
        write_torch_file(small_memory / "x.pt", b"", [content], options=WriteOptions(direct=False))


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_the_cgroup_is_seen(tmp_path: Path, home: Path, version: int) -> None:
    if version == 2:
        group, names = tmp_path, ("memory.max", "memory.current", "inactive_file")
    else:
        group, names = tmp_path / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group.mkdir(exist_ok=True)
    (group / names[0]).write_text(f"{100 * MIB}\n")
    (group / names[1]).write_text(f"{70 * MIB}\n")
    (group / "memory.stat").write_text(f"anon 5\n{names[2]} {20 * MIB}\n")
    assert find_room(40 * MIB, home, cgroup_root=tmp_path).is_shared_memory
    with pytest.raises(ConfigError, match=r"memory limit of the cgroup .* leaves 50.0 MiB: raise the container's"):
        find_room(60 * MIB, home, cgroup_root=tmp_path)
    room = find_room(60 * MIB, home, tmp_path / "disk", cgroup_root=tmp_path)
    assert not room.is_shared_memory
    assert room.obstacles[0].available_bytes == 50 * MIB
    (group / names[0]).write_text("max\n" if version == 2 else str(0x7FFFFFFFFFFFF000))
    assert find_room(60 * MIB, home, cgroup_root=tmp_path).is_shared_memory


def test_limits_of_the_process_are_seen(home: Path) -> None:
    script = (
        "import resource, sys; from pathlib import Path; from dlrover.snapshot.memory.room import find_room;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20));"
        "find_room(1 << 21, Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(home)], capture_output=True, text=True, check=False, timeout=30
    )
    assert "the limit on file sizes leaves 1.0 MiB: raise `ulimit -f`" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        find_room(1, tmp_path / "no")
