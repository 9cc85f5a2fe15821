"""The user's plug-ins: asked in a thread, with a limit, once for each host; whatever they do, the job goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrover.master import topology_plugins as room
from dlrover.master.config import EXIT_USAGE
from dlrover.master.topology_plugins import DefaultTopologyQuerier, DpTopologySorter, NodeTopologyMeta, TopologyPlugins
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.job import (
    AwaitOrder,
    FailureKind,
    JobTerms,
    Limits,
    Micros,
    NodeRank,
    ReportFailure,
    Round,
    Run,
    WorkerFailure,
)
from tests.master.conftest import Connect, MakeMaster, StartMaster, journalled

FOUR = JobTerms(limits=Limits(min_nodes=4, max_nodes=4))


PATIENT = 150.0


def plugins(**asked: Any) -> TopologyPlugins:
    """A busy machine may be late; and who waits in vain for an order must not only be late."""
    return TopologyPlugins(time_limit=PATIENT, **asked)


class Switches:
    """Hosts l0, l2 below switch a, the others below b, all below the outer switch s."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def query(self, host: str) -> tuple[str, str]:
        self.asked.append(host)
        return ("a" if host in ("host-l0", "host-l2") else "b"), "s"


async def world_of(start_master: StartMaster, connect: Connect, topology: TopologyPlugins) -> list[int]:
    """Group ranks of four nodes, by node rank."""
    master = await start_master(topology=topology)
    agents = [
        connect(master.address, launch=f"l{number}", terms=FOUR, node_rank=NodeRank(number)) for number in range(4)
    ]
    for agent in agents:
        await agent.attached()
    await asyncio.gather(*(agent.join() for agent in agents))
    wishes = [(await agent.wish(Run)).wish for agent in agents]
    return [wish.world.group_rank for wish in wishes]


async def test_the_world_follows_the_switches_that_the_querier_names(
    start_master: StartMaster, connect: Connect
) -> None:
    switches = Switches()
    assert await world_of(start_master, connect, plugins(query=switches.query)) == [0, 2, 1, 3]
    assert sorted(switches.asked) == [f"host-l{number}" for number in range(4)]


async def test_plug_ins_are_asked_about_the_machine_below_a_pod(start_master: StartMaster, connect: Connect) -> None:
    """NODE_IP: switches are known by the addresses of machines, not by those of pods."""
    asked: list[str] = []
    sorted_: list[str] = []

    def query(host: str) -> tuple[str, str]:
        asked.append(host)
        return "a", "s"

    def sort(nodes: dict[int, NodeTopologyMeta]) -> list[int]:
        sorted_.extend(node.node_ip for node in nodes.values())
        return list(nodes)

    master = await start_master(topology=plugins(query=query, sort=sort))
    terms = JobTerms(limits=Limits(min_nodes=1, max_nodes=1))
    agent = connect(master.address, launch="pod", terms=terms, node_ip="10.0.0.7", name="job-worker-0")
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    assert asked == ["10.0.0.7"]
    assert set(sorted_) == {"10.0.0.7"}
    [node] = (await master.status()).nodes
    assert (node.name, node.host) == ("job-worker-0", "host-pod")


async def test_the_world_follows_the_sorter(start_master: StartMaster, connect: Connect, tmp_path: Path) -> None:
    ids = set()

    def backwards(nodes: dict[int, NodeTopologyMeta]) -> list[int]:
        ids.update((node.node_id, node.node_group) for node in nodes.values())
        return sorted(nodes, reverse=True)

    assert await world_of(start_master, connect, plugins(sort=backwards)) == [3, 2, 1, 0]
    assert ids == {(number, -1) for number in range(1, 5)}, "each launch has an id of its own"
    awaited = {each.limit for each in journalled(tmp_path / "journal.sqlite") if isinstance(each, AwaitOrder)}
    assert awaited == {2 * PATIENT}, "the answer may first come for the nodes before it"


async def test_who_is_refused_lets_nobody_wait_for_an_order(start_master: StartMaster, connect: Connect) -> None:
    one = JobTerms(limits=Limits(min_nodes=1, max_nodes=1))
    master = await start_master(topology=plugins(sort=sorted))
    agent = connect(master.address, launch="l0", terms=one, node_rank=NodeRank(0))
    attached = await agent.attached()
    await agent.join()
    await agent.wish(Run)
    stranger = connect(master.address, launch="l1", terms=one, node_rank=NodeRank(0))
    with pytest.raises(Rejected):
        await stranger.attached()
    failure = WorkerFailure(global_rank=0, local_rank=0, pid=1, kind=FailureKind.SIGNAL, signal=9, exited_at=Micros(0))
    report = ReportFailure(node=attached.node, incarnation=attached.incarnation, round=Round(1), failures=(failure,))
    await agent.channel.call(report, timeout=20)
    await agent.join(2)
    await agent.wish(Run)


