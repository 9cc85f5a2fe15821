"""Code of users: whatever it does, the caller gets an answer or a reason."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover.host.extensions import NoAnswer, TimedCalls, UnusableExtension, build, build_installed

DEADLINE = 60.0
MODULE = """
class Good:
    def work(self): return 7
class Idle:
    def work(self): return 0
class Lacking:
    work = 3
class Leaving:
    def __init__(self): raise SystemExit(3)
class Moody:
    @property
    def work(self): raise RuntimeError("not today")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "user_extension.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("user_extension", None)


def test_a_class_is_found_by_its_name_and_built(package: Path) -> None:
    assert build("user_extension::Good", method="work").work() == 7


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("user_extension", "give the form module::Class"),
        ("::Good", "give the form module::Class"),
        ("no_such_module::Good", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("user_extension::Missing", "AttributeError: module 'user_extension' has no attribute 'Missing'"),
        ("user_extension::Lacking", "it has no method `work`"),
        ("user_extension::Leaving", "SystemExit: 3"),
        ("user_extension::Moody", "RuntimeError: not today"),
    ],
)
def test_an_unusable_class_is_reported_with_the_reason(package: Path, name: str, reason: str) -> None:
    with pytest.raises(UnusableExtension) as raised:
        build(name, method="work")
    assert str(raised.value) == reason


def test_an_unusable_installed_extension_costs_a_warning_and_no_other(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = package / "user_extension-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: user-extension\nVersion: 1\n")
    lines = [f"{name.lower()} = user_extension:{name}" for name in ("Leaving", "Idle", "Good")]
    (info / "entry_points.txt").write_text("\n".join(["[dlrover.test_extensions]", *lines]))

    def adapt(name: str, extension: Any) -> Any:
        return None if name == "idle" else extension

    found = dict(
        build_installed(
            "dlrover.test_extensions", what="tester", method="work", log=logging.getLogger("test"), adapt=adapt
        )
    )
    assert list(found) == ["good"]
    assert [record.message for record in caplog.records] == ["The tester leaving is not used: SystemExit: 3"]


@pytest.fixture
def held() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


async def test_what_an_extension_raises_is_the_reason_for_no_answer() -> None:
    calls = TimedCalls("test", time_limit=DEADLINE, max_timeouts=2)
    with pytest.raises(NoAnswer, match="ValueError: invalid literal"):
        await calls.call(lambda: int("x"))
    with pytest.raises(NoAnswer, match="RuntimeError: SystemExit: 4"):
        await calls.call(lambda: sys.exit(4))

    async def leave() -> None:
        sys.exit(5)

    with pytest.raises(NoAnswer, match="RuntimeError: SystemExit: 5"):
        await calls.call_async(leave)
    assert await calls.call(lambda: 8) == 8
    calls.close()


async def test_no_second_call_while_one_that_took_too_long_still_runs(held: threading.Event) -> None:
    calls = TimedCalls("test", time_limit=0.05, max_timeouts=2)
    with pytest.raises(NoAnswer, match=r"it took longer than 0\.05 s"):
        await calls.call(lambda: held.wait(DEADLINE))
    num_more = 0

    def more() -> None:
        nonlocal num_more
        num_more += 1

    with pytest.raises(NoAnswer, match="an earlier call has not returned"):
        await calls.call(more)
    assert num_more == 0
    assert not calls.is_disabled
    held.set()
    await asyncio.wait_for(calls.wait_until_idle(), DEADLINE)
    assert not calls.is_disabled
    calls.close()


async def test_an_extension_is_disabled_after_timeouts_in_a_row(held: threading.Event) -> None:
    calls = TimedCalls("test", time_limit=0.05, max_timeouts=3, num_threads=2)
    for _ in range(2):
        with pytest.raises(NoAnswer, match="it took longer"):
            await calls.call(lambda: held.wait(DEADLINE))
    with pytest.raises(NoAnswer, match="an earlier call has not returned"):
        await calls.call(lambda: 1)
    assert not calls.is_disabled, "a refused call is no timeout"
    held.set()
    await asyncio.wait_for(calls.wait_until_idle(), DEADLINE)
    with pytest.raises(NoAnswer, match="it took longer"):
        await calls.call_async(lambda: asyncio.sleep(DEADLINE))
    assert calls.is_disabled
    with pytest.raises(NoAnswer, match="disabled after 3 timeouts"):
        await calls.call(lambda: 1)
    calls.close()


async def test_a_call_that_never_began_does_not_run_later(held: threading.Event) -> None:
    calls = TimedCalls("test", time_limit=0.2, max_timeouts=9, num_threads=1)
    ran = []

    async def ask(work: Any) -> str:
        try:
            return str(await calls.call(work))
        except NoAnswer as error:
            return str(error)

    answers = await asyncio.gather(ask(lambda: held.wait(DEADLINE)), ask(lambda: ran.append(1)))
    assert answers == ["it took longer than 0.2 s"] * 2
    held.set()
    await asyncio.wait_for(calls.wait_until_idle(), DEADLINE)
    calls.close()
    assert ran == []
