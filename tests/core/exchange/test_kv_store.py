"""The store inside the job: torch's semantics, limits, rounds, replay, and a digest that does not cost the values."""

from __future__ import annotations

import hashlib
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.core.commit_order import replay
from dlrover.core.exchange.kv_store import KvStore
from dlrover.core.job import Job, Origin
from dlrover.core.outcome import NotYet
from dlrover.protocol.codec import encode_frame
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.frames import Answer
from dlrover.protocol.messages.job import (
    MAX_MESSAGE_BYTES,
    Attach,
    Attached,
    Done,
    Incarnation,
    LookAgain,
    MasterStarted,
    NodeId,
    Reply,
    Round,
)
from dlrover.protocol.messages.kv import (
    ENTRY_BYTES,
    MAX_KEY_BYTES,
    MAX_STORE_BYTES,
    MAX_VALUE_BYTES,
    AnyKvCommand,
    KvAdd,
    KvAppend,
    KvCheck,
    KvCompareSet,
    KvCount,
    KvDelete,
    KvFlag,
    KvGet,
    KvKeys,
    KvList,
    KvNumber,
    KvPop,
    KvPush,
    KvQueueLength,
    KvSet,
    KvValues,
    KvWait,
)
from tests.core.scene import Scene, micros, terms

ROUND = Round(1)


def put(key: str, value: bytes = b"v", round_: int = 0) -> KvSet:
    return KvSet(items={key: value}, round=Round(round_))


class Shop(Scene):
    """A scene whose nodes use the store."""

    def kv(self, name: str, command: AnyKvCommand) -> Reply:
        agent = self.agents[name]
        fields = {name: getattr(command, name) for name in command.__struct_fields__}
        fields |= {"node": agent.node, "incarnation": agent.incarnation}
        return self.send(name, type(command)(**fields)).reply


def running() -> Shop:
    shop = Shop(terms(2))
    shop.gather("a", "b")
    return shop


