"""Credentials of a bucket, wherever they come from, are shown to nobody, whatever goes wrong.

The server here says everything that it was told in each of its answers, as some do.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon.daemon_helpers import environment, fetch
from daemon.object_nodes import Node, payloads, prefix
from object_proxy import FaultProxy, Message, answer
from support_daemon import GIVE_UP_S

from kvstored.kvctl.command import main as kvctl

WORDS = ("hidden-key-id", "hidden-secret", "hidden-session", "hidden-token", "hidden-sas")
FORBIDDEN = (*WORDS, "Signature=", "AWS4-HMAC", "SharedKey", "Bearer ")
USUAL = ("AWS_", "GOOGLE_", "AZURE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


class Gossip:
    """A server that repeats all of a request, in answers of every kind."""

    def __init__(self) -> None:
        self._turn = itertools.count()
        self.asked: list[str] = []

    def __call__(self, method: str, request: Message) -> bytes:
        said = bytes(request).decode("latin1").replace("\r\n", " ")
        self.asked.append(said)
        kind = next(self._turn) % 6
        if kind == 0:
            return answer("403 Forbidden", "AccessDenied", said)
        if kind == 1:
            return answer("400 Bad Request", "ExpiredToken", said)
        if kind == 2:
            return answer(f"500 {WORDS[1]}", "InternalError", said)
        if kind == 3:
            where = f"http://127.0.0.1:9/?X-Amz-Security-Token={WORDS[2]}"
            return f"HTTP/1.1 301 Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()
        if kind == 4:
            return f"HTTP/1.1 200 OK\r\nContent-Length: {len(said)}\r\n\r\n{said}".encode("latin1")
        return answer("404 Not Found", WORDS[1], said)


@pytest.fixture(scope="module")
def gossip() -> Gossip:
    return Gossip()


@pytest.fixture(scope="module")
def proxy(gossip: Gossip) -> Iterator[FaultProxy]:
    with FaultProxy(answers=gossip) as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kv"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


def place(name: str, folder: Path, endpoint: str) -> tuple[str, dict[str, str]]:
    """Where a bucket is, and an environment that says who may use it."""
    token = folder / "token"
    token.write_text(WORDS[3])
    match name:
        case "environment":
            return "s3", {
                "AWS_ACCESS_KEY_ID": WORDS[0],
                "AWS_SECRET_ACCESS_KEY": WORDS[1],
                "AWS_SESSION_TOKEN": WORDS[2],
            }
        case "web identity":
            return "s3", {
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(token),
                "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
                "AWS_ENDPOINT_URL_STS": endpoint,
            }
        case "container":
            return "s3", {
                "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{endpoint}/give",
                "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(token),
            }
        case _:
            sas = f"sv=2024-01-01&sig={WORDS[4]}"
            return "az", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_SAS_KEY": sas}


def toml(scheme: str, endpoint: str) -> str:
    return (
        f'[object]\nurl = "{scheme}://bucket/p"\nendpoint = "{endpoint}"\nallow_http = true\n'
        'range_timeout_s = 1\n[log]\nlevel = "debug"\nformat = "json"\n'
    )


PLACES = ("environment", "web identity", "container", "sas")


@pytest.mark.parametrize("name", PLACES)
def test_what_a_daemon_says_holds_no_credentials(
    name: str,
    folder: Path,
    gossip: Gossip,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scheme, environ = place(name, folder, proxy.endpoint)
    for variable in environment():
        if variable.upper().startswith(USUAL):
            monkeypatch.delenv(variable)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    gossip.asked.clear()
    node = Node(folder, toml=toml(scheme, proxy.endpoint))
    node.start()
    try:
        shown = _use(node)
    finally:
        node.kill()
        for client in node.clients:
            client.close()
    captured = capfd.readouterr()
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "token"]
    files = [path for path in files if "nvme" not in path.parts]
    shown += [captured.out, captured.err, *(str(path.read_bytes()) for path in files)]
    asked = "".join(gossip.asked)  # but a token is given away over TLS alone, which is not had here
    assert name == "web identity" or any(word in asked for word in FORBIDDEN), "they were used"
    assert "bucket/p" in captured.out
    for text in shown:
        for word in FORBIDDEN:
            assert word not in text


def _use(node: Node) -> list[str]:
    """Ask a daemon for everything that may go wrong; all that it answers."""
    client, of = node.client(), prefix(2, 1)
    answers: list[object] = [
        client.get(of, [bytearray(1 << 20) for _ in range(2)], timeout_s=2.0),
        client.match(of, depth="pool", timeout_s=2.0),
        client.put(of, payloads(2, 1)),
        client.delete(of, timeout_s=2.0),
    ]
    target = ["--target", node.admin_target]
    for words in (["tiers"], ["status"], ["purge", "--yes", "--timeout", "2"]):
        kvctl([*words, *target])
        kvctl([*words, *target, "--json"])
    answers.append(node.status())
    (ready,) = [line for line in node.log.splitlines() if '"message": "ready"' in line]
    http = json.loads(ready)["http"]
    answers += [fetch(http, path) for path in ("/metrics", "/status", "/readyz")]
    return [*map(str, answers), node.log]


@pytest.mark.parametrize(
    ("extra", "variables"),
    [
        (f'url = "s3://{WORDS[0]}:{WORDS[1]}@bucket/p"', {}),
        (f'url = "s3://bucket/p?secret={WORDS[1]}"', {}),
        (f'url = "s3://bucket"\nendpoint = "http://{WORDS[0]}:{WORDS[1]}@host"', {}),
        (f'url = "s3://bucket"\nsecret_access_key = "{WORDS[1]}"', {}),
        ("", {"KVSTORED_OBJECT__URL": f"s3://bucket?{WORDS[1]}"}),
        ('url = "gs://bucket"', {"GOOGLE_SERVICE_ACCOUNT_KEY": f'{{"private_key": "{WORDS[1]}"'}),
        (
            'url = "az://bucket"',
            {
                "AZURE_STORAGE_ACCOUNT_NAME": "a",
                "AZURE_STORAGE_ACCOUNT_KEY": f"{WORDS[1]} no base64",
            },
        ),
    ],
)
def test_a_refused_configuration_is_not_repeated(
    extra: str, variables: dict[str, str], folder: Path
) -> None:
    file = folder / "kvstored.toml"
    file.write_text(
        f'[daemon]\ndata_dir = "{folder}/data"\n[listen]\nunix = "{folder}/k.sock"\n'
        f'[ram]\ncap_bytes = "16MiB"\n[nvme]\nenabled = false\n[object]\n{extra}\n'
    )
    ended = subprocess.run(
        [sys.executable, "-m", "kvstored", "serve", "--config", str(file)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
    )
    assert ended.returncode == 2
    assert "object." in ended.stderr
    assert not any(word in ended.stdout + ended.stderr for word in WORDS)
