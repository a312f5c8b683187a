"""The process ends in time, whatever is stuck."""

from __future__ import annotations

import signal

import pytest
from daemon.daemon_helpers import process

SCRIPT = """
import logging, os, sys, threading
from kvstored import logs
from kvstored.stopping import StopWatch, block_signals, leave

block_signals()
stuck_main, timeout_s = sys.argv[1] == "main", float(sys.argv[2])
stream = logs.configure("info", "logfmt")
stop = threading.Event()

def on_stop(reason):
    logging.info("told to stop: %s", reason)
    if sys.argv[1] != "nothing-happens":
        stop.set()

watch = StopWatch(timeout_s, on_stop, lambda: "12 bytes are not durable", stream)
watch.start()
never, _ = os.pipe()
threading.Thread(target=os.read, args=(never, 1)).start()  # in the kernel, and not a daemon thread
logging.info("up")
if len(sys.argv) > 3:
    watch.begin("the heart died", 7)
if stuck_main:
    os.read(never, 1)
stop.wait()
logging.info("clean, %s left", "time" if watch.left_s() > 0 else "no time")
leave(watch.status, stream)
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stuck_thread_does_not_hold_a_clean_stop_up(signum: signal.Signals) -> None:
    with process("-c", SCRIPT, "clean", "3600") as child:
        child.wait_line("up")
        child.child.send_signal(signum)
        assert child.status() == 0
        assert f"told to stop: {signum.name}" in child.stderr
        assert "clean, time left" in child.stderr


def test_at_the_deadline_the_process_says_what_is_undone_and_ends_with_0() -> None:
    with process("-c", SCRIPT, "main", "0.5") as child:
        child.wait_line("up")
        child.child.terminate()
        assert child.status() == 0
        assert "12 bytes are not durable" in child.stderr
        assert "the stop took too long" in child.stderr
        assert "clean" not in child.stderr


def test_a_second_signal_ends_it_at_once() -> None:
    with process("-c", SCRIPT, "nothing-happens", "3600") as child:
        child.wait_line("up")
        child.child.terminate()
        child.wait_line("told to stop: SIGTERM")
        while child.child.poll() is None:
            child.child.send_signal(signal.SIGINT)
            signal.sigtimedwait([], 0.05)
        assert child.status() == 128 + signal.SIGINT
        assert "stopped by a second signal" in child.stderr


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    with process("-c", SCRIPT, "nothing-happens", "1") as child:
        child.wait_line("up")
        child.child.terminate()
        child.child.send_signal(signal.SIGINT)
        assert child.status() == 0
        assert "second signal" not in child.stderr


def test_a_stop_from_inside_has_its_own_status() -> None:
    with process("-c", SCRIPT, "clean", "3600", "begin") as child:
        assert child.status() == 7
        assert "told to stop: the heart died" in child.stderr
    with process("-c", SCRIPT, "nothing-happens", "0.5", "begin") as child:
        assert child.status() == 7
        assert "the stop took too long" in child.stderr


def test_the_signals_are_blocked_before_numpy_starts_threads() -> None:
    with process("-c", "import sys, kvstored.cli; sys.exit('numpy' in sys.modules)") as child:
        assert child.status() == 0
