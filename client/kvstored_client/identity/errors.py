"""Exceptions of the identity package: input from which no key can be computed."""

from __future__ import annotations


class IdentityError(ValueError):
    """Base of every refusal in this package.

    `field` names the argument at fault; `position` is the index of the offending element where the
    argument is a sequence, else None.
    """

    def __init__(self, field: str, problem: str, position: int | None = None) -> None:
        where = field if position is None else f"{field}[{position}]"
        super().__init__(f"{where}: {problem}")
        self.field = field
        self.problem = problem
        self.position = position


class TokenError(IdentityError):
    """A token id that is not an integer of 0 to 2**32 - 1, or ids in an unusable container."""


class FieldError(IdentityError):
    """A family's field of a wrong type, length or range."""


class PartError(IdentityError):
    """A part that contradicts itself or its family."""


class GroupError(IdentityError):
    """A group or group rule that cannot hold."""


class SaltError(IdentityError):
    """A salt or deployment secret of a wrong type or length."""


class LabelError(IdentityError):
    """A namespace, tenant, part or group name that is not a label."""


class ExtraError(IdentityError):
    """An extra with an empty or negative range, or a digest of a wrong type or length."""


class BlockHashError(IdentityError):
    """An engine's block hash that is not 1 to 64 bytes."""


class FingerprintMismatchError(IdentityError):
    """A family spec whose fingerprint is not the one its fields give."""
