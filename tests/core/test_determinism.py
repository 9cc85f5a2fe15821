"""The same commands lead to the same state, in any process; and the core pulls in nothing that could prevent it."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from dlrover.core.commit_order import replay
from tests.core.test_properties import a_random_journal

REPLAY = """
import pathlib, sys
import msgspec
from dlrover.core.commit_order import replay
records = msgspec.msgpack.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=list[bytes])
print(replay(None, records).job.digest().hex())
"""

IMPORT = """
import importlib, pkgutil, sys
import dlrover.core
for module in pkgutil.walk_packages(dlrover.core.__path__, "dlrover.core."):
    importlib.import_module(module.name)
print(" ".join(sorted(sys.modules)))
"""

# `statistics` imports `random` without using it here; that nothing of the core does, the import contracts hold.
FORBIDDEN = {"asyncio", "grpc", "logging", "multiprocessing", "select", "selectors", "socket", "sqlite3"}
FORBIDDEN |= {
    "subprocess",
    "tempfile",
    "threading",
    "torch",
    "numpy",
    "psutil",
    "rich",
    "typer",
    "dlrover.protocol.rpc.client",
}


def run(script: str, *args: str, hash_seed: str = "random") -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_commands_give_the_same_digest_twice(seed: int) -> None:
    journal = a_random_journal(seed)
    assert journal == a_random_journal(seed)
    assert len(journal) > 300
    job = replay(None, journal).job
    assert job.digest() == replay(None, journal).job.digest()
    half = len(journal) // 2
    snapshot = replay(None, journal[:half]).job.encode()
    assert replay(snapshot, journal[half:]).job.encode() == job.encode()


def test_another_process_with_another_hash_seed_gives_the_same_digest(tmp_path: pathlib.Path) -> None:
    """I5"""
    import msgspec

    journal = a_random_journal(3)
    path = tmp_path / "journal"
    path.write_bytes(msgspec.msgpack.encode(journal))
    digest = replay(None, journal).job.digest().hex()
    assert [run(REPLAY, str(path), hash_seed=seed) for seed in ("0", "1234")] == [digest, digest]


def test_the_core_needs_no_clock_thread_network_or_chance() -> None:
    loaded = set(run(IMPORT).split())
    assert "dlrover.core.job" in loaded
    assert not loaded & FORBIDDEN
