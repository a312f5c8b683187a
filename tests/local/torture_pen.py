"""Processes to be killed: forked, at an order, by one that has imported everything already.

Run as a program it is that process. It reads orders from stdin, one JSON object per line, and
writes what it and its victims have to say to stdout, likewise. A victim is reaped when that is
asked for and not before, so its pid is nobody else's until then; a victim's own forked children
come to it as they are orphaned.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import traceback
from collections import deque
from pathlib import Path
from types import TracebackType

GIVE_UP_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36

Message = dict[str, object]


# ---- the victims' side ---------------------------------------------------------------------------


class Stage:
    """What a victim is given. `order`: what was asked of it."""

    def __init__(self, order: Message) -> None:
        self.order = order
        self.target = str(order["target"])
        self.number = int(str(order["number"]))

    def tell(self, **words: object) -> None:
        """Say something; one write, so lines of several victims do not mix."""
        line = json.dumps({"number": self.number, "pid": os.getpid(), **words}) + "\n"
        os.write(1, line.encode())

    def arrived(self) -> None:
        """The step is reached. Before that is said a child is forked, if one was ordered."""
        self.tell(at=self.order.get("step", ""), child=self._fork())

    def _fork(self) -> int:
        how = self.order.get("fork")
        if not how:
            return 0
        # "raw": as a library in C forks, without the client's being told. PyDLL keeps the GIL.
        libc = ctypes.PyDLL(None)
        child = os.fork() if how == "os" else int(libc.fork())
        if not child:
            while True:
                libc.pause()
        return child

    def die(self) -> None:
        """Now, and not one instruction later."""
        os.kill(os.getpid(), signal.SIGKILL)


def _victim(order: Message) -> None:
    stage = Stage(order)
    try:
        import torture_fuzz
        import torture_steps

        if order["what"] == "fuzz":
            torture_fuzz.work(stage)
        else:
            torture_steps.STEPS[str(order["step"])](stage)
        while True:
            signal.pause()
    except BaseException:
        stage.tell(error=traceback.format_exc())
    finally:
        os._exit(1)


def serve() -> None:
    """The program."""
    import torture_fuzz
    import torture_steps  # noqa: F401

    # Misses are what a client on a tiny cap is here to have.
    logging.getLogger("kvstored_client").addHandler(logging.NullHandler())
    assert ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    for line in orders:
        order = json.loads(line)
        if order.get("what") == "fuzz":
            torture_fuzz.prepare()  # once, for all
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            os.write(1, json.dumps({"reaped": order["reap"], "status": status}).encode() + b"\n")
        elif not os.fork():
            orders.close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.close(null)
            _victim(order)
    _end_all()


def _end_all() -> None:
    """Kill what is left of the victims, and their children, which become this process's own."""
    while children := Path("/proc/thread-self/children").read_text().split():
        for child in children:
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)


# ---- the tests' side -----------------------------------------------------------------------------


class Pen:
    """The process that forks, and talk with its victims."""

    def __init__(self) -> None:
        here = Path(__file__)
        paths = [str(here.parent), str(here.parent.parent), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, str(here)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        self._lines = b""
        self._heard: deque[Message] = deque()

    def __enter__(self) -> Pen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=GIVE_UP_S)
        assert self._process.returncode == 0

    def order(self, **order: object) -> None:
        """Have a victim forked."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, timeout_s: float = GIVE_UP_S) -> Message | None:
        """What is said next; None: nothing for so long. What went wrong with a victim is raised."""
        message = self._heard.popleft() if self._heard else self._line(timeout_s)
        if message is not None:
            assert "error" not in message, message["error"]
        return message

    def _line(self, timeout_s: float) -> Message | None:
        assert self._process.stdout is not None
        while b"\n" not in self._lines:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 1 << 16)
            assert more, "the pen is gone"
            self._lines += more
        line, _, self._lines = self._lines.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def reap(self, pid: int) -> int:
        """Wait for the end of one that was killed; its wait status."""
        self.order(reap=pid)
        while True:
            message = self._line(GIVE_UP_S)
            assert message is not None, f"{pid} does not end"
            if message.get("reaped") == pid:
                return int(str(message["status"]))
            self._heard.append(message)


if __name__ == "__main__":
    serve()
