"""What all tests rely on: signals as in an interactive shell, and no test that fails because the machine is busy."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import small_disk as small

# A gate judges a change by the same examples each time; people's own runs look for new ones.
hypothesis.settings.register_profile(
    "dlrover",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("dlrover")

# Started by nohup, or in the background of a script, this process ignores some signals and all children would inherit that.
for _number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(_number, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small.mounted(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe that takes nothing before somebody reads. Whoever has it closes the end for writing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"." * 4096)
    os.set_blocking(writer, True)
    yield reader, writer
    os.close(reader)


@pytest.fixture
def reserved_port() -> Iterator[int]:
    """
    A port of the loopback for a server that is started later, and the next one for the master of a job with this `--master-port`.
    As long as the test lasts the kernel gives them to nobody who asks for any port, from whatever address; a listener that allows
    its address to be used again, as servers do, binds beside us.
    """
    from dlrover.cli.launch.discovery import MasterPort

    for _ in range(100):
        with contextlib.closing(MasterPort("0.0.0.0", 0, purpose="test")) as seat:
            try:
                beside = MasterPort("0.0.0.0", seat.port + 1, purpose="test")
            except OSError:
                continue
            with contextlib.closing(beside):
                yield seat.port
            return
    raise AssertionError("no two ports in a row are free")
