"""
`POST /ask`: one-shot questions of programs that have no gRPC. The same messages as JSON, answered on the same path.

The head of a request decides whether the master reads its body: it must show the job's token, announce no more than the limit, and find a
free place. The body has a deadline of its own, because a connection that has shown the token is not closed for being slow.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from dlrover.master.web.access import Access, Scope, bearer_of
from dlrover.protocol.codec import QUESTION, Codec, Question
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Answer, Refusal
from dlrover.protocol.rpc.questions import Ask, refusal_of, sendable, verdict_on
from dlrover.protocol.rpc.rarely import Rarely
from dlrover.protocol.text import UNENCODABLE

log = logging.getLogger(__name__)

ASK_PATH = "/ask"
MAX_QUESTION_BYTES = 1024 * 1024
"""As JSON. The longest question of use names some hundred keys."""
BODY_TIMEOUT = 10.0
"""Seconds for a body, from its head on."""
MAX_ASKING = 64
"""Requests at a time, those that wait for their answer included: a question of the key-value store may wait for 60 s."""

_QUESTION: Codec[Question] = Codec(Question, name="question", max_bytes=MAX_QUESTION_BYTES, is_json=True)
_STATUSES: dict[str, int] = {
    ErrorCode.BAD_TOKEN: 401,
    ErrorCode.MALFORMED: 400,
    ErrorCode.UNKNOWN: 400,
    ErrorCode.TOO_LARGE: 413,
}
_OTHER_REFUSAL = 409

T = TypeVar("T")


class JsonQuestions:
    """`headers` are those of every answer of the port."""

    def __init__(self, ask: Ask, *, access: Access, headers: dict[str, str]) -> None:
        self._ask = ask
        self._access = access
        self._headers = headers
        self._num_asking = 0
        self._refusals: defaultdict[str, Rarely] = defaultdict(Rarely)

    async def answer(self, request: Request) -> Response:
        try:
            self._check_head(request)
        except (Rejected, Unavailable) as error:
            return self._refuse(request, error)
        self._num_asking += 1
        try:
            question = _read(await _body(request))
            verdict = await _unless_gone(request, verdict_on(question, self._ask))
        except Rejected as error:
            return self._refuse(request, error)
        except ClientDisconnect:
            return Response(status_code=400)  # its reader is gone
        finally:
            self._num_asking -= 1
        return self._respond(verdict)

    def _check_head(self, request: Request) -> None:
        """
        Token first: a stranger learns nothing else about us. Raises Rejected or Unavailable.

        As a bearer token only: browsers add cookies to requests that other sites send.
        """
        if self._access.scope_of_token(bearer_of(request.headers)) is not Scope.ACT:
            raise Rejected(
                "The job's token is missing or wrong. Send it as `Authorization: Bearer TOKEN`; the read-only token is not enough.",
                code=ErrorCode.BAD_TOKEN,
            )
        announced = request.headers.get("content-length", "0")
        if int(announced) > MAX_QUESTION_BYTES:  # the server has checked that it is a number
            raise _too_large(announced)
        if self._num_asking >= MAX_ASKING:
            raise Unavailable(
                f"The master already works on {MAX_ASKING} requests. Try again later.", code=ErrorCode.TOO_MANY_WAITING
            )

    def _refuse(self, request: Request, error: Rejected | Unavailable) -> Response:
        refusals = self._refusals[error.code]
        if refusals.now():
            peer = request.client.host if request.client is not None else "unknown"
            log.warning("requests rejected num=%d newest=%s reason=%s", refusals.num, peer, error.code)
        return self._respond(refusal_of(error))

    def _respond(self, verdict: Answer | Refusal) -> Response:
        sent, _ = sendable(verdict)
        status, headers = 200, self._headers
        if isinstance(sent, Refusal) and sent.retry_after is not None:
            status, headers = 503, {**headers, "Retry-After": str(math.ceil(sent.retry_after))}
        elif isinstance(sent, Refusal):
            status = _STATUSES.get(sent.code, _OTHER_REFUSAL)
        if status == 401:
            headers = {**headers, "WWW-Authenticate": "Bearer"}
        return Response(msgspec.json.encode(sent), status, headers, "application/json")


def _read(data: bytes) -> Question:
    """JSON holds numbers and texts that no message of ours can carry, and the journal could not either. Raises Rejected."""
    question = _QUESTION.decode(data)
    try:
        return QUESTION.decode(QUESTION.encode(question))
    except UNENCODABLE as error:
        raise Rejected(f"malformed question: {error}", code=ErrorCode.MALFORMED) from error


async def _body(request: Request) -> bytes:
    """Bounded while it comes, in size and in time. Raises Rejected or ClientDisconnect."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_QUESTION_BYTES:
                    raise _too_large(f"more than {MAX_QUESTION_BYTES}")
    except TimeoutError:
        raise Rejected(
            f"Only {len(body)} bytes of the body arrived within {BODY_TIMEOUT:g} s.", code=ErrorCode.MALFORMED
        ) from None
    return bytes(body)


def _too_large(size: str) -> Rejected:
    return Rejected(f"The question has {size} bytes, and the limit is {MAX_QUESTION_BYTES}.", code=ErrorCode.TOO_LARGE)


async def _unless_gone(request: Request, answering: Awaitable[T]) -> T:
    """A question may wait for a minute: without its caller it ends at once. Raises ClientDisconnect then."""
    answer = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(request.receive())  # the body has come: what comes next is the end of the connection
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        answer.cancel()
        gone.cancel()
        await asyncio.gather(answer, gone, return_exceptions=True)
