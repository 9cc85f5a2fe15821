"""`POST /ask` of a real master process: what a program without gRPC gets, and what strangers and clumsy programs get."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dlrover.master.web.access import Access, Scope, read_only_token
from dlrover.master.web.questions import BODY_TIMEOUT, MAX_ASKING, MAX_QUESTION_BYTES
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Answer
from dlrover.protocol.messages.job import Ping, StopJob
from dlrover.protocol.messages.kv import KvSet
from dlrover.protocol.rpc.client import ask
from tests.master.conftest import TOKEN, Connect, MakeMaster, MasterProcess, status_of
from tests.master.web.page_lab import StandInJob, a_status, bearer, fetch, serve_page

DEADLINE = 60
PING = b'{"type": "Ping"}'
WITH_TOKEN = bearer(TOKEN)


@pytest.fixture
def master(make_master: MakeMaster) -> MasterProcess:
    master = make_master(dashboard_port=0)
    master.start()
    return master


def place(master: MasterProcess) -> tuple[str, int]:
    assert master.ready is not None
    host, port = master.ready.dashboard.removeprefix("http://").rstrip("/").split(":")
    return host, int(port)


def post(
    master: MasterProcess, body: bytes, headers: dict[str, str] = WITH_TOKEN, *, method: str = "POST"
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(*place(master), timeout=DEADLINE)
    try:
        connection.request(method, "/ask", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def question(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, **fields}).encode()


class Conversation:
    """A request byte by byte."""

    def __init__(self, master: MasterProcess, *lines: str) -> None:
        """`lines`: of the head, which is complete if the last one is empty."""
        self._socket = socket.create_connection(place(master), timeout=DEADLINE)
        self.send("\r\n".join(["POST /ask HTTP/1.1", "Host: localhost", *lines]).encode() + b"\r\n")

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, Any]]:
        response = http.client.HTTPResponse(self._socket)
        response.begin()
        return response.status, json.loads(response.read())

    def is_closed(self) -> bool:
        """Waits for it."""
        try:
            while self._socket.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def converse(master: MasterProcess):
    conversations: list[Conversation] = []

    def begin(*lines: str) -> Conversation:
        conversations.append(Conversation(master, *lines))
        return conversations[-1]

    yield begin
    for conversation in conversations:
        conversation.close()


def until(condition: Callable[[], bool]) -> None:
    end_at = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end_at
        time.sleep(0.01)


async def test_the_same_questions_have_the_same_answers_as_over_grpc(master: MasterProcess) -> None:
    status, verdict = await asyncio.to_thread(post, master, PING)
    assert (status, verdict["type"], verdict["id"]) == (200, "Answer", 0)
    pong = await ask(master.address, Ping(), token=TOKEN, timeout=DEADLINE)
    assert msgspec.convert(verdict, Answer) == Answer(id=0, body=pong)
    status, verdict = await asyncio.to_thread(post, master, question("AskStatus"))
    assert (status, verdict["body"]["type"], verdict["body"]["job_name"]) == (200, "JobStatus", "job")


async def test_keys_that_an_agent_sets_are_read_and_waited_for(master: MasterProcess, connect: Connect) -> None:
    agent = connect(master.address)
    await agent.attached()

    async def put(key: str, value: bytes) -> None:
        command = KvSet(items={key: value}, node=agent.node, incarnation=agent.incarnation)
        await agent.channel.call(command, timeout=DEADLINE)

    await put("here", b"\x00\xff")
    status, verdict = await asyncio.to_thread(post, master, question("KvGet", keys=["here"]))
    assert (status, [base64.b64decode(value) for value in verdict["body"]["values"]]) == (200, [b"\x00\xff"])
    waiting = asyncio.ensure_future(asyncio.to_thread(post, master, question("KvGet", keys=["later"], wait=50)))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    await put("later", b"v")
    status, verdict = await asyncio.wait_for(waiting, DEADLINE)
    assert (status, base64.b64decode(verdict["body"]["values"][0])) == (200, b"v")
    status, verdict = await asyncio.to_thread(post, master, question("KvGet", keys=["never"]))
    assert (status, verdict["type"], verdict["code"], verdict["retry_after"]) == (409, "Refusal", "kv-timeout", None)


async def test_a_command_of_people_acts_on_the_job(master: MasterProcess, connect: Connect) -> None:
    agent = connect(master.address)
    await agent.attached()
    status, verdict = await asyncio.to_thread(post, master, question("StopJob", message="enough"))
    assert (status, verdict["body"]) == (200, {"type": "Done"})
    assert "enough" in (await status_of(master.address)).verdict


def test_without_the_token_nothing_is_read(master: MasterProcess, converse: Callable[..., Conversation]) -> None:
    """The body never comes, and the answer does."""
    access = Access(TOKEN)
    for credentials in (
        "X-Nothing: at all",
        "Authorization: Bearer wrong",
        "Authorization: Bearer",
        f"Authorization: Basic {TOKEN}",
        f"Authorization: Bearer {read_only_token(TOKEN)}",
        f"Cookie: {access.cookie_name}={access.cookie(Scope.ACT)}",
    ):
        conversation = converse(credentials, "Content-Length: 1000", "")
        status, refusal = conversation.answer()
        assert (status, refusal["type"], refusal["code"]) == (401, "Refusal", "bad-token"), credentials
    stranger = converse("Content-Length: 1000", "")
    assert stranger.answer()[0] == 401
    assert stranger.is_closed()
    until(lambda: "connections without the job token closed" in master.log())
    assert "reason=no-token" in master.log(), "not as one that says nothing"


def test_a_head_that_does_not_end_is_not_waited_for(
    master: MasterProcess, converse: Callable[..., Conversation]
) -> None:
    assert converse(f"Authorization: Bearer {TOKEN}", "X-Slow: and").is_closed()


def test_a_stranger_s_name_for_this_machine_is_refused(master: MasterProcess) -> None:
    rebound = {"Host": "rebound.example.net"}
    status, answer = post(master, PING, rebound)
    assert (status, "not served under the name" in answer["error"]) == (421, True)
    assert post(master, PING, {**rebound, **WITH_TOKEN})[0] == 200, "who shows the token is a program"


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"", "malformed", "malformed question"),
        (b"{", "malformed", "malformed question"),
        (b'{"type": "Ping"} more', "malformed", "trailing"),
        (b"\xff\xfe", "malformed", "malformed question"),
        (b"[" * 100_000, "malformed", "malformed question"),
        (b"{}", "malformed", "`type`"),
        (question("KvGet", keys=5), "malformed", "`$.keys`"),
        (question("KvGet", keys=["k"], round=1 << 70), "malformed", "malformed question"),
        (question("ScaleJob", min_nodes=1, max_nodes=1 << 70), "malformed", "malformed question"),
        (b'{"type": "StopJob", "message": "\\ud800"}', "malformed", "malformed question"),
        (question("Question"), "unknown", "The sender may be newer"),
        (question("Attach"), "unknown", "The sender may be newer"),
        (question("KvSet", items={"k": ""}), "unknown", "The sender may be newer"),
    ],
    ids=[
        *(
            "empty",
            "half",
            "trailing",
            "bytes",
            "deep",
            "no-type",
            "field",
            "number",
            "command",
            "surrogate",
            "unknown",
        ),
        *("attach", "of-agents"),
    ],
)
def test_what_is_no_question_is_refused_with_its_reason(
    master: MasterProcess, body: bytes, code: str, text: str
) -> None:
    status, refusal = post(master, body)
    assert (status, refusal["code"]) == (400, code)
    assert text in refusal["message"]
    assert post(master, PING)[0] == 200, "and the next one is answered"


def test_a_question_has_a_size(master: MasterProcess, converse: Callable[..., Conversation]) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    for length in (str(MAX_QUESTION_BYTES + 1), "9" * 20):
        status, refusal = converse(token, f"Content-Length: {length}", "").answer()
        assert (status, refusal["code"]) == (413, "too-large")
    unannounced = converse(token, "Transfer-Encoding: chunked", "")
    for _ in range(MAX_QUESTION_BYTES // 65536 + 1):
        unannounced.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
    status, refusal = unannounced.answer()
    assert (status, refusal["code"]) == (413, "too-large")
    assert str(MAX_QUESTION_BYTES) in refusal["message"]
    padded = PING + b" " * (MAX_QUESTION_BYTES - len(PING))
    assert post(master, padded)[0] == 200, "the largest one"


def test_other_methods_are_refused(master: MasterProcess) -> None:
    assert post(master, b"", method="GET")[0] == 405


@pytest.mark.slow
def test_a_body_has_a_deadline(master: MasterProcess, converse: Callable[..., Conversation]) -> None:
    slow = converse(f"Authorization: Bearer {TOKEN}", "Content-Length: 16", "")
    slow.send(b'{"type"')
    status, refusal = slow.answer()
    assert (status, refusal["code"]) == (400, "malformed")
    assert f"Only 7 bytes of the body arrived within {BODY_TIMEOUT:g} s" in refusal["message"]


def test_places_are_few_and_a_caller_that_goes_gives_its_own_back(
    master: MasterProcess, converse: Callable[..., Conversation]
) -> None:
    token = f"Authorization: Bearer {TOKEN}"
    body = question("KvGet", keys=["never"], wait=60)
    waiting = [converse(token, f"Content-Length: {len(body)}", "") for _ in range(MAX_ASKING)]
    for conversation in waiting:
        conversation.send(body)
    until(lambda: post(master, PING)[0] == 503)
    began_at = time.monotonic()
    status, refusal = converse(token, "Content-Length: 16", "").answer()  # its body does not come
    assert (status, refusal["code"], refusal["retry_after"]) == (503, "too-many-waiting", 1.0)
    for conversation in waiting:
        conversation.close()
    until(lambda: post(master, PING)[0] == 200)
    assert time.monotonic() - began_at < 50, "they waited until their time was over"


def test_refusals_are_logged_ever_more_rarely(master: MasterProcess) -> None:
    for _ in range(20):
        assert post(master, PING, bearer("wrong"))[0] == 401
    assert post(master, b"{")[0] == 400
    until(lambda: "reason=malformed" in master.log())
    told = re.findall(r"requests rejected num=(\d+) newest=127\.0\.0\.1 reason=([\w-]+)", master.log())
    assert told == [*((str(num), "bad-token") for num in (1, 2, 4, 8, 16)), ("1", "malformed")]
    assert "wrong" not in master.log()


# With a job that exists only as messages: verdicts that a real one seldom gives.


async def test_a_refusal_for_now_says_when_to_try_again() -> None:
    job = StandInJob(refusal=Unavailable("The journal is full.", 2.5, code="blocked"))
    async with serve_page(job) as page:
        answer = await fetch(page, "/ask", method="POST", body=question("StopJob", message="m"), headers=bearer())
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        assert json.loads(answer.body) == {
            "type": "Refusal",
            "id": 0,
            "code": "blocked",
            "message": "The journal is full.",
            "retry_after": 2.5,
        }
        job.refusal = Rejected("no", code="code-of-a-plug-in")
        answer = await fetch(page, "/ask", method="POST", body=question("StopJob", message="m"), headers=bearer())
        assert (answer.status, json.loads(answer.body)["code"]) == (409, "code-of-a-plug-in")
        assert job.asked == [StopJob(message="m")] * 2


async def test_a_status_that_one_message_cannot_carry_is_fitted_as_over_grpc() -> None:
    async with serve_page(StandInJob(status=a_status(40_000))) as page:
        answer = await fetch(page, "/ask", method="POST", body=question("AskStatus"), headers=bearer())
        status = json.loads(answer.body)["body"]
        assert (answer.status, 0 < len(status["nodes"]) < 40_000) == (200, True)
        assert len(status["nodes"]) + sum(status["left_out"]["nodes"].values()) == 40_000


async def test_an_answer_that_cannot_be_encoded_is_refused() -> None:
    job = StandInJob(status=a_status(1, name="\udcff"))
    async with serve_page(job) as page:
        answer = await fetch(page, "/ask", method="POST", body=question("AskStatus"), headers=bearer())
        assert (answer.status, json.loads(answer.body)["code"]) == (409, "internal")
