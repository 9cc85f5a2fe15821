"""Copies between agents: kept, refused, brought back; and what a peer that lies, hangs or is gone can do to a restart."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import zlib

import msgspec
import pytest

from dlrover.agent.replicas.editions import shards_of_node
from dlrover.agent.replicas.parity_store import HEAD_BYTES, ParityStore
from dlrover.agent.replicas.store import header_of, meta_of
from dlrover.agent.replicas.wire import PeerServer, RateLimit, Secret, connect
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import NodeId, NodeRank, Round
from dlrover.protocol.messages.peers import Accepted, HeldList, ListHeld, Peer, PieceHeader, Proof
from dlrover.snapshot.memory.checksum import Algorithm
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.mirror import copy_paths
from dlrover.snapshot.memory.segment import segment_paths
from dlrover.snapshot.parity import add_slowly
from dlrover.snapshot.storage.persist import pin_newest, read_request, release
from tests.agent.lab import DEADLINE, until
from tests.agent.replicas.replica_lab import JOB, TOKEN, Lab, Meddler, is_right, states_in


@pytest.fixture
def lab(tmp_path):
    lab = Lab(tmp_path)
    yield lab
    lab.close()


async def two_nodes(lab: Lab, **config):
    for node in (0, 1):
        lab.start(node, **config)
    trainers = [lab.trainer(node, node) for node in (0, 1)]
    for node in (0, 1):
        await lab.enter(node)
    return trainers


async def test_a_new_node_gets_the_shard_of_the_lost_one(lab):
    trainers = await two_nodes(lab)
    for step in (1, 2, 3):
        for node in (0, 1):
            await lab.push(node, trainers[node].save(step, num_shards=2))
            assert lab.nodes[node].copied_step == step
    lab.lose(1)
    lab.start(2)
    lab.round = Round(2)
    await lab.enter(0)
    await lab.enter(2)
    assert lab.nodes[2].copied_step is None, "nobody keeps anything of it yet"
    assert list(states_in(lab.homes[2], 1)) == [3], "the newest step that all nodes can have"
    assert is_right(states_in(lab.homes[2], 1)[3], 3, 1)
    assert sorted(states_in(lab.homes[0], 0)) == [2, 3], "the survivor's own are as they were"


async def test_survivors_go_back_to_the_step_that_the_lost_node_can_still_have(lab):
    """Its last two saves had no copy yet: then every node needs an older one, and has it from its keeper."""
    trainers = await two_nodes(lab)
    for step in (1, 2):
        for node in (0, 1):
            await lab.push(node, trainers[node].save(step, num_shards=2))
    for step in (3, 4):
        for trainer in trainers:
            trainer.save(step, num_shards=2)
    await lab.push(0, trainers[0].save(5, num_shards=2))
    trainers[0].close()
    # The first node's copies are of 2 and 5, the other's of 1 and 2; both nodes stay, but the second lost its own segments.
    for path in segment_paths(lab.homes[1], 1):
        path.unlink()
    lab.round = Round(2)
    lab.nodes[0]._members = lab.nodes[1]._members = ()
    await lab.enter(0)
    await lab.enter(1)
    assert is_right(states_in(lab.homes[0], 0)[2], 2, 0)
    assert is_right(states_in(lab.homes[1], 1)[2], 2, 1)


async def test_ranks_that_moved_get_the_shards_of_their_new_place(lab):
    for node in (0, 1, 2):
        lab.start(node)
    trainers = [lab.trainer(node, node) for node in (0, 1, 2)]
    for node in (0, 1, 2):
        await lab.enter(node)
    for node in (0, 1, 2):
        await lab.push(node, trainers[node].save(7, num_shards=3))
    lab.lose(0)
    lab.start(3)
    lab.round = Round(2)
    for node in (1, 2, 3):
        await lab.enter(node)
    for shard, node in enumerate((1, 2, 3)):
        assert is_right(states_in(lab.homes[node], shard)[7], 7, shard)


async def test_a_state_that_all_nodes_share_is_not_copied_and_comes_from_any_of_them(lab):
    lab.start(0)
    lab.start(1)
    trainers = [lab.trainer(node, 0) for node in (0, 1)]
    for node in (0, 1):
        await lab.enter(node)
        await lab.push(node, trainers[node].save(4, num_shards=1))
    assert not copy_paths(lab.homes[0])
    assert not copy_paths(lab.homes[1])
    lab.lose(0)
    lab.start(2, copies=0)
    lab.round = Round(2)
    await lab.enter(2)
    assert is_right(states_in(lab.homes[2], 0)[4], 4, 0)


async def test_a_save_of_which_a_shard_is_nowhere_is_not_fetched(lab):
    trainers = await two_nodes(lab)
    trainers[0].save(1, num_shards=2)
    await lab.push(1, trainers[1].save(1, num_shards=2))
    lab.lose(0)
    lab.start(2)
    lab.round = Round(2)
    await lab.enter(2)
    assert not segment_paths(lab.homes[2], 0)
    assert not segment_paths(lab.homes[2], 1)


async def test_the_trainer_may_ask_for_copies(lab):
    trainers = await two_nodes(lab, copies=0)
    await lab.push(0, trainers[0].save(1, num_shards=2))
    assert not copy_paths(lab.homes[1])
    await lab.push(0, trainers[0].save(2, num_shards=2, replica_count=1))
    assert len(copy_paths(lab.homes[1])) == 1


async def test_two_copies_are_kept_and_the_newer_never_overwrites_the_newest(lab):
    trainers = await two_nodes(lab)
    for step in range(1, 6):
        await lab.push(0, trainers[0].save(step, num_shards=2))
        held = [item.step for item in lab.nodes[1]._store.list().items if item.is_copy]
        assert sorted(held) == [step - 1, step][-step:]
    assert len(copy_paths(lab.homes[1])) == 1


async def test_what_is_offered_just_as_the_copies_are_done_is_copied_too(lab):
    """The task had looked for the last time, and did not count as done yet: the newest step had no copy until the next save."""
    trainers = await two_nodes(lab)
    replicas = lab.nodes[0]
    first, *late = (trainers[0].save(step, num_shards=2) for step in (1, 2))

    class Offers(dict):
        def pop(self, path, default=None):
            found = super().pop(path, default)
            if found is None and late:
                asyncio.get_running_loop().call_soon(replicas.offer, late.pop())
            return found

    replicas._offered = Offers()
    replicas.offer(first)
    await until(lambda: 2 in [item.step for item in lab.nodes[1]._store.list().items if item.is_copy])


async def test_copies_of_former_rounds_go_when_the_new_round_has_saved(lab):
    trainers = await two_nodes(lab)
    await lab.push(0, trainers[0].save(1, num_shards=2))
    lab.round = Round(2)
    for node in (0, 1):
        await lab.enter(node)
    for step in (2, 3):
        await lab.push(1, trainers[1].save(step, num_shards=2, round_=2))
    assert not copy_paths(lab.homes[1]), "nobody refreshed it"
    assert len(copy_paths(lab.homes[0])) == 1


async def push_by_hand(lab: Lab, name, address: str, round_: int = 1, stall: float = 10.0) -> None:
    """As the replicas do it, without their patience."""
    pinned = pin_newest(name.path, name.slot, name.generation)
    assert pinned is not None
    try:
        request = read_request(decode_contents(pinned.sections()))
        assert request is not None
        with connect(
            address, Secret(TOKEN, JOB), None, deadline=time.monotonic() + 10 * stall, stall=stall
        ) as connection:
            connection.send(header_of(pinned, request, Round(round_)))
            connection.receive(Accepted)
            connection.send_bytes(meta_of(pinned))
            connection.send_bytes(pinned.data)
            connection.receive(Accepted)
    finally:
        release(pinned)


async def test_a_stale_round_or_generation_is_refused(lab):
    trainers = await two_nodes(lab)
    old, new = trainers[0].save(1, num_shards=2), trainers[0].save(2, num_shards=2)
    address = lab.nodes[1].address
    await push_by_hand(lab, new, address)
    for name in (old, new):
        with pytest.raises(Rejected, match="already holds generation") as refused:
            await push_by_hand(lab, name, address)
        assert refused.value.code == "stale-generation"
    lab.round = Round(2)
    await lab.enter(1)
    late = trainers[0].save(3, num_shards=2)
    with pytest.raises(Rejected) as refused:
        await push_by_hand(lab, late, address, round_=1)
    assert refused.value.code == "stale-round"
    with connect(address, Secret(TOKEN, JOB), None, deadline=time.monotonic() + DEADLINE) as connection:
        connection.send(ListHeld(round=Round(1)))
        with pytest.raises(Rejected, match="round 1, but this node is in round 2"):
            connection.receive(HeldList)


async def test_a_node_that_began_anew_replaces_the_copies_of_its_former_life(lab):
    """Its generations count from 1 again, in a later round."""
    trainers = await two_nodes(lab)
    for step in (1, 2, 3):
        await lab.push(0, trainers[0].save(step, num_shards=2))
    trainers[0].close()
    for path in segment_paths(lab.homes[0], 0):
        path.unlink()
    lab.round = Round(2)
    await lab.enter(1)
    again = lab.trainer(0, 0)
    await push_by_hand(lab, again.save(2, num_shards=2, round_=2, attempt="again"), lab.nodes[1].address, round_=2)
    held = [item for item in lab.nodes[1]._store.list().items if item.is_copy]
    assert [(item.step, item.attempt) for item in held] == [(2, "again")]


async def test_a_wrong_token_and_another_job_are_refused(lab):
    lab.start(0)
    for secret in (Secret("another token", JOB), Secret(TOKEN, "another job"), Secret("", JOB)):
        with pytest.raises(Rejected, match="token"):
            connect(lab.nodes[0].address, secret, None, deadline=time.monotonic() + DEADLINE)
    connect(lab.nodes[0].address, Secret(TOKEN, JOB), None, deadline=time.monotonic() + DEADLINE).close()


async def test_who_answers_must_know_the_token_too():
    """A caller gives nothing to a stranger that took over the address."""
    stranger = PeerServer("127.0.0.1", Secret("guessed", JOB), None, lambda connection: None)
    try:
        with pytest.raises(Rejected, match="token"):
            connect(stranger.address, Secret(TOKEN, JOB), None, deadline=time.monotonic() + DEADLINE)
    finally:
        stranger.close()


async def test_every_flipped_bit_of_a_transfer_is_caught(lab):
    """One after the other over the whole stream: proof, header, metadata, data. None becomes a copy; the next whole one does."""
    trainers = await two_nodes(lab)
    meddler = Meddler(lab.nodes[1].address)
    name = trainers[0].save(1, num_shards=2, size=64)
    pinned = pin_newest(name.path, name.slot, name.generation)
    assert pinned is not None
    request = read_request(decode_contents(pinned.sections()))
    assert request is not None
    num_header = 8 + len(msgspec.msgpack.encode(header_of(pinned, request, Round(1))))
    num_proof = 8 + len(msgspec.msgpack.encode(Proof(nonce=bytes(32), mac=bytes(32))))
    total = num_proof + num_header + pinned.record.meta_length + pinned.record.data_length
    release(pinned)
    num_caught = 0
    try:
        for offset in range(0, total, 7):
            meddler.offset = offset
            with pytest.raises((Rejected, Unavailable)):
                await push_by_hand(lab, name, meddler.address, stall=0.5)
            num_caught += 1
            assert lab.nodes[1]._store.holdings.newest_copy(0) is None, offset
        assert num_caught > 150
        meddler.offset = -1
        await push_by_hand(lab, name, meddler.address)
        assert lab.nodes[1]._store.holdings.newest_copy(0) is not None
    finally:
        meddler.close()


async def test_a_peer_that_hangs_holds_up_a_restart_no_longer_than_the_deadline(lab):
    """One takes the call and says nothing, one does not even take it; what the others have is fetched."""
    trainers = await two_nodes(lab)
    await lab.push(0, trainers[0].save(1, num_shards=2))
    await lab.push(1, trainers[1].save(1, num_shards=2))
    lab.lose(1)
    lab.start(2, stall=DEADLINE, ask_limit=4.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        lab.strangers = [Peer(NodeId(8), NodeRank(8), f"127.0.0.1:{silent.getsockname()[1]}")]
        dead = f"127.0.0.1:{gone.getsockname()[1]}"
        lab.strangers.append(Peer(NodeId(9), NodeRank(9), dead))
        gone.close()
        lab.round = Round(2)
        begun_at = time.monotonic()
        await lab.enter(2)
        assert time.monotonic() - begun_at < DEADLINE / 2
    assert is_right(states_in(lab.homes[2], 1)[1], 1, 1)


async def test_a_holder_that_stops_in_the_middle_is_given_up(lab):
    """It sends some bytes and then none: the workers start without the snapshot, and no half of it stays."""
    trainers = await two_nodes(lab)
    for node in (0, 1):
        await lab.push(node, trainers[node].save(1, num_shards=2, size=2_000_000))
    lab.lose(1)
    lab.start(2, stall=0.3, ask_limit=1.0, fetch_limit=1.0)
    blocked = RateLimit(1.0)
    original = lab.nodes[0]._store._give

    def give_slowly(connection, request):
        send = connection.send_bytes
        connection.send_bytes = lambda data, **options: send(data, limit=blocked)
        original(connection, request)

    lab.nodes[0]._store._give = give_slowly
    lab.round = Round(2)
    begun_at = time.monotonic()
    await lab.enter(2)
    assert time.monotonic() - begun_at < 20.0
    assert states_in(lab.homes[2], 1) == {}


@pytest.mark.parametrize(
    ("num_shards", "nodes", "expected"),
    [
        (1, 3, [(0,), (0,), (0,)]),
        (3, 3, [(0,), (1,), (2,)]),
        (4, 2, [(0, 1), (2, 3)]),
        (2, 4, [(0,), (1,), (0,), (1,)]),
        (2, 3, [(), (), ()]),
    ],
)
def test_the_shards_of_a_node(num_shards, nodes, expected):
    assert [shards_of_node(num_shards, rank, nodes) for rank in range(nodes)] == expected


def test_the_rate_limit_spreads_bytes_over_time():
    assert RateLimit().pause(10**9) == 0.0
    limit = RateLimit(1000.0)
    begun_at = time.monotonic()
    assert limit.pause(500) == pytest.approx(0.5)
    second = limit.pause(500)
    assert 1.0 - (time.monotonic() - begun_at) - 1e-6 <= second <= 1.0 + 1e-6


async def group_of(lab: Lab, size: int, parity: tuple[int, int], lanes: int = 1):
    for node in range(size):
        lab.start(node, copies=0, num_data=parity[0], num_parity=parity[1])
    trainers = [[lab.trainer(node, node * lanes + lane) for lane in range(lanes)] for node in range(size)]
    for node in range(size):
        await lab.enter(node)
    return trainers


async def save_everywhere(lab: Lab, trainers, step: int, **more) -> None:
    num_shards = sum(map(len, trainers))
    jobs = [
        (node, trainer.save(step, num_shards=num_shards, size=1000 + 300 * trainer.shard, **more))
        for node, own in enumerate(trainers)
        for trainer in own
    ]
    await asyncio.gather(*(lab.push(node, name) for node, name in jobs))


@pytest.mark.parametrize(
    ("size", "parity", "lost", "lanes"),
    [
        (3, (2, 1), [1], 1),
        (3, (2, 1), [0], 2),
        (4, (2, 1), [2], 1),  # a larger group than asked for
        (4, (2, 2), [1, 3], 1),
        (5, (3, 2), [0, 4], 1),
        (5, (4, 1), [4], 1),
    ],
)
async def test_lost_nodes_are_computed_from_parity(lab, size, parity, lost, lanes):
    trainers = await group_of(lab, size, parity, lanes)
    for step in (1, 2, 3):
        await save_everywhere(lab, trainers, step)
    for node in lost:
        lab.lose(node)
    for number, node in enumerate(lost):
        lab.start(100 + number, copies=0, num_data=parity[0], num_parity=parity[1])
        lab.order.remove(100 + number)
        lab.order.insert(node, 100 + number)
    lab.round = Round(2)
    for node in list(lab.order):
        await lab.enter(node)
    for number, node in enumerate(lost):
        for shard in range(node * lanes, (node + 1) * lanes):
            states = states_in(lab.homes[100 + number], shard)
            assert list(states) == [3]
            assert is_right(states[3], 3, shard)
            assert len(states[3]["tensor"]) == 1000 + 300 * shard


async def test_a_flipped_bit_of_a_parity_never_becomes_a_state(lab):
    """Of what survivors hold: at places all over it. The node that is computed from it has nothing then, or what it had."""
    trainers = await group_of(lab, 3, (2, 1))
    await save_everywhere(lab, trainers, 1)
    lab.lose(1)
    parities = [path for node in (0, 2) for path in lab.homes[node].glob("parity-*.whole")]
    num_caught = 0
    for number, part in enumerate((None, 0.001, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)):
        for path in parities if part is not None else ():
            content = bytearray(path.read_bytes())
            content[HEAD_BYTES + int(part * (len(content) - HEAD_BYTES))] ^= 1 << number % 8
            path.write_bytes(content)
        new = 10 + number
        lab.start(new, copies=0, num_data=2, num_parity=1)
        lab.order.remove(new)
        lab.order.insert(1, new)
        lab.round = Round(2)
        await lab.enter(new)
        states = states_in(lab.homes[new], 1)
        assert part is not None or states, "without damage it is computed"
        assert all(is_right(state, step, 1) for step, state in states.items())
        num_caught += not states
        lab.lose(new)
    assert num_caught == 9, "each of these places is part of what is computed, and they add up"


class Delivery:
    """The receiving end of a connection over which these bytes come."""

    def __init__(self, content: bytes) -> None:
        self._content, self.said = content, []

    def send(self, message) -> None:
        self.said.append(message)

    def receive_into(self, view: memoryview) -> None:
        view[:] = self._content


def test_a_piece_that_arrives_damaged_is_not_added_to_a_parity(tmp_path):
    """It could never be taken out again: the stripe would be lost without anybody knowing."""
    store = ParityStore(lambda: add_slowly)
    store.enter(tmp_path / "node")
    piece = bytes(range(200))
    header = PieceHeader(
        round=Round(1), attempt="a-1", step=1, saved_in=1, num_shards=2, lane=0, stripe=0, row=0, column=0, num_data=1,
        shard=0, image_bytes=200, length=200, crc=zlib.crc32(piece), algorithm=Algorithm.CRC32,
    )  # fmt: skip
    for place in (0, 99, 199):
        damaged = bytearray(piece)
        damaged[place] ^= 8
        with pytest.raises(Rejected, match="different checksum"):
            store.take(Delivery(bytes(damaged)), header)
        assert store.list() == ()
    store.take(Delivery(piece), header)
    [held] = store.list()
    assert held.columns == ((0, 200),)


async def test_more_losses_than_parities_are_not_made_good(lab):
    trainers = await group_of(lab, 4, (3, 1))
    await save_everywhere(lab, trainers, 1)
    for node in (0, 1):
        lab.lose(node)
        lab.start(node + 10, copies=0, num_data=3, num_parity=1)
    lab.round = Round(2)
    await lab.enter(10)
    assert not segment_paths(lab.homes[10])


async def test_a_loss_while_parity_is_made_is_made_good_from_the_save_before(lab):
    """One member never gives its pieces of the second save: it is lost just then."""
    trainers = await group_of(lab, 3, (2, 1))
    await save_everywhere(lab, trainers, 1)
    names = [own[0].save(2, num_shards=3) for own in trainers]
    lab.taken.clear()
    for node in (0, 1):
        lab.nodes[node].offer(names[node])
    await asyncio.wait_for(lab.taken.wait(), DEADLINE)
    lab.lose(2)
    lab.start(9, copies=0, num_data=2, num_parity=1)
    lab.round = Round(2)
    for node in (0, 1, 9):
        await lab.enter(node)
    assert list(states_in(lab.homes[9], 2)) == [1]
    assert is_right(states_in(lab.homes[9], 2)[1], 1, 2)


async def test_parity_costs_its_share_of_memory_twice(lab):
    """Of the newest whole one and the one that grows, whatever the number of saves."""
    trainers = await group_of(lab, 3, (2, 1))
    for step in range(1, 6):
        await save_everywhere(lab, trainers, step)
        for home in lab.homes.values():
            assert len(list(home.glob("parity-*"))) == min(step, 2)


async def test_parity_is_made_though_the_nodes_have_other_numbers_by_now(lab):
    """A master lost its journal after the round had begun, and before anybody had asked who is in the group."""
    trainers = await group_of(lab, 3, (2, 1))
    lab.numbered_from = 10
    await save_everywhere(lab, trainers, 1)
    for replicas in lab.nodes.values():
        assert [held.step for held in replicas._store.parity.list()] == [1]


async def test_a_member_that_skipped_a_save_does_not_stop_the_others(lab):
    """Two of them gave their pieces of the first save, the third only has the second: all go on to that one."""
    trainers = await group_of(lab, 3, (2, 1))
    first = [own[0].save(1, num_shards=3) for own in trainers]
    second = [own[0].save(2, num_shards=3) for own in trainers]
    lab.taken.clear()
    for node in (0, 1):
        lab.nodes[node].offer(first[node])
    await asyncio.wait_for(lab.taken.wait(), DEADLINE)
    lab.nodes[2].offer(second[2])
    for node in (0, 1):
        lab.nodes[node].offer(second[node])
    await asyncio.wait_for(
        asyncio.gather(*(task for each in lab.nodes.values() for task in each._pushing.values())), DEADLINE
    )
    for replicas in lab.nodes.values():
        newest = {held.stripe: held.step for held in replicas._store.parity.list()}
        assert list(newest.values()) == [2]


async def test_parity_is_made_again_in_a_new_round_and_protects_from_the_next_loss(lab):
    trainers = await group_of(lab, 3, (2, 1))
    await save_everywhere(lab, trainers, 1)
    lab.lose(1)
    for number, lost in ((2, 0), (3, 10)):
        new = 10 * (number - 1)
        lab.start(new, copies=0, num_data=2, num_parity=1)
        lab.round = Round(number)
        await asyncio.gather(*(lab.enter(node) for node in lab.order))
        pushes = [task for each in lab.nodes.values() for task in each._pushing.values()]
        await asyncio.wait_for(asyncio.gather(*pushes), DEADLINE)
        shard = lab.order.index(new)
        assert is_right(states_in(lab.homes[new], shard)[1], 1, shard)
        if number == 2:
            lab.lose(lost)


async def test_what_comes_when_the_workers_have_started_is_not_put_where_they_look(lab):
    """It would count as the newest of its shard, though training has gone on without it."""
    trainers = await two_nodes(lab)
    for node in (0, 1):
        await lab.push(node, trainers[node].save(1, num_shards=2, size=100_000))
    lab.lose(1)
    lab.start(2)
    lab.round = Round(2)
    store = lab.nodes[0]._store
    original, asked, release_it = store._give, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def give_late(connection, request):
        loop.call_soon_threadsafe(asked.set)
        assert release_it.wait(DEADLINE)
        original(connection, request)

    store._give = give_late
    entering = asyncio.create_task(lab.enter(2))
    await asyncio.wait_for(asked.wait(), DEADLINE)
    entering.cancel()  # a newer round has begun
    with pytest.raises(asyncio.CancelledError):
        await entering
    release_it.set()
    await asyncio.to_thread(_join_fetchers)
    assert states_in(lab.homes[2], 1) == {}


def _join_fetchers() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("dlrover-fetch"):
            thread.join(DEADLINE)
            assert not thread.is_alive()
