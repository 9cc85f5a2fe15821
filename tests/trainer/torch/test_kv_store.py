"""
`MasterKVStore` beside torch's own stores: what is documented for all of them holds for ours.

Each test of the first part runs on torch's HashStore and TCPStore as well, so that what it asserts is what torch does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import DistStoreError, Store

from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Reply, Round, WorkerRequest
from dlrover.protocol.messages.kv import MAX_KEY_BYTES, MAX_VALUE_BYTES, KvAdd, KvGet, KvNumber, KvSet
from dlrover.trainer import environment
from dlrover.trainer.agent_link import AgentLink
from dlrover.trainer.environment import WorkerEnvironment
from dlrover.trainer.stand_in import StandIn
from dlrover.trainer.sync import SyncClient
from dlrover.trainer.torch.kv_store import MasterKVStore, QueueEmptyError, store_barrier
from tests.trainer.torch.deaf_agent import DeafAgent
from tests.trainer.torch.store_lab import StoreLab

SHORT = timedelta(milliseconds=150)
LONG = timedelta(seconds=30)
OURS = ("master", "master under a PrefixStore", "stand-in")
ALL = (*OURS, "HashStore", "TCPStore")
BARE = tuple(kind for kind in ALL if "PrefixStore" not in kind)
"""torch's PrefixStore hands queues and lists of keys to C++ stores only."""

_prefixes = count()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def link(lab: StoreLab) -> AgentLink:
    return lab.link()


class Patient:
    """Takes an agent that is only busy for alive."""

    def __init__(self, inner: AgentLink) -> None:
        self._inner = inner

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        return self._inner.ask(request, timeout=timeout + 30)


MakeStore = Callable[[timedelta], Store]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> MakeStore:
    """Stores of one kind that share nothing with those of other tests."""
    kind: str = getattr(request, "param", "master")

    def make(timeout: timedelta = LONG) -> Store:
        store: Store
        if kind == "HashStore":
            store = dist.HashStore()
        elif kind == "TCPStore":
            store = dist.TCPStore("127.0.0.1", 0, 1, True, timeout=LONG)
        else:
            link = StandIn() if kind == "stand-in" else Patient(request.getfixturevalue("link"))
            store = MasterKVStore(f"test-{next(_prefixes)}", link=link)
            if "PrefixStore" in kind:
                store = dist.PrefixStore("inner", store)
        store.set_timeout(timeout)
        return store

    return make


