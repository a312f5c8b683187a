"""The daemon's side of all local sessions: the socket, who may come in, and who maps what.

Belongs to the verbs' loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Protocol

from kvstored.errors import Draining, ResourceExhausted
from kvstored.server.dispatcher import Dispatcher
from kvstored.server.local.awake import Awake
from kvstored.server.local.figures import LocalFigures
from kvstored.server.local.leases import Share
from kvstored.server.local.mover import Movers
from kvstored.server.local.peer import PeerGoneError, identify
from kvstored.server.local.puts import Puts
from kvstored.server.local.session import Segments, Session, State
from kvstored.server.local.staging import Staging
from kvstored.server.sockets import ListenError, UnixSocket
from kvstored.tiers.base import TierUsage
from kvstored.trouble import Trouble
from kvstored_client.target import local_socket_path

_log = logging.getLogger(__name__)

_MODE = 0o660  # as the engines' gRPC socket
_BACKLOG = 128
_ACCEPTS_PER_TURN = 16
_RETRY_ACCEPT_S = 0.1
_PROMPT_S = 0.2  # a RETIRE that is not answered for so long may never be


class Ram(Segments, Protocol):
    """What local sessions need of the RAM tier."""

    retiring: Callable[[int], asyncio.Future[None] | None] | None
    stuck: Callable[[], frozenset[int]] | None

    def usage(self) -> TierUsage:
        """The tier's cap, among others."""

    def namespace_usage(self, namespace: str) -> TierUsage:
        """A namespace's cap, among others."""


