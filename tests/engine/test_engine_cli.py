"""`python -m kvstored_client.engine`, and the parts of the demo that do not need the model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored_client.engine import demo
from kvstored_client.engine.__main__ import _summary, main
from kvstored_client.engine.credentials import read_token
from kvstored_client.engine.demo_daemon import DaemonFailed, PrivateDaemon
from kvstored_client.engine.demo_progress import PrefillProgress
from kvstored_client.engine.engine import Completion
from kvstored_client.engine.model import Model
from kvstored_client.engine.tokenizer import Tokenizer

GIVE_UP_S = 110.0


def test_answers_without_a_daemon_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstored_client.engine", "--prompt", "Say hello."]
    options = ["--target", f"unix://{tmp_path}/none.sock", "--max-tokens", "2", "--json"]
    done = subprocess.run(
        [*command, *options, "--context", "256"],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )
    answer = json.loads(done.stdout)
    assert answer["model"] == "SmolLM2-135M-Instruct"
    assert len(answer["token_ids"]) == 2
    assert answer["finish_reason"] == "length"
    assert answer["cached_tokens"] == 0
    assert done.stderr.startswith("kvstored is away, going on without it: ")
    assert f" computed; store unix://{tmp_path}/none.sock away; first token" in done.stderr
    assert (tmp_path / "kvstored" / "fingerprints.json").exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--target", "localhost"], "target 'localhost' is not understood"),
        (["--model", "/nonexistent.gguf", "--no-store"], "/nonexistent.gguf"),
    ],
)
def test_mistakes_are_said_in_one_line(
    options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--prompt", "x", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert problem in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("prompt", "cached", "reason", "target", "answered", "says"),
    [
        (
            32,
            0,
            "",
            "unix:///k",
            True,
            "32 prompt tokens: 0 from the store, 32 computed; store "
            "unix:///k answered (it keeps whole chunks of 64 tokens); first",
        ),
        (
            200,
            0,
            "never_stored",
            "unix:///k",
            True,
            "200 prompt tokens: 0 from the store, 200 "
            "computed; store unix:///k answered (never_stored); first",
        ),
        (
            200,
            192,
            "",
            "unix:///k",
            True,
            "200 prompt tokens: 192 from the store (4.0 MB from ram)"
            ", 8 computed; store unix:///k answered; first",
        ),
        (200, 0, "unreachable", "unix:///k", True, "store unix:///k away (unreachable); first"),
        (200, 0, "", "unix:///k", False, "200 computed; store unix:///k away; first"),
        (200, 0, "", None, False, "200 computed; no store asked; first"),
    ],
)
def test_the_summary_says_what_the_store_did(
    prompt: int, cached: int, reason: str, target: str | None, answered: bool, says: str
) -> None:
    tiers = {"ram": 4_000_000} if cached else {}
    done = Completion(prompt, [1], "length", cached, tiers, reason, 5.0, 0.0, 9.0)
    assert says in _summary(done, target, answered=answered)


def test_a_token_is_never_an_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--prompt", "x", "--token", "secret-token"])
    assert ended.value.code == 2
    file = tmp_path / "token"
    file.write_text("from-the-file\n")
    assert read_token(str(file), {"KVSTORED_TOKEN": "from-the-environment"}) == "from-the-file"
    monkeypatch.setattr("sys.stdin", io.StringIO("from-stdin\n"))
    assert read_token("-", {}) == "from-stdin"
    assert read_token(None, {"KVSTORED_TOKEN": "from-the-environment"}) == "from-the-environment"
    assert read_token(None, {}) is None
    file.write_text("\n")
    assert main(["--prompt", "x", "--token-file", str(file)]) == 2
    assert "is empty" in capsys.readouterr().err


def completion(
    tokens: list[int], cached: int, tier: str = "", ttft_ms: float = 100.0
) -> Completion:
    tiers = {tier: cached} if tier else {}
    return Completion(2000, tokens, "length", cached, tiers, "", ttft_ms, 0.0, ttft_ms)


def four_passes(tokens_after_restart: list[int], hit_after_restart: int) -> list[demo.Pass]:
    return [
        demo.Pass("off", [completion([1, 2], 0, ttft_ms=t) for t in (900.0, 1000.0, 1100.0)]),
        demo.Pass("empty", [completion([1, 2], 0)] * 3),
        demo.Pass("warm", [completion([1, 2], 1984, "ram", 50.0)] * 3),
        demo.Pass(
            "restarted", [completion(tokens_after_restart, hit_after_restart, "nvme", 60.0)] * 3
        ),
    ]


def test_report_of_a_good_run() -> None:
    report, good = demo._report("m", four_passes([1, 2], 1984))
    assert good
    assert report == {
        "model": "m",
        "prompts": 3,
        "prompt_tokens": 6000,
        "cold_ttft_ms_p50": 1000.0,
        "warm_ttft_ms_p50": 50.0,
        "ttft_speedup": 20.0,
        "hit_tokens": 5952,
        "miss_tokens": 48,
        "tokens_identical": True,
        "after_restart": {"hit_tokens": 5952, "ttft_ms_p50": 60.0},
    }


def test_a_differing_token_or_a_lost_hit_fails_the_demo() -> None:
    report, good = demo._report("m", four_passes([1, 3], 1984))
    assert (report["tokens_identical"], good) == (False, False)
    report, good = demo._report("m", four_passes([1, 2], 1920))
    assert (report["tokens_identical"], good) == (True, False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_now_and_then_and_in_place_on_a_terminal() -> None:
    times = iter([0.0, 1.0, 3.5, 3.5, 4.0, 9.0])
    out = io.StringIO()
    progress = PrefillProgress(out, every_s=3.0, clock=lambda: next(times))
    for tokens in (64, 128, 192):
        progress.step(tokens, 256)
    progress.step(256, 256)
    progress.end()
    assert out.getvalue() == "    128 of 256 prompt tokens in place ...\n"

    screen = Terminal()
    progress = PrefillProgress(screen)
    progress.step(64, 256)
    progress.step(256, 256)
    progress.end()
    assert "\n" not in screen.getvalue()
    *_, last, rest = screen.getvalue().split("\r\x1b[K")
    assert last == "    256 of 256 prompt tokens in place ..."
    assert rest == ""


def test_table_shows_the_first_turn_of_each_pass(model: Model) -> None:
    passes = four_passes([1, 2], 1984)
    passes[1].completions[0] = completion([1, 2], 0, ttft_ms=901.0)
    lines = demo._table(passes, model).splitlines()
    assert lines[0].split()[:4] == ["1st", "TTFT", "TTFT", "p50"]
    assert lines[2].split()[:5] == ["empty", "901", "ms", "100", "ms"]
    assert "only its 1st TTFT is cold" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_document_is_long_enough(tokenizer: Tokenizer) -> None:
    text = Path(demo.__file__).with_name("data") / "constitution.txt"
    assert len(tokenizer.encode(text.read_text())) >= 1500


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_private_daemon_starts_again_and_leaves_nothing() -> None:
    with PrivateDaemon("64MiB", "128MiB") as daemon:
        daemon.start()
        first = daemon.pid
        daemon.stop()
        daemon.start()
        second = daemon.pid
        folder = daemon.folder
        assert folder.is_dir()
    assert first != second
    assert gone(first)
    assert gone(second)
    assert not folder.exists()


def test_a_daemon_that_does_not_start_is_reported_with_what_it_said() -> None:
    with PrivateDaemon(ram_cap="12 parsecs") as daemon:
        folder = daemon.folder
        with pytest.raises(DaemonFailed, match=r"ended while starting(.|\n)*cap_bytes"):
            daemon.start()
    assert not folder.exists()


INTERRUPTED = """
import signal, sys
from kvstored_client.engine import demo
from kvstored_client.engine.demo_daemon import PrivateDaemon

def work():
    with PrivateDaemon("64MiB", "128MiB") as daemon:
        daemon.start()
        print(daemon.pid, daemon.folder, flush=True)
        signal.pause()

demo._demo = work
sys.exit(demo.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_leaves_nothing(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        pid, folder = child.stdout.readline().split()
        child.send_signal(number)
        rest = child.stdout.read()
        assert child.wait(GIVE_UP_S) == 130
    assert "stopped" in rest
    assert gone(int(pid))
    assert not Path(folder).exists()