def on(kinds: tuple[str, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("make", kinds, indirect=True)


BAD_CALLS: dict[str, tuple[type[Exception], Callable[[Any], object]]] = {
    "a key that is no text": (TypeError, lambda store: store.set(1, "v")),
    "a value that is a number": (TypeError, lambda store: store.set("k", 1)),
    "no value": (TypeError, lambda store: store.set("k", None)),
    "no key": (TypeError, lambda store: store.get(None)),
    "a text added": (TypeError, lambda store: store.add("n", "1")),
    "a fraction added": (TypeError, lambda store: store.add("n", 1.5)),
    "more than 64 bits added": (TypeError, lambda store: store.add("n", 1 << 63)),
    "one text as keys to check": (TypeError, lambda store: store.check("k")),
    "a dict as keys to check": (TypeError, lambda store: store.check({"k": 1})),
    "one text as keys to wait for": (TypeError, lambda store: store.wait("k")),
    "an int as timeout": (TypeError, lambda store: store.wait(["there"], 1)),
    "a text as timeout": (TypeError, lambda store: store.wait(["there"], "1")),
    "a number compared": (TypeError, lambda store: store.compare_set("k", 1, 2)),
    "no key to delete": (TypeError, lambda store: store.delete_key(None)),
    "a number appended": (TypeError, lambda store: store.append("k", 1)),
    "one text as keys to get": (TypeError, lambda store: store.multi_get("k")),
    "more keys than values": (DistStoreError, lambda store: store.multi_set(["a", "b"], ["1"])),
    "more values than keys": (DistStoreError, lambda store: store.multi_set(["a"], ["1", "2"])),
    "no values": (DistStoreError, lambda store: store.multi_set(["a"], [])),
    "one text as values": (TypeError, lambda store: store.multi_set(["a", "b"], "12")),
    "a number among values": (TypeError, lambda store: store.multi_set(["a"], [1])),
    "a timeout that is a text": (TypeError, lambda store: store.set_timeout("1")),
}
"""What torch's TCPStore refuses, and how. A HashStore reads beyond the end of lists of unequal length."""


@on(tuple(kind for kind in ALL if kind != "HashStore"))
def test_bad_arguments_are_the_errors_of_a_tcp_store_and_change_nothing(make: MakeStore) -> None:
    store = make(LONG)
    store.set("there", "1")
    for what, (expected, call) in BAD_CALLS.items():
        with pytest.raises(expected) as raised:
            call(store)
        assert raised.type is expected, what
    assert not any(store.check([key]) for key in ("k", "n", "a", "b"))
    store.wait(["there"], 1.0)  # seconds
    assert store.get(b"there") == b"1"


@on(tuple(kind for kind in BARE if kind != "HashStore"))
def test_whether_to_wait_for_a_queue_is_yes_or_no(make: MakeStore) -> None:
    store: Any = make(LONG)
    store.queue_push("q", "v")
    with pytest.raises(TypeError):
        store.queue_pop("q", "no")
    assert store.queue_len("q") == 1


@on(ALL)
class TestLikeTorch:
    def test_a_value_is_set_read_and_overwritten(self, make: MakeStore) -> None:
        store = make(LONG)
        store.set("k", "text")
        assert store.get("k") == b"text"
        store.set("k", b"\xff\x00")
        assert store.get("k") == b"\xff\x00"
        store.set("k", "")
        assert (store.check(["k"]), store.get("k")) == (True, b"")

    def test_a_missing_key_ends_the_wait_with_an_error(self, make: MakeStore) -> None:
        store = make(SHORT)
        store.set("there", "1")
        waits: list[Callable[[], object]] = [
            lambda: store.get("missing"),
            lambda: store.wait(["there", "missing"]),
            lambda: store.multi_get(["there", "missing"]),
        ]
        for wait in waits:
            began_at = time.monotonic()
            with pytest.raises(DistStoreError):
                wait()
            assert SHORT.total_seconds() * 0.9 <= time.monotonic() - began_at < 10
        store.set("missing", "now")
        assert store.get("missing") == b"now"

    def test_a_wait_may_have_its_own_timeout(self, make: MakeStore) -> None:
        store = make(LONG)
        with pytest.raises(DistStoreError):
            store.wait(["missing"], timedelta(milliseconds=10))
        store.set("there", "1")
        store.wait(["there"], LONG)

    def test_the_timeout_can_be_changed(self, make: MakeStore) -> None:
        store = make(LONG)
        assert store.timeout == LONG
        store.set_timeout(SHORT)
        assert store.timeout == SHORT
        with pytest.raises(DistStoreError):
            store.get("missing")

    def test_who_waits_is_woken_by_anothers_set(self, make: MakeStore) -> None:
        store = make(LONG)
        with ThreadPoolExecutor(1) as pool:
            for number in range(10):
                got = pool.submit(store.clone().get, f"k{number}")
                store.set(f"k{number}", str(number))
                assert got.result(20) == str(number).encode()

    def test_a_wait_for_several_keys_ends_with_the_last_of_them(self, make: MakeStore) -> None:
        store = make(LONG)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.clone().wait, ["a", "b", "c"])
            store.set("b", "")
            store.set("a", "")
            assert not waiting.done()
            store.set("c", "")
            waiting.result(20)

    def test_a_counter_begins_with_the_first_amount(self, make: MakeStore) -> None:
        store = make(LONG)
        assert [store.add("n", amount) for amount in (3, 0, -5)] == [3, 3, -2]
        assert store.get("n") == b"-2"
        store.set("n", "40")
        assert store.add("n", 2) == 42

    def test_concurrent_adds_lose_nothing(self, make: MakeStore) -> None:
        store = make(LONG)

        def add(peer: Store) -> list[int]:
            return [peer.add("n", 1) for _ in range(25)]

        with ThreadPoolExecutor(8) as pool:
            seen = [number for numbers in pool.map(add, [store.clone() for _ in range(8)]) for number in numbers]
        assert sorted(seen) == list(range(1, 201))
        assert store.get("n") == b"200"

    def test_check_looks_once(self, make: MakeStore) -> None:
        store = make(LONG)
        store.set("a", "")
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        assert store.check([])

    @pytest.mark.parametrize(
        ("value", "expected", "answer"),
        [(None, "", b"new"), (None, "x", b"x"), ("old", "old", b"new"), ("old", "x", b"old"), ("old", "", b"old")],
    )
    def test_compare_and_set(self, make: MakeStore, value: str | None, expected: str, answer: bytes) -> None:
        store = make(LONG)
        if value is not None:
            store.set("k", value)
        assert store.compare_set("k", expected, "new") == answer
        assert store.check(["k"]) == (value is not None or not expected)

    def test_of_many_who_want_to_be_first_one_is(self, make: MakeStore) -> None:
        store = make(LONG)
        with ThreadPoolExecutor(8) as pool:
            claims = [pool.submit(store.clone().compare_set, "leader", "", f"rank {rank}") for rank in range(8)]
        assert len({claim.result(20) for claim in claims} | {store.get("leader")}) == 1

    def test_a_key_is_deleted_once(self, make: MakeStore) -> None:
        store = make(LONG)
        before = store.num_keys()
        store.set("k", "v")
        assert store.num_keys() == before + 1
        assert store.delete_key("k")
        assert not store.delete_key("k")
        assert (store.check(["k"]), store.num_keys()) == (False, before)

    def test_append(self, make: MakeStore) -> None:
        store = make(LONG)
        store.append("k", "ab")
        store.append("k", "c")
        assert store.get("k") == b"abc"

    def test_many_at_once(self, make: MakeStore) -> None:
        store = make(LONG)
        assert store.has_extended_api()
        store.multi_set(["a", "b"], ["1", b"2"])
        assert store.multi_get(["b", "a"]) == [b"2", b"1"]

    def test_a_prefix_store_keeps_its_keys_apart(self, make: MakeStore) -> None:
        store = make(LONG)
        left, right = dist.PrefixStore("left", store), dist.PrefixStore("right", store)
        left.set("k", "l")
        right.set("k", "r")
        assert (left.get("k"), right.get("k"), store.get("left/k")) == (b"l", b"r", b"l")
        assert left.delete_key("k")
        assert right.check(["k"])

    def test_a_clone_sees_the_same(self, make: MakeStore) -> None:
        store = make(LONG)
        clone = store.clone()
        clone.set("k", "v")
        del clone
        assert store.get("k") == b"v"

    def test_the_barrier_of_torch(self, make: MakeStore) -> None:
        store = make(LONG)
        if not hasattr(store, "barrier"):
            pytest.skip("this torch has none")
        _all_arrive(lambda peer: peer.barrier("b", 3), store, 3)

    def test_the_store_barrier(self, make: MakeStore) -> None:
        """Spec 03 section 18.3"""
        store = make(LONG)
        _all_arrive(lambda peer: store_barrier(peer, 3, "b"), store, 3)
        with pytest.raises(DistStoreError):
            store_barrier(make(LONG), 2, "alone", 0.05)

    def test_a_key_is_text(self, make: MakeStore) -> None:
        store: Any = make(LONG)
        with pytest.raises(TypeError):
            store.set(3, "v")
        with pytest.raises(TypeError):
            store.set("k", 3)


@on(BARE)
class TestQueuesLikeTorch:
    def test_first_in_first_out(self, make: MakeStore) -> None:
        store = make(LONG)
        assert store.queue_len("q") == 0
        store.queue_push("q", "1")
        store.queue_push("q", b"2")
        assert store.queue_len("q") == 2
        assert (store.queue_pop("q"), store.queue_pop("q")) == (b"1", b"2")

    def test_nothing_to_pop(self, make: MakeStore) -> None:
        store = make(SHORT)
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)
        with pytest.raises(DistStoreError):
            store.queue_pop("q")
        store.set("q", "a value is no element")
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)

    def test_who_waits_is_woken_and_each_value_goes_to_one(self, make: MakeStore) -> None:
        store = make(LONG)
        with ThreadPoolExecutor(4) as pool:
            popped = [pool.submit(store.clone().queue_pop, "q") for _ in range(4)]
            for number in range(4):
                store.queue_push("q", str(number))
            assert sorted(pop.result(20) for pop in popped) == [b"0", b"1", b"2", b"3"]
        assert store.queue_len("q") == 0

    def test_a_queue_is_there_while_it_holds_something(self, make: MakeStore) -> None:
        store = make(SHORT)
        assert not store.check(["q"])
        store.queue_push("q", "1")
        assert store.check(["q"])
        store.wait(["q"])
        store.queue_pop("q")
        assert not store.check(["q"])

    def test_keys_are_listed(self, make: MakeStore) -> None:
        store = make(LONG)
        if not hasattr(store, "list_keys"):
            pytest.skip("this torch cannot")
        store.multi_set(["a", "b"], ["", ""])
        assert {"a", "b"} <= set(store.list_keys())


