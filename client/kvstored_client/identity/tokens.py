"""Token ids, from whatever an engine holds them in, as one array of little-endian uint32."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from typing import Protocol, SupportsIndex, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvstored_client.identity.errors import TokenError

TOKEN_STOP = 1 << 32

_FIELD = "token_ids"
_RANGE = "must be 0 to 4294967295"


@runtime_checkable
class TensorLike(Protocol):
    """As much of a torch.Tensor as is needed to read one without importing torch."""

    def detach(self) -> TensorLike:
        """The same data without its history."""

    def cpu(self) -> TensorLike:
        """The same data in host memory."""

    def numpy(self) -> NDArray[np.generic]:
        """The same data as an array."""


TokenIds = Sequence[int] | NDArray[np.integer] | TensorLike
"""Token ids of one prompt: a list, tuple, range, array.array, numpy array or torch tensor."""


def token_array(token_ids: TokenIds) -> NDArray[np.uint32]:
    """Token ids as a read-only array of little-endian uint32, shape [tokens]; always a copy.

    Raises TokenError, with the position of the first one, for ids that are not integers (floats and
    bools included) or outside 0 to 2**32 - 1, and for containers that are not one-dimensional.
    """
    if isinstance(token_ids, np.ndarray):
        tokens = _from_numpy(token_ids)
    elif isinstance(token_ids, TensorLike):
        tokens = _from_numpy(_host_copy(token_ids))
    elif isinstance(token_ids, Sequence | array) and not isinstance(
        token_ids, str | bytes | bytearray | memoryview
    ):
        tokens = _from_sequence(token_ids)
    else:
        kind = type(token_ids).__name__
        raise TokenError(_FIELD, f"must be a list, tuple, array or tensor of ints, not {kind}")
    tokens.flags.writeable = False
    return tokens


def _host_copy(tensor: TensorLike) -> NDArray[np.generic]:
    try:
        return tensor.detach().cpu().numpy()
    except TypeError as exc:  # a type that numpy lacks, like bfloat16
        raise TokenError(_FIELD, f"must be integers ({exc})", 0) from None


def _from_numpy(values: NDArray[np.generic]) -> NDArray[np.uint32]:
    if values.ndim != 1:
        problem = f"must have one dimension (one prompt), not shape {list(values.shape)}"
        raise TokenError(_FIELD, problem)
    if values.dtype.kind == "O":
        return _from_sequence(values.tolist())
    if values.size == 0:
        return np.zeros(0, "<u4")
    if values.dtype.kind not in "iu":
        raise TokenError(_FIELD, f"must be an integer, not {values.dtype}", 0)
    return _from_integers(cast("NDArray[np.int64]", values))


def _from_integers(values: NDArray[np.int64]) -> NDArray[np.uint32]:
    """`values` may be of any integer type; the annotation names one to have comparisons typed."""
    if int(values.min()) < 0 or int(values.max()) >= TOKEN_STOP:
        position = int(np.argmax((values < 0) | (values >= TOKEN_STOP)))
        raise TokenError(_FIELD, f"{_RANGE}, not {values[position]}", position)
    return values.astype("<u4", copy=True)


def _from_sequence(values: Sequence[int]) -> NDArray[np.uint32]:
    # A bool is an int to everything that converts quickly, hence the look at the types first.
    kinds = set(map(type, values))
    if kinds <= {int}:
        try:
            return np.array(array("I", values), "<u4")
        except OverflowError:
            pass  # found again below, with its position
    elif all(issubclass(kind, np.integer) for kind in kinds):
        integers = np.asarray(values)
        if integers.dtype.kind in "iu":  # int64 mixed with uint64 comes out as float64
            return _from_integers(integers)
    checked = [_checked(position, value) for position, value in enumerate(values)]
    return np.array(array("I", checked), "<u4")


def _checked(position: int, value: object) -> int:
    # Scalar arrays and tensors say what they hold in `dtype`; a bool one would pass for 0 or 1.
    holds = str(getattr(value, "dtype", type(value).__name__))
    if getattr(value, "ndim", 0) != 0:
        raise TokenError(_FIELD, "must be an integer, not an array of them", position)
    if "bool" in holds or not isinstance(value, SupportsIndex):
        raise TokenError(_FIELD, f"must be an integer, not {holds}", position)
    try:
        token = operator.index(value)
    except TypeError:  # a float tensor has __index__ too
        raise TokenError(_FIELD, f"must be an integer, not {holds}", position) from None
    if not 0 <= token < TOKEN_STOP:
        raise TokenError(_FIELD, f"{_RANGE}, not {token}", position)
    return token
