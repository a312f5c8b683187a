"""hello, list, usage and status, as step generators. No I/O; see steps.Verb.

These have no miss to answer with: they raise ServiceError.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from google.protobuf.message import Message

from kvstored_client import results
from kvstored_client.calling import Calling
from kvstored_client.config import CallOptions, checked_uint
from kvstored_client.errors import OptionError
from kvstored_client.failures import Failure
from kvstored_client.proto import admin_pb2 as admin
from kvstored_client.proto import kvstore_pb2 as pb
from kvstored_client.proto import methods
from kvstored_client.proto.methods import Method
from kvstored_client.results import tier_name
from kvstored_client.steps import Verb, ask, remaining_ms

_Reply = TypeVar("_Reply", bound=Message)
_Result = TypeVar("_Result")

MAX_LIST_ENTRIES = 10_000


class AdminVerbs(Calling):
    """The verbs that answer or raise."""

    @staticmethod
    def answered(answer: _Result | Failure) -> _Result:
        """The answer, or the failure as an exception."""
        if isinstance(answer, Failure):
            raise answer.to_exception()
        return answer

    def hello(self, options: CallOptions) -> Verb[results.HelloResult]:
        """See KVClient.hello."""
        context, deadline = self.opening(options, self.timeouts.match_s)
        session = self.answered((yield from self.keeper.hello(None, context, deadline)))
        reply = session.hello
        return results.HelloResult(
            server=reply.server,
            protocol_version=reply.protocol_version,
            boot_epoch=reply.boot_epoch,
            features=frozenset(_feature(number) for number in reply.features),
            max_keys_per_call=reply.limits.max_keys_per_call,
            max_put_bytes=reply.limits.max_put_bytes,
            max_object_bytes=reply.limits.max_object_bytes,
        )

    def _ask(
        self, method: Method, request: Message, reply: type[_Reply], deadline: float
    ) -> Verb[_Reply]:
        return self.answered((yield from ask(method, request, reply, deadline)))

    def list_page(
        self, family: bytes, cursor: bytes, limit: int, options: CallOptions
    ) -> Verb[tuple[list[results.ListEntry], bytes]]:
        """One page, and the cursor of the next (empty at the end)."""
        if not isinstance(family, bytes) or len(family) not in (0, 32):
            raise OptionError("family must be a fingerprint of 32 bytes, or empty for all")
        checked_uint("limit", limit, MAX_LIST_ENTRIES + 1)
        context, deadline = self.opening(options, self.timeouts.admin_s)
        context.deadline_ms = remaining_ms(deadline)
        request = pb.ListRequest(
            ctx=context, namespace=self.namespace, family=family, cursor=cursor, limit=limit
        )
        reply = yield from self._ask(methods.LIST, request, pb.ListReply, deadline)
        return [_entry(item) for item in reply.entries], reply.cursor

    def usage(self, options: CallOptions) -> Verb[results.UsageResult]:
        """See KVClient.usage."""
        context, deadline = self.opening(options, self.timeouts.admin_s)
        context.deadline_ms = remaining_ms(deadline)
        request = pb.UsageRequest(ctx=context, namespace=self.namespace)
        reply = yield from self._ask(methods.USAGE, request, pb.UsageReply, deadline)
        return results.UsageResult(
            tiers=tuple(
                results.TierUsage(tier_name(t.tier), t.charged_bytes, t.cap_bytes, t.objects)
                for t in reply.tiers
            ),
            tenants=tuple(
                results.TenantUsage(t.tenant, tier_name(t.tier), t.charged_bytes, t.byte_seconds)
                for t in reply.tenants
            ),
        )

    def status(self, options: CallOptions) -> Verb[results.StatusResult]:
        """See KVClient.status."""
        _, deadline = self.opening(options, self.timeouts.match_s)
        reply = yield from self._ask(
            methods.STATUS, admin.StatusRequest(), admin.StatusReply, deadline
        )
        return results.StatusResult(
            tiers=tuple(_same(results.TierStatus, item) for item in reply.tiers),
            namespaces=tuple(_same(results.NamespaceStatus, item) for item in reply.namespaces),
            version=reply.version,
            boot_epoch=reply.boot_epoch,
            uptime_ms=reply.uptime_ms,
            phase=reply.phase,
            chunks=reply.chunks,
            objects=reply.objects,
            dirty_bytes=reply.dirty_bytes,
            leased_bytes=reply.leased_bytes,
            families=reply.families,
        )


_Row = TypeVar("_Row", results.TierStatus, results.NamespaceStatus)


def _same(row: type[_Row], message: Message) -> _Row:
    """A message as the value class with the same field names."""
    return row(**{each.name: getattr(message, each.name) for each in fields(row)})


def _feature(number: int) -> str:
    """A feature's name, like "prefetch"; "feature_99" for one this client does not know."""
    try:
        return pb.Feature.Name(number).removeprefix("FEATURE_").lower()
    except ValueError:
        return f"feature_{number}"


def _entry(item: pb.ListEntry) -> results.ListEntry:
    return results.ListEntry(
        key=item.key,
        family=item.family,
        tenant=item.tenant,
        depth=item.depth,
        end_token=item.end_token,
        nbytes=item.payload_bytes,
        tier=tier_name(item.tier),
        expires_ms=item.expires_ms,
        parts=tuple(item.parts),
    )
