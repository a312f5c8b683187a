from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "boot_epoch", "uptime_ms", "phase", "tiers", "namespaces", "chunks", "objects", "dirty_bytes", "leased_bytes", "families")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_MS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    version: str
    boot_epoch: int
    uptime_ms: int
    phase: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStatus]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    chunks: int
    objects: int
    dirty_bytes: int
    leased_bytes: int
    families: int
    def __init__(self, version: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., phase: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., chunks: _Optional[int] = ..., objects: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., families: _Optional[int] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("name", "cap_bytes", "footprint_bytes", "charged_bytes", "objects", "health", "mode")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOOTPRINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    name: str
    cap_bytes: int
    footprint_bytes: int
    charged_bytes: int
    objects: int
    health: str
    mode: str
    def __init__(self, name: _Optional[str] = ..., cap_bytes: _Optional[int] = ..., footprint_bytes: _Optional[int] = ..., charged_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., health: _Optional[str] = ..., mode: _Optional[str] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("name", "tier", "charged_bytes", "cap_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    tier: str
    charged_bytes: int
    cap_bytes: int
    def __init__(self, name: _Optional[str] = ..., tier: _Optional[str] = ..., charged_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ...) -> None: ...