@on(("master", "stand-in", "HashStore"))
def test_nothing_is_added_to_what_is_no_number(make: MakeStore) -> None:
    """A TCPStore drops the connection instead."""
    store = make(LONG)
    store.set("k", "text")
    with pytest.raises(ValueError, match=r"stoll|no decimal number"):
        store.add("k", 1)
    assert store.get("k") == b"text"


@on(("master", "stand-in"))
class TestOurs:
    def test_an_error_names_what_is_missing(self, make: MakeStore) -> None:
        with pytest.raises(DistStoreError, match=r"wait timeout after 150ms: No process has set 'test-\d+/b'"):
            make(SHORT).wait(["b"])

    def test_what_is_too_large_is_refused_and_changes_nothing(self, make: MakeStore) -> None:
        store = make(LONG)
        store.set("k", "v")
        puts: list[Callable[[], object]] = [
            lambda: store.set("k", bytes(MAX_VALUE_BYTES + 1)),
            lambda: store.set("k", bytes(5 * MAX_VALUE_BYTES)),
            lambda: store.append("k", bytes(MAX_VALUE_BYTES)),
            lambda: store.set("k" * (MAX_KEY_BYTES + 1), "v"),
        ]
        for put in puts:
            with pytest.raises(ValueError, match=r"limit|at most"):
                put()
        assert (store.get("k"), store.num_keys()) == (b"v", 1)

    def test_more_than_one_message_holds_is_taken_apart(self, make: MakeStore) -> None:
        store = make(LONG)
        values = [bytes([number]) * MAX_VALUE_BYTES for number in range(6)]
        keys = [str(number) for number in range(6)]
        store.multi_set(keys, values)
        assert store.multi_get(keys) == values
        assert store.multi_get([]) == []
        for key in keys:
            store.delete_key(key)

    @pytest.mark.parametrize("how", ["add", "append", "compare_set", "queue_push", "multi_set"])
    def test_whatever_brings_a_key_wakes_who_waits_for_it(self, make: MakeStore, how: str) -> None:
        """A HashStore lets them wait after an `add`."""
        store: Any = make(LONG)
        arguments = {"add": ("k", 1), "compare_set": ("k", "", "v"), "multi_set": (["k"], ["v"])}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, ["k"])
            getattr(store, how)(*arguments.get(how, ("k", "v")))
            waiting.result(20)

    def test_a_list_is_not_a_text(self, make: MakeStore) -> None:
        store: Any = make(LONG)
        with pytest.raises(TypeError, match="give a list"):
            store.check("abc")

    def test_keys_are_counted_below_the_own_prefix(self, make: MakeStore) -> None:
        store, other = make(LONG), make(LONG)
        store.multi_set(["a", "b"], ["", ""])
        other.set("a", "")
        assert (store.num_keys(), store.list_keys()) == (2, ["a", "b"])


