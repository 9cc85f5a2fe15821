"""Workers of a state in pieces wait for each other before a step, and never for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.protocol.progress_page import DEATH_NOTICE_AT, ProgressPage
from dlrover.trainer.torch.resilience.meeting import Meeting

DEADLINE = 60.0


@pytest.fixture
def pages() -> Iterator[list[BreathPage]]:
    progress = [ProgressPage() for _ in range(3)]
    pages = [BreathPage(each.descriptor, DEATH_NOTICE_AT) for each in progress]
    yield pages
    for page, each in zip(pages, progress, strict=True):
        page.close()
        each.close()


def come(room: Meeting, is_lost: threading.Event) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(room.is_complete_after_wait(is_lost.is_set)), daemon=True)
    thread.start()
    return thread, answers


def test_nobody_passes_before_the_last_one_has_come(pages: list[BreathPage]) -> None:
    first, answers = come(Meeting(pages[0], pages[1:]), threading.Event())
    second, others = come(Meeting(pages[1], [pages[0], pages[2]]), threading.Event())
    first.join(0.1)
    assert first.is_alive()
    assert second.is_alive()
    pages[2].num_ready = 1
    first.join(DEADLINE)
    second.join(DEADLINE)
    assert answers == others == [True]


def test_a_lost_worker_ends_the_wait(pages: list[BreathPage]) -> None:
    is_lost = threading.Event()
    room = Meeting(pages[0], pages[1:])
    thread, answers = come(room, is_lost)
    is_lost.set()
    while thread.is_alive():  # a wake-up may come just before the wait, as in the product, which repeats it
        room.interrupt()
        thread.join(0.01)
    assert answers == [False]


def test_one_that_never_comes_is_waited_for_once(pages: list[BreathPage]) -> None:
    room = Meeting(pages[0], pages[1:], patience=0.05)
    assert room.is_complete_after_wait(lambda: False)
    room.patience = 10 * DEADLINE
    assert room.is_complete_after_wait(lambda: False)
    assert pages[0].num_ready == 2, "others that wait for this one need not"
