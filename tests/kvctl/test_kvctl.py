"""kvctl against a real daemon: what it does, prints, and ends with."""

from __future__ import annotations

import io
import json
import tempfile
from asyncio import to_thread
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from server.serving import TOKEN, serving

from kvstored.bench import processes
from kvstored.kvctl import main

MIB = 1 << 20
PART_BYTES = 8192
FAMILY = {
    "model": "m",
    "weights_hex": "00ff",
    "kv_dtype": "float32",
    "chunk_tokens": 16,
    "groups": {"default": "all", "window": {"trailing": 32}, "state": "last"},
    "parts": [
        {"name": "kv", "nbytes": PART_BYTES},
        {"name": "packed", "max_nbytes": 65536, "layers": [0, 2]},
    ],
}

Kvctl = Callable[..., tuple[int, dict[str, object]]]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory() as directory,
        processes.daemon(Path(directory), 64 * MIB, tcp=False) as running,
    ):
        yield running.target


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("TARGET", "NAMESPACE", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"KVCTL_{name}", raising=False)
    monkeypatch.delenv("KVSTORED_TARGET", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def kvctl(target: str, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """Run with --json; (exit status, the one JSON object)."""

    def run(*words: str) -> tuple[int, dict[str, object]]:
        capsys.readouterr()
        status = main([*words, "--target", target, "--json"])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return status, json.loads(out)

    return run


_tokens = iter(range(0, 10**9, 10**4))


@pytest.fixture
def prompt(tmp_path: Path) -> list[str]:
    """--family and --token-ids of 4 chunks that no other test uses; the last is short."""
    (tmp_path / "family.json").write_text(json.dumps(FAMILY))
    begin = next(_tokens)
    (tmp_path / "ids.txt").write_text(str(list(range(begin, begin + 3 * 16 + 5))))
    return PROMPT


def content(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


def test_a_prefix_goes_in_and_comes_out(kvctl: Kvctl, prompt: list[str], tmp_path: Path) -> None:
    data = content(4 * PART_BYTES, 1)
    Path("kv.bin").write_bytes(data)
    status, answer = kvctl("put", *prompt, "--part", "kv=kv.bin")
    assert (status, answer["stored"], answer["reason"]) == (0, 4, "")
    assert answer["outcomes"] == ["stored"] * 4
    status, answer = kvctl("put", *prompt, "--part", "kv=kv.bin")
    assert (status, answer["existed"]) == (0, 4)

    status, answer = kvctl("match", *prompt, "--parts", "kv")
    assert (status, answer["chunks"], answer["tokens"]) == (0, 4, 53)
    assert answer["bytes"] == len(data)
    assert answer["states"] == ["in_ram"] * 4

    status, answer = kvctl("get", *prompt, "--parts", "kv", "--part", "kv=out.bin")
    assert (status, answer["chunks"], answer["bytes"]) == (0, 4, len(data))
    assert answer["bytes_by_tier"] == {"ram": len(data)}
    assert Path("out.bin").read_bytes() == data

    status, answer = kvctl(
        "get", *prompt, "--start", "1", "--stop", "3", "--part", "kv=mid.bin", "--parts", "kv"
    )
    assert Path("mid.bin").read_bytes() == data[PART_BYTES : 3 * PART_BYTES]
    left = {p.name for p in tmp_path.iterdir()}
    assert left == {"family.json", "ids.txt", "kv.bin", "out.bin", "mid.bin"}

    status, answer = kvctl("delete", *prompt)
    assert (status, answer) == (0, {"deleted": 4})
    status, answer = kvctl("match", *prompt, "--parts", "kv", "--each")
    assert (status, answer["chunks"], answer["reason"]) == (1, 0, "deleted")


def test_chunks_by_the_keys_that_list_shows(kvctl: Kvctl, prompt: list[str]) -> None:
    data = content(2 * PART_BYTES, 2)
    Path("kv.bin").write_bytes(data)
    kvctl("put", *prompt, "--part", "kv=kv.bin")
    status, answer = kvctl("list", "--limit", "10000")
    assert status == 0
    assert answer["complete"] is True
    entries = answer["entries"]
    assert isinstance(entries, list)
    mine = sorted(entries, key=lambda e: e["depth"])[-2:]
    assert [e["depth"] for e in mine] == [0, 1]
    assert mine[0]["parts"] == ["kv"]
    named = ["--fingerprint", mine[0]["family"], "--keys", ",".join(e["key"] for e in mine)]
    status, answer = kvctl("match", *named, "--parts", "kv")
    assert (status, answer["chunks"]) == (0, 2)
    status, answer = kvctl("get", *named, "--part", "kv=out.bin")
    assert (status, answer["bytes"]) == (0, len(data))
    assert Path("out.bin").read_bytes() == data
    status, answer = kvctl("list", "--fingerprint", mine[0]["family"], "--limit", "1")
    assert isinstance(answer["entries"], list)
    assert (len(answer["entries"]), answer["complete"]) == (1, False)
    assert kvctl("list", "--fingerprint", "00" * 32)[1] == {"entries": [], "complete": True}
    assert kvctl("delete", *named, "--corrupt") == (0, {"deleted": 2})


def test_parts_of_varying_size_have_a_file_for_each_object(kvctl: Kvctl, prompt: list[str]) -> None:
    packed = [content(5000, 3), content(6000, 4)]
    Path("kv.bin").write_bytes(content(2 * PART_BYTES, 5))
    for i, data in enumerate(packed):
        Path(f"packed{i}").write_bytes(data)
    both = ["--part", "kv=kv.bin", "--part", "packed=packed0", "--part", "packed=packed1"]
    status, answer = kvctl("put", *prompt, *both)
    assert (status, answer["stored"]) == (0, 2)
    status, answer = kvctl("get", *prompt, "--stop", "2", "--part", "packed=out")
    assert status == 0
    assert Path("out").read_bytes() == b"".join(packed)
    assert answer["bytes"] == 11000 + 2 * PART_BYTES


def test_a_partial_get_keeps_the_leading_chunks(kvctl: Kvctl, prompt: list[str]) -> None:
    data = content(4 * PART_BYTES, 6)
    Path("kv.bin").write_bytes(data)
    kvctl("put", *prompt, "--part", "kv=kv.bin")
    kvctl("delete", *prompt, "--start", "2")
    status, answer = kvctl("get", *prompt, "--parts", "kv", "--part", "kv=out.bin")
    assert (status, answer["chunks"], answer["reason"]) == (1, 2, "deleted")
    assert Path("out.bin").read_bytes() == data[: 2 * PART_BYTES]


def test_a_get_that_brings_nothing_leaves_the_file_alone(kvctl: Kvctl, prompt: list[str]) -> None:
    Path("out.bin").write_text("precious")
    status, answer = kvctl("get", *prompt, "--parts", "kv", "--part", "kv=out.bin")
    assert (status, answer["chunks"], answer["reason"]) == (1, 0, "never_stored")
    assert Path("out.bin").read_text() == "precious"
    assert not Path(".out.bin.part").exists()


def test_pictures(kvctl: Kvctl) -> None:
    status, answer = kvctl("status")
    assert (status, answer["phase"]) == (0, "ready")
    tiers = answer["tiers"]
    assert isinstance(tiers, list)
    assert tiers[0]["cap_bytes"] == 64 * MIB
    status, answer = kvctl("usage")
    tiers = answer["tiers"]
    assert isinstance(tiers, list)
    assert (status, tiers[0]["tier"]) == (0, "ram")


@pytest.mark.parametrize("words", [["status"], ["usage"], ["list"], ["match"], ["get"], ["delete"]])
def test_people_get_lines(
    target: str, capsys: pytest.CaptureFixture[str], prompt: list[str], words: list[str]
) -> None:
    chunks = [*prompt, "--parts", "kv"] if words[0] in ("match", "get", "delete") else []
    status = main([*words, *chunks, "--target", target])
    captured = capsys.readouterr()
    assert status == (1 if words[0] in ("match", "get") else 0)
    assert captured.out.strip()
    assert captured.err == ""
    assert not captured.out.startswith("{")


PROMPT = ["--family", "family.json", "--token-ids", "ids.txt"]

MISTAKES = [
    (["match"], "name the chunks by"),
    (["match", "--keys", "00"], "name the chunks by"),
    (["match", "--fingerprint", "0g", "--keys", "00" * 32], "--fingerprint: '0g' is not hex"),
    (["match", "--fingerprint", "00" * 32, "--keys", "00" * 31], "31 bytes, not 32"),
    (["match", "--fingerprint", "00" * 32, "--keys", "00" * 32, "--start", "1"], "--start"),
    (["get", "--fingerprint", "00" * 32, "--keys", "00" * 32, "--part", "kv"], "NAME=FILE"),
    (["match", "--family", "no.json", "--token-ids", "ids.txt"], "--family no.json"),
    (["match", "--family", "ids.txt", "--token-ids", "ids.txt"], "JSON object is needed"),
    (["match", "--family", "odd.json", "--token-ids", "ids.txt"], "unknown field 'modell'"),
    (["match", "--family", "family.json", "--token-ids", "words.txt"], "whole numbers"),
    (
        ["match", *PROMPT, "--stop", "9"],
        "chunks [0, 9)",
    ),
    (["match", *PROMPT, "--parts", "v"], "part 'v'"),
    (["match", *PROMPT, "--request-salt", "z"], "hex"),
    (
        ["put", *PROMPT, "--part", "v=kv.bin"],
        "--part v",
    ),
    (
        ["put", *PROMPT, "--part", "kv=ids.txt"],
        "are not objects of 8192 bytes",
    ),
    (
        ["put", *PROMPT, "--part", "kv=none.bin"],
        "No such file",
    ),
    *(
        (["put", *PROMPT, "--part", "kv=kv.bin", f"--ttl={ttl}"], f"--ttl {ttl}: 0 (the")
        for ttl in ("nan", "inf", "-1", "1e+300")
    ),
    (["list", "--limit", "0"], "--limit 0"),
    (["list", "--token-file", "none.txt"], "--token-file none.txt"),
    (["list", "--token-file", "empty.txt"], "is empty"),
    (["list", "--timeout", "-1"], "out of range"),
    (["bench", "remote", "--rounds", "4"], "at least 5"),
    (["bench", "remote", "--object-mib", "x"], "--object-mib x"),
    (["bench", "remote", "--chunks", "0"], "--chunks"),
]


@pytest.mark.parametrize(("words", "says"), MISTAKES, ids=lambda v: " ".join(v)[:50])
def test_mistakes_are_named_and_end_with_2(
    kvctl: Kvctl, prompt: list[str], words: list[str], says: str
) -> None:
    del prompt
    Path("odd.json").write_text('{"modell": "m"}')
    Path("words.txt").write_text("1 two 3")
    Path("empty.txt").write_text("\n")
    status, answer = kvctl(*words)
    assert status == 2
    assert says in str(answer["error"])


def test_the_command_line_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nonsense"], [], ["put"], ["bench"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    for words in (["--help"], ["get", "--help"], ["bench", "remote", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "KVCTL_TOKEN" in capsys.readouterr().out


def test_no_daemon(capsys: pytest.CaptureFixture[str], tmp_path: Path, prompt: list[str]) -> None:
    nowhere = ["--target", f"unix://{tmp_path}/none.sock", "--timeout", "2"]
    Path("kv.bin").write_bytes(bytes(PART_BYTES))
    for words in (
        ["status"],
        ["list"],
        ["match", *prompt],
        ["put", *prompt, "--part", "kv=kv.bin"],
    ):
        assert main([*words, *nowhere]) == 1
        captured = capsys.readouterr()
        first, _, detail = captured.err.partition("\n")
        assert first == (
            f"kvctl: no daemon answers at unix://{tmp_path}/none.sock: start it with `kvstored "
            "serve`, or name it with --target"
        )
        assert "none.sock" in detail
        assert "Traceback" not in detail
        assert captured.out == ""
    assert main(["list", *nowhere, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["error"].startswith("no daemon answers at unix://")
    assert "none.sock" in answer["detail"]


def test_the_daemon_is_where_every_client_looks(
    target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVSTORED_TARGET", target)
    assert main(["usage", "--json"]) == 0
    monkeypatch.setenv("KVCTL_TARGET", "unix:///nowhere/k.sock")
    assert main(["usage", "--json"]) == 1
    assert "/nowhere/k.sock" in capsys.readouterr().err


def test_a_broken_target_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--target", "localhost:1"]) == 2
    assert "unix:///path" in capsys.readouterr().err


async def test_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with serving() as served:
        monkeypatch.setenv("KVCTL_TARGET", f"unix://{served.unix_path}")
        monkeypatch.setenv("KVCTL_NAMESPACE", "locked")

        async def usage(*words: str) -> int:
            return await to_thread(main, ["usage", "--json", *words])

        assert await usage() == 1
        assert "does not grant" in capsys.readouterr().err
        monkeypatch.setenv("KVCTL_TOKEN", "wrong")
        assert await usage() == 1
        monkeypatch.setenv("KVCTL_TOKEN", TOKEN)
        assert await usage() == 0
        monkeypatch.setenv("KVCTL_TOKEN", "wrong")
        (tmp_path / "token").write_text(TOKEN + "\n")
        assert await usage("--token-file", str(tmp_path / "token")) == 0
        monkeypatch.setattr("sys.stdin", io.StringIO(TOKEN))
        assert await usage("--token-file", "-") == 0
        monkeypatch.delenv("KVCTL_TOKEN")
        monkeypatch.setenv("KVCTL_TOKEN_FILE", str(tmp_path / "token"))
        assert await usage() == 0
        # A namespace's token is no operator's, and the operators' socket needs none.
        assert await to_thread(main, ["status"]) == 1
        monkeypatch.delenv("KVCTL_TOKEN_FILE")
        assert await to_thread(main, ["status"]) == 0
