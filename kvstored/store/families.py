"""The families that one namespace has declared: what its keys' bytes mean and how long they are."""

from __future__ import annotations

from collections.abc import Iterable

from kvstored import errors
from kvstored.store.api import Family, PartInfo
from kvstored.tiers.base import MAX_OBJECT_BYTES, MIN_OBJECT_BYTES
from kvstored_client.identity import MAX_CHUNK_TOKENS, GroupRule, fingerprint_of_spec
from kvstored_client.proto import kvstore_pb2 as pb

MAX_FAMILIES = 4096
MAX_PARTS = 4096

_RULES = {
    pb.GroupSpec.ALL: lambda group: GroupRule.all(),
    pb.GroupSpec.TRAILING: lambda group: GroupRule.trailing(group.trailing_tokens),
    pb.GroupSpec.LAST: lambda group: GroupRule.last(),
}


class Families:
    """Families by fingerprint and by number; numbers and parts are only ever appended."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._by_fingerprint: dict[bytes, int] = {}
        self.by_number: list[Family] = []
        self._declared: list[bool] = []

    def __len__(self) -> int:
        return len(self.by_number)

    def number(self, fingerprint: bytes) -> int:
        """The number of a declared or recovered family. KeyError if it is neither."""
        return self._by_fingerprint[fingerprint]

    def get(self, fingerprint: bytes) -> Family:
        """A declared family; raises UnknownFamily."""
        number = self._by_fingerprint.get(fingerprint)
        if number is None or not self._declared[number]:
            raise errors.UnknownFamily(
                f"family {fingerprint.hex()[:16]}… is not declared in this namespace",
                "declare it with Hello and try again",
            )
        return self.by_number[number]

    def recovered(self, fingerprint: bytes) -> Family:
        """The family of recovered objects, whether or not its spec was found."""
        number = self._by_fingerprint.get(fingerprint)
        if number is None:
            number = self._append(Family(self._namespace, fingerprint, "unknown", 0, {}), False)
        return self.by_number[number]

    def _append(self, family: Family, declared: bool) -> int:
        number = len(self.by_number)
        self._by_fingerprint[family.fingerprint] = number
        self.by_number.append(family)
        self._declared.append(declared)
        return number

    def declare(self, spec: pb.FamilySpec) -> tuple[Family, bool]:
        """Take a spec in. True: something in it is new.

        Raises BadRequest for a malformed spec, FamilyConflict where its fingerprint is not its own
        or a part was declared before in another way, ResourceExhausted beyond the bounds.
        """
        _check_fingerprint(spec)
        number = self._by_fingerprint.get(spec.fingerprint)
        if number is None:
            if len(self.by_number) >= MAX_FAMILIES:
                raise errors.ResourceExhausted(
                    f"namespace has {MAX_FAMILIES} families already", "restart to clear unused ones"
                )
            family = Family(self._namespace, spec.fingerprint, spec.model, spec.chunk_tokens, {})
        else:
            family = self.by_number[number]
        parts = _distinct(spec.parts)
        fresh = [part for part in parts if self._check_part(family, spec, part)]
        if len(family.parts) + len(fresh) > MAX_PARTS:
            raise errors.ResourceExhausted(
                f"family would have more than {MAX_PARTS} parts", "declare fewer, larger parts"
            )
        new = number is None or bool(fresh) or not self._declared[number]
        if number is None:
            number = self._append(family, True)
        family.model, family.chunk_tokens = spec.model, spec.chunk_tokens
        family.rules = {group.name: _RULES[group.rule](group) for group in spec.groups}
        for part in fresh:
            _set_part(family, part)
        self._declared[number] = True
        return family, new

    def _check_part(self, family: Family, spec: pb.FamilySpec, part: pb.PartSpec) -> bool:
        """True: a part to add (or to complete, when recovered by name only)."""
        if not part.name or len(part.name.encode()) > 64:
            raise errors.BadRequest(f"part name {part.name!r} is not 1 to 64 bytes long")
        if part.group not in {group.name for group in spec.groups}:
            raise errors.BadRequest(
                f"part {part.name!r} names group {part.group!r}, which the family does not have"
            )
        size = part.bytes or part.max_bytes
        if not MIN_OBJECT_BYTES <= size <= MAX_OBJECT_BYTES:
            raise errors.BadRequest(
                f"part {part.name!r} is {size} bytes, not {MIN_OBJECT_BYTES} to {MAX_OBJECT_BYTES}"
            )
        index = family.part_index.get(part.name)
        if index is None:
            return True
        known = family.parts[index]
        if not known.group:  # known from recovered objects only
            return True
        if known.spec != part:
            raise errors.FamilyConflict(
                f"part {part.name!r} was declared before with other sizes, layers, heads or group",
                "give parts that differ different names",
            )
        return False

    def add_part_name(self, family: Family, name: str) -> int:
        """Index of a part known from recovered objects, with or without its spec."""
        index = family.part_index.get(name)
        if index is None:
            index = len(family.parts)
            family.parts.append(PartInfo(name, "", 0, MAX_OBJECT_BYTES, pb.PartSpec(name=name)))
            family.part_index[name] = index
        return index


def _distinct(parts: Iterable[pb.PartSpec]) -> list[pb.PartSpec]:
    """Parts by name; one that comes twice must be the same both times."""
    by_name: dict[str, pb.PartSpec] = {}
    for part in parts:
        if by_name.setdefault(part.name, part) != part:
            raise errors.FamilyConflict(
                f"part {part.name!r} is declared twice in one spec, differently",
                "give parts that differ different names",
            )
    return list(by_name.values())


def _set_part(family: Family, part: pb.PartSpec) -> None:
    kept = pb.PartSpec()
    kept.CopyFrom(part)
    info = PartInfo(part.name, part.group, part.bytes, part.max_bytes or part.bytes, kept)
    index = family.part_index.get(part.name)
    if index is None:
        family.part_index[part.name] = len(family.parts)
        family.parts.append(info)
    else:
        family.parts[index] = info


def _check_fingerprint(spec: pb.FamilySpec) -> None:
    if not 1 <= spec.chunk_tokens <= MAX_CHUNK_TOKENS:
        raise errors.BadRequest(f"chunk_tokens is {spec.chunk_tokens}, not 1 to {MAX_CHUNK_TOKENS}")
    if any(group.rule not in _RULES for group in spec.groups) or not spec.groups:
        raise errors.BadRequest("a family needs groups, each with rule ALL, TRAILING or LAST")
    try:
        fingerprint = fingerprint_of_spec(spec)
    except ValueError as error:
        raise errors.BadRequest(f"family spec is malformed: {error}") from error
    if fingerprint != spec.fingerprint:
        raise errors.FamilyConflict(
            "the fingerprint is not the one of the fields sent with it",
            "compute it as docs/identity.md says",
        )


def spec_of(family: Family, template: pb.FamilySpec) -> bytes:
    """The serialised spec to remember: the fields of `template` with every part known so far."""
    spec = pb.FamilySpec()
    spec.CopyFrom(template)
    del spec.parts[:]
    spec.parts.extend(part.spec for part in family.parts if part.group)
    return spec.SerializeToString(deterministic=True)
