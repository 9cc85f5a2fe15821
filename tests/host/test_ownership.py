"""What other users of the machine put under our names is neither read nor written."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from dlrover.cli.launch.discovery import read_token_file
from dlrover.cli.launch.runtime_dir import user_root
from dlrover.cli.options.environment import Environment
from dlrover.cli.options.settings import probe_directory
from dlrover.compat.client.comm import ParallelConfig
from dlrover.compat.client.paral_config_tuner import ParalConfigTuner
from dlrover.compat.client.shared_objects import SharedDict, SharedMemory, create_shared_memory
from dlrover.host.ownership import (
    NotOurs,
    check_directory,
    check_server,
    make_directory,
    make_private,
    open_checked,
    peer_credentials,
)
from dlrover.master.journal.journal import Journal, JournalError
from dlrover.platforms.hosted.client import LocalOptions, LocalPlatform
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.protocol.messages.job import Round
from dlrover.protocol.messages.kv import KvCheck
from dlrover.snapshot.memory.homes import Home
from dlrover.snapshot.storage.places import SavePlace
from dlrover.trainer.agent_link import AgentLink
from dlrover.trainer.data.loader_service import LoaderClient
from dlrover.trainer.data.shard_feed import DataUnavailable
from dlrover.trainer.environment import WorkerEnvironment
from dlrover.trainer.events.process import Outlet, Process
from dlrover.trainer.progress import ProgressReporter
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader
from dlrover.trainer.torch.flash_checkpoint.saving.outlets import AgentOutlet
from dlrover.unified.runtime.relay_client import RelayWire
from tests.second_user import SECOND_USER, SecondServer, give_away, needs_root, shared_directory

pytestmark = needs_root


@pytest.fixture
def shared() -> Iterator[Path]:
    with shared_directory() as path:
        yield path


def planted(shared: Path, name: str, content: str = "of another user", mode: int = 0o644) -> Path:
    path = shared / name
    path.parent.mkdir(exist_ok=True)
    if path.parent != shared:
        give_away(path.parent, 0o777)
    path.write_text(content)
    return give_away(path, mode)


# The check itself.


def test_files_in_a_shared_directory_are_ours_by_owner_type_and_mode(shared: Path) -> None:
    mine = shared / "mine"
    os.close(open_checked(str(mine), os.O_WRONLY | os.O_CREAT))
    mine.write_text("mine")
    os.close(open_checked(str(mine), os.O_RDONLY))
    target = shared / "target"
    target.write_text("mine")
    link, pipe, twin, theirs = shared / "link", shared / "pipe", shared / "twin", planted(shared, "theirs")
    link.symlink_to(target)
    os.mkfifo(pipe)
    os.link(target, twin)
    for path, reason in (
        (theirs, "belongs to another user"),
        (link, "is a symbolic link"),
        (pipe, "is not a regular file"),
        (twin, "has another hard link"),
    ):
        for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            with pytest.raises(NotOurs, match=reason):
                open_checked(str(path), flags)
    mine.chmod(0o666)
    with pytest.raises(NotOurs, match="is writable by every user"):
        open_checked(str(mine), os.O_RDWR | os.O_TRUNC)
    assert {theirs.read_text(), target.read_text(), mine.read_text()} == {"of another user", "mine"}


def test_a_file_of_ours_is_emptied_after_the_check(shared: Path) -> None:
    (shared / "mine").write_text("mine")
    os.close(open_checked(str(shared / "mine"), os.O_WRONLY | os.O_TRUNC))
    assert (shared / "mine").read_text() == ""


def test_directories_in_a_shared_directory_are_ours_all_the_way(shared: Path, tmp_path: Path) -> None:
    assert make_directory(str(shared / "a" / "b")) is True
    assert check_directory(str(shared)) is True
    assert check_directory("/usr/lib") is False
    give_away(shared / "a", 0o755)
    with pytest.raises(NotOurs, match=f"{shared / 'a'} belongs to another user"):
        check_directory(str(shared / "a" / "b"))
    with pytest.raises(NotOurs, match="belongs to another user"):
        make_private(shared / "a" / "b" / "c")
    (shared / "open").mkdir(mode=0o777)
    (shared / "open").chmod(0o777)
    with pytest.raises(NotOurs, match="is writable by every user"):
        check_directory(str(shared / "open"))
    (shared / "link").symlink_to(tmp_path)
    assert check_directory(str(shared / "link")) is True, "ours, like what it leads to"
    give_away(shared / "link", 0)
    with pytest.raises(NotOurs, match="belongs to another user"):
        check_directory(str(shared / "link"))
    (tmp_path / "link").symlink_to(shared / "a" / "b")
    with pytest.raises(NotOurs, match="belongs to another user"):
        check_directory(str(tmp_path / "link"))


def test_a_private_directory_is_closed_to_others(shared: Path) -> None:
    (shared / "mine").mkdir(mode=0o755)
    make_private(shared / "mine")
    assert stat.S_IMODE((shared / "mine").stat().st_mode) == 0o700


def test_the_kernel_names_the_peer() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_credentials(one) == (os.getpid(), os.getuid(), os.getgid())
        check_server(one)


# Everything of ours that lies where others can write.


def test_the_directories_of_jobs_and_snapshots_are_not_another_users(shared: Path) -> None:
    (shared / "dlrover-0").mkdir()
    give_away(shared / "dlrover-0", 0o777)
    with pytest.raises(
        ConfigError, match=f"belongs to another user \\(uid {SECOND_USER}\\).*set TMPDIR to another directory"
    ):
        user_root(Environment(temp_dir=str(shared)))
    with pytest.raises(NotOurs):
        Home(shared / "dlrover-0", "job", "launch", 0)
    with pytest.raises(NotOurs):
        Home(shared / "dlrover-0" / "below", "job", "launch", 0)
    assert list((shared / "dlrover-0").iterdir()) in ([], [shared / "dlrover-0" / "below"])


def test_logs_journals_and_tokens_are_not_another_users(shared: Path) -> None:
    planted(shared, "logs/anything")
    with pytest.raises(ConfigError, match=r"log directory .* belongs to another user .*--log-dir"):
        probe_directory(str(shared / "logs"), option="--log-dir", purpose="log")
    assert [path.name for path in (shared / "logs").iterdir()] == ["anything"]
    journal = planted(shared, "journal.sqlite", "", mode=0o666)
    with pytest.raises(JournalError, match="belongs to another user"):
        Journal(journal, job_name="job", decision_version=1)
    assert journal.read_text() == ""
    with pytest.raises(ConfigError, match=r"token file .* belongs to another user"):
        read_token_file(str(planted(shared, "token", "their secret")))


def test_events_are_not_written_where_another_user_could_lead_them(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A link in a foreign directory, and one in the shared directory itself."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    names = [f"events_0_{os.getpid()}.log", f"events_sys_0_{os.getpid()}.log"]
    (shared / "dlrover").mkdir()
    give_away(shared / "dlrover", 0o777)
    for folder in (shared / "dlrover", shared):
        for name in names:
            (folder / name).symlink_to(precious)
            give_away(folder / name, 0)
        monkeypatch.setenv("DLROVER_EVENT_FILE_DIR", str(folder))
        outlet = Outlet()
        process = Process("Test", outlet)
        process.instant("an event")
        process.instant("another")
        process.info("said")
        outlet.close()
    assert precious.read_text() == "mine"
    told = [record for record in caplog.records if "No events are written" in record.message]
    assert len(told) == 1
    assert "Set DLROVER_EVENT_FILE_DIR to a directory that belongs to you" in told[0].message


def test_a_config_of_another_user_does_not_set_the_batch_size(shared: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = json.dumps({"dataloader": {"version": 9, "batch_size": 77}})
    path = planted(shared, "dlrover/auto_paral_config.json", content)
    loader = ElasticDataLoader(torch.arange(8), batch_size=2, config_file=str(path))
    loader.update_batch_size(4)
    assert loader.get_batch_size() == 4
    assert path.read_text() == content
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert "belongs to another user" in caplog.text


def test_the_tuner_of_the_original_reads_and_writes_nothing_of_another_user(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in a shared directory itself, and one in another user's: without an agent scripts find it under a name in `/tmp`."""
    tuner = ParalConfigTuner()
    content = json.dumps({"dataloader": {"version": 9, "batch_size": 77}, "restart": True})
    for name in ("auto_paral_config.json", "dlrover/auto_paral_config.json"):
        path = planted(shared, name, content, mode=0o666)
        tuner.config_path = str(path)
        assert tuner.read_paral_config() is None
    tuner.write_paral_config(ParallelConfig())
    assert path.read_text() == content
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert caplog.text.count("belongs to another user") == 3