def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is hashed from now on."""
    sizes: list[int] = []
    blake2b = hashlib.blake2b

    def counting(data: bytes, *, digest_size: int) -> Any:
        sizes.append(len(data))
        return blake2b(data, digest_size=digest_size)

    monkeypatch.setattr(hashlib, "blake2b", counting)
    return sizes


def missing(answer: Reply | NotYet) -> str:
    assert isinstance(answer, NotYet)
    assert isinstance(answer.otherwise, Rejected)
    assert answer.otherwise.code == "kv-timeout"
    return str(answer.otherwise)


class TestValues:
    def test_a_value_is_bytes_and_overwritten(self) -> None:
        store = KvStore()
        assert store.apply(put("k", b"\xff\x00")) == Done()
        assert store.answer(KvGet(keys=("k",))) == KvValues((b"\xff\x00",))
        store.apply(put("k", b""))
        assert store.answer(KvGet(keys=("k",))) == KvValues((b"",)), "an empty value is a value"

    def test_many_are_set_and_read_together_in_the_order_asked_for(self) -> None:
        store = KvStore()
        store.apply(KvSet(items={"a": b"1", "b": b"2"}))
        assert store.answer(KvGet(keys=("b", "a", "b"))) == KvValues((b"2", b"1", b"2"))
        assert store.answer(KvGet(keys=())) == KvValues(())

    def test_what_is_missing_is_named_and_waited_for_together(self) -> None:
        store = KvStore()
        store.apply(put("b"))
        answer = store.answer(KvGet(keys=("a", "b", "c")))
        assert missing(answer) == "No process has set 'a', 'c'."
        assert isinstance(answer, NotYet)
        assert answer.topics == ("kv/0/a", "kv/0/c")
        store.apply(put("a"))
        answer = store.answer(KvGet(keys=("a", "b", "c")))
        assert isinstance(answer, NotYet)
        assert answer.topics == ("kv/0/c",)

    def test_of_very_many_missing_keys_some_are_waited_for_at_a_time(self) -> None:
        answer = KvStore().answer(KvWait(keys=tuple(map(str, range(100_000)))))
        assert isinstance(answer, NotYet)
        assert 1000 <= len(answer.topics) <= 10_000

    def test_a_thousand_missing_keys_are_not_all_named(self) -> None:
        text = missing(KvStore().answer(KvWait(keys=tuple(map(str, range(1000))))))
        assert text.endswith("'7' and 992 more.")

    def test_counters_are_decimal_text(self) -> None:
        store = KvStore()
        assert store.apply(KvAdd(key="n", amount=3)) == KvNumber(3)
        assert store.apply(KvAdd(key="n", amount=-5)) == KvNumber(-2)
        assert store.answer(KvGet(keys=("n",))) == KvValues((b"-2",))
        store.apply(put("n", b"40"))
        assert store.apply(KvAdd(key="n", amount=2)) == KvNumber(42)
        store.apply(put("empty", b""))
        assert store.apply(KvAdd(key="empty", amount=1)) == KvNumber(1), "as torch counts it"

    @pytest.mark.parametrize("value", [b"x", b"1.5", b"\xff", b"1 ", "١".encode(), b"9" * 40])
    def test_nothing_is_added_to_what_is_no_number(self, value: bytes) -> None:
        store = KvStore()
        store.apply(put("k", value))
        with pytest.raises(Rejected, match="no decimal number") as refused:
            store.apply(KvAdd(key="k", amount=1))
        assert refused.value.code == "kv-not-a-number"
        assert store.answer(KvGet(keys=("k",))) == KvValues((value,))

    def test_a_counter_does_not_leave_64_bits(self) -> None:
        store = KvStore()
        store.apply(KvAdd(key="n", amount=2**63 - 1))
        with pytest.raises(Rejected, match="exceeds 64 bits"):
            store.apply(KvAdd(key="n", amount=1))
        store.apply(KvAdd(key="m", amount=-(2**63)))
        with pytest.raises(Rejected, match="exceeds 64 bits"):
            store.apply(KvAdd(key="m", amount=-1))

    @pytest.mark.parametrize(
        ("value", "expected", "answer", "after"),
        [
            (None, b"", b"new", b"new"),
            (None, b"x", b"x", None),  # torch answers what was expected, although there is no such key
            (b"old", b"old", b"new", b"new"),
            (b"old", b"x", b"old", b"old"),
            (b"old", b"", b"old", b"old"),
            (b"", b"", b"new", b"new"),
        ],
    )
    def test_compare_and_set(self, value: bytes | None, expected: bytes, answer: bytes, after: bytes | None) -> None:
        store = KvStore()
        if value is not None:
            store.apply(put("k", value))
        assert store.apply(KvCompareSet(key="k", expected=expected, desired=b"new")) == KvValues((answer,))
        if after is None:
            assert store.answer(KvCheck(keys=("k",))) == KvFlag(False)
        else:
            assert store.answer(KvGet(keys=("k",))) == KvValues((after,))

    def test_append_and_delete(self) -> None:
        store = KvStore()
        store.apply(KvAppend(key="k", value=b"ab"))
        store.apply(KvAppend(key="k", value=b"c"))
        assert store.answer(KvGet(keys=("k",))) == KvValues((b"abc",))
        assert store.apply(KvDelete(key="k")) == KvFlag(True)
        assert store.apply(KvDelete(key="k")) == KvFlag(False)
        assert (store.rooms, store.size_bytes) == ({}, 0)

    def test_keys_are_counted_and_listed_by_prefix(self) -> None:
        store = KvStore()
        store.apply(KvSet(items={"a/1": b"", "a/2": b"", "b/1": b""}))
        store.apply(KvPush(key="a/queue", value=b""))
        assert store.answer(KvCount()) == KvNumber(3)
        assert store.answer(KvCount(prefix="a/")) == KvNumber(2)
        assert store.answer(KvList(prefix="a/")) == KvKeys(("a/1", "a/2"))


class TestQueues:
    def test_first_in_first_out_and_an_empty_one_is_refused(self) -> None:
        store = KvStore()
        store.apply(KvPush(key="q", value=b"1"))
        store.apply(KvPush(key="q", value=b"2"))
        assert store.answer(KvQueueLength(key="q")) == KvNumber(2)
        assert [store.apply(KvPop(key="q")) for _ in range(2)] == [KvValues((b"1",)), KvValues((b"2",))]
        with pytest.raises(Rejected, match="'q' is empty") as refused:
            store.apply(KvPop(key="q"))
        assert refused.value.code == "kv-empty"
        assert (store.rooms, store.size_bytes) == ({}, 0)

    def test_a_queue_is_there_for_check_and_wait_but_has_no_value(self) -> None:
        store = KvStore()
        store.apply(KvPush(key="q", value=b"1"))
        assert store.answer(KvCheck(keys=("q",))) == KvFlag(True)
        assert store.answer(KvWait(keys=("q",))) == Done()
        assert "'q'" in missing(store.answer(KvGet(keys=("q",))))

    def test_who_waits_for_a_queue_is_not_woken_by_a_value_of_that_name(self) -> None:
        store = KvStore()
        store.apply(put("q"))
        assert "'q'" in missing(store.answer(KvWait(keys=("q",), is_for_queues=True)))
        store.apply(KvPush(key="q", value=b"1"))
        assert store.answer(KvWait(keys=("q",), is_for_queues=True)) == Done()


class TestLimits:
    @pytest.mark.parametrize(
        "command",
        [
            put("k", bytes(MAX_VALUE_BYTES + 1)),
            put("k" * (MAX_KEY_BYTES + 1)),
            KvSet(items={"fine": b"", "k": bytes(MAX_VALUE_BYTES + 1)}),
            KvPush(key="k", value=bytes(MAX_VALUE_BYTES + 1)),
            KvAppend(key="big", value=b"x"),
            KvCompareSet(key="big", expected=bytes(MAX_VALUE_BYTES), desired=bytes(MAX_VALUE_BYTES + 1)),
            KvAdd(key="ü" * MAX_KEY_BYTES, amount=1),
        ],
        ids=lambda command: type(command).__name__,
    )
    def test_what_is_too_large_changes_nothing(self, command: AnyKvCommand) -> None:
        store = KvStore()
        store.apply(put("big", bytes(MAX_VALUE_BYTES)))
        before = (store.history, store.size_bytes)
        with pytest.raises(Rejected, match=r"at most|the limit is") as refused:
            store.apply(command)
        assert refused.value.code == "kv-too-large"
        assert len(str(refused.value)) < 500
        assert (store.history, store.size_bytes) == before
        assert store.answer(KvCount()) == KvNumber(1)

    def test_a_full_store_refuses_more_and_takes_less(self) -> None:
        store = KvStore()
        value = bytes(MAX_VALUE_BYTES)
        for number in range(MAX_STORE_BYTES // (MAX_VALUE_BYTES + ENTRY_BYTES + 3)):
            store.apply(put(f"{number:03}", value))
        for command in (put("one more", value), KvPush(key="q", value=value), KvAppend(key="x", value=value)):
            with pytest.raises(Rejected, match="would exceed its limit") as refused:
                store.apply(command)
            assert refused.value.code == "kv-full"
        store.apply(put("000", b"small"))
        store.apply(put("one more", value))
        assert store.size_bytes <= MAX_STORE_BYTES

    def test_an_answer_that_no_message_holds_is_refused(self) -> None:
        store = KvStore()
        for key in "abcd":
            store.apply(put(key, bytes(MAX_VALUE_BYTES)))
        with pytest.raises(Rejected, match="Ask for fewer at once") as refused:
            store.answer(KvGet(keys=tuple("abcd")))
        assert refused.value.code == "kv-too-large"
        assert isinstance(store.answer(KvGet(keys=tuple("abc"))), KvValues)

    def test_small_values_weigh_what_their_message_does(self) -> None:
        """The headers of very many make an answer that no frame holds."""
        store = KvStore()
        keys = tuple(f"{number:06}" for number in range(200_000))
        store.apply(KvSet(items=dict.fromkeys(keys, bytes(20))))
        with pytest.raises(Rejected, match="Ask for fewer at once") as refused:
            store.answer(KvGet(keys=keys))
        assert refused.value.code == "kv-too-large"
        answer = store.answer(KvGet(keys=keys[: len(keys) // 2]))
        assert isinstance(answer, KvValues)
        assert len(encode_frame([Answer(id=1, body=answer)])) <= MAX_MESSAGE_BYTES

    @given(st.lists(st.tuples(st.sampled_from(["put", "add", "append", "delete", "push", "pop", "drop"]), st.sampled_from("ab"),
                              st.binary(max_size=3), st.integers(0, 2)), max_size=30))  # fmt: skip
    def test_the_size_is_that_of_what_is_there(self, operations: list[tuple[str, str, bytes, int]]) -> None:
        store = KvStore()
        for kind, key, value, round_ in operations:
            commands: dict[str, AnyKvCommand] = {
                "put": put(key, value, round_),
                "add": KvAdd(key=key, amount=len(value), round=Round(round_)),
                "append": KvAppend(key=key, value=value, round=Round(round_)),
                "delete": KvDelete(key=key, round=Round(round_)),
                "push": KvPush(key=key, value=value, round=Round(round_)),
                "pop": KvPop(key=key, round=Round(round_)),
            }
            try:
                store.drop_before(Round(round_)) if kind == "drop" else store.apply(commands[kind])
            except Rejected:
                continue
        entries = [(key, value) for room in store.rooms.values() for key, value in room.values.items()]
        entries += [(k, v) for room in store.rooms.values() for k, queue in room.queues.items() for v in queue]
        assert store.size_bytes == sum(len(key.encode()) + len(value) + ENTRY_BYTES for key, value in entries)
        assert all(room.values or room.queues for room in store.rooms.values())


class TestRounds:
    def test_keys_of_a_round_are_apart_and_dropped_two_rounds_later(self) -> None:
        shop = running()
        shop.kv("a", put("job", b"0"))
        for round_ in (1, 2, 3):
            assert shop.kv("a", put("k", f"of round {round_}".encode(), round_)) == Done()
            assert shop.job.ask(KvGet(keys=("k",), round=Round(round_))) == KvValues((f"of round {round_}".encode(),))
            if round_ > 1:  # the one before is still there, for who is on its way out
                assert isinstance(shop.job.ask(KvGet(keys=("k",), round=Round(round_ - 1))), KvValues)
            shop.fail("a", step=round_)
            shop.rejoin("a", "b")
        assert shop.job.state.rendezvous.round == 4
        assert list(shop.job.state.kv.rooms) == [0, 3]
        assert shop.job.ask(KvGet(keys=("job",))) == KvValues((b"0",))
        for request in (KvGet(keys=("k",), round=Round(2)), KvCount(round=Round(2))):
            with pytest.raises(Rejected, match="keys of round 2 are gone") as refused:
                shop.job.ask(request)
            assert refused.value.code == "stale-round"
        with pytest.raises(Rejected, match="keys of round 2 are gone"):
            shop.kv("b", put("k", b"late", 2))

    @pytest.mark.parametrize("round_", [2, -1])
    def test_a_round_that_was_never_there_is_refused(self, round_: int) -> None:
        shop = running()
        with pytest.raises(Rejected, match=f"no round {round_} yet") as refused:
            shop.kv("a", put("k", b"", round_))
        assert refused.value.code == "unknown-round"

    def test_a_former_life_changes_nothing(self) -> None:
        """I6"""
        shop = running()
        old = shop.agents["a"]
        shop.restart_agent("a")
        command = KvSet(items={"k": b"v"}, node=old.node, incarnation=old.incarnation)
        with pytest.raises(Rejected) as refused:
            shop.do(command, Origin(old.node, old.incarnation, 99))
        assert refused.value.code == "stale-incarnation"
        new = shop.agents["a"]
        with pytest.raises(Rejected, match="may not speak for node") as refused:
            shop.do(command, Origin(new.node, new.incarnation, 99))
        assert refused.value.code == "wrong-sender"

    def test_a_stranger_changes_nothing(self) -> None:
        with pytest.raises(Rejected, match="not part of the job"):
            running().do(KvSet(items={"k": b"v"}, node=NodeId(99), incarnation=Incarnation(1)))


class TestTheJob:
    def test_a_change_says_what_it_touched(self) -> None:
        shop = running()
        for command, topics in (
            (KvSet(items={"x": b"", "y": b""}, round=ROUND), ("kv/1/x", "kv/1/y")),
            (KvAdd(key="n", amount=1), ("kv/0/n",)),
            (KvPush(key="q", value=b""), ("kv/0/q",)),
        ):
            shop.kv("a", command)
            assert shop.outcomes[-1].effects == (LookAgain(topics),)
        shop.kv("a", KvPop(key="q"))
        assert shop.outcomes[-1].effects == ()

    def test_a_thousand_nodes_add_up_whatever_is_sent_twice(self) -> None:
        job, now = Job(), micros(0)
        job.apply(MasterStarted(1, "a-job"), now)
        for number in range(1000):
            attach = Attach(launch=f"l{number}", host=f"h{number}", terms=terms(1000), local_world_size=1)
            attached = job.apply(attach, now).reply
            assert isinstance(attached, Attached)
            add = KvAdd(key="n", amount=1, node=attached.node, incarnation=attached.incarnation)
            origin = Origin(attached.node, attached.incarnation, 1)
            assert [job.apply(add, now, origin).reply for _ in range(2)] == [KvNumber(number + 1)] * 2
        assert job.ask(KvGet(keys=("n",))) == KvValues((b"1000",))

    def test_a_command_sent_again_is_applied_once(self) -> None:
        shop = running()
        agent = shop.agents["a"]
        add = KvAdd(key="n", amount=1, node=agent.node, incarnation=agent.incarnation)
        origin = Origin(agent.node, agent.incarnation, 50)
        assert [shop.do(add, origin).reply for _ in range(2)] == [KvNumber(1), KvNumber(1)]

    def test_answers_that_were_heard_are_not_stored(self) -> None:
        shop = running()
        agent = shop.agents["a"]
        for number, answered in ((50, 0), (51, 0), (52, 50)):
            push = KvPush(key="q", value=b"v", node=agent.node, incarnation=agent.incarnation)
            shop.do(push, Origin(agent.node, agent.incarnation, number, answered))
        assert list(shop.job.state.replay_guard.by_node[agent.node].replies) == [51, 52]

    def test_a_replay_gives_the_same_store_and_the_same_digest(self) -> None:
        shop = running()
        for number in range(5):
            shop.kv("a", KvAppend(key="k", value=bytes([number]), round=ROUND))
            shop.kv("b", KvPush(key="q", value=bytes([number])))
        shop.kv("a", KvPop(key="q"))
        replayed = replay(None, shop.journal).job  # compares the digest of each batch
        assert replayed.encode() == shop.job.encode()
        assert replayed.digest() == shop.job.digest()
        decoded = Job.decode(shop.job.encode())
        assert decoded.digest() == shop.job.digest()
        assert decoded.ask(KvGet(keys=("k",), round=ROUND)) == KvValues((bytes(range(5)),))

    def test_answers_that_nobody_has_confirmed_cost_a_digest_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = [f"n{number}" for number in range(8)]
        shop = Shop(terms(8))
        shop.gather(*names)
        shop.kv("n0", KvAdd(key="n", amount=1))
        shop.job.digest()
        hashed = count_hashed(monkeypatch)
        shop.kv("n0", KvAdd(key="n", amount=1))
        before = sum(hashed)
        for number in range(64):
            shop.kv("n0", KvPush(key="q", value=bytes(64 * 1024)))
            shop.kv(names[number % 8], KvPop(key="q"))
        hashed.clear()
        shop.kv("n0", KvAdd(key="n", amount=1))
        assert sum(hashed) < before + 10_000

    def test_stored_answers_are_in_the_snapshot_and_a_replay_has_the_same_digest(self) -> None:
        shop = running()
        agent = shop.agents["a"]
        who: Any = {"node": agent.node, "incarnation": agent.incarnation}
        shop.kv("b", KvPush(key="q", value=b"taken"))
        shop.kv("b", KvPush(key="q", value=b"left"))
        popped = shop.do(KvPop(key="q", **who), Origin(agent.node, agent.incarnation, 50)).reply
        assert popped == KvValues((b"taken",))
        snapshot = shop.job.encode()
        num_records = len(shop.journal)
        swap = KvCompareSet(key="k", expected=b"", desired=b"mine", **who)
        shop.do(swap, Origin(agent.node, agent.incarnation, 51, answered=49))
        shop.restart_agent("b")
        replayed = replay(snapshot, shop.journal[num_records:]).job  # compares the digest of each batch
        assert replayed.digest() == shop.job.digest() == replay(None, shop.journal).job.digest()
        assert replayed.encode() == shop.job.encode()
        assert replayed.answered(Origin(agent.node, agent.incarnation, 50)) == popped

    def test_what_a_sender_was_answered_is_in_the_digest(self) -> None:
        one, other = running(), running()
        for shop, value in ((one, b"1"), (other, b"2")):
            agent = shop.agents["a"]
            shop.job.state.replay_guard.store(Origin(agent.node, agent.incarnation, 50), KvValues((value,)))
        assert one.job.digest() != other.job.digest()

    @pytest.mark.parametrize("is_swap", [False, True], ids=["pop", "compare_set"])
    def test_answers_with_values_wait_for_those_before_to_be_heard(self, is_swap: bool) -> None:
        """Each is kept until the sender says that it came, in every snapshot."""
        shop = running()
        agent = shop.agents["a"]
        who: Any = {"node": agent.node, "incarnation": agent.incarnation}
        value = bytes(MAX_VALUE_BYTES)
        shop.kv("b", put("k", value))
        for _ in range(9):
            shop.kv("b", KvPush(key="q", value=value))
        command = KvCompareSet(key="k", expected=b"x", desired=b"y", **who) if is_swap else KvPop(key="q", **who)
        for number in range(50, 58):
            shop.do(command, Origin(agent.node, agent.incarnation, number))
        before = shop.job.encode()
        with pytest.raises(Rejected, match="8388608 bytes of answers") as refused:
            shop.do(command, Origin(agent.node, agent.incarnation, 58))
        assert refused.value.code == "kv-busy"
        assert shop.job.encode() == before, "nothing was taken"
        again = Origin(agent.node, agent.incarnation, 50)
        assert shop.do(command, again).reply == KvValues((value,)), "who asks again hears what was decided"
        shop.do(command, Origin(agent.node, agent.incarnation, 58, answered=50))
        assert list(shop.job.state.replay_guard.by_node[agent.node].replies) == list(range(51, 59))

    def test_two_histories_have_two_digests(self) -> None:
        one, other = running(), running()
        assert one.job.digest() == other.job.digest()
        one.kv("a", put("k", b"1"))
        other.kv("a", put("k", b"2"))
        assert one.job.digest() != other.job.digest()

    def test_values_are_in_the_snapshot_and_not_in_the_digest(self) -> None:
        shop = running()
        shop.kv("a", put("k", bytes(MAX_VALUE_BYTES)))
        assert len(shop.job.encode()) > MAX_VALUE_BYTES
        tampered = Job.decode(shop.job.encode())
        tampered.state.kv.rooms[Round(0)].values["k"] = b"other"
        assert tampered.digest() == shop.job.digest(), "the history stands for the values"
        tampered.state.kv.history = b"other"
        assert tampered.digest() != shop.job.digest()


def test_every_command_of_the_store_touches_or_is_known_not_to() -> None:
    from dlrover.core.exchange.kv_store import topics_of

    silent = {KvDelete, KvPop}
    for kind in typing.get_args(AnyKvCommand):
        fields = {"key": "k", "value": b"", "amount": 1, "expected": b"", "desired": b"", "items": {"k": b""}}
        command = kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
        assert bool(topics_of(command)) == (kind not in silent)
