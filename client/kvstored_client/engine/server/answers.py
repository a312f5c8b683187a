"""Answers in OpenAI's JSON: whole, or chunk by chunk."""

from __future__ import annotations

from kvstored_client.engine.server.service import Answer, Piece, Usage

Json = dict[str, object]


def whole(answer: Answer, text: str, last: Piece) -> Json:
    """The answer to a request without `stream`."""
    if answer.call.messages is None:
        kind, part = "text_completion", Json(text=text)
    else:
        message = Json(role="assistant", content=text, refusal=None)
        kind, part = "chat.completion", Json(message=message)
    return {
        **_head(answer, kind),
        "choices": [_choice(part, last)],
        "usage": usage_json(last.usage),
    }


def opening(answer: Answer) -> list[Json]:
    """Chunks before the first piece."""
    if answer.call.messages is None:
        return []
    return [_chunk(answer, {"delta": {"role": "assistant", "content": ""}}, Piece(""))]


def chunks(answer: Answer, piece: Piece) -> list[Json]:
    """Chunks for one piece; for the last one also the end, and usage where it is wanted."""
    last = piece.finish_reason is not None
    if answer.call.messages is None:
        made = [_chunk(answer, {"text": piece.text}, piece)]
    else:
        made = []
        if piece.text:
            made.append(_chunk(answer, {"delta": {"content": piece.text}}, Piece("")))
        if last:
            made.append(_chunk(answer, {"delta": {}}, piece))
    if last and answer.call.include_usage:
        head = _head(answer, _chunk_kind(answer))
        made.append({**head, "choices": [], "usage": usage_json(piece.usage)})
    return made


def usage_json(usage: Usage | None) -> Json:
    """The field `usage`."""
    assert usage is not None, "the last piece has it"
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chunk(answer: Answer, part: Json, piece: Piece) -> Json:
    chunk = {**_head(answer, _chunk_kind(answer)), "choices": [_choice(part, piece)]}
    return {**chunk, "usage": None} if answer.call.include_usage else chunk


def _chunk_kind(answer: Answer) -> str:
    return "text_completion" if answer.call.messages is None else "chat.completion.chunk"


def _choice(part: Json, piece: Piece) -> Json:
    return {"index": 0, **part, "logprobs": None, "finish_reason": piece.finish_reason}


def _head(answer: Answer, kind: str) -> Json:
    prefix = "cmpl" if answer.call.messages is None else "chatcmpl"
    return {
        "id": f"{prefix}-{answer.id}",
        "object": kind,
        "created": answer.created_s,
        "model": answer.call.model,
    }
