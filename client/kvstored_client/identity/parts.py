"""Parts: what one object holds of a chunk. They enter no fingerprint and no key."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final

from kvstored_client.identity.checks import label, uint
from kvstored_client.identity.errors import PartError
from kvstored_client.proto import kvstore_pb2 as pb

MIN_OBJECT_BYTES: Final = 4096
MAX_OBJECT_BYTES: Final = 256 << 20


@dataclass(frozen=True)
class KVPart:
    """What one object holds of a chunk.

    `nbytes` is the exact size of every object of the part, `max_nbytes` the most where sizes vary:
    exactly one is given, 4 KiB to 256 MiB. `layers` and `heads` are half-open ranges (start, stop);
    None: all layers; all heads, or replicated on every rank. Raises PartError.
    """

    name: str
    nbytes: int | None = None
    _: KW_ONLY
    max_nbytes: int | None = None
    group: str = "default"
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        label("name", self.name, error=PartError)
        label("group", self.group, error=PartError)
        if (self.nbytes is None) == (self.max_nbytes is None):
            raise PartError("nbytes", f"part {self.name!r} needs one of nbytes and max_nbytes")
        size_field = "max_nbytes" if self.nbytes is None else "nbytes"
        size = self.max_nbytes if self.nbytes is None else self.nbytes
        uint(size_field, size, least=MIN_OBJECT_BYTES, stop=MAX_OBJECT_BYTES + 1, error=PartError)
        for name in ("layers", "heads"):
            span = getattr(self, name)
            if span is not None:
                object.__setattr__(self, name, _checked_span(name, span))

    def spec(self) -> pb.PartSpec:
        """The part as the wire carries it."""
        layers, heads = self.layers or (0, 0), self.heads or (0, 0)
        return pb.PartSpec(
            name=self.name,
            group=self.group,
            bytes=self.nbytes or 0,
            max_bytes=self.max_nbytes or 0,
            layer_start=layers[0],
            layer_stop=layers[1],
            head_start=heads[0],
            head_stop=heads[1],
        )

    @classmethod
    def from_spec(cls, spec: pb.PartSpec) -> KVPart:
        """The part that `spec` describes. Raises PartError."""
        return cls(
            spec.name,
            spec.bytes or None,
            max_nbytes=spec.max_bytes or None,
            group=spec.group,
            layers=_span_of(spec.layer_start, spec.layer_stop),
            heads=_span_of(spec.head_start, spec.head_stop),
        )


def _checked_span(name: str, span: object) -> tuple[int, int]:
    if not isinstance(span, tuple | list) or len(span) != 2:
        raise PartError(name, f"must be (start, stop), not {span!r}")
    start = uint(name, span[0], error=PartError)
    stop = uint(name, span[1], error=PartError)
    if start >= stop:
        raise PartError(name, f"start must be less than stop, not {start} and {stop}")
    return start, stop


def _span_of(start: int, stop: int) -> tuple[int, int] | None:
    return (start, stop) if start or stop else None
