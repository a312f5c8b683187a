"""Which failures of a volume are its device's, and may mend by themselves. Pure."""

from __future__ import annotations

import errno

import lmdb

from kvstored.errors import DataDirectoryError, KvstoredError

FAILURES = (KvstoredError, OSError, lmdb.Error)
"""What a volume raises when it cannot be opened or does not do what it is asked."""


class VolumeAway(DataDirectoryError):
    """A volume that is known is not where it was."""


_DEVICE_ERRORS = frozenset(
    {
        errno.EIO,
        errno.ENODEV,
        errno.ENXIO,
        errno.ESTALE,
        errno.ENOTCONN,
        errno.ENOMEDIUM,
        errno.ETIMEDOUT,
        errno.EUCLEAN,
        errno.EREMOTEIO,
    }
)


def may_mend(error: BaseException) -> bool:
    """Whether waiting may mend what keeps a volume from being opened: its device, not a mistake."""
    if isinstance(error, VolumeAway | lmdb.Error):
        return True
    cause = error.__cause__ if isinstance(error, DataDirectoryError) else error
    return isinstance(cause, lmdb.Error) or (
        isinstance(cause, OSError) and cause.errno in _DEVICE_ERRORS
    )
