from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_LOCAL: _ClassVar[Feature]
    FEATURE_PREFETCH: _ClassVar[Feature]
    FEATURE_PIN: _ClassVar[Feature]
    FEATURE_DURABLE: _ClassVar[Feature]
    FEATURE_USAGE: _ClassVar[Feature]

class TierKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[TierKind]
    TIER_RAM: _ClassVar[TierKind]
    TIER_NVME: _ClassVar[TierKind]
    TIER_OBJECT: _ClassVar[TierKind]

class ChunkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_UNSPECIFIED: _ClassVar[ChunkState]
    IN_RAM: _ClassVar[ChunkState]
    IN_NVME: _ClassVar[ChunkState]
    IN_OBJECT: _ClassVar[ChunkState]
    NOT_NEEDED: _ClassVar[ChunkState]
    MISS_NEVER_STORED: _ClassVar[ChunkState]
    MISS_EVICTED: _ClassVar[ChunkState]
    MISS_EXPIRED: _ClassVar[ChunkState]
    MISS_CORRUPT: _ClassVar[ChunkState]
    MISS_TIER_DOWN: _ClassVar[ChunkState]
    MISS_DEADLINE: _ClassVar[ChunkState]
    MISS_DECLINED: _ClassVar[ChunkState]
    MISS_REFUSED_AT_PUT: _ClassVar[ChunkState]
    MISS_DELETED: _ClassVar[ChunkState]
    MISS_AFTER_GAP: _ClassVar[ChunkState]
    MISS_UNREACHABLE: _ClassVar[ChunkState]

class MatchMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PREFIX: _ClassVar[MatchMode]
    EACH: _ClassVar[MatchMode]

