"""The routes that compute: a body is read, an answer is sent whole or as a stream of events.

Whatever ends an answer early, the client going away above all, its `close` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstored_client.engine.server import answers
from kvstored_client.engine.server.errors import (
    ApiError,
    BodyTooLarge,
    BodyTooSlow,
    UnsupportedMediaType,
)
from kvstored_client.engine.server.fields import Fields
from kvstored_client.engine.server.protocol import Call, parse_tenant
from kvstored_client.engine.server.service import Answer, Service

MAX_BODY_BYTES = 16 << 20

T = TypeVar("T")
Parse = Callable[[Fields, str], Call]


class Completions:
    """One such route, as an ASGI application: it has a place from its first byte to its last."""

    def __init__(self, service: Service, parse: Parse, body_wait_s: float) -> None:
        self._service = service
        self._parse = parse
        self._body_wait_s = body_wait_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ApiError while nothing has been sent."""
        request = Request(scope, receive)
        with self._service.place(), contextlib.suppress(ClientDisconnect):
            fields = Fields.parse(await read_json(request, self._body_wait_s))
            call = self._parse(fields, parse_tenant(request.headers.get("x-tenant")))
            answer = await self._service.begin(call)
            try:
                if call.stream:
                    response = StreamingResponse(_stream(answer), media_type="text/event-stream")
                    response.headers["cache-control"] = "no-cache"
                    await response(scope, receive, send)
                else:
                    whole = await _unless_gone(_collect(answer), receive)
                    await JSONResponse(whole)(scope, receive, send)
            finally:
                answer.close()


async def read_json(request: Request, wait_s: float) -> bytes:
    """The body. Raises BodyTooLarge, BodyTooSlow after `wait_s`, and UnsupportedMediaType: a web
    page can make a browser send a form or text to this port, but not JSON.
    """
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise UnsupportedMediaType(f"the content type must be application/json, not {declared!r}")
    body = bytearray()
    try:
        async with asyncio.timeout(wait_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"a body may have {MAX_BODY_BYTES} bytes at most")
    except TimeoutError as error:
        raise BodyTooSlow(f"only {len(body)} bytes of the body came in {wait_s:g} s") from error
    return bytes(body)


async def _collect(answer: Answer) -> answers.Json:
    pieces = [piece async for piece in answer.pieces()]
    return answers.whole(answer, "".join(piece.text for piece in pieces), pieces[-1])


async def _stream(answer: Answer) -> AsyncGenerator[str, None]:
    for chunk in answers.opening(answer):
        yield _event(chunk)
    try:
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                for chunk in answers.chunks(answer, piece):
                    yield _event(chunk)
    except ApiError as error:  # too late for a status
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(chunk: answers.Json) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n"


async def _unless_gone(work: Coroutine[None, None, T], receive: Receive) -> T:
    """What `work` gives. Cancels it and raises ClientDisconnect when the client goes away first."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
