"""Families: everything that decides what a chunk's bytes mean, and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Final

from kvstored_client.identity.checks import label, octets, text, uint, uint64
from kvstored_client.identity.errors import (
    FingerprintMismatchError,
    GroupError,
    PartError,
)
from kvstored_client.identity.groups import GroupRule, RuleKind
from kvstored_client.identity.hashing import (
    encode_bytes,
    encode_text,
    encode_u32,
    encode_u64,
    family_fingerprint,
)
from kvstored_client.identity.parts import KVPart
from kvstored_client.identity.prefix import (
    Extra,
    Prefix,
    foreign_prefix,
    native_prefix,
)
from kvstored_client.identity.tokens import TokenIds
from kvstored_client.proto import kvstore_pb2 as pb

MAX_CHUNK_TOKENS: Final = 65536
MAX_GROUPS: Final = 64

_RULE_NUMBERS: Final[dict[RuleKind, pb.GroupSpec.Rule]] = {
    "all": pb.GroupSpec.ALL,
    "trailing": pb.GroupSpec.TRAILING,
    "last": pb.GroupSpec.LAST,
}
_RULE_KINDS: Final = {number: kind for kind, number in _RULE_NUMBERS.items()}
_NAMED_FIELDS: Final = ("model", "kv_dtype")
_TEXT_FIELDS: Final = (
    "lora",
    "quantisation",
    "position_encoding",
    "draft_model",
    "memory_order",
    "engine_format",
)


@dataclass(frozen=True)
class KVFamily:
    """Everything that decides what a chunk's bytes mean.

    Chunks of two families never share a key if any field differs, `parts` alone excepted: ranks and
    pipeline stages of one engine declare different parts of the same family.

    `weights` identifies the weights (a str counts as its UTF-8); `weights_epoch` rises when they
    are updated in place. `quantisation_scales` is a digest of the scales where they are not part of
    the weights. `groups` gives each attention group its rule. Text fields and `weights` are at most
    1024 bytes and taken as they are; model, weights and kv_dtype are not empty. `chunk_tokens` is 1
    to 65536. Families are equal when all fields are, parts included. Raises FieldError, GroupError
    and PartError.
    """

    model: str
    weights: str | bytes
    kv_dtype: str
    chunk_tokens: int = 64
    parts: Sequence[KVPart] = ()
    _: KW_ONLY
    weights_epoch: int = 0
    lora: str = ""
    quantisation: str = ""
    quantisation_scales: bytes = b""
    groups: Mapping[str, GroupRule] = field(default_factory=lambda: {"default": GroupRule.all()})
    position_encoding: str = ""
    draft_model: str = ""
    memory_order: str = ""
    engine_format: str = ""
    fingerprint: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in _NAMED_FIELDS:
            text(name, getattr(self, name), least=1)
        for name in _TEXT_FIELDS:
            text(name, getattr(self, name))
        object.__setattr__(self, "weights", _checked_weights(self.weights))
        octets("quantisation_scales", self.quantisation_scales)
        uint64("weights_epoch", self.weights_epoch)
        uint("chunk_tokens", self.chunk_tokens, least=1, stop=MAX_CHUNK_TOKENS + 1)
        object.__setattr__(self, "groups", MappingProxyType(_checked_groups(self.groups)))
        object.__setattr__(self, "parts", _checked_parts(self.parts, self.groups))
        object.__setattr__(self, "fingerprint", family_fingerprint(_encode(self._bare_spec())))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Callable[[bytes], KVFamily], tuple[bytes]]:
        # Engines send families to worker processes; `groups` could not go by itself.
        return _from_wire, (self.spec().SerializeToString(),)

    def _bare_spec(self) -> pb.FamilySpec:
        """The spec without fingerprint and parts."""
        return pb.FamilySpec(
            model=self.model,
            weights=_checked_weights(self.weights),
            weights_epoch=self.weights_epoch,
            lora=self.lora,
            kv_dtype=self.kv_dtype,
            quantisation=self.quantisation,
            quantisation_scales=self.quantisation_scales,
            groups=[
                pb.GroupSpec(
                    name=name,
                    rule=_RULE_NUMBERS[rule.kind],
                    trailing_tokens=rule.tokens,
                    attention=rule.attention,
                )
                for name, rule in self.groups.items()
            ],
            position_encoding=self.position_encoding,
            draft_model=self.draft_model,
            chunk_tokens=self.chunk_tokens,
            memory_order=self.memory_order,
            engine_format=self.engine_format,
        )

    def spec(self) -> pb.FamilySpec:
        """The family as the wire carries it, with fingerprint and parts."""
        spec = self._bare_spec()
        spec.fingerprint = self.fingerprint
        spec.parts.extend(part.spec() for part in self.parts)
        return spec

    @classmethod
    def from_spec(cls, spec: pb.FamilySpec) -> KVFamily:
        """The family that `spec` describes.

        Raises FingerprintMismatchError where its fingerprint is not the one its fields give, and
        whatever the constructor raises.
        """
        family = _unverified(spec, tuple(KVPart.from_spec(part) for part in spec.parts))
        if spec.fingerprint != family.fingerprint:
            problem = f"is {spec.fingerprint.hex()}, but the fields give {family.fingerprint.hex()}"
            raise FingerprintMismatchError("fingerprint", problem)
        return family

    def prefix(
        self,
        token_ids: TokenIds,
        request_salt: bytes = b"",
        extras: Iterable[Extra] | None = None,
    ) -> Prefix:
        """The prefix of a prompt given by its tokens; keys follow the native scheme.

        `token_ids`: ints of 0 to 2**32 - 1, shape [tokens], possibly none; copied. `request_salt`
        (at most 1024 bytes) keeps prefixes apart that would otherwise be shared. `extras`: what
        lies under placeholder tokens, such as images; their order does not matter. The last chunk
        may be short. Raises TokenError, SaltError and ExtraError.
        """
        return native_prefix(self, token_ids, request_salt, extras or ())

    def foreign(
        self,
        block_hashes: Iterable[bytes],
        request_salt: bytes = b"",
        *,
        tokens: int | None = None,
    ) -> Prefix:
        """The prefix of a prompt given by the engine's own block hashes, one per chunk.

        Each hash is 1 to 64 opaque bytes and must stand for everything up to the block's end.
        `tokens` is the prompt's length where the last block is short. Raises BlockHashError,
        SaltError and TokenError.
        """
        return foreign_prefix(self, block_hashes, request_salt, tokens)


def fingerprint_of_spec(spec: pb.FamilySpec) -> bytes:
    """The fingerprint, 32 bytes, that the fields of `spec` give, whatever `spec.fingerprint` says.

    Looks at everything but the parts. Raises FieldError and GroupError for fields that no KVFamily
    can have.
    """
    return _unverified(spec, ()).fingerprint


def _from_wire(serialised: bytes) -> KVFamily:
    return KVFamily.from_spec(pb.FamilySpec.FromString(serialised))


def _unverified(spec: pb.FamilySpec, parts: tuple[KVPart, ...]) -> KVFamily:
    groups: dict[str, GroupRule] = {}
    for position, group in enumerate(spec.groups):
        if group.name in groups:
            raise GroupError("groups", f"{group.name!r} is declared twice", position)
        kind = _RULE_KINDS.get(group.rule)
        if kind is None:
            raise GroupError("groups", f"{group.name!r} has unknown rule {group.rule}", position)
        groups[group.name] = GroupRule(kind, group.trailing_tokens, group.attention)
    return KVFamily(
        spec.model,
        spec.weights,
        spec.kv_dtype,
        spec.chunk_tokens,
        parts,
        weights_epoch=spec.weights_epoch,
        lora=spec.lora,
        quantisation=spec.quantisation,
        quantisation_scales=spec.quantisation_scales,
        groups=groups,
        position_encoding=spec.position_encoding,
        draft_model=spec.draft_model,
        memory_order=spec.memory_order,
        engine_format=spec.engine_format,
    )


def _encode(spec: pb.FamilySpec) -> bytes:
    """Canonical encoding of a family; protobuf's own is not canonical across languages."""
    groups = sorted(spec.groups, key=lambda group: group.name.encode("utf-8"))
    encoded_groups = [
        encode_text(group.name)
        + encode_u32(group.rule)
        + encode_u32(group.trailing_tokens)
        + encode_text(group.attention)
        for group in groups
    ]
    return b"".join(
        (
            encode_text(spec.model),
            encode_bytes(spec.weights),
            encode_u64(spec.weights_epoch),
            encode_text(spec.lora),
            encode_text(spec.kv_dtype),
            encode_text(spec.quantisation),
            encode_bytes(spec.quantisation_scales),
            encode_u32(len(groups)),
            *encoded_groups,
            encode_text(spec.position_encoding),
            encode_text(spec.draft_model),
            encode_u32(spec.chunk_tokens),
            encode_text(spec.memory_order),
            encode_text(spec.engine_format),
        )
    )