class Away:
    """A link whose agent cannot reach the master for the first few requests, or is refused for now."""

    def __init__(self, num_refused: int, error: Rejected | None = None) -> None:
        self.num_refused = num_refused
        self._error = error or Unavailable("the master is away")
        self._room = StandIn()

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        self.num_refused -= 1
        if self.num_refused >= 0:
            raise self._error
        return self._room.ask(request, timeout=timeout)


def test_while_large_answers_are_under_way_others_wait_for_their_turn() -> None:
    link = Away(0, Rejected("answers under way", code="kv-busy"))
    store = MasterKVStore(timeout=LONG, link=link)
    store.queue_push("q", "v")
    link.num_refused = 2
    assert store.queue_pop("q", False) == b"v"
    link.num_refused = 2
    assert store.compare_set("k", "", "v") == b"v"
    store.set_timeout(timedelta(0))
    link.num_refused = 1
    with pytest.raises(DistStoreError, match="answers under way"):
        store.compare_set("k", "v", "w")


def test_who_waits_goes_on_until_its_own_time_is_over() -> None:
    link = Away(0)
    store = MasterKVStore(timeout=LONG, link=link)
    store.set("k", "v")
    link.num_refused = 2
    assert store.get("k") == b"v"
    with pytest.raises(DistStoreError, match="the master is away"):
        MasterKVStore(timeout=0.05, link=Away(1000)).get("k")
    client = SyncClient(link=Away(1))
    assert not client.barrier("b", timeout=0.05)
    assert not client.barrier("b", timeout=0.05)


