"""The configuration as a whole: defaults, sources, and every fault at once."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from config.config_helpers import GIB, load, problems

from kvstored import config
from kvstored.config import TcpAddress
from kvstored.config import host as hosts
from kvstored.errors import ConfigError

MIB = 1 << 20
TOKEN = "sesame-open-up-1"
NAMESPACE = f'[[namespace]]\nname = "a"\ntokens = ["{TOKEN}"]\n'


def _run(*arguments: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVSTORED_")}
    return subprocess.run(
        [sys.executable, "-m", "kvstored", *arguments],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_embedded_defaults(tmp_path: Path) -> None:
    settings = load(tmp_path).settings
    assert settings.ram.cap_bytes == GIB
    assert settings.nvme.enabled
    assert settings.nvme.cap_bytes <= 10 * GIB
    assert settings.listen.unix == tmp_path / "run/kvstored.sock"
    assert settings.listen.tcp is None
    assert settings.listen.http == TcpAddress("127.0.0.1", 9441)
    assert settings.daemon.data_dir == tmp_path / "state"
    assert settings.daemon.stop_timeout_s == 30
    assert [n.name for n in settings.namespaces] == ["default"]
    assert settings.namespaces[0].tokens == ()


def test_default_ram_is_a_quarter_of_little_memory(tmp_path: Path) -> None:
    assert load(tmp_path, memory_bytes=GIB).settings.ram.cap_bytes == GIB // 4


@pytest.mark.parametrize("setting", ['cap_bytes = "32MiB"', "enabled = true"])
def test_only_a_default_does_without_nvme_where_the_disk_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    def disk_of(size_bytes: int) -> None:
        monkeypatch.setattr(hosts, "disk_for", lambda path: size_bytes)

    disk_of(12 * MIB)
    silent = load(tmp_path)
    assert not silent.settings.nvme.enabled
    assert "room for 12 MiB only" in silent.warnings[0]
    (problem,) = problems(tmp_path, f"[nvme]\n{setting}")
    assert problem.startswith("nvme.cap_bytes")
    assert "12 MiB" in problem
    assert "nvme.enabled = false" in problem
    disk_of(40 * MIB)
    asked = load(tmp_path, f"[nvme]\n{setting}")
    assert asked.settings.nvme.enabled
    assert asked.warnings == ()


def test_everything_can_be_set(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("token-from-a-file\n")
    (tmp_path / "secret").write_text("0123456789abcdef0123\n")
    toml = f"""
    [daemon]
    data_dir = "{tmp_path}/d"
    deployment_secret_file = "{tmp_path}/secret"
    stop_timeout_s = 2.5
    default_namespace = false
    [listen]
    unix = "unix:{tmp_path}/u.sock"
    tcp = "[::1]:9440"
    http = "{tmp_path}/h.sock"
    [ram]
    cap_bytes = "64MiB"
    [nvme]
    cap_bytes = 134217728
    [limits]
    max_put_bytes = "1MiB"
    max_dirty_bytes = "2MiB"
    max_calls = 3
    stall_timeout_s = 1.5
    [local]
    enabled = false
    max_sessions = 5
    max_leased_percent_session = 6
    max_leased_percent_namespace = 7
    max_staging_bytes = "3MiB"
    max_total_staging_bytes = "4MiB"
    [tenants]
    max = 4
    [log]
    level = "debug"
    format = "json"
    [[namespace]]
    name = "team-a"
    tokens = ["{TOKEN}"]
    token_files = ["{tmp_path}/token"]
    token_env = ["TEAM_TOKEN"]
    admin = true
    ram_cap_bytes = "8MiB"
    nvme_cap_bytes = "16MiB"
    default_ttl_s = 1.5
    """
    settings = load(tmp_path, toml, {"TEAM_TOKEN": "token-from-env"}).settings
    assert settings.daemon.deployment_secret is not None
    assert settings.daemon.deployment_secret.reveal() == "0123456789abcdef0123"
    assert settings.daemon.stop_timeout_s == 2.5
    assert settings.listen.unix == tmp_path / "u.sock"
    assert settings.listen.http == tmp_path / "h.sock"
    assert str(settings.listen.tcp) == "[::1]:9440"
    assert (settings.ram.cap_bytes, settings.nvme.cap_bytes) == (64 << 20, 128 << 20)
    assert dataclasses.astuple(settings.limits) == (1 << 20, 2 << 20, 3, 1.5)
    assert dataclasses.astuple(settings.local) == (False, 5, 6, 7, 3 << 20, 4 << 20)
    assert settings.tenants.max == 4
    assert dataclasses.astuple(settings.log) == ("debug", "json")
    (namespace,) = settings.namespaces
    assert [t.reveal() for t in namespace.tokens] == [TOKEN, "token-from-a-file", "token-from-env"]
    assert namespace.admin
    assert (namespace.ram_cap_bytes, namespace.nvme_cap_bytes) == (8 << 20, 16 << 20)
    assert namespace.default_ttl_ms == 1500


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    environ = {
        "KVSTORED_RAM__CAP_BYTES": "32MiB",
        "KVSTORED_NVME__ENABLED": "false",
        "KVSTORED_LIMITS__MAX_CALLS": "7",
        "KVSTORED_DAEMON__STOP_TIMEOUT_S": "1.5",
        "KVSTORED_NAMESPACE__TEAM_A__TOKENS": f"{TOKEN}, {TOKEN}2",
        "KVSTORED_NAMESPACE__DEFAULT__DEFAULT_TTL_S": "60",
    }
    toml = '[ram]\ncap_bytes = "64MiB"\n[[namespace]]\nname = "team-a"\nadmin = true\n'
    settings = load(tmp_path, toml, environ).settings
    assert settings.ram.cap_bytes == 32 << 20
    assert (settings.nvme.enabled, settings.nvme.cap_bytes) == (False, 0)
    assert settings.limits.max_calls == 7
    assert settings.daemon.stop_timeout_s == 1.5
    by_name = {n.name: n for n in settings.namespaces}
    assert [t.reveal() for t in by_name["team-a"].tokens] == [TOKEN, TOKEN + "2"]
    assert by_name["team-a"].admin
    assert by_name["default"].default_ttl_ms == 60_000


def test_variables_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    environ = {"KVSTORED_PORT": "tcp://10.0.0.1:9440", "KVSTORED_SERVICE_HOST": "10.0.0.1"}
    assert load(tmp_path, "", environ).settings == load(tmp_path).settings


def test_every_fault_is_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    toml = f"""
    stray = 1
    [daemon]
    data_dir = "{tmp_path}/file/data"
    stop_timeout_s = "soon"
    [listen]
    tcp = "0.0.0.0:9440"
    http = "nowhere"
    [ram]
    cap_bytes = "900GiB"
    cap_byte = 1
    [nvme]
    cap_bytes = "900PiB"
    [limits]
    max_calls = 0
    max_put_bytes = true
    [tenants]
    max = 1.5
    [log]
    level = "verbose"
    [rma]
    cap_bytes = 1
    [[namespace]]
    name = "twice"
    [[namespace]]
    name = "twice"
    ram_cap_bytes = "12 bananas"
    [[namespace]]
    name = "bad name"
    """
    environ = {"KVSTORED_RAM_CAP_BYTES": "1GiB", "KVSTORED_NVME__ENABLED": "maybe"}
    found = problems(tmp_path, toml, environ)
    expected = {
        "stray = 1": "outside any section",
        "daemon.data_dir": "cannot be written",
        'daemon.stop_timeout_s = "soon"': "write seconds from 1 to 3600",
        'listen.tcp = "0.0.0.0:9440"': "needs a namespace with tokens",
        'listen.http = "nowhere"': "write host:port",
        'ram.cap_bytes = "900GiB"': "above the memory there is: 8 GiB",
        "ram.cap_byte = 1": "did you mean cap_bytes?",
        'nvme.cap_bytes = "900PiB"': "above what the disk",
        "limits.max_calls = 0": "write a whole number from 1 to",
        "limits.max_put_bytes = true": 'such as "1GiB"',
        "tenants.max = 1.5": "write a whole number",
        'log.level = "verbose"': "write one of debug, info",
        "[rma]": "did you mean ram?",
        'namespace "twice"': "given 2 times",
        'namespace.twice.ram_cap_bytes = "12 bananas"': 'such as "1GiB"',
        'namespace.bad name.name = "bad name"': "1 to 64 letters",
        "KVSTORED_RAM_CAP_BYTES": "did you mean KVSTORED_RAM__CAP_BYTES",
        'nvme.enabled = "maybe" (KVSTORED_NVME__ENABLED)': "write true or false",
    }
    for start, what in expected.items():
        assert any(p.startswith(start) and what in p for p in found), (start, found)
    assert len(found) == len(expected), found


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        ("[ram", "not valid TOML"),
        ('[listen]\nunix = "/' + "x" * 120 + '"', "at most 101 bytes"),
        ('[listen]\nunix = "run/k.sock"', "write an absolute path"),
        ('[listen]\nhttp = "nowhere"', "such as 127.0.0.1:9441, or the absolute path"),
        ('[listen]\nhttp = "127.0.0.1:http"', "such as 127.0.0.1:9441, or the absolute path"),
        ('[listen]\ntcp = ":9440"\n' + NAMESPACE, "write a host before the port"),
        ('[listen]\ntcp = "h:70000"\n' + NAMESPACE, "write host:port"),
        ('[listen]\ntcp = "::1:9440"\n' + NAMESPACE, "write a host before the port"),
        ('[daemon]\ndeployment_secret = "short"', "at least 16 random characters"),
        ('[daemon]\ndeployment_secret = ""', "write a text in quotes"),
        ('[daemon]\ndeployment_secret_file = "/no/such"', "cannot be read"),
        ("[daemon]\ndefault_namespace = false", "namespace: there is none"),
        ('[[namespace]]\ntokens = ["12345678"]', "namespace.#1.name"),
        ('[[namespace]]\nname = "a"\ntokens = ["short"]', "at least 8 printable"),
        ('[[namespace]]\nname = "a"\ntokens = ["with space in it"]', "without spaces"),
        ('[[namespace]]\nname = "a"\ntokens = "no-list-at-all"', "write a list of texts"),
        ('[[namespace]]\nname = "a"\ntoken_files = ["/no/such"]', "cannot be read"),
        ('[[namespace]]\nname = "a"\ntoken_env = ["NO_SUCH"]', "no variable NO_SUCH"),
        ('[[namespace]]\nname = "a"\nadmin = true', "only tokens can be marked admin"),
        ('[[namespace]]\nname = "a"\nram_cap_bytes = "2GiB"', "must be from 4 KiB to 1 GiB"),
        ('[[namespace]]\nname = "a"\ndefault_ttl_s = nan', "write seconds from 0"),
        ('[namespace]\nname = "a"', "headed [[namespace]]"),
    ],
)
def test_one_fault_one_message(tmp_path: Path, toml: str, what: str) -> None:
    found = problems(tmp_path, toml)
    assert len(found) == 1, found
    assert what in found[0]


def test_each_bad_token_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("x\n")
    toml = f"""
    [[namespace]]
    name = "a"
    tokens = ["hunter2", "{TOKEN}", "hunter3"]
    token_files = ["{tmp_path}/short"]
    token_env = ["GOOD", "BAD"]
    """
    found = problems(tmp_path, toml, {"GOOD": TOKEN, "BAD": "hunter4"})
    assert [p.split(" (")[0] for p in found] == [
        "namespace.a.tokens[0]",
        "namespace.a.tokens[2]",
        "namespace.a.token_files[0]",
        "namespace.a.token_env[1]",
    ]
    assert "hunter" not in " ".join(found)


def test_no_message_shows_a_secret(tmp_path: Path) -> None:
    toml = """
    token = "hunter2-hunter2"
    [daemon]
    deployment_secret = "hunter2"
    [[namespace]]
    name = "a"
    token = "hunter2-hunter2"
    tokens = ["hunter2"]
    [[namespace]]
    name = "b"
    tokens = "hunter2"
    """
    found = problems(tmp_path, toml, {"KVSTORED_NAMESPACE__C__TOKENS": "hunter2"})
    assert len(found) == 6
    assert "hunter2" not in " ".join(found)


def test_tcp_needs_tokens_or_an_explicit_insecure(tmp_path: Path) -> None:
    tcp = '[listen]\ntcp = "127.0.0.1:0"\n'
    assert "--insecure" in problems(tmp_path, tcp)[0]
    assert load(tmp_path, tcp, insecure=True).settings.listen.insecure
    assert not load(tmp_path, tcp + NAMESPACE).settings.listen.insecure


def test_metrics_for_everybody_are_warned_of(tmp_path: Path) -> None:
    (warning,) = load(tmp_path, '[listen]\nhttp = "0.0.0.0:9441"').warnings
    assert "without a token" in warning
    assert load(tmp_path).warnings == ()


def test_file_is_found_by_argument_variable_and_systemd(tmp_path: Path) -> None:
    for name, calls in (("a", 1), ("b", 2)):
        (tmp_path / name).write_text(f"[limits]\nmax_calls = {calls}\n")
    (tmp_path / "etc").mkdir()
    systemd = {"CONFIGURATION_DIRECTORY": str(tmp_path / "etc"), "XDG_STATE_HOME": str(tmp_path)}
    named = {**systemd, "KVSTORED_CONFIG": str(tmp_path / "b")}

    def calls_of(file: Path | None, environ: dict[str, str]) -> int:
        return config.load(file, environ).settings.limits.max_calls

    assert calls_of(tmp_path / "a", named) == 1
    assert calls_of(None, named) == 2
    assert calls_of(None, systemd) == 256
    (tmp_path / "etc/kvstored.toml").write_text("[limits]\nmax_calls = 3\n")
    assert calls_of(None, systemd) == 3
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path / "missing", systemd)


def test_check_config_prints_toml_with_secrets_masked(tmp_path: Path) -> None:
    file = tmp_path / "k.toml"
    file.write_text(f'[daemon]\ndeployment_secret = "{TOKEN}"\n{NAMESPACE}')
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "KVSTORED_RAM__CAP_BYTES": "32MiB"}
    done = _run("check-config", "--config", str(file), environ=environ)
    assert (done.returncode, done.stderr) == (0, "")
    assert TOKEN not in done.stdout
    shown = tomllib.loads(done.stdout)
    assert shown["ram"]["cap_bytes"] == 32 << 20
    assert shown["namespace"][1]["tokens"] == ["********"]
    assert "KVSTORED_RAM__CAP_BYTES" in done.stdout
    assert not (tmp_path / "state").exists()


def test_mistakes_end_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "KVSTORED_RAM__CAP_BYTES": "1TiB"}
    for command in ("check-config", "serve"):
        done = _run(command, environ={**environ, "KVSTORED_LOG__LEVEL": "loud"})
        assert done.returncode == 2
        assert "ram.cap_bytes" in done.stderr
        assert "log.level" in done.stderr
        assert "Traceback" not in done.stderr
    assert _run("sever", environ={}).returncode == 2
