"""The verbs' loop comes first, and only it does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvstored import scheduling

SCRIPT = """
import json, os, resource, sys, threading
from kvstored import scheduling

def nice_of(thread):
    return os.getpriority(os.PRIO_PROCESS, thread)

os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
if sys.argv[2] == "forbidden":
    resource.setrlimit(resource.RLIMIT_NICE, (0, 0))
    os.setgid(65534)
    os.setuid(65534)
answer = scheduling.favour_this_thread()
found = {}
other = threading.Thread(target=lambda: found.update(other=nice_of(threading.get_native_id())))
other.start()
other.join()
child = os.fork()
if not child:
    os._exit(nice_of(0) + 100)
found["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) - 100
print(json.dumps({"answer": answer, "mine": nice_of(0), **found}))
"""


def nices(begin: int, right: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(begin), right],
        capture_output=True,
        text=True,
        check=False,
    )
    if "PermissionError" in done.stderr:
        pytest.skip("only root may set nice values back")
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def test_only_the_calling_thread_is_favoured() -> None:
    found = nices(0, "as root")
    assert found == {"answer": scheduling.NICE, "mine": scheduling.NICE, "other": 0, "child": 0}


def test_what_is_not_permitted_is_left() -> None:
    assert nices(0, "forbidden") == {"answer": 0, "mine": 0, "other": 0, "child": 0}


def test_a_nice_value_that_somebody_gave_is_kept() -> None:
    assert nices(5, "as root") == {"answer": 5, "mine": 5, "other": 5, "child": 5}


def test_an_unknown_processor_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_SYSCALLS", {})
    monkeypatch.setattr("os.getpriority", lambda which, who: 0)
    assert scheduling.favour_this_thread() == 0