async def test_a_sorter_sees_what_the_querier_found(start_master: StartMaster, connect: Connect) -> None:
    topology = plugins(query=Switches().query, sort=DpTopologySorter().sort)
    assert await world_of(start_master, connect, topology) == [0, 2, 1, 3]


@pytest.mark.parametrize("kind", [SystemError, SystemExit])
async def test_plug_ins_that_raise_or_talk_rubbish_harm_nobody(
    start_master: StartMaster, connect: Connect, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    def broken(host: str) -> None:
        raise kind(f"no route to {host}")

    assert await world_of(start_master, connect, plugins(query=broken, sort=lambda nodes: [7, 7])) == [
        0,
        1,
        2,
        3,
    ]
    told = [record.message for record in caplog.records if "returned no usable answer" in record.message]
    assert len(told) == 2, "one warning for each"


class TestCalls:
    @pytest.fixture
    def held(self) -> Iterator[threading.Event]:
        """Set at the end, so that no thread stays behind."""
        event = threading.Event()
        yield event
        event.set()

    async def test_a_plug_in_that_never_answers_is_asked_no_more_after_a_while(
        self, held: threading.Event, caplog: pytest.LogCaptureFixture
    ) -> None:
        num_asked = 0

        def stuck(host: str) -> tuple[str, str]:
            nonlocal num_asked
            num_asked += 1
            held.wait(10)
            return "a", "b"

        topology = TopologyPlugins(query=stuck, time_limit=0.02)
        for number in range(10):
            assert await topology.place_of(f"host-{number}") == ()
        topology.close()
        assert num_asked <= room.MAX_TIMEOUTS, "a thread that does not begin within the limit does not ask either"
        assert not topology.has_querier
        assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]

    async def test_an_answer_is_kept(self) -> None:
        switches = Switches()
        topology = plugins(query=switches.query)
        assert topology.known_place("host-l0") is None
        assert await topology.place_of("host-l0") == ("s", "a"), "outermost first"
        assert await topology.place_of("host-l0") == topology.known_place("host-l0")
        topology.close()
        assert switches.asked == ["host-l0"]

    @pytest.mark.parametrize("answer", [None, 7, "ab" * 200, ["x" * 300], [1, 2], ["a"] * 20])
    async def test_an_answer_that_is_no_place_is_none(self, answer: object) -> None:
        topology = plugins(query=lambda host: answer)
        assert await topology.place_of("h") == ()
        topology.close()

    async def test_half_a_character_in_a_name_keeps_no_node_out(self) -> None:
        topology = plugins(query=lambda host: ("a", "caf\udce9"))
        assert await topology.place_of("h") == ("caf?", "a")
        topology.close()

    async def test_two_empty_names_mean_that_nobody_knows(self) -> None:
        topology = plugins(query=DefaultTopologyQuerier().query)
        assert await topology.place_of("h") == ()
        topology.close()


def test_the_sorter_of_the_original_keeps_neighbours_together() -> None:
    nodes = {rank: NodeTopologyMeta(node_rank=rank, process_num=8, asw="ab"[rank % 2], psw="p") for rank in range(4)}
    assert list(DpTopologySorter().sort(nodes)) == [0, 2, 1, 3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no-separator", "module::Class"),
        ("no_such_module::Class", "ModuleNotFoundError"),
        ("dlrover.master.topology_plugins::Nothing", "AttributeError"),
        ("dlrover.core.membership.nodes::Node", "TypeError"),
        ("dlrover.master.topology_plugins::DpTopologySorter", "query"),
    ],
)
def test_a_plug_in_that_cannot_be_had_is_found_at_the_start(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TopologyPlugins.load(name, "")


def test_a_master_with_a_wrong_plug_in_says_so_and_touches_nothing(make_master: MakeMaster, tmp_path: Path) -> None:
    master = make_master(topology_sorter="no_such_module::Sorter")
    assert master.run_to_end() == EXIT_USAGE
    assert "no_such_module::Sorter" in master.log()
    assert not master.journal.exists()
