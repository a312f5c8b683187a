"""Identity: what a chunk of KV cache is called, computed alike by every client and the daemon.

docs/identity.md defines the encodings, proto/golden/identity.json holds vectors to check them by.
Needs numpy and protobuf; neither grpc nor torch.
"""

from kvstored_client.identity.checks import (
    DEFAULT_TENANT,
    MAX_FIELD_BYTES,
    MAX_LABEL_BYTES,
    validate_namespace,
    validate_tenant,
)
from kvstored_client.identity.errors import (
    BlockHashError,
    ExtraError,
    FieldError,
    FingerprintMismatchError,
    GroupError,
    IdentityError,
    LabelError,
    PartError,
    SaltError,
    TokenError,
)
from kvstored_client.identity.family import (
    MAX_CHUNK_TOKENS,
    KVFamily,
    fingerprint_of_spec,
)
from kvstored_client.identity.groups import GroupRule, RuleKind, longest_boundary
from kvstored_client.identity.hashing import KEY_BYTES, derive_namespace_salt
from kvstored_client.identity.parts import MAX_OBJECT_BYTES, MIN_OBJECT_BYTES, KVPart
from kvstored_client.identity.prefix import Extra, ForeignPrefix, NativePrefix, Prefix
from kvstored_client.identity.tokens import TokenIds

__all__ = [
    "DEFAULT_TENANT",
    "KEY_BYTES",
    "MAX_CHUNK_TOKENS",
    "MAX_FIELD_BYTES",
    "MAX_LABEL_BYTES",
    "MAX_OBJECT_BYTES",
    "MIN_OBJECT_BYTES",
    "BlockHashError",
    "Extra",
    "ExtraError",
    "FieldError",
    "FingerprintMismatchError",
    "ForeignPrefix",
    "GroupError",
    "GroupRule",
    "IdentityError",
    "KVFamily",
    "KVPart",
    "LabelError",
    "NativePrefix",
    "PartError",
    "Prefix",
    "RuleKind",
    "SaltError",
    "TokenError",
    "TokenIds",
    "derive_namespace_salt",
    "fingerprint_of_spec",
    "longest_boundary",
    "validate_namespace",
    "validate_tenant",
]
