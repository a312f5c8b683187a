"""What a completion request says: OpenAI's fields, a few of this server's, and what is refused."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvstored_client.engine.sampler import Sampling
from kvstored_client.engine.server.errors import BadRequest
from kvstored_client.engine.server.fields import Fields, checked_text, shown
from kvstored_client.engine.tokenizer import Message
from kvstored_client.identity import IdentityError, validate_tenant

MAX_STOPS = 16
MAX_SALT_BYTES = 1024
COMPLETION_TOKENS = 16
"""Tokens of a completion that does not say how many, as OpenAI has it."""

_GREEDY_BELOW = 1e-4  # dividing by less overflows float32
_IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Labels that change nothing about the answer."""

_ONE = "this server gives one answer to a request"
_NO_LOGPROBS = "this server does not give log probabilities"
_NO_PENALTY = "this server samples from the model's own distribution"
_TEXT_ONLY = "this server answers with text"


@dataclass(frozen=True, slots=True)
class Call:
    """One request for a completion.

    The prompt is `messages` of a chat, or `text`, or `token_ids`. `max_tokens` None: as many as
    there is room for. `sampling` has `max_tokens` 1 until the prompt's length is known.
    `include_usage`: a stream ends with a chunk that has it.
    """

    model: str
    messages: Sequence[Message] | None
    text: str | None
    token_ids: Sequence[int] | None
    sampling: Sampling
    max_tokens: int | None
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    request_salt: bytes
    tenant: str

    @property
    def prompt_field(self) -> str:
        """The field that has the prompt."""
        return "prompt" if self.messages is None else "messages"


def parse_completion(fields: Fields, tenant: str) -> Call:
    """A body of /v1/completions. Raises BadRequest."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    text = token_ids = None
    if isinstance(prompt, str):
        text = checked_text(prompt, "prompt")
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        token_ids = prompt
    else:
        raise BadRequest("prompt must be one string, or the token ids of one", "prompt")
    fields.refuse("logprobs", (), _NO_LOGPROBS)
    fields.refuse("best_of", (1,), _ONE)
    fields.refuse("echo", (False,), "send the prompt only where you need it")
    fields.refuse("suffix", ("",), "this server only continues a text")
    tokens = fields.integer("max_tokens", COMPLETION_TOKENS)
    return _call(fields, tenant, None, text, token_ids, tokens)


def parse_chat(fields: Fields, tenant: str) -> Call:
    """A body of /v1/chat/completions. Raises BadRequest."""
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    parsed = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    fields.refuse("logprobs", (False,), _NO_LOGPROBS)
    fields.refuse("top_logprobs", (0,), _NO_LOGPROBS)
    for name in ("tools", "functions"):
        fields.refuse(name, ([],), _TEXT_ONLY)
    for name in ("tool_choice", "function_call"):
        fields.refuse(name, ("none",), _TEXT_ONLY)
    fields.refuse("parallel_tool_calls", (False, True), _TEXT_ONLY)
    fields.refuse("response_format", ({"type": "text"},), _TEXT_ONLY)
    fields.refuse("modalities", (["text"],), _TEXT_ONLY)
    tokens = fields.integer("max_completion_tokens", fields.integer("max_tokens"))
    return _call(fields, tenant, parsed, None, None, tokens)


def parse_tenant(header: str | None) -> str:
    """The value of the header X-Tenant. Raises BadRequest for one that is no label."""
    try:
        return validate_tenant(header or "")
    except IdentityError as error:
        raise BadRequest(f"the header X-Tenant cannot be used: {error}", "X-Tenant") from error


def _call(
    fields: Fields,
    tenant: str,
    messages: Sequence[Message] | None,
    text: str | None,
    token_ids: Sequence[int] | None,
    max_tokens: int | None,
) -> Call:
    model = fields.text("model")
    if not model:
        raise BadRequest("model must name the model; see /v1/models", "model")
    fields.refuse("n", (1,), _ONE)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.refuse(name, (0, 0.0), _NO_PENALTY)
    fields.refuse("logit_bias", ({},), _NO_PENALTY)
    if max_tokens is not None and max_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, not {shown(max_tokens)}", "max_tokens")
    sampling, stops = _sampling(fields), _stops(fields)
    stream = fields.flag("stream")
    include_usage = _include_usage(fields, stream)
    salt = fields.text("cache_salt").encode()
    if len(salt) > MAX_SALT_BYTES:
        raise BadRequest(f"cache_salt may have {MAX_SALT_BYTES} bytes at most", "cache_salt")
    fields.close(_IGNORED)
    return Call(
        model=model,
        messages=messages,
        text=text,
        token_ids=token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stops=stops,
        stream=stream,
        include_usage=include_usage,
        request_salt=salt,
        tenant=tenant,
    )


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRequest(f"{where} must be an object with role and content", where)
    role = message.get("role")
    if role == "developer":  # OpenAI's newer name; templates know the older one
        role = "system"
    if role not in ("system", "user", "assistant"):
        raise BadRequest(
            f"{where} has the role {shown(role)}; system, user, assistant are known", where
        )
    unknown = sorted(k for k, v in message.items() if k not in ("role", "content") and v)
    if unknown:
        raise BadRequest(f"{where} has {shown(unknown[0])}, which this server does not know", where)
    return {"role": role, "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if not isinstance(content, list):
        return checked_text(content, where)
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRequest(f"{where} has a part that is not text: {shown(part)}", where)
    return "".join(checked_text(part.get("text"), where) for part in content)


def _sampling(fields: Fields) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    seed = fields.integer("seed")
    try:
        return Sampling(
            max_tokens=1,
            temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
            seed=secrets.randbits(63) if seed is None else seed,
            ignore_eos=fields.flag("ignore_eos"),
            top_p=fields.number("top_p", 1.0, 0.0, 1.0),
            top_k=fields.integer("top_k", 0) or 0,
        )
    except ValueError as error:
        raise BadRequest(str(error), str(error).partition(" ")[0]) from error


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequest(f"stop must be a string, or a list of at most {MAX_STOPS}", "stop")
    checked = tuple(checked_text(text, "stop") for text in stops)
    if "" in checked:
        raise BadRequest("stop has an empty string, with which every text would end", "stop")
    return checked


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, Mapping):
        raise BadRequest("stream_options must be an object", "stream_options")
    if not stream:
        raise BadRequest("stream_options may be given only with stream", "stream_options")
    inner = Fields(options)
    include = inner.flag("include_usage")
    inner.refuse("include_obfuscation", (False, True), "")
    inner.close()
    return include
