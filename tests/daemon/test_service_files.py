"""systemd unit, container files and configuration page agree with the daemon."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from kvstored import config
from kvstored.config.host import Host
from kvstored.looplag import LoopLag
from kvstored.server.metrics import MetricsCollector, MetricsSources, Snapshot

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd/kvstored.service"
PAGE = (ROOT / "docs/configuration.md").read_text()


def _load(folder: Path, environ: dict[str, str]) -> config.Loaded:
    host = Host(8 << 30, "the test's memory", folder / "state", folder / "run")
    return config.load(None, environ, host=host)


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # keys as they are written
    parser.read(UNIT)
    return parser["Service"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_unit_verifies_clean() -> None:
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_unit_leaves_the_daemon_time_to_stop(
    unit: configparser.SectionProxy, tmp_path: Path
) -> None:
    ours = _load(tmp_path, {}).settings.daemon.stop_timeout_s
    assert float(unit["TimeoutStopSec"].removesuffix("s")) > ours
    assert unit["Type"] == "notify"
    assert unit["NotifyAccess"] == "main"
    assert unit["Restart"] == "on-failure"
    assert unit["User"] == "kvstored" != "root"
    assert {"RuntimeDirectory", "StateDirectory", "LimitNICE", "LimitNOFILE", "WatchdogSec"} <= set(
        unit
    )
    account = (ROOT / "systemd/kvstored.sysusers.conf").read_text()
    assert re.search(r"^u kvstored ", account, re.MULTILINE)


def test_what_the_unit_sets_is_what_the_daemon_reads(
    unit: configparser.SectionProxy, tmp_path: Path
) -> None:
    """systemd makes these variables of the unit's directories."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/kvstored.toml").write_text('[ram]\ncap_bytes = "16MiB"\n')
    environ = {
        "RUNTIME_DIRECTORY": f"/run/{unit['RuntimeDirectory']}",
        "STATE_DIRECTORY": str(tmp_path / unit["StateDirectory"]),
        "CONFIGURATION_DIRECTORY": str(tmp_path / "etc"),
    }
    settings = config.load(None, environ).settings
    assert settings.listen.unix == Path("/run/kvstored/kvstored.sock")
    assert settings.daemon.data_dir == tmp_path / "kvstored"
    assert settings.ram.cap_bytes == 16 << 20


def test_image_is_built_of_what_there_is_and_is_not_root() -> None:
    lines = (ROOT / "docker/Dockerfile").read_text().splitlines()
    copied = [line.split()[1:-1] for line in lines if re.match(r"COPY (?!--from)", line)]
    sources = {source for group in copied for source in group}
    assert {"pyproject.toml", "kvstored", "client"} <= sources
    allowed = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in allowed, source
    assert "USER kvstored" in lines
    assert sum(line.startswith("FROM ") for line in lines) == 2
    assert any(line.startswith("HEALTHCHECK") for line in lines)


def test_compose_file_configures_a_daemon_and_publishes_on_loopback(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    service = compose["services"]["kvstored"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert int(service["stop_grace_period"].removesuffix("s")) > 30
    (tmp_path / "token").write_text("a-token-of-the-test")
    environ = {
        name: value.replace("/run/secrets/kvstored_token", str(tmp_path / "token"))
        for name, value in service["environment"].items()
    }
    settings = _load(tmp_path, environ).settings
    assert str(settings.listen.tcp) == "0.0.0.0:9440"
    assert settings.namespaces[0].tokens
    limit = re.fullmatch(r"(\d+)g", service["mem_limit"])
    assert limit is not None
    assert settings.ram.cap_bytes + (1 << 30) <= int(limit[1]) << 30
    volumes = {volume.split(":")[0] for volume in service["volumes"]}
    assert volumes <= set(compose["volumes"])


def test_page_describes_every_setting(tmp_path: Path) -> None:
    for setting in _load(tmp_path, {}).effective:
        section = setting.table.strip("[]")
        name = setting.key if section == "namespace" else f"{section}.{setting.key}"
        assert f"`{name}`" in PAGE, name


def test_page_names_every_metric() -> None:
    registry = CollectorRegistry()
    sources = MetricsSources(
        Snapshot, lambda: LoopLag(0, 0, 0, 0), lambda: {"task": 0}, lambda: "ready", 0.0
    )
    registry.register(MetricsCollector(sources))
    named = set()
    for pattern in re.findall(r"`(kvstored_[a-z_{},]+)`", PAGE):
        head, _, rest = pattern.partition("{")
        inner, _, tail = rest.partition("}")
        named |= {head + word + tail for word in inner.split(",")} if rest else {pattern}
    text = generate_latest(registry).decode()
    exported = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert named == exported
