"""A request's life: prompt to tokens, a job of the engine, tokens to text, figures at the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from kvstored_client.engine.engine import PromptError, PromptTooLong, QueueFullError
from kvstored_client.engine.server.errors import (
    ApiError,
    BadRequest,
    EngineFailed,
    NotFound,
    Overloaded,
    Stopping,
)
from kvstored_client.engine.server.protocol import Call
from kvstored_client.engine.server.runner import EngineRunner, Job
from kvstored_client.engine.server.text import AnswerText
from kvstored_client.engine.tokenizer import ChatError, Tokenizer
from kvstored_client.engine.types import FinishReason, Request, TokenEvent

MORE_THAN_QUEUED = 16
"""Requests that may be read and tokenised beside those the engine runs and has queued."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `cached_tokens` of the prompt were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that an answer goes on with. `finish_reason` and `usage` are of its last piece."""

    text: str
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class Answer:
    """One answer under way. `close` it, whatever happens: then its blocks come back."""

    def __init__(self, service: Service, call: Call, job: Job) -> None:
        self.id = uuid.uuid4().hex
        self.created_s = int(time.time())
        self.call = call
        self._service = service
        self._job = job
        self._ended = False
        self._started_s = time.monotonic()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The text as it comes; the last piece has reason and usage. Raises ApiError."""
        text = AnswerText(self._service.tokenizer, self.call.stops)
        async for event in self._events():
            if event.token_id is None:
                raise EngineFailed("the engine aborted the request")
            if text.tokens == 0:
                self._service.observe_ttft(time.monotonic() - self._started_s)
            new = text.push(event.token_id, event.finish_reason)
            if text.finish_reason is not None:
                self._ended = True
                usage = Usage(event.prompt_tokens, text.tokens, event.cached_tokens)
                yield Piece(new, text.finish_reason, usage)
                return
            if new:
                yield Piece(new)

    def close(self) -> None:
        """Nobody reads on."""
        if not self._ended:
            self._service.stats.dropped += 1
        self._job.close()

    async def _events(self) -> AsyncGenerator[TokenEvent, None]:
        try:
            async for event in self._job.events():
                yield event
        except ApiError:
            self._ended = True
            raise


TTFT_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


@dataclass(slots=True)
class ServiceStats:
    """Sums since the start. `refused`: found no place, beside those the engine refused; `dropped`:
    their clients went away. `ttft_counts`: times to the first token, by `TTFT_BOUNDS_S`.
    """

    refused: int = 0
    dropped: int = 0
    ttft_sum_s: float = 0.0
    ttft_counts: list[int] = field(default_factory=lambda: [0] * (len(TTFT_BOUNDS_S) + 1))


class Service:
    """What the routes call. All methods are for the event loop."""

    def __init__(self, runner: EngineRunner, tokenizer: Tokenizer, model_name: str) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.started_s = int(time.time())
        self.stats = ServiceStats()
        self.stopping = False
        limits = runner.engine.limits
        self._most = limits.max_running + limits.max_waiting + MORE_THAN_QUEUED
        self._present = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # Tokenising a long prompt takes a while, and two at a time leave the engine its cores.
        self._workers = ThreadPoolExecutor(2, "tokenize")

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """A request's place, from before its body is read to after its answer. Raises Overloaded
        and Stopping.
        """
        self.check_running()
        if self._present >= self._most:
            self.stats.refused += 1
            raise Overloaded(f"{self._present} requests are under way; try again later")
        self._present += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._present -= 1
            if self._present == 0:
                self._idle.set()

    async def begin(self, call: Call) -> Answer:
        """Queue a request. Raises ApiError: the model is another, the prompt cannot be run, there
        is no room in the queue.
        """
        if call.model != self.model_name:
            raise NotFound(
                f"no model {call.model!r} here; this server has {self.model_name!r}",
                "model",
                "model_not_found",
            )
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._workers, self._prompt, call)
        self.check_running()
        room = max(1, self.runner.engine.limit_tokens - len(prompt))
        sampling = replace(call.sampling, max_tokens=call.max_tokens or room)
        request = Request(uuid.uuid4().hex, prompt, sampling, call.request_salt, call.tenant)
        try:
            return Answer(self, call, self.runner.submit(request))
        except QueueFullError as error:
            raise Overloaded(str(error)) from error
        except PromptError as error:
            code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
            raise BadRequest(str(error), call.prompt_field, code) from error

    def check_running(self) -> None:
        """Raises Stopping where no requests are taken, EngineFailed where none can be computed."""
        if self.stopping:
            raise Stopping("this server stops; it takes no more requests")
        if not self.runner.alive:
            raise EngineFailed("the engine has stopped; the server must be restarted")

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def observe_ttft(self, seconds: float) -> None:
        """Count a time to the first token."""
        at = sum(1 for bound in TTFT_BOUNDS_S if seconds > bound)
        self.stats.ttft_counts[at] += 1
        self.stats.ttft_sum_s += seconds

    def close(self) -> None:
        """End the threads that tokenise."""
        self._workers.shutdown()

    def _prompt(self, call: Call) -> list[int]:
        """The prompt's tokens. On a worker."""
        if call.token_ids is not None:
            return list(call.token_ids)
        if call.text is not None:
            self._check_length(call.text, call)
            return self.tokenizer.encode(call.text, with_special=True)
        try:
            text = self.tokenizer.chat_text(call.messages or ())
        except ChatError as error:
            raise BadRequest(str(error), "messages") from error
        self._check_length(text, call)
        return self.tokenizer.encode(text)

    def _check_length(self, text: str, call: Call) -> None:
        """Refuse what cannot fit before seconds go into finding out how many tokens it is."""
        tokens = self.runner.engine.limit_tokens
        most = tokens * self.tokenizer.longest_token_chars
        if len(text) > most:
            raise BadRequest(
                f"{len(text)} characters do not fit into {tokens} tokens; those hold {most}",
                call.prompt_field,
                "context_length_exceeded",
            )