def _checked_groups(groups: Mapping[str, GroupRule]) -> dict[str, GroupRule]:
    if not isinstance(groups, Mapping):
        raise GroupError("groups", f"must map names to rules, not be {type(groups).__name__}")
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise GroupError("groups", f"must be 1 to {MAX_GROUPS}, not {len(groups)}")
    for name, rule in groups.items():
        label("groups", name, error=GroupError)
        if not isinstance(rule, GroupRule):
            raise GroupError("groups", f"{name!r} has a {type(rule).__name__}, not a GroupRule")
    return dict(sorted(groups.items(), key=lambda item: item[0].encode("utf-8")))


def _checked_parts(parts: Iterable[KVPart], groups: Mapping[str, GroupRule]) -> tuple[KVPart, ...]:
    checked: dict[str, KVPart] = {}
    for position, part in enumerate(parts):
        if not isinstance(part, KVPart):
            raise PartError("parts", f"must be a KVPart, not {type(part).__name__}", position)
        if part.name in checked:
            raise PartError("parts", f"{part.name!r} is declared twice", position)
        if part.group not in groups:
            problem = f"{part.name!r} names group {part.group!r}, which the family lacks"
            raise PartError("parts", problem, position)
        checked[part.name] = part
    return tuple(checked.values())


def _checked_weights(weights: str | bytes) -> bytes:
    if isinstance(weights, str):
        return text("weights", weights, least=1).encode("utf-8")
    return octets("weights", weights, least=1)
