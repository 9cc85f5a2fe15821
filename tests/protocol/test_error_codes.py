"""Codes of refusals on the wire: plain text, so that peers of other versions understand each other."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import msgspec
import pytest

from dlrover.platforms.hosted.messages import ANSWER, IntentRefused, RefusalKind
from dlrover.protocol.codec import VERDICT, Codec, decode_from_master, encode_frame, fit_verdict
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Refusal
from dlrover.protocol.messages.job import AgentMessage, MasterRefusal, Ping
from dlrover.protocol.messages.peers import PeerMessage, Refused
from tests.protocol.conftest import Agent, PlainLoop, Serve

OF_TOMORROW = "code-of-tomorrow"
WORKER_ANSWER: Codec[AgentMessage] = Codec(AgentMessage, name="answer")
PEER: Codec[PeerMessage] = Codec(PeerMessage, name="message")


@pytest.mark.parametrize("code", ErrorCode)
def test_a_code_travels_as_its_text(code: ErrorCode) -> None:
    for message, plain in (
        (Refusal(id=1, code=code, message="m"), Refusal(id=1, code=code.value, message="m")),
        (MasterRefusal(id=1, code=code, message="m"), MasterRefusal(id=1, code=code.value, message="m")),
        (Refused(code=code), Refused(code=code.value)),
    ):
        assert type(plain.code) is str
        assert msgspec.msgpack.encode(message) == msgspec.msgpack.encode(plain)
        assert msgspec.json.encode(message) == msgspec.json.encode(plain)
    assert (str(code), f"{code}", "%s" % code, json.dumps(code)) == (*[code.value] * 3, f'"{code.value}"')  # noqa: UP031


def test_a_code_is_equal_to_what_came_over_the_wire() -> None:
    (came,) = decode_from_master(encode_frame([Refusal(id=1, code=ErrorCode.KV_FULL, message="m")]))
    assert isinstance(came, Refusal)
    assert came.code == ErrorCode.KV_FULL
    assert came.code in {ErrorCode.KV_FULL, ErrorCode.KV_BUSY}
    assert ErrorCode(came.code) is ErrorCode.KV_FULL
    assert pickle.loads(pickle.dumps(ErrorCode.KV_FULL)) is copy.copy(ErrorCode.KV_FULL) is ErrorCode.KV_FULL


def test_an_unknown_code_decodes_wherever_a_code_may_come() -> None:
    refusal = Refusal(id=1, code=OF_TOMORROW, message="m")
    assert decode_from_master(encode_frame([refusal])) == [refusal]
    assert VERDICT.decode(fit_verdict(refusal)[1]) == refusal
    of_agent = MasterRefusal(id=1, code=OF_TOMORROW, message="m")
    assert WORKER_ANSWER.decode(WORKER_ANSWER.encode(of_agent)) == of_agent
    of_peer = Refused(code=OF_TOMORROW)
    assert PEER.decode(PEER.encode(of_peer)) == of_peer
    of_host = IntentRefused(kind=RefusalKind.BAD, message="m", code=OF_TOMORROW)
    assert ANSWER.decode(ANSWER.encode(of_host)) == of_host


async def test_a_refusal_with_an_unknown_code_reaches_the_caller(
    serve: Serve, master_loop: PlainLoop, connect: Callable[[str], Agent]
) -> None:
    _, address = await serve()
    agent = connect(address)
    await agent.attached()
    master_loop.answers = lambda request: Refusal(id=request.id, code=OF_TOMORROW, message="in words")
    with pytest.raises(Rejected, match="in words") as caught:
        await agent.channel.call(Ping(), timeout=10)
    assert caught.value.code == OF_TOMORROW
    assert not agent.running.done(), "the stream goes on"


def test_errors_without_a_code_have_the_general_one() -> None:
    assert (Rejected("no").code, Unavailable("later").code) == (ErrorCode.REJECTED, ErrorCode.UNAVAILABLE)
