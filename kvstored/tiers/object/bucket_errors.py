"""What an error of obstore means. Pure.

obstore tells most things apart by text alone: its last lines are a dump of the error and of its
causes. That text is matched here and never passed on: an error's body can hold a session token, and
a URL what a deployment would rather keep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from kvstored.tiers.object.api import Outcome

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,40})</Code>")
_UNEXPECTED = re.compile(r"Requested \d+\.\.(\d+), got \d+\.\.(\d+)")
_CREDENTIALS = frozenset(
    {
        "AccessDenied",
        "AuthorizationHeaderMalformed",
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidToken",
        "RequestExpired",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
_THROTTLES = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "RequestLimitExceeded"}
)
_CAUSES = (  # text of the dump, in order; outcome; our words for it
    ("dns error", Outcome.NAME, "the endpoint's name was not resolved"),
    ("failed to lookup address", Outcome.NAME, "the endpoint's name was not resolved"),
    ("169.254.", Outcome.DENIED, "no credentials in the environment, and no instance gives any"),
    ("MissingCredentials", Outcome.DENIED, "no credentials"),
    ("BareRedirect", Outcome.SERVER, "redirected nowhere; most likely the region is wrong"),
    ("IncompleteBody", Outcome.SHORT, "the body ended early"),
    ("UnexpectedEof", Outcome.SHORT, "the body ended early"),
    ("NotPartial", Outcome.LONG, "the whole object came where a range was asked for"),
    ("TimedOut", Outcome.DEADLINE, "no answer in time"),
    ("ConnectionReset", Outcome.NETWORK, "connection reset"),
    ("ConnectionRefused", Outcome.NETWORK, "connection refused"),
    ("IncompleteMessage", Outcome.NETWORK, "connection closed before an answer"),
    ("HttpError", Outcome.NETWORK, "no HTTP answer"),
    ("Os {", Outcome.SERVER, "the directory's file system refused"),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One error, told apart. `words` are our own, and may be shown to anybody."""

    outcome: Outcome
    words: str


def classify(error: BaseException) -> Failure:
    """What an exception that obstore raised means; SERVER where nothing is known of it."""
    text = str(error)
    status = _STATUS.search(text)
    code = _CODE.search(text)
    known = _by_type(error, code.group(1) if code else "")
    if known is not None:
        return known
    if "169.254." in text:
        return Failure(Outcome.DENIED, "no credentials found, and the instance gives none")
    if status is not None:
        return _of_status(int(status.group(1)), code.group(1) if code else "")
    unexpected = _UNEXPECTED.search(text)
    if unexpected is not None:
        short = int(unexpected.group(2)) < int(unexpected.group(1))
        return Failure(Outcome.SHORT if short else Outcome.LONG, "another range than asked for")
    for cause, outcome, words in _CAUSES:
        if cause in text:
            return Failure(outcome, words)
    return Failure(Outcome.SERVER, f"unknown error ({type(error).__name__})")


def _by_type(error: BaseException, code: str) -> Failure | None:
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return Failure(Outcome.EXISTED, "the name is taken")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError | PermissionError):
        return Failure(Outcome.DENIED, f"access denied ({code or type(error).__name__})")
    if isinstance(error, FileNotFoundError):
        if code == "NoSuchBucket":
            return Failure(Outcome.NO_BUCKET, "there is no such bucket")
        return Failure(Outcome.ABSENT, "no such object")
    if isinstance(error, TimeoutError):
        return Failure(Outcome.DEADLINE, "no answer in time")
    return None


def _of_status(status: int, code: str) -> Failure:
    words = f"HTTP {status} {code}".rstrip()
    if code == "NoSuchBucket":
        return Failure(Outcome.NO_BUCKET, "there is no such bucket")
    if code in _CREDENTIALS or status in (401, 403):
        return Failure(Outcome.DENIED, f"access denied ({code or status})")
    if code in _THROTTLES or status == 429:
        return Failure(Outcome.THROTTLED, words)
    if status == 503 and not code:
        return Failure(Outcome.SERVER, words)
    if status in (404, 416):
        return Failure(Outcome.ABSENT if status == 404 else Outcome.SHORT, words)
    if status == 412:
        return Failure(Outcome.EXISTED, "the name is taken")
    return Failure(Outcome.SERVER, words)