def test_a_worker_joins_again_until_a_master_without_its_journal_knows_the_world() -> None:
    assert SyncClient(link=Away(2, Rejected("not all are back", code="world-unknown"))).join_sync("x")
    assert not SyncClient(link=Away(1, Rejected("of another round", code="stale-round"))).join_sync("x")


@pytest.mark.parametrize(("told", "timeout"), [("", 60.0), ("7", 7.0), ("soon", 60.0)])
def test_a_script_waits_for_an_answer_as_long_as_its_variable_says(
    told: str, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MASTER_CLIENT_TIMEOUT."""
    waited: list[float] = []

    class Patient(Away):
        def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
            waited.append(timeout)
            return super().ask(request, timeout=timeout)

    monkeypatch.setenv("MASTER_CLIENT_TIMEOUT", told)
    environment.client_timeout.cache_clear()
    try:
        SyncClient(link=Patient(0)).notify_barrier("b")
    finally:
        environment.client_timeout.cache_clear()
    assert waited == [timeout]


def test_a_prefix_ends_with_one_slash() -> None:
    link = StandIn()
    MasterKVStore("p", link=link).set("k", "v")
    assert MasterKVStore("p/", link=link).get("k") == b"v"
    assert MasterKVStore("", link=link).get("p/k") == b"v"
    with pytest.raises(TypeError, match="prefix must be a str, not int"):
        MasterKVStore(3)  # type: ignore[arg-type]


class TestWithAMaster:
    def test_very_many_small_values_are_taken_apart_and_the_node_lives_on(self, tmp_path: Path) -> None:
        """What they are wrapped in makes one answer more than a message holds."""
        lab = StoreLab(tmp_path)
        try:
            store = MasterKVStore("many", timedelta(seconds=120), link=lab.link())
            before = lab.life
            keys = [f"{number:06}" for number in range(200_000)]
            values = [b"%020d" % number for number in range(200_000)]
            store.multi_set(keys, values)
            assert store.multi_get(keys) == values
            assert lab.life == before
            keys = [chr(0x10000 + number) * 20 for number in range(60_000)]  # 80 bytes each, 20 characters
            store.multi_set(keys, [b""] * len(keys))
            assert store.multi_get(keys) == [b""] * len(keys)
            assert lab.life == before
        finally:
            lab.close()

    def test_rounds_are_apart_and_others_are_refused(self, lab: StoreLab, link: AgentLink) -> None:
        own = MasterKVStore("r", round=lab.where.round, link=link)
        job = MasterKVStore("r", round=0, link=link)
        own.set("k", "own")
        job.set("k", "job")
        assert (own.get("k"), job.get("k")) == (b"own", b"job")
        with pytest.raises(DistStoreError, match="only from workers of the running round"):
            MasterKVStore("r", round=7, link=link).set("k", "v")
        late = AgentLink(WorkerEnvironment(agent_socket=lab.where.agent_socket, round=Round(7), local_rank=0))
        with pytest.raises(DistStoreError, match="A worker of round 7"):
            MasterKVStore("r", round=0, link=late).get("k")
        late.close()

    def test_a_master_that_dies_costs_nothing(self, lab: StoreLab, link: AgentLink) -> None:
        store = MasterKVStore("restart", LONG, link=link)
        store.set("before", "v")
        with ThreadPoolExecutor(5) as pool:
            waiting = pool.submit(store.get, "after")
            adding = [pool.submit(lambda: [store.add("n", 1) for _ in range(50)]) for _ in range(4)]
            store.wait(["n"])
            started = lab.restart_master()
            assert sorted(number for adds in adding for number in adds.result(60)) == list(range(1, 201))
            started.result(30)
            store.set("after", "v")
            assert waiting.result(30) == b"v"
        assert store.multi_get(["before", "n"]) == [b"v", b"200"]

    def test_processes_add_up(self, lab: StoreLab) -> None:
        script = "for _ in range(25): link.ask(KvAdd(key='p/n', amount=1), timeout=20)"
        children = [_start(lab.where, script) for _ in range(4)]
        assert [child.wait(60) for child in children] == [0] * 4
        assert MasterKVStore("p", round=0, link=lab.link()).get("n") == b"100"

    def test_a_fork_has_its_own_connection(self, lab: StoreLab) -> None:
        script = """
        link.ask(KvSet(items={"f/k": b"v"}), timeout=20)
        got = []
        thread = threading.Thread(target=lambda: got.append(link.ask(KvGet(keys=("f/child",), wait=20), timeout=20)))
        thread.start()  # reads from the connection while we fork
        child = os.fork()
        if not child:
            value = link.ask(KvGet(keys=("f/k",)), timeout=20).values[0]
            link.ask(KvSet(items={"f/child": value + b"!"}), timeout=20)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        thread.join(20)
        assert got == [KvValues((b"v!",))], got
        assert link.ask(KvGet(keys=("f/k",)), timeout=20) == KvValues((b"v",))
        """
        assert _start(lab.where, script).wait(60) == 0

    def test_a_signal_handler_may_use_the_store_while_its_thread_waits(self, lab: StoreLab) -> None:
        script = """
        def handle(number, frame):
            link.ask(KvSet(items={"signal/k": b"v"}), timeout=20)

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        # Nobody else brings what we wait for.
        assert link.ask(KvGet(keys=("signal/k",), wait=30), timeout=40) == KvValues((b"v",))
        """
        assert _start(lab.where, script).wait(60) == 0

    def test_a_signal_handler_may_use_the_store_wherever_its_thread_is(self, lab: StoreLab) -> None:
        """Also with a lock held, and while another thread reads the answers."""
        script = """
        import sys
        num_handled = 0

        def handle(number, frame):
            global num_handled
            num_handled += 1
            link.ask(KvAdd(key="signals/n", amount=1), timeout=20)

        seen = set()

        def trace(frame, event, arg):
            if frame.f_code.co_filename != agent_link.__file__:
                return None
            place = (frame.f_code.co_name, frame.f_lineno)
            if event == "line" and place not in seen:
                seen.add(place)
                signal.raise_signal(signal.SIGALRM)  # handled here and now, and not traced
            return trace

        other = threading.Thread(target=lambda: link.ask(KvGet(keys=("signals/end",), wait=30), timeout=40))
        signal.signal(signal.SIGALRM, handle)
        for is_alone in (True, False):
            if not is_alone:
                other.start()
            seen.clear()
            sys.settrace(trace)
            for _ in range(5):
                link.ask(KvAdd(key="signals/n", amount=1), timeout=20)
            sys.settrace(None)
        link.ask(KvSet(items={"signals/end": b""}), timeout=20)
        other.join()
        assert num_handled > 40, num_handled
        assert link.ask(KvAdd(key="signals/n", amount=0), timeout=20).number == num_handled + 10
        """
        assert _start(lab.where, script).wait(60) == 0

    def test_a_signal_handler_may_raise_wherever_its_thread_is(self, lab: StoreLab) -> None:
        """As Ctrl-C does. What comes after it is asked and answered as before, by other threads, too."""
        script = """
        import sys

        class Interrupted(Exception):
            pass

        def handle(number, frame):
            raise Interrupted

        tried = set()

        def trace(frame, event, arg):
            global is_armed
            if frame.f_code.co_filename != agent_link.__file__:
                return None
            place = (frame.f_code.co_name, frame.f_lineno)
            if event == "line" and is_armed and place not in tried:
                tried.add(place)
                is_armed = False
                signal.raise_signal(signal.SIGALRM)
            return trace

        signal.signal(signal.SIGALRM, handle)
        is_armed = False
        while not is_armed:
            is_armed = True
            sys.settrace(trace)
            try:
                link.ask(KvAdd(key="raising", amount=1), timeout=20)
                assert is_armed, "nothing was raised"
            except Interrupted:
                pass
            sys.settrace(None)
            other = threading.Thread(target=lambda: link.ask(KvSet(items={str(len(tried)): b""}), timeout=20))
            other.start()
            other.join()
            link.ask(KvGet(keys=(str(len(tried)),)), timeout=20)
        assert len(tried) > 40, tried
        """
        assert _start(lab.where, script).wait(120) == 0

    def test_what_a_signal_handler_cut_off_is_not_continued(self) -> None:
        path = tempfile.mkdtemp(prefix="dlr-") + "/s"  # short, as it must be
        script = """
        import socket
        import msgspec
        from dlrover.protocol.messages.kv import KvNumber
        from dlrover.protocol.local_frames import pack, receive_frame
        from dlrover.protocol.messages.job import AskMaster, MasterAnswer

        server = socket.create_server(link._where.agent_socket, family=socket.AF_UNIX)

        def serve():
            first, _ = server.accept()
            receive_frame(first)
            first.recv(100)  # the rest is more than the socket takes while nobody reads
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
            connection, _ = server.accept()
            receive_frame(connection)
            asked = msgspec.msgpack.decode(receive_frame(connection)[0], type=AskMaster)
            connection.sendall(pack(msgspec.msgpack.encode(MasterAnswer(id=asked.id, reply=KvNumber(7)))))

        class Interrupted(Exception):
            pass

        def handle(number, frame):
            raise Interrupted

        signal.signal(signal.SIGALRM, handle)
        threading.Thread(target=serve, daemon=True).start()
        try:
            link.ask(KvSet(items={"k": bytes(1 << 20)}), timeout=20)
        except Interrupted:
            assert link.ask(KvAdd(key="k", amount=1), timeout=10) == KvNumber(7)
        else:
            raise AssertionError("nobody has taken that much")
        """
        where = WorkerEnvironment(agent_socket=path, round=Round(1), local_rank=0)
        try:
            assert _start(where, script).wait(60) == 0
        finally:
            shutil.rmtree(Path(path).parent)

    def test_many_threads_have_requests_under_way_on_one_connection(self, lab: StoreLab) -> None:
        store = MasterKVStore("threads", LONG, link=lab.link())
        with ThreadPoolExecutor(32) as pool:
            waiting = [pool.submit(store.get, str(number)) for number in range(31)]
            for number in reversed(range(31)):
                store.set(str(number), str(number))
            assert [int(value.result(20)) for value in waiting] == list(range(31))

    def test_the_agent_may_be_away_for_a_while(self, lab: StoreLab) -> None:
        link = lab.link()
        store = MasterKVStore("away", LONG, link=link)
        store.set("k", "v")
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "later")
            lab.restart_socket()
            store.set("later", "v")
            assert waiting.result(20) == b"v"

    def test_a_command_whose_answer_was_lost_is_not_sent_again(self) -> None:
        with DeafAgent() as agent:
            link = AgentLink(agent.where)
            with pytest.raises(Unavailable, match="may have carried out the request"):
                link.ask(KvAdd(key="k", amount=1), timeout=20)
            assert agent.num_heard == 1
            with pytest.raises(Unavailable):
                link.ask(KvGet(keys=("k",)), timeout=3)
            assert agent.num_heard > 2, "a question may be asked again"
            link.close()

    def test_without_an_agent_the_deadline_holds(self, tmp_path: Path) -> None:
        link = AgentLink(WorkerEnvironment(agent_socket=str(tmp_path / "none"), round=Round(1), local_rank=0))
        began_at = time.monotonic()
        with pytest.raises(Unavailable, match="No agent answers"):
            link.ask(KvSet(items={}), timeout=0.3)
        assert time.monotonic() - began_at < 20

    def test_a_message_that_fits_into_no_frame_is_refused_here(self, link: AgentLink) -> None:
        with pytest.raises(Rejected, match="longer than the limit"):
            link.ask(KvSet(items={"k": bytes(5 * MAX_VALUE_BYTES)}), timeout=20)
        assert link.ask(KvAdd(key="still alive", amount=1), timeout=20) == KvNumber(1)


@pytest.mark.parametrize("kind", ["master", "stand-in"])
class TestSyncClient:
    def client(self, kind: str, request: pytest.FixtureRequest) -> SyncClient:
        return SyncClient(link=StandIn() if kind == "stand-in" else request.getfixturevalue("link"))

    def test_one_that_joins_alone_is_all(self, kind: str, request: pytest.FixtureRequest) -> None:
        client = self.client(kind, request)
        assert not client.wait_sync_finished(f"{kind} never joined", timeout=0.05)
        for _ in range(3):  # a name can be used again
            assert client.join_sync(f"{kind} s")
            assert client.wait_sync_finished(f"{kind} s", timeout=20)

    def test_each_passage_of_a_barrier_needs_a_notification(self, kind: str, request: pytest.FixtureRequest) -> None:
        client = self.client(kind, request)
        for _ in range(2):
            assert not client.barrier(f"{kind} b", timeout=0.05)
            with ThreadPoolExecutor(1) as pool:
                passed = pool.submit(client.barrier, f"{kind} b", 20)
                assert client.notify_barrier(f"{kind} b")
                assert passed.result(20)

    def test_what_is_refused_is_false(
        self, kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
    ) -> None:
        if kind == "stand-in":
            pytest.skip("alone, nothing is refused")
        assert not self.client(kind, request).join_sync("x" * 1000)
        assert "needs a name" in caplog.text


def _all_arrive(barrier: Callable[[Store], None], store: Store, world_size: int) -> None:
    arrived = threading.Barrier(world_size)

    def arrive(peer: Store) -> None:
        arrived.wait(20)
        barrier(peer)

    with ThreadPoolExecutor(world_size) as pool:
        for done in [pool.submit(arrive, store.clone()) for _ in range(world_size)]:
            done.result(20)


def _start(where: WorkerEnvironment, script: str) -> subprocess.Popen[bytes]:
    """In a process of its own: this one has gRPC in it, and its forks would not be what a worker's are."""
    code = f"""
import os, signal, threading
from dlrover.protocol.messages.kv import KvAdd, KvGet, KvSet, KvValues
from dlrover.trainer import agent_link
from dlrover.trainer.agent_link import AgentLink
from dlrover.trainer.environment import WorkerEnvironment
link = AgentLink(WorkerEnvironment(agent_socket={where.agent_socket!r}, round={where.round}, local_rank=0))
{textwrap.dedent(script)}
"""
    return subprocess.Popen([sys.executable, "-c", code])
