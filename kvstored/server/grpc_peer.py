"""How a call over gRPC ends that does not end well."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import grpc
import grpc.aio

from kvstored.errors import KvstoredError
from kvstored.server.grpc_status import status_code, trailer

_log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[bytes, bytes]

LAST_WORD_S = 5.0
"""How long a peer may take to take the status; what it has not taken by then it does not get."""


class Peer:
    """The sending side of one call."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._first: asyncio.Task[None] | None = None

    async def write(self, message: bytes) -> None:
        """Send a message. The call's first must go by here, others may use the context's own.

        With the first goes the call's initial metadata. As long as it is under way, gRPC refuses
        a status; hence it goes on although the call is cancelled, and `end` waits for it.
        """
        if self._first is not None:
            await self.context.write(message)
            return
        self._first = asyncio.ensure_future(self.context.write(message))
        # Once the call is cancelled nobody looks whether it could be sent.
        self._first.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._first)

    async def end(self, error: Exception) -> NoReturn:
        """End the call with the error's status and trailer; an unexpected one is logged.

        Where the peer is gone, or takes nothing any more, the call just ends.
        """
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, KvstoredError):
            known = error
        else:
            _log.error("a call failed", exc_info=error)
            known = KvstoredError("internal error", "see the daemon's log")
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if self._first is not None:
                    await asyncio.wait([self._first])
                await self.context.abort(status_code(known), str(known), trailer(known))
        except (grpc.aio.InternalError, TimeoutError):
            _log.debug("the peer does not hear how its call ended: %s", known)
        # Any other exception gRPC would log, and try to send.
        raise asyncio.CancelledError
