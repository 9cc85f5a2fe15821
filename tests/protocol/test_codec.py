"""Bytes of any kind either become a message of the declared type or a refusal."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.protocol.codec import QUESTION, decode_from_agent, decode_from_master, encode_frame, encode_frames
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.frames import Ack, Answer, Refusal, Request
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, AskStatus, Done, JobTerms, StopJob
from dlrover.protocol.messages.kv import KvValues


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_understood(data: bytes) -> None:
    for decode in (decode_from_agent, decode_from_master, QUESTION.decode):
        with contextlib.suppress(Rejected):
            decode(data)


_JSON_LIKE = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.sampled_from(["Request", "Ack", "x"]) | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["type", "id", "body", "number"]), inner),
    max_leaves=8,
)


@given(st.lists(_JSON_LIKE))
def test_well_formed_nonsense_is_refused_or_understood(parcels: list[object]) -> None:
    with contextlib.suppress(Rejected):
        decode_from_agent(msgspec.msgpack.encode(parcels))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Rejected, match="malformed"):
        decode_from_agent(b"\x91" * 1_000_000 + b"\x01")


def test_a_refusal_says_where_the_message_is_wrong() -> None:
    data = msgspec.msgpack.encode([{"type": "Ack", "number": "three"}])
    with pytest.raises(Rejected, match=r"Expected `int`, got `str` - at `\$\.number`"):
        decode_from_agent(data)


def test_size_is_checked_before_decoding() -> None:
    with pytest.raises(Rejected) as caught:
        QUESTION.decode(b"\xc1" * (MAX_MESSAGE_BYTES + 1))
    assert caught.value.code == "too-large"


def test_frames_are_split_at_the_limit_and_keep_the_order() -> None:
    body = StopJob(message="x" * (MAX_MESSAGE_BYTES // 3))
    requests = [Request(id=number, body=body) for number in range(7)]
    frames = encode_frames(requests)
    assert all(len(frame) <= MAX_MESSAGE_BYTES for frame in frames)
    assert [parcel for frame in frames for parcel in decode_from_agent(frame)] == requests


def test_an_answer_that_fits_into_no_frame_is_refused_and_the_others_arrive() -> None:
    answers = [Answer(id=number, body=Done()) for number in range(3)]
    large = Answer(id=3, body=KvValues((bytes(MAX_MESSAGE_BYTES),)))
    frames = encode_frames([*answers, large, Answer(id=4, body=Done())])
    assert all(len(frame) <= MAX_MESSAGE_BYTES for frame in frames)
    parcels = [parcel for frame in frames for parcel in decode_from_master(frame)]
    assert [parcel for parcel in parcels if isinstance(parcel, Answer)] == [*answers, Answer(id=4, body=Done())]
    (refusal,) = [parcel for parcel in parcels if isinstance(parcel, Refusal)]
    assert (refusal.id, refusal.code, refusal.retry_after) == (3, "too-large", None)
    assert "4194304" in refusal.message


def test_unknown_fields_are_ignored_so_that_versions_may_differ() -> None:
    data = msgspec.msgpack.encode({"type": "AskStatus", "colour": "blue"})
    assert QUESTION.decode(data) == AskStatus()
    assert decode_from_agent(encode_frame([Ack(1)])) == [Ack(1)]


@pytest.mark.parametrize("timeout", [-1.0, float("nan")])
def test_a_shutdown_timeout_that_is_no_duration_is_refused(timeout: float) -> None:
    data = msgspec.msgpack.encode({"shutdown_timeout": timeout})
    with pytest.raises(msgspec.ValidationError, match="--shutdown-timeout"):
        msgspec.msgpack.decode(data, type=JobTerms)
