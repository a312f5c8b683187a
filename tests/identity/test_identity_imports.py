"""What the identity package pulls in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[2] / "client" / "kvstored_client"

# The parent package is stood in for, so that this says what identity itself imports.
PROBE = """
import sys, types
parent = types.ModuleType("kvstored_client")
parent.__path__ = [sys.argv[1]]
sys.modules["kvstored_client"] = parent
import kvstored_client.identity as identity
family = identity.KVFamily("m", "w", "float32", parts=[identity.KVPart("kv", 4096)])
family.prefix([1, 2, 3]).keys(bytes(32))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_identity_imports_neither_grpc_nor_torch_nor_the_daemon() -> None:
    command = [sys.executable, "-c", PROBE, str(CLIENT)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    imported = set(done.stdout.split())
    assert {"kvstored_client", "numpy", "google"} <= imported
    assert imported.isdisjoint({"grpc", "torch", "kvstored"})
