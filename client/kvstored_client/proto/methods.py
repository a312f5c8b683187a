"""The method table of proto/kvstored/v1, written by hand and shared by client and daemon.

There are no generated gRPC stubs: payload methods carry raw messages that protobuf never sees, and
stubs tie a client to one grpcio version. tests/protocol proves this table equal to the service
descriptors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb

PROTOCOL_VERSION = 1
"""What this package speaks; see HelloRequest.protocol_version."""

KVSTORE_SERVICE = "kvstored.v1.KVStore"
ADMIN_SERVICE = "kvstored.v1.Admin"

AUTHORIZATION_METADATA = "authorization"
"""Request metadata key; its value is "Bearer " followed by the token."""

BEARER_PREFIX = "Bearer "

ERROR_METADATA = "kvstored-error-bin"
"""Trailing metadata key; its value is a serialised pb.Error."""


class Kind(enum.Enum):
    """Shape of a method, in gRPC's words."""

    UNARY_UNARY = "unary_unary"
    UNARY_STREAM = "unary_stream"
    STREAM_STREAM = "stream_stream"


class Raw(enum.Enum):
    """Stands where a message class would: the gRPC messages of that side are plain bytes.

    Some of them are serialised typed messages and the rest payload; which is which is stated at
    the method in kvstore.proto.
    """

    RAW = "raw"


RAW = Raw.RAW


@dataclass(frozen=True, slots=True)
class Method:
    """One remote procedure. `path` is the full gRPC path."""

    service: str
    name: str
    kind: Kind
    request: type[Message] | Raw
    reply: type[Message] | Raw

    @property
    def path(self) -> str:
        """Full path, like "/kvstored.v1.KVStore/Get"."""
        return f"/{self.service}/{self.name}"

    @property
    def request_deserializer(self) -> Callable[[bytes], Message] | None:
        """What a server hands to grpc; None (bytes stay bytes) for a raw side."""
        return None if isinstance(self.request, Raw) else self.request.FromString

    @property
    def request_serializer(self) -> Callable[[Message], bytes] | None:
        """What a client hands to grpc; None (bytes stay bytes) for a raw side."""
        return None if isinstance(self.request, Raw) else self.request.SerializeToString

    @property
    def reply_deserializer(self) -> Callable[[bytes], Message] | None:
        """What a client hands to grpc; None (bytes stay bytes) for a raw side."""
        return None if isinstance(self.reply, Raw) else self.reply.FromString

    @property
    def reply_serializer(self) -> Callable[[Message], bytes] | None:
        """What a server hands to grpc; None (bytes stay bytes) for a raw side."""
        return None if isinstance(self.reply, Raw) else self.reply.SerializeToString


def _unary(
    name: str, request: type[Message], reply: type[Message], service: str = KVSTORE_SERVICE
) -> Method:
    return Method(service, name, Kind.UNARY_UNARY, request, reply)


HELLO = _unary("Hello", pb.HelloRequest, pb.HelloReply)
MATCH = _unary("Match", pb.MatchRequest, pb.MatchReply)
GET = Method(KVSTORE_SERVICE, "Get", Kind.UNARY_STREAM, pb.GetRequest, RAW)
PUT = Method(KVSTORE_SERVICE, "Put", Kind.STREAM_STREAM, RAW, RAW)
ACQUIRE = Method(KVSTORE_SERVICE, "Acquire", Kind.UNARY_STREAM, pb.AcquireRequest, pb.AcquireReply)
RESERVE = _unary("Reserve", pb.ReserveRequest, pb.ReserveReply)
COMMIT = _unary("Commit", pb.CommitRequest, pb.PutReply)
RELEASE = _unary("Release", pb.ReleaseRequest, pb.ReleaseReply)
PREFETCH = _unary("Prefetch", pb.PrefetchRequest, pb.PrefetchReply)
PIN = _unary("Pin", pb.PinRequest, pb.PinReply)
UNPIN = _unary("Unpin", pb.UnpinRequest, pb.UnpinReply)
TOUCH = _unary("Touch", pb.TouchRequest, pb.TouchReply)
DELETE = _unary("Delete", pb.DeleteRequest, pb.DeleteReply)
LIST = _unary("List", pb.ListRequest, pb.ListReply)
USAGE = _unary("Usage", pb.UsageRequest, pb.UsageReply)
STATUS = _unary("Status", admin.StatusRequest, admin.StatusReply, ADMIN_SERVICE)
LIST_VOLUMES = _unary(
    "ListVolumes", admin.ListVolumesRequest, admin.ListVolumesReply, ADMIN_SERVICE
)
DRAIN_VOLUME = _unary(
    "DrainVolume", admin.DrainVolumeRequest, admin.DrainVolumeReply, ADMIN_SERVICE
)
SCRUB = _unary("Scrub", admin.ScrubRequest, admin.ScrubReply, ADMIN_SERVICE)
PURGE = _unary("Purge", admin.PurgeRequest, admin.PurgeReply, ADMIN_SERVICE)

METHODS: tuple[Method, ...] = (
    HELLO,
    MATCH,
    GET,
    PUT,
    ACQUIRE,
    RESERVE,
    COMMIT,
    RELEASE,
    PREFETCH,
    PIN,
    UNPIN,
    TOUCH,
    DELETE,
    LIST,
    USAGE,
    STATUS,
    LIST_VOLUMES,
    DRAIN_VOLUME,
    SCRUB,
    PURGE,
)
"""Every method of both services, in the order of the proto files."""
