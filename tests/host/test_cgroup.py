from __future__ import annotations

from pathlib import Path

import pytest

from dlrover.host.cgroup import unified_directory

V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.mark.parametrize(
    ("own", "mounts", "expected"),
    [
        ("0::/user.slice/a.scope\n", "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/user.slice/a.scope"),
        ("1:cpu:/x\n0::/\n", V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", "/sys/fs/cgroup/unified"),
        ("0::/docker/abc/d\n", "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n", "/sys/fs/cgroup/d"),
        ("0::/docker/abc\n", "30 23 0:26 /docker/abc /my\\040groups rw - cgroup2 cgroup rw\n", "/my groups"),
        ("0::/elsewhere\n", "30 23 0:26 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup rw\n", None),
        ("1:cpu:/x\n", V1, None),
        ("0::/\n", V1, None),
    ],
    ids=["unified", "hybrid", "container", "container, own", "another container's", "version 1", "not mounted"],
)  # fmt: skip
def test_the_own_cgroup_is_found_where_it_is_mounted(
    tmp_path: Path, own: str, mounts: str, expected: str | None
) -> None:
    (tmp_path / "cgroup").write_text(own)
    (tmp_path / "mountinfo").write_text(mounts)
    assert unified_directory(str(tmp_path / "cgroup"), str(tmp_path / "mountinfo")) == expected
