"""The package's public names, and what importing it drags in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvstored_client

CLIENT = Path(kvstored_client.__file__).parent


def imported_after(statement: str) -> set[str]:
    """Top-level modules that are loaded once `statement` has run."""
    probe = f"import sys\n{statement}\nprint(*sorted({{n.partition('.')[0] for n in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", probe], check=True, capture_output=True, text=True, timeout=60
    )
    return set(done.stdout.split())


def test_every_promised_name_is_there_and_is_found_lazily() -> None:
    assert len(set(kvstored_client.__all__)) == len(kvstored_client.__all__)
    for name in kvstored_client.__all__:
        assert getattr(kvstored_client, name).__name__ == name
    assert dir(kvstored_client) == sorted(kvstored_client.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvstored_client.nothing


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse((CLIENT / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == set(kvstored_client.__all__)
    assert (CLIENT / "py.typed").exists()


def test_clients_load_grpc_only_when_a_step_needs_it_and_never_torch() -> None:
    loaded = imported_after(
        "from kvstored_client import AsyncKVClient, KVClient; "
        "KVClient('unix:///nowhere.sock'), AsyncKVClient('unix:///nowhere.sock')"
    )
    assert "numpy" in loaded
    assert loaded.isdisjoint({"grpc", "torch", "kvstored", "lmdb", "uvloop"})


def test_both_clients_have_the_same_verbs_and_arguments() -> None:
    import inspect

    from kvstored_client import AsyncKVClient, KVClient

    hooks = {"before_fork", "after_fork_in_parent", "after_fork_in_child"}

    def verbs(client: type) -> dict[str, list[str]]:
        return {
            name: [str(p).partition(":")[0] for p in inspect.signature(f).parameters.values()]
            for name, f in vars(client).items()
            if callable(f) and not name.startswith("_") and name not in hooks
        }

    jobs = {"submit_get", "submit_put", "completed"}  # what asyncio has tasks for
    blocking = {name: f for name, f in verbs(KVClient).items() if name not in jobs}
    assert blocking == verbs(AsyncKVClient)
    hot, small = (
        {"match", "get", "put", "acquire", "reserve"},
        {"touch", "prefetch", "pin", "unpin", "delete"},
    )
    asking, life = {"hello", "check", "list", "usage", "status"}, {"drain", "close"}
    assert set(verbs(KVClient)) == hot | jobs | small | asking | life


def test_errors_are_one_tree() -> None:
    errors = [
        getattr(kvstored_client, name)
        for name in kvstored_client.__all__
        if name.endswith("Error") and name != "IdentityError"
    ]
    assert all(issubclass(error, kvstored_client.KVStoredClientError) for error in errors)
