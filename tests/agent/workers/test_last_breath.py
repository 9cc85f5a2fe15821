"""The agent's half of a last breath, with real processes that answer, die, refuse, stand still or stay silent at each point."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover.agent.workers.last_breath import Survivor, take_last_breath
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agreed.last_breath import Plan
from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.host.shared_page.breath_words import EXIT_LAST_BREATH
from tests.agent.lab import DEADLINE, code_of, start_process, until, write

WORKER = """
    import os, signal, sys
    from dlrover.host.shared_page.breath_page import BreathPage
    from dlrover.host.shared_page.breath_words import EXIT_LAST_BREATH, BreathAnswer, BreathOrder
    path, folder, rank, step, digest, conduct = sys.argv[1:]
    page = BreathPage.open(path, 0)
    page.is_guarded = conduct != "unguarded"
    open(f"{folder}/ready{rank}", "w").close()
    page.wait_for_order(BreathOrder.NONE, None)
    if conduct == "silent":
        signal.pause()
    if conduct == "dies at the order":
        os.kill(os.getpid(), signal.SIGKILL)
    piece = int(conduct.split()[1]) if conduct.startswith("piece ") else None
    page.offer = (int(step), int(digest), piece, "can finish" in conduct)
    page.answer = BreathAnswer.REFUSED if conduct == "refuses" else BreathAnswer.OFFERED
    if conduct == "refuses":
        os._exit(EXIT_LAST_BREATH)
    if conduct == "dies after its offer":
        os.kill(os.getpid(), signal.SIGKILL)
    order = page.wait_for_order(BreathOrder.OFFER, None)
    if order is BreathOrder.FINISH:
        if conduct.endswith("dies over it"):
            os.kill(os.getpid(), signal.SIGKILL)
        if conduct.endswith("and refuses"):
            page.answer = BreathAnswer.REFUSED
            os._exit(EXIT_LAST_BREATH)
        page.offer = (int(step) + 1, int(digest) + 1, piece, False)
        page.answer = BreathAnswer.FINISHED
        order = page.wait_for_order(BreathOrder.FINISH, None)
    if order is BreathOrder.SAVE:
        if conduct == "dies while it saves":
            os.kill(os.getpid(), signal.SIGKILL)
        if conduct == "never saves":
            signal.pause()
        open(f"{folder}/saved{rank}", "w").close()
        page.answer = BreathAnswer.SAVED
    os._exit(EXIT_LAST_BREATH)
