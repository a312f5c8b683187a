"""What the README shows runs as it is pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support_daemon import GIVE_UP_S, Daemon, daemon

__all__ = ["daemon"]
README = Path(__file__).parents[2] / "README.md"


def run_snippet(target: str) -> str:
    (snippet,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        env={**os.environ, "KVSTORED_TARGET": target},
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_stores_and_then_finds_what_it_stored(daemon: Daemon) -> None:
    assert run_snippet(daemon.target) == "0 of 4 chunks from the store, 4 new ones stored\n"
    assert run_snippet(daemon.target) == "4 of 4 chunks from the store, 0 new ones stored\n"


def test_the_snippet_runs_without_a_daemon() -> None:
    assert run_snippet("unix:///nonexistent/k.sock").startswith("0 of 4 chunks")
