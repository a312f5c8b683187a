from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "boot_epoch", "uptime_ms", "phase", "tiers", "namespaces", "chunks", "objects", "dirty_bytes", "leased_bytes", "families", "bucket")
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
    BUCKET_FIELD_NUMBER: _ClassVar[int]
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
    bucket: BucketStatus
    def __init__(self, version: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., uptime_ms: _Optional[int] = ..., phase: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStatus, _Mapping]]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ..., chunks: _Optional[int] = ..., objects: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., families: _Optional[int] = ..., bucket: _Optional[_Union[BucketStatus, _Mapping]] = ...) -> None: ...

class BucketStatus(_message.Message):
    __slots__ = ("url", "health", "backlog_objects", "backlog_bytes", "in_flight", "uploaded_bytes", "fetched_bytes", "known_bytes", "known_objects", "cap_bytes", "janitor", "outcomes")
    URL_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_BYTES_FIELD_NUMBER: _ClassVar[int]
    KNOWN_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    JANITOR_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    url: str
    health: str
    backlog_objects: int
    backlog_bytes: int
    in_flight: int
    uploaded_bytes: int
    fetched_bytes: int
    known_bytes: int
    known_objects: int
    cap_bytes: int
    janitor: str
    outcomes: _containers.RepeatedCompositeFieldContainer[BucketOutcome]
    def __init__(self, url: _Optional[str] = ..., health: _Optional[str] = ..., backlog_objects: _Optional[int] = ..., backlog_bytes: _Optional[int] = ..., in_flight: _Optional[int] = ..., uploaded_bytes: _Optional[int] = ..., fetched_bytes: _Optional[int] = ..., known_bytes: _Optional[int] = ..., known_objects: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., janitor: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[BucketOutcome, _Mapping]]] = ...) -> None: ...

class BucketOutcome(_message.Message):
    __slots__ = ("verb", "outcome", "count")
    VERB_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    verb: str
    outcome: str
    count: int
    def __init__(self, verb: _Optional[str] = ..., outcome: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

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

class ListVolumesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListVolumesReply(_message.Message):
    __slots__ = ("volumes", "write_amplification")
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    WRITE_AMPLIFICATION_FIELD_NUMBER: _ClassVar[int]
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeStatus]
    write_amplification: float
    def __init__(self, volumes: _Optional[_Iterable[_Union[VolumeStatus, _Mapping]]] = ..., write_amplification: _Optional[float] = ...) -> None: ...

class VolumeStatus(_message.Message):
    __slots__ = ("number", "name", "directory", "state", "detail", "mode", "cap_bytes", "footprint_bytes", "charged_bytes", "objects", "read_bytes_per_s", "write_bytes_per_s", "errors", "read_bytes", "written_bytes", "accepted_bytes", "regions_total", "regions_free", "regions_abandoned", "scrub")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FOOTPRINT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FREE_FIELD_NUMBER: _ClassVar[int]
    REGIONS_ABANDONED_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    number: int
    name: str
    directory: str
    state: str
    detail: str
    mode: str
    cap_bytes: int
    footprint_bytes: int
    charged_bytes: int
    objects: int
    read_bytes_per_s: float
    write_bytes_per_s: float
    errors: _containers.RepeatedCompositeFieldContainer[VolumeErrors]
    read_bytes: int
    written_bytes: int
    accepted_bytes: int
    regions_total: int
    regions_free: int
    regions_abandoned: int
    scrub: ScrubStatus
    def __init__(self, number: _Optional[int] = ..., name: _Optional[str] = ..., directory: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ..., mode: _Optional[str] = ..., cap_bytes: _Optional[int] = ..., footprint_bytes: _Optional[int] = ..., charged_bytes: _Optional[int] = ..., objects: _Optional[int] = ..., read_bytes_per_s: _Optional[float] = ..., write_bytes_per_s: _Optional[float] = ..., errors: _Optional[_Iterable[_Union[VolumeErrors, _Mapping]]] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., accepted_bytes: _Optional[int] = ..., regions_total: _Optional[int] = ..., regions_free: _Optional[int] = ..., regions_abandoned: _Optional[int] = ..., scrub: _Optional[_Union[ScrubStatus, _Mapping]] = ...) -> None: ...

class VolumeErrors(_message.Message):
    __slots__ = ("stage", "count")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    stage: str
    count: int
    def __init__(self, stage: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ScrubStatus(_message.Message):
    __slots__ = ("running", "on_demand", "last_end", "last_done_ms", "passes_done", "pass_objects", "pass_bytes", "scrubbed_objects", "scrubbed_bytes", "dropped_objects", "dropped_bytes", "unreadable_objects")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    LAST_END_FIELD_NUMBER: _ClassVar[int]
    LAST_DONE_MS_FIELD_NUMBER: _ClassVar[int]
    PASSES_DONE_FIELD_NUMBER: _ClassVar[int]
    PASS_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PASS_BYTES_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    running: bool
    on_demand: bool
    last_end: str
    last_done_ms: int
    passes_done: int
    pass_objects: int
    pass_bytes: int
    scrubbed_objects: int
    scrubbed_bytes: int
    dropped_objects: int
    dropped_bytes: int
    unreadable_objects: int
    def __init__(self, running: bool = ..., on_demand: bool = ..., last_end: _Optional[str] = ..., last_done_ms: _Optional[int] = ..., passes_done: _Optional[int] = ..., pass_objects: _Optional[int] = ..., pass_bytes: _Optional[int] = ..., scrubbed_objects: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., dropped_objects: _Optional[int] = ..., dropped_bytes: _Optional[int] = ..., unreadable_objects: _Optional[int] = ...) -> None: ...

class DrainVolumeRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DrainVolumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScrubRequest(_message.Message):
    __slots__ = ("volume", "rate_bytes_per_s", "run")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    RATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    volume: str
    rate_bytes_per_s: int
    run: int
    def __init__(self, volume: _Optional[str] = ..., rate_bytes_per_s: _Optional[int] = ..., run: _Optional[int] = ...) -> None: ...

class ScrubReply(_message.Message):
    __slots__ = ("run", "volumes", "done")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    run: int
    volumes: _containers.RepeatedCompositeFieldContainer[ScrubProgress]
    done: bool
    def __init__(self, run: _Optional[int] = ..., volumes: _Optional[_Iterable[_Union[ScrubProgress, _Mapping]]] = ..., done: bool = ...) -> None: ...

class ScrubProgress(_message.Message):
    __slots__ = ("volume", "state", "objects", "scrubbed_objects", "scrubbed_bytes", "dropped_objects", "dropped_bytes", "unreadable_objects")
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    SCRUBBED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    volume: str
    state: str
    objects: int
    scrubbed_objects: int
    scrubbed_bytes: int
    dropped_objects: int
    dropped_bytes: int
    unreadable_objects: int
    def __init__(self, volume: _Optional[str] = ..., state: _Optional[str] = ..., objects: _Optional[int] = ..., scrubbed_objects: _Optional[int] = ..., scrubbed_bytes: _Optional[int] = ..., dropped_objects: _Optional[int] = ..., dropped_bytes: _Optional[int] = ..., unreadable_objects: _Optional[int] = ...) -> None: ...

class PurgeRequest(_message.Message):
    __slots__ = ("namespace", "tenant")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    tenant: str
    def __init__(self, namespace: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class PurgeReply(_message.Message):
    __slots__ = ("chunks", "bucket_objects")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    BUCKET_OBJECTS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    bucket_objects: int
    def __init__(self, chunks: _Optional[int] = ..., bucket_objects: _Optional[int] = ...) -> None: ...
