"""What a request can be answered with instead of tokens, in OpenAI's JSON form."""

from __future__ import annotations

from collections.abc import Mapping


class ApiError(Exception):
    """Base of them. `status` is HTTP's, `kind` and `code` are OpenAI's, `param` names the field."""

    status = 500
    kind = "server_error"
    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code

    def body(self) -> dict[str, object]:
        """The JSON object of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> Mapping[str, str]:
        """HTTP headers of the answer."""
        return {}


class BadRequest(ApiError):
    """The request cannot be served as it is written."""

    status = 400
    kind = "invalid_request_error"


class Forbidden(BadRequest):
    """The server was not started to allow it."""

    status = 403
    code = "forbidden"


class NotFound(BadRequest):
    """No such model, or no such path."""

    status = 404


class MethodNotAllowed(BadRequest):
    """The path is there, but not for this method."""

    status = 405


class BodyTooSlow(BadRequest):
    """The body has not come in time."""

    status = 408
    code = "request_timeout"


class Conflict(BadRequest):
    """Something that excludes it is under way."""

    status = 409
    code = "conflict"


class BodyTooLarge(BadRequest):
    """More bytes than a request may have."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(BadRequest):
    """The body is not declared to be JSON."""

    status = 415


class Overloaded(ApiError):
    """As many requests wait as may."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"

    def headers(self) -> Mapping[str, str]:
        """When to come again: a place is free as soon as one request ends."""
        return {"Retry-After": "1"}


class Stopping(ApiError):
    """The server takes no more requests, or ends this one, because it stops."""

    status = 503
    code = "stopping"

    def headers(self) -> Mapping[str, str]:
        """Another server, or the next one here, may be there soon."""
        return {"Retry-After": "5"}


class EngineFailed(ApiError):
    """Computing failed. It is in the server's log; the request may be sent again."""

    code = "engine_failed"