"""


class Node:
    """Workers and their pages."""

    def __init__(self, tree: ProcessTree, folder: Path) -> None:
        self._tree, self._folder = tree, folder
        self._descriptors: list[int] = []
        self.survivors: list[Survivor] = []

    async def start(self, *workers: tuple[int, int, str]) -> None:
        """Step, digest and conduct of each."""
        script = write(self._folder / "worker.py", WORKER)
        for rank, (step, digest, conduct) in enumerate(workers):
            descriptor = os.memfd_create("page")
            os.ftruncate(descriptor, 4096)
            self._descriptors.append(descriptor)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            words = (path, str(self._folder), str(rank), str(step), str(digest), conduct)
            process = start_process(sys.executable, script, *words, start_new_session=True)
            exited = self._tree.watch(process.pid)
            process.returncode = 0  # the tree reaps it
            self.survivors.append(Survivor(rank, process.pid, exited, BreathPage(descriptor, 0)))
        await until(lambda: len(list(self._folder.glob("ready*"))) == len(workers))

    async def breathe(self, limit: float = DEADLINE) -> Plan | None:
        return await asyncio.wait_for(take_last_breath(self.survivors, limit=limit), 2 * DEADLINE)

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in self._folder.glob("saved*"))

    async def codes(self) -> list[int]:
        return [code_of(await asyncio.wait_for(each.exit, DEADLINE)) for each in self.survivors]

    def close(self) -> None:
        for survivor in self.survivors:
            survivor.page.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


@pytest.fixture
async def node(tree: ProcessTree, tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tree, tmp_path)
    yield node
    tree.kill()
    node.close()


async def test_one_saves_and_all_end_with_a_code_of_their_own(node: Node) -> None:
    await node.start((57, 9, "good"), (57, 9, "good"), (57, 9, "good"))
    plan = await node.breathe()
    assert plan is not None
    assert (plan.step, plan.holders) == (57, (0, 1, 2))
    assert node.saved == ["saved0"]
    assert await node.codes() == [EXIT_LAST_BREATH] * 3


async def test_of_a_state_in_pieces_every_survivor_saves_its_own(node: Node) -> None:
    await node.start((57, 9, "piece 0"), (57, 8, "piece 1"), (56, 7, "piece 1"))
    plan = await node.breathe()
    assert plan is not None
    assert (plan.step, plan.is_cut) == (57, True)
    assert node.saved == ["saved0", "saved1"], "the third is behind, and the second has its piece"
    assert await node.codes() == [EXIT_LAST_BREATH] * 3


async def test_who_has_all_gradients_finishes_the_step_that_others_have_finished(node: Node) -> None:
    await node.start((57, 9, "piece 0"), (56, 7, "piece 1 can finish"))
    plan = await node.breathe()
    assert plan is not None
    assert (plan.step, plan.holders) == (57, (0, 1))
    assert node.saved == ["saved0", "saved1"]
    assert await node.codes() == [EXIT_LAST_BREATH] * 2


async def test_the_lost_worker_may_have_finished_the_step_so_the_others_do(node: Node) -> None:
    await node.start((56, 8, "piece 0 can finish"), (56, 7, "piece 1 can finish"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.step == 57
    assert node.saved == ["saved0", "saved1"]


@pytest.mark.parametrize(("end", "codes"), [("dies over it", -signal.SIGKILL), ("and refuses", EXIT_LAST_BREATH)])
async def test_one_that_cannot_finish_its_step_leaves_nobody_waiting(node: Node, end: str, codes: int) -> None:
    await node.start((57, 9, "piece 0"), (56, 7, f"piece 1 can finish {end}"), (56, 7, "piece 1"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.holders == ()
    assert node.saved == []
    assert await node.codes() == [EXIT_LAST_BREATH, codes, EXIT_LAST_BREATH]


async def test_who_is_ahead_by_one_step_saves(node: Node) -> None:
    await node.start((56, 8, "good"), (57, 9, "good"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.step == 57
    assert node.saved == ["saved1"]


@pytest.mark.parametrize("conduct", ["dies at the order", "dies after its offer", "dies while it saves"])
async def test_a_second_death_leaves_the_step_to_the_next_survivor(node: Node, conduct: str) -> None:
    await node.start((57, 9, conduct), (57, 9, "good"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.holders
    assert node.saved == ["saved1"]
    assert await node.codes() == [-signal.SIGKILL, EXIT_LAST_BREATH]


@pytest.mark.parametrize("conduct", ["dies at the order", "dies after its offer", "dies while it saves"])
async def test_if_the_last_one_dies_nothing_is_saved_and_nobody_waits(node: Node, conduct: str) -> None:
    await node.start((57, 9, conduct))
    plan = await node.breathe()
    assert plan is not None
    assert plan.holders == ()
    assert node.saved == []


async def test_different_digests_mean_that_nobody_saves_and_all_end(node: Node) -> None:
    await node.start((57, 9, "good"), (57, 8, "good"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.doubt == "survivors have different states of step 57"
    assert node.saved == []
    assert await node.codes() == [EXIT_LAST_BREATH] * 2


async def test_a_survivor_that_refuses_is_a_doubt(node: Node) -> None:
    await node.start((57, 9, "refuses"), (57, 9, "good"))
    plan = await node.breathe()
    assert plan is not None
    assert plan.doubt == "1 of the survivors did not answer"
    assert node.saved == []
    assert await node.codes() == [EXIT_LAST_BREATH] * 2


async def test_a_survivor_that_does_not_answer_costs_the_limit_and_no_more(node: Node) -> None:
    await node.start((57, 9, "silent"), (57, 9, "good"))
    began_at = time.monotonic()
    plan = await node.breathe(limit=1.0)
    assert time.monotonic() - began_at < 10
    assert plan is not None
    assert plan.doubt == "1 of the survivors did not answer"
    assert node.saved == []
    assert code_of(await asyncio.wait_for(node.survivors[1].exit, DEADLINE)) == EXIT_LAST_BREATH


async def test_one_that_never_finishes_its_save_is_not_followed_by_another_writer(node: Node) -> None:
    await node.start((57, 9, "never saves"), (57, 9, "good"))
    plan = await node.breathe(limit=1.0)
    assert plan is not None
    assert plan.doubt == "no survivor could save it"
    assert node.saved == []


async def test_a_stopped_worker_counts_as_lost(node: Node) -> None:
    await node.start((57, 9, "good"), (57, 9, "good"))
    os.kill(node.survivors[0].pid, signal.SIGSTOP)
    await until(lambda: node.survivors[0].is_stopped)
    plan = await node.breathe()
    assert plan is not None
    assert plan.holders == (1,)
    assert node.saved == ["saved1"]


async def test_workers_without_a_guard_are_not_asked(node: Node) -> None:
    await node.start((57, 9, "good"), (57, 9, "unguarded"))
    assert await node.breathe() is None
    assert all(survivor.is_alive for survivor in node.survivors)
