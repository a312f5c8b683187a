"""A redis-server of the benchmark's own, in memory only, and the least client that it needs."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvstored.bench.payloads import Bytes
from kvstored.bench.processes import START_S, STOP_S, BenchError, connect

PROGRAM = "redis-server"
IN_FLIGHT = 4
_WAITALL = socket.MSG_WAITALL


def installed() -> bool:
    """Whether there is one on this machine."""
    return shutil.which(PROGRAM) is not None


@contextlib.contextmanager
def server(directory: Path) -> Iterator[Path]:
    """One that keeps nothing on disk; its Unix socket. Raises BenchError."""
    path, log = directory / "redis.sock", directory / "redis.log"
    options = {
        "port": "0",
        "unixsocket": str(path),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "dir": str(directory),
    }
    command = [PROGRAM, *(word for name, value in options.items() for word in ("--" + name, value))]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_until_ready(process, path, log)
        yield path
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
        except OSError as error:
            if process.poll() is not None or time.monotonic() > end:
                tail = log.read_text(errors="replace")[-2000:]
                raise BenchError(f"{PROGRAM} did not start: {error}\n{tail}") from error
            time.sleep(0.02)  # nothing tells that a socket will appear
        else:
            return


class Redis:
    """A blocking client. Bytes move between the socket and the caller's memory, nowhere else.

    Raises BenchError for an answer that is not the one expected, OSError.
    """

    def __init__(self, path: Path) -> None:
        self._socket = connect(str(path))

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()

    def put(self, keys: Sequence[bytes], objects: Bytes) -> None:
        """Store rows of `objects`, shape [keys, bytes], by pipelined SET."""
        rest = b""
        for key, row in zip(keys, objects, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (_bulk(key), row.nbytes)
            self._socket.sendall(rest + head)
            self._socket.sendall(row.data)
            rest = b"\r\n"
        self._socket.sendall(rest)
        self._expect(b"+OK\r\n" * len(keys))

    def get(self, keys: Sequence[bytes], into: Bytes) -> None:
        """Read into the rows of `into`, shape [keys, bytes], by pipelined GET."""
        # MGET, or every GET at once, has redis collect all answers in fresh memory before it sends
        # the first: two to three times as slow.
        questions = [_command(b"GET", [key]) for key in keys]
        self._socket.sendall(b"".join(questions[:IN_FLIGHT]))
        for number, row in enumerate(into):
            self._expect(b"$%d\r\n" % row.nbytes)
            self._receive(row.data)
            self._expect(b"\r\n")
            self._socket.sendall(b"".join(questions[number + IN_FLIGHT : number + IN_FLIGHT + 1]))

    def exist(self, question: bytes, count: int) -> None:
        """See that all of as many keys are held. `question`: `exists` of them."""
        self._socket.sendall(question)
        self._expect(b":%d\r\n" % count)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Drop all, by one DEL."""
        self._send(b"DEL", keys)
        self._expect(b":%d\r\n" % len(keys))

    def _send(self, verb: bytes, keys: Sequence[bytes]) -> None:
        self._socket.sendall(_command(verb, keys))

    def _expect(self, answer: bytes) -> None:
        got = b""
        while len(got) < len(answer):
            more = self._socket.recv(len(answer) - len(got))
            got += more
            if not more or not answer.startswith(got):
                raise BenchError(f"redis answered {got[:200]!r}, not {answer[:200]!r}")

    def _receive(self, into: memoryview) -> None:
        while into:
            got = self._socket.recv_into(into, 0, _WAITALL)
            if not got:
                raise BenchError("redis went away")
            into = into[got:]


def exists(keys: Sequence[bytes]) -> bytes:
    """The command that asks how many of the keys are held."""
    return _command(b"EXISTS", keys)


def _command(verb: bytes, keys: Sequence[bytes]) -> bytes:
    return b"*%d\r\n" % (len(keys) + 1) + _bulk(verb) + b"".join(map(_bulk, keys))


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)