class LocalServer:
    """Listens beside the gRPC socket at `unix_path` and serves sessions.

    All methods are called on `loop`, the verbs' loop.
    """

    def __init__(
        self, dispatcher: Dispatcher, loop: asyncio.AbstractEventLoop, unix_path: Path, ram: Ram
    ) -> None:
        self.dispatcher = dispatcher
        self.loop = loop
        self.path = local_socket_path(unix_path)
        self.segments: Segments = ram
        self._ram = ram
        self._staging = Staging(dispatcher.limits.local)
        self._movers = Movers(loop)
        self.awake = Awake(loop)
        self._shares: dict[str, Share] = {}
        self._whole = Share(0)  # its cap is known once the tier is open
        self._sessions: dict[Session, None] = {}  # in the order in which they came
        self._per_namespace: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        # By segment: what is done when it is unmapped, who has not said so, and since when.
        self._retiring: dict[int, tuple[asyncio.Future[None], set[Session], float]] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._socket: UnixSocket | None = None
        self._listener: socket.socket | None = None
        self._accepting = False
        self._timer: asyncio.TimerHandle | None = None
        self._numbers = 0
        self._blind = False
        # Tried ten times a second, as long as descriptors lack.
        self._deaf = Trouble(_log, "no local session can be accepted: %s")
        self._unserved = Trouble(_log, "a local session cannot be served: %s")

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen and serve. Raises ListenError when the path cannot be used."""
        self._socket = UnixSocket(self.path, _MODE)
        listener = self._listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            listener.bind(self._socket.address.removeprefix("unix:"))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise ListenError(
                f"cannot listen at {self.path}: {error}", "set another path"
            ) from error
        self._movers.start()
        whole = self._ram.usage().cap_bytes * self.dispatcher.limits.local.max_leased_fraction_tier
        self._whole.cap_bytes = int(whole)
        self._ram.retiring = self.retire
        self._ram.stuck = self.stuck
        self._accept_more()
        self._look()
        self._socket.publish()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for requests under way; whether all ended in time. The dispatcher must be draining,
        so that new ones are refused.
        """
        tasks = [task for session in self._sessions for task in session.tasks]
        if not tasks:
            return True
        _, running = await asyncio.wait(tasks, timeout=timeout_s)
        return not running

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Say goodbye, close everything, and wait at most `timeout_s` for what threads still do.
        Idempotent.
        """
        if self._listener is None:
            return
        self._stop_accepting()
        self._listener.close()
        self._listener = None
        assert self._socket is not None, "it is listening"
        self._socket.remove()
        if self._timer is not None:
            self._timer.cancel()
        for session in [*self._sessions]:
            session.stop(Draining("the daemon is stopping", "again after a restart"))
        self._ram.retiring = self._ram.stuck = None
        if self._cleaning:
            await asyncio.wait([*self._cleaning], timeout=timeout_s)
        self._movers.stop()
        await self._staging.settled()

    def figures(self) -> LocalFigures:
        """How things stand."""
        states = Counter(session.state for session in self._sessions)
        return LocalFigures(
            sessions=states[State.OPEN],
            quarantined_sessions=states[State.QUARANTINED],
            leased_bytes=self._whole.used_bytes,
            staging_bytes=self._staging.footprint_bytes,
            ended=dict(self._ended),
        )

    # ---- coming in -------------------------------------------------------------------------------

    def _accept_more(self) -> None:
        if self._listener is not None and not self._accepting:
            self._accepting = True
            self.loop.add_reader(self._listener.fileno(), self._accept)

    def _stop_accepting(self) -> None:
        if self._listener is not None and self._accepting:
            self._accepting = False
            self.loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        assert self._listener is not None, "it is listening"
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    raise
                self._deaf.came(error, self.loop.time())
                # It stays readable: without a pause the loop would do nothing else.
                self._stop_accepting()
                self.loop.call_later(_RETRY_ACCEPT_S, self._accept_more)
                return
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            peer = identify(connection)
        except OSError as error:
            if not isinstance(error, PeerGoneError):
                self._unserved.came(error, self.loop.time())
            connection.close()
            return
        if peer.pidfd is None and not self._blind:
            self._blind = True
            _log.warning(
                "the death of a client cannot be seen, only the end of its connection: it runs in "
                "another pid namespace, or there are no pidfds here"
            )
        self._make_room_for_one()
        self._numbers += 1
        session = Session(self, connection, peer, self._numbers)
        self._sessions[session] = None
        session.start()

    def _make_room_for_one(self) -> None:
        """Those who connect and do not open are few: the oldest makes way."""
        opening = [s for s in self._sessions if s.state is State.OPENING]
        if len(opening) >= self.dispatcher.limits.local.max_sessions:
            opening[0].give_way()

    def let_in(self, session: Session, namespace: str) -> Share:
        """See Host."""
        limits = self.dispatcher.limits
        most = limits.local.max_sessions
        half = max(1, most // 2)
        if self._per_namespace.total() >= most or self._per_namespace[namespace] >= half:
            raise ResourceExhausted(
                f"{self._per_namespace[namespace]} local sessions of namespace {namespace!r} are "
                f"open, of {most} in all, of which one namespace may have half",
                "end some, or go by gRPC",
                retry_after_ms=limits.retry_after_ms,
            )
        self._per_namespace[namespace] += 1
        cap_bytes = self._ram.namespace_usage(namespace).cap_bytes
        share_bytes = int(cap_bytes * limits.local.max_leased_fraction_namespace)
        return self._shares.setdefault(namespace, Share(share_bytes, whole=self._whole))

    def share_bytes(self, namespace: str) -> int:
        """See Host."""
        cap_bytes = self._ram.namespace_usage(namespace).cap_bytes
        return int(cap_bytes * self.dispatcher.limits.local.max_leased_fraction_session)

    def make_puts(self, session: Session) -> Puts:
        """See Host."""
        return Puts(self.dispatcher, self._movers, self._staging, session)

    # ---- watching, and going ---------------------------------------------------------------------

    def _look(self) -> None:
        now = self.loop.time()
        for session in [*self._sessions]:
            session.look(now)
        every_s = self.dispatcher.limits.stall_timeout_s / 8
        self._timer = self.loop.call_later(every_s, self._look)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """See Host."""
        task = asyncio.ensure_future(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaned)

    def _cleaned(self, task: asyncio.Task[None]) -> None:
        self._cleaning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("giving back what a local session held failed", exc_info=error)

    def ended(self, session: Session, reason: str) -> None:
        """See Host."""
        self._ended[reason] += 1

    def over(self, session: Session) -> None:
        """See Host."""
        del self._sessions[session]
        if session.namespace:
            self._per_namespace[session.namespace] -= 1
        self.unmapped(session, [*session.told])

    # ---- retiring --------------------------------------------------------------------------------

    def retire(self, segment_id: int) -> asyncio.Future[None] | None:
        """Ask every client that was told of a segment to unmap it. Done when each has, or is gone:
        one whose session the daemon has ended may look at it until then. None: nobody was told.
        """
        told = {session for session in self._sessions if segment_id in session.told}
        if not told:
            return None
        done: asyncio.Future[None] = self.loop.create_future()
        self._retiring[segment_id] = (done, told, self.loop.time())
        for session in [*told]:
            session.retire_segment(segment_id)
        return done

    def stuck(self) -> frozenset[int]:
        """Ids of the segments that would not come back: told to a session that is over for us, or
        that has left a RETIRE unanswered for some time.
        """
        before = self.loop.time() - _PROMPT_S
        late = {s for _, told, at in self._retiring.values() if at < before for s in told}
        late |= {s for s in self._sessions if s.state is State.QUARANTINED}
        return frozenset(segment_id for session in late for segment_id in session.told)

    def unmapped(self, session: Session, segment_ids: Iterable[int]) -> None:
        """See Host."""
        for segment_id in segment_ids:
            asked = self._retiring.get(segment_id)
            if asked is None or session not in asked[1]:
                continue
            done, told, _ = asked
            session.told.discard(segment_id)
            told.discard(session)
            if not told:
                del self._retiring[segment_id]
                if not done.done():
                    done.set_result(None)
