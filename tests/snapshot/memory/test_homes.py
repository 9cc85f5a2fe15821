"""A node's segments: adopted by the next agent, reaped when nobody is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlrover.host.ownership import make_private
from dlrover.protocol.errors import Unavailable
from dlrover.snapshot.memory.homes import Home, home_path, reap_orphans, remove_empty_root
from dlrover.snapshot.memory.segment import SegmentWriter
from tests.snapshot.conftest import owner_of
from tests.snapshot.memory.states import newest_step, save


def test_a_restarted_agent_finds_everything_of_its_launch(home: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    for rank in (0, 1):
        writer = SegmentWriter(agent.path, owner_of(rank))
        save(writer, 4)
        save(writer, 5 + rank)
        writer.close()
    agent.close()
    successor = Home(home, "job", "launch", 0)
    found = {each.global_rank: [slot.step for slot in each.slots] for each in successor.snapshots()}
    assert found == {0: [4, 5], 1: [4, 6]}
    assert newest_step(successor.path, 1) == 6


def test_two_agents_cannot_hold_one_home(home: Path) -> None:
    with Home(home, "job", "launch", 0), pytest.raises(Unavailable, match="Another running agent uses the snapshots"):
        Home(home, "job", "launch", 0, patience=0)
    Home(home, "job", "launch", 0).close()


def test_the_directories_are_private(home: Path) -> None:
    agent = Home(home / "root", "job/../x", "a b", 3)
    assert agent.path.parent == home / "root"
    assert agent.path.name == "job----x.a-b.node-3"
    for path in (agent.path, agent.path.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    (home / "link").symlink_to(home / "root")
    with pytest.raises(PermissionError):
        make_private(home / "link")


def test_a_directory_that_others_remove_when_it_is_empty_is_made_again(home: Path) -> None:
    """Of two trainers that share the directory above, one may end while the other begins."""
    root = home / "root"
    has_begun, is_over = threading.Event(), threading.Event()

    def remove_again_and_again() -> None:
        while not is_over.is_set():
            has_begun.set()
            remove_empty_root(root)

    remover = threading.Thread(target=remove_again_and_again)
    remover.start()
    has_begun.wait(30)
    try:
        for _ in range(3000):
            make_private(root)
    finally:
        is_over.set()
        remover.join()
    root.mkdir(exist_ok=True)
    (root / "file").touch()
    with pytest.raises(FileExistsError):
        make_private(root / "file")


def test_a_living_owner_is_never_reaped(home: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    save(SegmentWriter(agent.path, owner_of(0)), 1)
    assert reap_orphans(home, time.time() + 1e6, grace=0) == []
    assert agent.path.exists()


def test_a_dead_owner_is_reaped_after_the_grace_or_at_once_on_request(home: Path) -> None:
    script = (
        "import sys, os; from dlrover.snapshot.memory.homes import Home; from dlrover.snapshot.memory.segment import SegmentWriter;"
        "from tests.snapshot.conftest import owner_of; from tests.snapshot.memory.states import save;"
        "agent = Home(sys.argv[1], 'job', 'launch', 0); save(SegmentWriter(agent.path, owner_of(0)), 3);"
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(home)], check=False, timeout=30)
    path = home_path(home, "job", "launch", 0)
    assert newest_step(path) == 3, "it outlives its owner"
    assert reap_orphans(home, time.time() + 590) == []
    assert reap_orphans(home, time.time() + 590, job="another") == []
    assert reap_orphans(home, time.time() + 610) == [path]
    assert not path.exists()
    subprocess.run([sys.executable, "-c", script, str(home)], check=False, timeout=30)
    assert reap_orphans(home, time.time(), grace=0, job="job") == [path]
    assert list(home.iterdir()) == []


def test_an_agent_and_a_reaper_that_meet_never_leave_an_agent_without_its_home(home: Path) -> None:
    """One process starts agents, another reaps at once; whoever has taken a home finds it there."""
    reaper = (
        "import sys, time; from dlrover.snapshot.memory.homes import reap_orphans; print('ready', flush=True)\n"
        "while True: reap_orphans(sys.argv[1], time.time() + 9999, grace=0)"  # whatever it sees is old enough
    )
    with subprocess.Popen([sys.executable, "-c", reaper, str(home)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            for _ in range(100):
                agent = Home(home, "job", "launch", 0, patience=30)
                assert (agent.path / "owner.json").read_bytes()
                agent.close()
        finally:
            process.kill()


def test_the_home_of_a_living_agent_is_never_reaped(home: Path) -> None:
    with Home(home, "job", "launch", 0) as agent:
        assert reap_orphans(home, time.time() + 9999, grace=0) == []
        assert (agent.path / "owner.json").read_bytes()
    assert reap_orphans(home, time.time() + 9999, grace=0) == [agent.path]


def test_a_sign_of_life_starts_the_grace_anew(home: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    hour_ago = time.time() - 3600
    for path in (agent.path, agent.path / "owner.json"):
        os.utime(path, (hour_ago, hour_ago))
    agent.touch()
    agent.close()
    assert reap_orphans(home, time.time()) == []
    assert reap_orphans(home, time.time() + 601) == [agent.path]


def test_a_trainer_that_still_writes_keeps_its_home(home: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    writer = SegmentWriter(agent.path, owner_of(0))
    save(writer, 1)
    agent.close()
    assert reap_orphans(home, time.time(), grace=0) == []
    writer.close()
    assert reap_orphans(home, time.time(), grace=0) == [agent.path]


def test_what_is_of_another_boot_is_reaped_at_once(home: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    agent.close()
    record = agent.path / "owner.json"
    import re

    record.write_text(re.sub(r'"boot_id":"[0-9a-f]+"', f'"boot_id":"{"0" * 32}"', record.read_text()))
    assert reap_orphans(home, time.time()) == [agent.path]


def test_files_on_disk_go_with_the_home_that_links_to_them(home: Path, tmp_path: Path) -> None:
    agent = Home(home, "job", "launch", 0)
    disk = tmp_path / "disk"
    disk.mkdir()
    real = disk / "x.segment"
    writer = SegmentWriter(agent.path, owner_of(0))
    save(writer, 1)
    writer.close()
    (name,) = agent.path.glob("*.segment")
    real.write_bytes(name.read_bytes())
    name.unlink()
    name.symlink_to(real)
    assert newest_step(agent.path) == 1
    agent.remove()
    assert not real.exists()
    assert not agent.path.exists()
