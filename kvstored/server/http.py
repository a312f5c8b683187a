"""/metrics, /status, /healthz and /readyz, in a thread of their own.

Probes must be answered while the verbs' loop is busy or stuck: that is when somebody looks. Nothing
here touches the store; metrics and status ask the loop for a snapshot with a bounded wait.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import make_wsgi_app

from kvstored.config import TcpAddress
from kvstored.server.sockets import ListenError, UnixSocket

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger("kvstored.http")

LOOP_STUCK_AFTER_S = 10.0
MAX_REQUESTS = 16
REQUEST_TIMEOUT_S = 5.0
BACKLOG = 64
UNIX_MODE = 0o660


@dataclass(frozen=True, slots=True)
class Health:
    """What the probes judge by; both may be called from any thread.

    `phase`: "starting", "ready" or "draining". `loop_silent_s`: time since the verbs' loop last
    showed a sign of life.
    """

    phase: Callable[[], str]
    loop_silent_s: Callable[[], float]

    def alive(self) -> bool:
        """The verbs' loop turns."""
        return self.loop_silent_s() < LOOP_STUCK_AFTER_S

    def ready(self) -> bool:
        """The daemon serves."""
        return self.alive() and self.phase() == "ready"


Page = Callable[[], Mapping[str, object]]
"""Makes what /status shows. Raises TimeoutError when the verbs' loop is stuck."""


def make_app(
    registry: CollectorRegistry, health: Health, page: Page | None = None
) -> WSGIApplication:
    """The router, as a WSGI application. `page` None: there is no /status."""
    # Compressing on the daemon's cores costs more than loopback bytes do.
    metrics = make_wsgi_app(registry, disable_compression=True)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            headers = [("Allow", "GET, HEAD"), ("Content-Length", "0")]
            start_response("405 Method Not Allowed", headers)
            return []
        if path == "/metrics":
            return _metrics(metrics, environ, start_response)
        if path in ("/healthz", "/readyz"):
            good = health.alive() if path == "/healthz" else health.ready()
            return _answer(
                start_response,
                "200 OK" if good else "503 Service Unavailable",
                {"phase": health.phase(), "loop_silent_s": round(health.loop_silent_s(), 3)},
            )
        if path == "/status" and page is not None:
            return _page(page, start_response)
        there = ["/metrics", "/healthz", "/readyz", *(["/status"] if page is not None else [])]
        here = {"error": f"nothing at {path}", "try": there}
        return _answer(start_response, "404 Not Found", here)

    return app


def _metrics(
    metrics: WSGIApplication, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    try:
        return metrics({**environ, "REQUEST_METHOD": "GET"}, start_response)
    except Exception as error:
        return _no_figures(error, start_response)


def _page(page: Page, start_response: StartResponse) -> Iterable[bytes]:
    try:
        body = page()
    except Exception as error:
        return _no_figures(error, start_response)
    return _answer(start_response, "200 OK", body)


def _no_figures(error: Exception, start_response: StartResponse) -> Iterable[bytes]:
    # Old figures would look like an idle daemon: none at all shows as a failed scrape.
    if isinstance(error, TimeoutError):
        what = "the verbs' loop does not answer"
    else:
        log.error("the figures could not be rendered", exc_info=error)
        what = "the figures could not be rendered; see the log"
    return _answer(start_response, "503 Service Unavailable", {"error": what})


def _answer(start_response: StartResponse, status: str, body: Mapping[str, object]) -> list[bytes]:
    data = (json.dumps(body) + "\n").encode()
    headers = [("Content-Type", "application/json"), ("Content-Length", str(len(data)))]
    start_response(status, headers)
    return [data]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base's own name
        """Probes come every few seconds: say nothing."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """A WSGI server on a socket that listens already, with a bounded number of threads."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, app: WSGIApplication) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = "kvstored", 0
        self.setup_environ()
        self.set_app(app)
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """As the base class, which knows no peers without an address."""
        connection, peer = self.socket.accept()
        return connection, peer[:2] if isinstance(peer, tuple) else ("unix", 0)

    def process_request(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Serve in a thread, or hang up when all are taken."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._slots.release()
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """As the base class; then free the slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A peer that hangs up or idles is nobody's fault; anything else is logged."""
        log.debug("a request was cut short", exc_info=True)


class HttpServer:
    """Serves the router on one address. Methods may be called from any thread."""

    def __init__(
        self,
        address: TcpAddress | Path,
        registry: CollectorRegistry,
        health: Health,
        page: Page | None = None,
    ) -> None:
        self._address = address
        self._app = make_app(registry, health, page)
        self._server: _Server | None = None
        self._unix: UnixSocket | None = None

    def start(self) -> str:
        """Listen, and answer from now on. Returns the address, with the port it really has.

        Raises ListenError where the address cannot be had.
        """
        if isinstance(self._address, Path):
            self._unix = UnixSocket(self._address, UNIX_MODE)
            listener, where = _listen_unix(self._unix), f"unix:{self._address}"
        else:
            listener = _listen_tcp(self._address)
            where = str(TcpAddress(self._address.host, listener.getsockname()[1]))
        self._server = _Server(listener, self._app)
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()
        return where

    def stop(self) -> None:
        """Stop listening; running answers may end by themselves. Idempotent."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.server_close()
        self._server = None
        if self._unix is not None:
            self._unix.remove()


def _listen_unix(unix: UnixSocket) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(unix.address.removeprefix("unix:"))
        listener.listen(BACKLOG)
        unix.publish()
    except OSError as error:
        listener.close()
        unix.remove()
        raise ListenError(
            f"cannot listen on {unix.address}: {error.strerror}", "set another listen.http"
        ) from error
    return listener


def _listen_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {address}: {error.strerror or error}",
            "set another listen.http; is another daemon running?",
        ) from error
