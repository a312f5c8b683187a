"""From a socket to the last answer: serves until it is told to stop, then in order.

1. It is told to stop (SIGTERM, SIGINT, `ask_stop`): new requests are refused with 503, /healthz
   says so, and those under way go on.
2. The last has ended, or the grace is over: those left get an error; connections are closed.
3. The hook puts what is queued, and the engine's thread ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn

from kvstored_client.engine.engine import Engine
from kvstored_client.engine.server.app import make_app
from kvstored_client.engine.server.runner import EngineRunner
from kvstored_client.engine.server.service import Service
from kvstored_client.engine.server.weights import LoadModel, WeightUpdater
from kvstored_client.engine.tokenizer import Tokenizer

_CLOSE_CONNECTIONS_S = 5
"""How long clients that read slowly have to read what was computed for them, after the grace."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How to serve. `grace_s`: how long requests under way may take when the server stops;
    `put_wait_s`: how long the hook may take then. `body_wait_s`: how long a request may take to
    send its body.
    """

    model_name: str
    load_weights: LoadModel | None = None
    grace_s: float = 30.0
    put_wait_s: float = 30.0
    body_wait_s: float = 60.0


class EngineServer(uvicorn.Server):
    """Serves one engine, which it closes at the end.

    Make it on the event loop on which `run` is awaited. `ask_stop` is for any thread.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.runner = EngineRunner(engine)
        self.service = Service(self.runner, tokenizer, settings.model_name)
        updater = WeightUpdater(self.runner, settings.load_weights)
        config = uvicorn.Config(
            make_app(self.service, updater, settings.body_wait_s),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_CLOSE_CONNECTIONS_S,
        )
        super().__init__(config)
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()

    async def run_on(self, listener: socket.socket, on_ready: Callable[[], None]) -> bool:
        """Serve on a bound socket until told to stop. False: the store did not take in time what
        was queued for it.
        """
        self.runner.start()
        stopping = asyncio.create_task(self._stop_in_order())
        on_ready()
        try:
            await self.serve([listener])
        finally:
            stopping.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            self.service.stopping = True
            self.service.close()
            stopped = await asyncio.to_thread(self.runner.stop, self._settings.put_wait_s)
        return stopped

    def ask_stop(self) -> None:
        """Stop in order. A second time: without the grace."""
        with contextlib.suppress(RuntimeError):  # it has stopped, and its loop is closed
            self._loop.call_soon_threadsafe(self._ask)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal, in place of uvicorn's way to stop."""
        self.ask_stop()

    def _ask(self) -> None:
        if self._asked.is_set():
            self.should_exit = True
            self.force_exit = True
        self._asked.set()
        self.service.stopping = True

    async def _stop_in_order(self) -> None:
        await self._asked.wait()
        try:
            await asyncio.wait_for(self.service.idle(), self._settings.grace_s)
        except TimeoutError:
            self.runner.give_up()
        self.should_exit = True


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any that is free. Raises OSError, ValueError for a number
    that is no port.
    """
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port {port} is none; 0 (any that is free) to 65535 are")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OSError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