def test_shared_memory_of_another_user_is_not_taken_over() -> None:
    name = f"dlrover_test_{uuid.uuid4().hex}"
    path = Path("/dev/shm") / name
    path.write_bytes(b"x" * 100)
    try:
        give_away(path, 0o666)
        for size in (100, 200):
            with pytest.raises(NotOurs, match="belongs to another user"):
                create_shared_memory(name, True, size)
        with pytest.raises(NotOurs, match="belongs to another user"):
            create_shared_memory(name, False)
        assert path.read_bytes() == b"x" * 100
    finally:
        path.unlink()
    made = SharedMemory(name, create=True, size=10)
    made.close()
    made.unlink()


# Sockets: nothing is said to a server of another user.


@pytest.fixture
def serve() -> Iterator[Callable[[str], SecondServer]]:
    made: list[SecondServer] = []

    def build(address: str) -> SecondServer:
        made.append(SecondServer(address))
        return made[-1]

    yield build
    for server in made:
        server.close()


def test_workers_and_masters_say_nothing_to_a_server_of_another_user(
    tmp_path: Path, serve: Callable[[str], SecondServer], caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "agent.sock")
    server = serve(path)
    where = WorkerEnvironment(
        agent_socket=path, round=Round(1), local_rank=0, snapshot_home=str(tmp_path / "shm" / "home")
    )
    with pytest.raises(Unavailable, match="is served by another user"):
        AgentLink(where).ask(KvCheck(keys=("a",)), timeout=0.5)
    reporter = ProgressReporter(where)
    reporter.report(1)
    reporter.close()
    outlet = AgentOutlet(where)
    outlet.open(SavePlace(directory="/nowhere"))
    outlet.close()
    assert "The trainer cannot report its snapshots to the agent" in caplog.text
    with pytest.raises(Unavailable, match="is served by another user"):
        RelayWire(path, 0)
    with pytest.raises(Unavailable, match="is served by another user"):
        asyncio.run(LocalPlatform(LocalOptions(socket=path), "uid").list())
    assert server.heard() == b""


def test_dataloaders_and_shared_objects_say_nothing_to_a_server_of_another_user(
    serve: Callable[[str], SecondServer],
) -> None:
    name = f"dlrover-data-{uuid.uuid4().hex}"
    loader = serve("\0" + name)
    with pytest.raises(DataUnavailable, match="is served by another user"):
        LoaderClient(name, _Answer)
    assert loader.heard() == b""
    mine = SharedDict(name, create=True)
    path = mine._path
    mine.close()
    try:
        server = serve(str(path))
        with pytest.raises(NotOurs, match="is served by another user"):
            SharedDict(name).get()
        assert server.heard() == b""
    finally:
        path.unlink()


class _Answer(msgspec.Struct):
    trouble: str = ""
