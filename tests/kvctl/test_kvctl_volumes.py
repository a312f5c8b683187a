"""`kvctl volumes` and `kvctl scrub` against a real daemon with two volumes, and its metrics."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support_daemon import TOKEN, Daemon

from kvstored.bench import processes
from kvstored.kvctl import main
from kvstored_client import KVClient, KVFamily, KVPart, Prefix

MIB = 1 << 20
PART_BYTES = 256 << 10
CHUNKS = 16
FAMILY = KVFamily("m", "w", "float32", 16, [KVPart("kv", PART_BYTES)])

Kvctl = Callable[..., tuple[int, dict[str, Any], str]]


class TwoVolumes(Daemon):
    """A daemon whose volumes are the folders v0 and v1."""

    def _config(self) -> str:
        file = Path(super()._config())
        text = file.read_text().replace('cap_bytes = "192MiB"\n', "scrub_bytes_per_s = 0\n")
        text = text.replace('http = "127.0.0.1:0"', f'http = "{self.folder}/http.sock"')
        for name in ("v0", "v1"):
            (self.folder / name).mkdir(exist_ok=True)
            table = f'path = "{self.folder / name}"\ncap_bytes = "96MiB"'
            text += f"[[nvme.volumes]]\n{table}\n"
        file.write_text(text)
        return str(file)

    def http(self, path: str) -> tuple[int, str]:
        """GET; status and body."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.folder / "http.sock"))
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body

    def metric(self, name: str) -> float:
        """One sample."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.http("/metrics")[1], re.MULTILINE)
        assert found is not None, name
        return float(found[1])


@pytest.fixture(scope="module")
def one_daemon() -> Iterator[TwoVolumes]:
    daemon = TwoVolumes(Path(tempfile.mkdtemp(prefix="kv")))
    try:
        yield daemon
    finally:
        daemon.kill()
        shutil.rmtree(daemon.folder)


@pytest.fixture
def daemon(one_daemon: TwoVolumes) -> TwoVolumes:
    """Running, and without chunks: a test may leave it stopped. The last ones change its volumes
    for good.
    """
    if one_daemon.child is None:
        one_daemon.start()
    with KVClient(one_daemon.target) as client:
        client.delete(prefix())
    return one_daemon


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARGET", "NAMESPACE", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"KVCTL_{name}", raising=False)


@pytest.fixture
def kvctl(daemon: TwoVolumes, capsys: pytest.CaptureFixture[str]) -> Kvctl:
    """Run with --json; (exit status, the one JSON object, what stderr says)."""

    def run(*words: str) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        status = main([*words, "--target", daemon.target, "--json"])
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        assert "Traceback" not in captured.err
        return status, json.loads(captured.out), captured.err

    return run


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in answer["volumes"]}


def content() -> bytes:
    return np.random.default_rng(5).bytes(CHUNKS * PART_BYTES)


def prefix() -> Prefix:
    return FAMILY.prefix(list(range(CHUNKS * 16)))


def put(daemon: TwoVolumes) -> None:
    """CHUNKS objects, durable, on both volumes."""
    data = content()
    views = [data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES)]
    with KVClient(daemon.target) as client:
        result = client.put(prefix(), views, durability="durable", timeout_s=30)
        assert result.stored == CHUNKS


def get(daemon: TwoVolumes) -> tuple[list[str], bool]:
    """(state of each chunk, whether those that came are right)."""
    into = bytearray(CHUNKS * PART_BYTES)
    with KVClient(daemon.target) as client:
        states = [s.name.lower() for s in client.match(prefix(), mode="each").states]
        got = client.get(prefix(), into, timeout_s=30)
    return states, into[: got.chunks * PART_BYTES] == content()[: got.chunks * PART_BYTES]


def test_volumes_are_shown_with_all_that_is_known(
    daemon: TwoVolumes, kvctl: Kvctl, capsys: pytest.CaptureFixture[str]
) -> None:
    status, answer, _ = kvctl("volumes")
    assert status == 0
    assert answer["write_amplification"] is None
    assert [v["number"] for v in answer["volumes"]] == [0, 1]
    empty = by_name(answer)
    assert {v["state"] for v in empty.values()} == {"ok"}
    assert empty["v0"]["directory"] == str(daemon.folder / "v0")
    assert 0 < empty["v0"]["cap_bytes"] <= 96 * MIB
    put(daemon)
    status, answer, _ = kvctl("volumes")
    full = by_name(answer)
    assert sum(v["objects"] for v in full.values()) == CHUNKS
    assert all(v["objects"] for v in full.values())
    assert sum(v["accepted_bytes"] for v in full.values()) == CHUNKS * PART_BYTES
    assert all(v["written_bytes"] > v["accepted_bytes"] for v in full.values())
    assert answer["write_amplification"] > 1
    assert main(["volumes", "--target", daemon.target]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^v1 +ok +", shown, re.MULTILINE)
    assert "write amplification" in shown

    for v in full.values():
        for figure in ("cap_bytes", "footprint_bytes", "charged_bytes", "objects"):
            assert daemon.metric(f'kvstored_volume_{figure}{{volume="{v["name"]}"}}') == v[figure]
        assert daemon.metric(f'kvstored_volume_state{{state="ok",volume="{v["name"]}"}}') == 1
        assert daemon.metric(f'kvstored_volume_state{{state="lost",volume="{v["name"]}"}}') == 0
        for figure in ("written_bytes", "accepted_bytes"):
            name = f'kvstored_volume_{figure}_total{{volume="{v["name"]}"}}'
            assert daemon.metric(name) >= v[figure] > 0
        regions = [
            daemon.metric(f'kvstored_volume_regions{{state="{s}",volume="{v["name"]}"}}')
            for s in ("used", "free", "abandoned")
        ]
        assert sum(regions) == v["regions_total"]
    assert daemon.metric("kvstored_nvme_write_amplification_ratio") > 1
    code, page = daemon.http("/status")
    assert code == 200
    told = json.loads(page)
    assert told["phase"] == "ready"
    assert [v["name"] for v in told["volumes"]] == ["v0", "v1"]
    assert {t["name"] for t in told["tiers"]} == {"ram", "nvme"}
    assert "locked" not in page


def rot(folder: Path, payload: bytes) -> None:
    """Change a byte in the middle of an object, where it lies."""
    for file in folder.glob("v*/data"):
        with file.open("r+b") as data:
            at = data.read().find(payload)
            if at >= 0:
                data.seek(at + len(payload) // 2)
                data.write(bytes([payload[len(payload) // 2] ^ 1]))
                data.flush()
                os.fsync(data.fileno())
                return
    raise AssertionError("there is no such object")


def test_a_scrub_reads_everything_and_drops_what_is_rotten(
    daemon: TwoVolumes, kvctl: Kvctl, capsys: pytest.CaptureFixture[str]
) -> None:
    put(daemon)
    status, answer, said = kvctl("scrub")
    assert status == 0
    parts = answer["volumes"]
    assert [p["volume"] for p in parts] == ["v0", "v1"]
    assert {p["state"] for p in parts} == {"done"}
    assert sum(p["scrubbed_objects"] for p in parts) == CHUNKS
    assert sum(p["scrubbed_bytes"] for p in parts) == CHUNKS * PART_BYTES
    assert re.search(r"v0 done, \d+ of \d+ objects", said)
    scrub = by_name(kvctl("volumes")[1])["v0"]["scrub"]
    assert (scrub["passes_done"], scrub["on_demand"], scrub["last_end"]) == (1, True, "done")
    assert daemon.metric('kvstored_volume_scrub_last_done_seconds{volume="v0"}') > 1e9

    # Rotten on the device while RAM still has it: the copy goes, the object stays.
    data = content()
    rot(daemon.folder, data[:PART_BYTES])
    status, answer, _ = kvctl("scrub", "v0", "v1", "--rate", "200MiB")
    assert status == 1
    assert [sum(p[k] for p in answer["volumes"]) for k in ("dropped_objects", "dropped_bytes")] == [
        1,
        PART_BYTES,
    ]
    assert sum(p["scrubbed_objects"] for p in answer["volumes"]) == CHUNKS
    assert daemon.metric('kvstored_checksum_failures_total{tier="nvme"}') == 1
    assert get(daemon) == (["in_ram"] * CHUNKS, True)
    assert kvctl("scrub")[0] == 0

    daemon.stop()
    daemon.start()
    rot(daemon.folder, data[PART_BYTES : 2 * PART_BYTES])
    assert main(["scrub", "--target", daemon.target]) == 1
    shown = capsys.readouterr().out
    assert re.search(r"^volume +scrub +objects +read +rotten", shown)
    states, right = get(daemon)
    assert (states[1], right) == ("miss_corrupt", True)
    assert kvctl("scrub")[0] == 0


def test_a_missing_volume_is_shown_as_lost(daemon: TwoVolumes, kvctl: Kvctl) -> None:
    put(daemon)
    daemon.stop()
    gone = daemon.folder / "v0"
    gone.rename(daemon.folder / "elsewhere")
    daemon.start()  # which finds an empty v0, as when nothing is mounted there
    volumes = by_name(kvctl("volumes")[1])
    assert volumes["v0"]["state"] == "lost"
    assert "mount its device" in volumes["v0"]["detail"]
    assert volumes["v0"]["scrub"] is None
    assert volumes["v1"]["state"] == "ok"
    assert daemon.metric('kvstored_volume_state{state="lost",volume="v0"}') == 1
    status, answer, _ = kvctl("scrub")
    assert (status, [v["state"] for v in answer["volumes"]]) == (1, ["away", "done"])
    assert os.listdir(gone) == []
    states, right = get(daemon)
    assert right
    assert 0 < states.count("in_nvme") < CHUNKS
    daemon.stop()
    gone.rmdir()
    (daemon.folder / "elsewhere").rename(gone)


def test_mistakes_and_who_may(daemon: TwoVolumes, kvctl: Kvctl, tmp_path: Path) -> None:
    for words, says in (
        (["volumes", "drain"], "name the volume"),
        (["volumes", "drain", "v9"], "there is no volume v9 (the volumes are: v0, v1)"),
        (["volumes", "--no-wait"], "nothing to wait for"),
        (["scrub", "v9"], "there is no volume v9: v0, v1"),
        (["scrub", "v0", "v9"], "there is no volume v9: v0, v1"),
        (["scrub", "--rate", "fast"], "--rate fast"),
        (["scrub", "--rate", "0"], "--rate 0"),
    ):
        status, answer, _ = kvctl(*words)
        assert status == 2, words
        assert says in answer["error"]
    assert {v["scrub"]["on_demand"] for v in kvctl("volumes")[1]["volumes"]} == {False}
    for words in (["volumes", "fill", "v0"], ["volumes", "drain", "v0", "v1"]):
        with pytest.raises(SystemExit) as ended:
            kvctl(*words)
        assert ended.value.code == 2
    (tmp_path / "token").write_text(TOKEN)
    engine = ["--token-file", str(tmp_path / "token"), "--namespace", "locked"]
    for words in (["volumes"], ["volumes", "drain", "v0"], ["scrub"]):
        status, answer, _ = kvctl(*words, *engine)
        assert status == 1
        assert "admin token" in answer["error"]
    assert by_name(kvctl("volumes")[1])["v0"]["state"] == "ok"


def test_a_drained_volume_holds_nothing_and_nothing_is_missed(
    daemon: TwoVolumes, kvctl: Kvctl
) -> None:
    put(daemon)
    status, answer, said = kvctl("volumes", "drain", "v0")
    assert (status, answer["volume"]["state"]) == (0, "drained")
    assert "v0 is drained" in said
    volumes = by_name(kvctl("volumes")[1])
    assert (volumes["v0"]["objects"], volumes["v1"]["objects"]) == (0, CHUNKS)
    assert daemon.metric('kvstored_volume_state{state="drained",volume="v0"}') == 1
    assert kvctl("volumes", "drain", "v0")[0] == 0
    status, answer, _ = kvctl("volumes", "drain", "v1")
    assert status == 2
    assert "v1 is the only volume that takes objects" in answer["error"]
    daemon.stop()
    daemon.start()
    assert by_name(kvctl("volumes")[1])["v0"]["state"] == "drained"
    assert get(daemon) == (["in_nvme"] * CHUNKS, True)
    status, answer, _ = kvctl("scrub")
    assert (status, [v["volume"] for v in answer["volumes"]]) == (0, ["v1"])
    status, answer, _ = kvctl("scrub", "v0")
    assert (status, answer["volumes"][0]["state"]) == (1, "away")
    status, answer, _ = kvctl("volumes", "drain", "v0", "--no-wait")
    assert (status, answer["volume"]["state"]) == (0, "drained")


def test_where_there_is_no_such_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with processes.daemon(tmp_path, 64 * MIB) as running:
        target = ["--target", running.target]
        assert main(["volumes", *target]) == 0
        assert "there is no NVMe tier" in capsys.readouterr().out
        assert main(["volumes", "drain", "v0", *target]) == 2
        assert main(["scrub", *target]) == 2
        assert capsys.readouterr().err.count("there is no NVMe tier, hence no volume") == 2