class Depth(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEPTH_NODE: _ClassVar[Depth]
    DEPTH_RAM: _ClassVar[Depth]
    DEPTH_POOL: _ClassVar[Depth]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTED: _ClassVar[Durability]
    DURABLE: _ClassVar[Durability]

class WhenFull(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT: _ClassVar[WhenFull]
    REFUSE: _ClassVar[WhenFull]

class PutState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUT_UNSPECIFIED: _ClassVar[PutState]
    NOT_OFFERED: _ClassVar[PutState]
    WANTED: _ClassVar[PutState]
    STORED: _ClassVar[PutState]
    EXISTED: _ClassVar[PutState]
    REFUSED_LENGTH: _ClassVar[PutState]
    REFUSED_NO_ROOM: _ClassVar[PutState]
    REFUSED_CAP: _ClassVar[PutState]
    REFUSED_DEADLINE: _ClassVar[PutState]
    REFUSED_CHECKSUM: _ClassVar[PutState]
    REFUSED_DRAINING: _ClassVar[PutState]
    STORED_NOT_DURABLE: _ClassVar[PutState]
    REFUSED_TOO_LARGE: _ClassVar[PutState]
    REFUSED_UNREACHABLE: _ClassVar[PutState]

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ERROR_UNSPECIFIED: _ClassVar[ErrorCode]
    BAD_REQUEST: _ClassVar[ErrorCode]
    BAD_KEYS: _ClassVar[ErrorCode]
    UNKNOWN_PART: _ClassVar[ErrorCode]
    UNKNOWN_FAMILY: _ClassVar[ErrorCode]
    FAMILY_CONFLICT: _ClassVar[ErrorCode]
    WRONG_LENGTH: _ClassVar[ErrorCode]
    TOO_LARGE: _ClassVar[ErrorCode]
    TRUNCATED: _ClassVar[ErrorCode]
    OVERLONG: _ClassVar[ErrorCode]
    UNAUTHENTICATED: _ClassVar[ErrorCode]
    RESOURCE_EXHAUSTED: _ClassVar[ErrorCode]
    DEADLINE: _ClassVar[ErrorCode]
    DRAINING: _ClassVar[ErrorCode]
    UNIMPLEMENTED: _ClassVar[ErrorCode]
    INTERNAL: _ClassVar[ErrorCode]
    VERSION: _ClassVar[ErrorCode]
FEATURE_UNSPECIFIED: Feature
FEATURE_LOCAL: Feature
FEATURE_PREFETCH: Feature
FEATURE_PIN: Feature
FEATURE_DURABLE: Feature
FEATURE_USAGE: Feature
TIER_UNSPECIFIED: TierKind
TIER_RAM: TierKind
TIER_NVME: TierKind
TIER_OBJECT: TierKind
STATE_UNSPECIFIED: ChunkState
IN_RAM: ChunkState
IN_NVME: ChunkState
IN_OBJECT: ChunkState
NOT_NEEDED: ChunkState
MISS_NEVER_STORED: ChunkState
MISS_EVICTED: ChunkState
MISS_EXPIRED: ChunkState
MISS_CORRUPT: ChunkState
MISS_TIER_DOWN: ChunkState
MISS_DEADLINE: ChunkState
MISS_DECLINED: ChunkState
MISS_REFUSED_AT_PUT: ChunkState
MISS_DELETED: ChunkState
MISS_AFTER_GAP: ChunkState
MISS_UNREACHABLE: ChunkState
PREFIX: MatchMode
EACH: MatchMode
DEPTH_NODE: Depth
DEPTH_RAM: Depth
DEPTH_POOL: Depth
ACCEPTED: Durability
DURABLE: Durability
WAIT: WhenFull
REFUSE: WhenFull
PUT_UNSPECIFIED: PutState
NOT_OFFERED: PutState
WANTED: PutState
STORED: PutState
EXISTED: PutState
REFUSED_LENGTH: PutState
REFUSED_NO_ROOM: PutState
REFUSED_CAP: PutState
REFUSED_DEADLINE: PutState
REFUSED_CHECKSUM: PutState
REFUSED_DRAINING: PutState
STORED_NOT_DURABLE: PutState
REFUSED_TOO_LARGE: PutState
REFUSED_UNREACHABLE: PutState
ERROR_UNSPECIFIED: ErrorCode
BAD_REQUEST: ErrorCode
BAD_KEYS: ErrorCode
UNKNOWN_PART: ErrorCode
UNKNOWN_FAMILY: ErrorCode
FAMILY_CONFLICT: ErrorCode
WRONG_LENGTH: ErrorCode
TOO_LARGE: ErrorCode
TRUNCATED: ErrorCode
OVERLONG: ErrorCode
UNAUTHENTICATED: ErrorCode
RESOURCE_EXHAUSTED: ErrorCode
DEADLINE: ErrorCode
DRAINING: ErrorCode
UNIMPLEMENTED: ErrorCode
INTERNAL: ErrorCode
VERSION: ErrorCode

class RawFrames(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Context(_message.Message):
    __slots__ = ("request_id", "tenant", "deadline_ms", "hints")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    deadline_ms: int
    hints: Hints
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., hints: _Optional[_Union[Hints, _Mapping]] = ...) -> None: ...

class Hints(_message.Message):
    __slots__ = ("session_id", "turn", "end_of_session", "expected_gap_ms", "shared_prefix", "one_shot", "probe")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    END_OF_SESSION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    ONE_SHOT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    end_of_session: bool
    expected_gap_ms: int
    shared_prefix: bool
    one_shot: bool
    probe: bool
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., end_of_session: bool = ..., expected_gap_ms: _Optional[int] = ..., shared_prefix: bool = ..., one_shot: bool = ..., probe: bool = ...) -> None: ...

class ChunkRun(_message.Message):
    __slots__ = ("namespace", "family", "keys", "start", "parent", "end_token", "parts")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    family: bytes
    keys: bytes
    start: int
    parent: bytes
    end_token: int
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., family: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., start: _Optional[int] = ..., parent: _Optional[bytes] = ..., end_token: _Optional[int] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("ctx", "protocol_version", "client", "namespace", "families")
    CTX_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    protocol_version: int
    client: str
    namespace: str
    families: _containers.RepeatedCompositeFieldContainer[FamilySpec]
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., protocol_version: _Optional[int] = ..., client: _Optional[str] = ..., namespace: _Optional[str] = ..., families: _Optional[_Iterable[_Union[FamilySpec, _Mapping]]] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("protocol_version", "min_protocol_version", "server", "boot_epoch", "features", "namespace_salt", "limits")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_SALT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    min_protocol_version: int
    server: str
    boot_epoch: int
    features: _containers.RepeatedScalarFieldContainer[Feature]
    namespace_salt: bytes
    limits: Limits
    def __init__(self, protocol_version: _Optional[int] = ..., min_protocol_version: _Optional[int] = ..., server: _Optional[str] = ..., boot_epoch: _Optional[int] = ..., features: _Optional[_Iterable[_Union[Feature, str]]] = ..., namespace_salt: _Optional[bytes] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_keys_per_call", "max_parts_per_family", "min_object_bytes", "max_object_bytes", "max_put_bytes", "max_frame_bytes", "max_families_per_hello", "max_objects_per_call")
    MAX_KEYS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    MAX_PARTS_PER_FAMILY_FIELD_NUMBER: _ClassVar[int]
    MIN_OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_OBJECT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FAMILIES_PER_HELLO_FIELD_NUMBER: _ClassVar[int]
    MAX_OBJECTS_PER_CALL_FIELD_NUMBER: _ClassVar[int]
    max_keys_per_call: int
    max_parts_per_family: int
    min_object_bytes: int
    max_object_bytes: int
    max_put_bytes: int
    max_frame_bytes: int
    max_families_per_hello: int
    max_objects_per_call: int
    def __init__(self, max_keys_per_call: _Optional[int] = ..., max_parts_per_family: _Optional[int] = ..., min_object_bytes: _Optional[int] = ..., max_object_bytes: _Optional[int] = ..., max_put_bytes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ..., max_families_per_hello: _Optional[int] = ..., max_objects_per_call: _Optional[int] = ...) -> None: ...

class FamilySpec(_message.Message):
    __slots__ = ("fingerprint", "model", "weights", "weights_epoch", "lora", "kv_dtype", "quantisation", "quantisation_scales", "groups", "position_encoding", "draft_model", "chunk_tokens", "memory_order", "engine_format", "parts")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LORA_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_FIELD_NUMBER: _ClassVar[int]
    QUANTISATION_SCALES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    POSITION_ENCODING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_ORDER_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FORMAT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    model: str
    weights: bytes
    weights_epoch: int
    lora: str
    kv_dtype: str
    quantisation: str
    quantisation_scales: bytes
    groups: _containers.RepeatedCompositeFieldContainer[GroupSpec]
    position_encoding: str
    draft_model: str
    chunk_tokens: int
    memory_order: str
    engine_format: str
    parts: _containers.RepeatedCompositeFieldContainer[PartSpec]
    def __init__(self, fingerprint: _Optional[bytes] = ..., model: _Optional[str] = ..., weights: _Optional[bytes] = ..., weights_epoch: _Optional[int] = ..., lora: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., quantisation: _Optional[str] = ..., quantisation_scales: _Optional[bytes] = ..., groups: _Optional[_Iterable[_Union[GroupSpec, _Mapping]]] = ..., position_encoding: _Optional[str] = ..., draft_model: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., memory_order: _Optional[str] = ..., engine_format: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[PartSpec, _Mapping]]] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("name", "rule", "trailing_tokens", "attention")
    class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        RULE_UNSPECIFIED: _ClassVar[GroupSpec.Rule]
        ALL: _ClassVar[GroupSpec.Rule]
        TRAILING: _ClassVar[GroupSpec.Rule]
        LAST: _ClassVar[GroupSpec.Rule]
    RULE_UNSPECIFIED: GroupSpec.Rule
    ALL: GroupSpec.Rule
    TRAILING: GroupSpec.Rule
    LAST: GroupSpec.Rule
    NAME_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    TRAILING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    name: str
    rule: GroupSpec.Rule
    trailing_tokens: int
    attention: str
    def __init__(self, name: _Optional[str] = ..., rule: _Optional[_Union[GroupSpec.Rule, str]] = ..., trailing_tokens: _Optional[int] = ..., attention: _Optional[str] = ...) -> None: ...

class PartSpec(_message.Message):
    __slots__ = ("name", "group", "bytes", "max_bytes", "layer_start", "layer_stop", "head_start", "head_stop")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_STOP_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    name: str
    group: str
    bytes: int
    max_bytes: int
    layer_start: int
    layer_stop: int
    head_start: int
    head_stop: int
    def __init__(self, name: _Optional[str] = ..., group: _Optional[str] = ..., bytes: _Optional[int] = ..., max_bytes: _Optional[int] = ..., layer_start: _Optional[int] = ..., layer_stop: _Optional[int] = ..., head_start: _Optional[int] = ..., head_stop: _Optional[int] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("ctx", "run", "mode", "depth", "hold", "hold_id")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    HOLD_ID_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    mode: MatchMode
    depth: Depth
    hold: bool
    hold_id: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., mode: _Optional[_Union[MatchMode, str]] = ..., depth: _Optional[_Union[Depth, str]] = ..., hold: bool = ..., hold_id: _Optional[int] = ...) -> None: ...

class MatchReply(_message.Message):
    __slots__ = ("chunks", "tokens", "states", "payload_bytes", "eta_ms")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ETA_MS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    tokens: int
    states: bytes
    payload_bytes: int
    eta_ms: float
    def __init__(self, chunks: _Optional[int] = ..., tokens: _Optional[int] = ..., states: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., eta_ms: _Optional[float] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("ctx", "run", "bypass_ram")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BYPASS_RAM_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    bypass_ram: bool
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., bypass_ram: bool = ...) -> None: ...

class GetBlock(_message.Message):
    __slots__ = ("objects", "payload_bytes", "last", "states")
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    objects: _containers.RepeatedCompositeFieldContainer[GetObject]
    payload_bytes: int
    last: bool
    states: bytes
    def __init__(self, objects: _Optional[_Iterable[_Union[GetObject, _Mapping]]] = ..., payload_bytes: _Optional[int] = ..., last: bool = ..., states: _Optional[bytes] = ...) -> None: ...

class GetObject(_message.Message):
    __slots__ = ("index", "length_bytes", "checksum", "tier")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    index: int
    length_bytes: int
    checksum: bytes
    tier: TierKind
    def __init__(self, index: _Optional[int] = ..., length_bytes: _Optional[int] = ..., checksum: _Optional[bytes] = ..., tier: _Optional[_Union[TierKind, str]] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("ctx", "run", "lengths_bytes", "checksums", "durability", "when_full", "ttl_ms")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    lengths_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksums: bytes
    durability: Durability
    when_full: WhenFull
    ttl_ms: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., lengths_bytes: _Optional[_Iterable[int]] = ..., checksums: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ..., when_full: _Optional[_Union[WhenFull, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PutPlan(_message.Message):
    __slots__ = ("states", "payload_bytes", "max_frame_bytes")
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    payload_bytes: int
    max_frame_bytes: int
    def __init__(self, states: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    def __init__(self, states: _Optional[bytes] = ...) -> None: ...

class LocalOpen(_message.Message):
    __slots__ = ("protocol_version", "namespace", "token", "client")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    namespace: str
    token: str
    client: str
    def __init__(self, protocol_version: _Optional[int] = ..., namespace: _Optional[str] = ..., token: _Optional[str] = ..., client: _Optional[str] = ...) -> None: ...

class LocalOpened(_message.Message):
    __slots__ = ("protocol_version", "boot_epoch", "session_id", "max_leased_bytes", "max_staging_bytes", "max_requests")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    boot_epoch: int
    session_id: int
    max_leased_bytes: int
    max_staging_bytes: int
    max_requests: int
    def __init__(self, protocol_version: _Optional[int] = ..., boot_epoch: _Optional[int] = ..., session_id: _Optional[int] = ..., max_leased_bytes: _Optional[int] = ..., max_staging_bytes: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...

class LocalSegment(_message.Message):
    __slots__ = ("segment_id", "size_bytes")
    SEGMENT_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    segment_id: int
    size_bytes: int
    def __init__(self, segment_id: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class LocalRing(_message.Message):
    __slots__ = ("size_bytes",)
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    size_bytes: int
    def __init__(self, size_bytes: _Optional[int] = ...) -> None: ...

class LocalArea(_message.Message):
    __slots__ = ("area_id", "size_bytes")
    AREA_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    area_id: int
    size_bytes: int
    def __init__(self, area_id: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class LocalRetire(_message.Message):
    __slots__ = ("segment_ids", "area_ids")
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    AREA_IDS_FIELD_NUMBER: _ClassVar[int]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    area_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, segment_ids: _Optional[_Iterable[int]] = ..., area_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("ctx", "run", "lease_id")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    lease_id: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class AcquireReply(_message.Message):
    __slots__ = ("indices", "segment_ids", "offsets_bytes", "lengths_bytes", "checksums", "tiers", "states")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    segment_ids: _containers.RepeatedScalarFieldContainer[int]
    offsets_bytes: _containers.RepeatedScalarFieldContainer[int]
    lengths_bytes: _containers.RepeatedScalarFieldContainer[int]
    checksums: bytes
    tiers: bytes
    states: bytes
    def __init__(self, indices: _Optional[_Iterable[int]] = ..., segment_ids: _Optional[_Iterable[int]] = ..., offsets_bytes: _Optional[_Iterable[int]] = ..., lengths_bytes: _Optional[_Iterable[int]] = ..., checksums: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., states: _Optional[bytes] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("ctx", "run", "lease_id", "lengths_bytes", "when_full", "ttl_ms")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_BYTES_FIELD_NUMBER: _ClassVar[int]
    WHEN_FULL_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    lease_id: int
    lengths_bytes: _containers.RepeatedScalarFieldContainer[int]
    when_full: WhenFull
    ttl_ms: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., lease_id: _Optional[int] = ..., lengths_bytes: _Optional[_Iterable[int]] = ..., when_full: _Optional[_Union[WhenFull, str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("area_id", "offsets_bytes", "states")
    AREA_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    area_id: int
    offsets_bytes: _containers.RepeatedScalarFieldContainer[int]
    states: bytes
    def __init__(self, area_id: _Optional[int] = ..., offsets_bytes: _Optional[_Iterable[int]] = ..., states: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("ctx", "lease_id", "durability", "indices")
    CTX_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    lease_id: int
    durability: Durability
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., lease_id: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("ctx", "lease_ids")
    CTX_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("ctx", "run")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ...) -> None: ...

class PrefetchReply(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    def __init__(self, states: _Optional[bytes] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("ctx", "run", "ttl_ms")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    ttl_ms: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class PinReply(_message.Message):
    __slots__ = ("states", "pinned")
    STATES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    pinned: int
    def __init__(self, states: _Optional[bytes] = ..., pinned: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("ctx", "run")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ...) -> None: ...

class UnpinReply(_message.Message):
    __slots__ = ("unpinned",)
    UNPINNED_FIELD_NUMBER: _ClassVar[int]
    unpinned: int
    def __init__(self, unpinned: _Optional[int] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("ctx", "run", "ttl_ms")
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    ttl_ms: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class TouchReply(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    def __init__(self, states: _Optional[bytes] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("ctx", "run", "reason")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNSPECIFIED: _ClassVar[DeleteRequest.Reason]
        REQUESTED: _ClassVar[DeleteRequest.Reason]
        CORRUPT: _ClassVar[DeleteRequest.Reason]
    UNSPECIFIED: DeleteRequest.Reason
    REQUESTED: DeleteRequest.Reason
    CORRUPT: DeleteRequest.Reason
    CTX_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    run: ChunkRun
    reason: DeleteRequest.Reason
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., run: _Optional[_Union[ChunkRun, _Mapping]] = ..., reason: _Optional[_Union[DeleteRequest.Reason, str]] = ...) -> None: ...

class DeleteReply(_message.Message):
    __slots__ = ("deleted",)
    DELETED_FIELD_NUMBER: _ClassVar[int]
    deleted: int
    def __init__(self, deleted: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("ctx", "namespace", "family", "cursor", "limit")
    CTX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    namespace: str
    family: bytes
    cursor: bytes
    limit: int
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., namespace: _Optional[str] = ..., family: _Optional[bytes] = ..., cursor: _Optional[bytes] = ..., limit: _Optional[int] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("entries", "cursor")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ListEntry]
    cursor: bytes
    def __init__(self, entries: _Optional[_Iterable[_Union[ListEntry, _Mapping]]] = ..., cursor: _Optional[bytes] = ...) -> None: ...

class ListEntry(_message.Message):
    __slots__ = ("key", "family", "tenant", "depth", "end_token", "payload_bytes", "tier", "expires_ms", "parts")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    family: bytes
    tenant: str
    depth: int
    end_token: int
    payload_bytes: int
    tier: TierKind
    expires_ms: int
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[bytes] = ..., family: _Optional[bytes] = ..., tenant: _Optional[str] = ..., depth: _Optional[int] = ..., end_token: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., tier: _Optional[_Union[TierKind, str]] = ..., expires_ms: _Optional[int] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("ctx", "namespace")
    CTX_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ctx: Context
    namespace: str
    def __init__(self, ctx: _Optional[_Union[Context, _Mapping]] = ..., namespace: _Optional[str] = ...) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("tiers", "tenants")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierUsage]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantUsage]
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierUsage, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantUsage, _Mapping]]] = ...) -> None: ...

class TierUsage(_message.Message):
    __slots__ = ("tier", "charged_bytes", "cap_bytes", "objects")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    OBJECTS_FIELD_NUMBER: _ClassVar[int]
    tier: TierKind
    charged_bytes: int
    cap_bytes: int
    objects: int
    def __init__(self, tier: _Optional[_Union[TierKind, str]] = ..., charged_bytes: _Optional[int] = ..., cap_bytes: _Optional[int] = ..., objects: _Optional[int] = ...) -> None: ...

class TenantUsage(_message.Message):
    __slots__ = ("tenant", "tier", "charged_bytes", "byte_seconds")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHARGED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: TierKind
    charged_bytes: int
    byte_seconds: float
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[_Union[TierKind, str]] = ..., charged_bytes: _Optional[int] = ..., byte_seconds: _Optional[float] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "hint", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    hint: str
    retry_after_ms: int
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ..., hint: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...
