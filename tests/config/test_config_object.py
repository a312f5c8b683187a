"""Section [object]."""

from __future__ import annotations

from pathlib import Path

import pytest
from config.config_helpers import load, problems

from kvstored import config
from kvstored.tiers.object.settings import ObjectSettings

MIB = 1 << 20


def test_without_a_url_there_is_no_bucket(tmp_path: Path) -> None:
    assert load(tmp_path).settings.object == ObjectSettings()


def test_every_setting_arrives(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        """
[object]
url = "s3://cache/team"
endpoint = "http://127.0.0.1:9000"
region = "eu-north-1"
allow_http = true
cap_bytes = "2TiB"
ttl_s = 3600
write_back = "second_hit"
max_backlog_bytes = "1GiB"
parallel = 8
range_bytes = "4MiB"
connect_timeout_s = 3
range_timeout_s = 4
head_timeout_s = 0.5
negative_ttl_s = 1
janitor = false
promote_nvme = false
""",
    )
    assert loaded.settings.object == ObjectSettings(
        "s3://cache/team",
        "http://127.0.0.1:9000",
        "eu-north-1",
        True,
        2 << 40,
        3600.0,
        "second_hit",
        1 << 30,
        8,
        4 * MIB,
        3.0,
        4.0,
        0.5,
        1.0,
        False,
        False,
    )
    assert 'url = "s3://cache/team"' in config.render(loaded.effective)


def test_the_environment_names_a_bucket(tmp_path: Path) -> None:
    settings = load(tmp_path, environ={"KVSTORED_OBJECT__URL": "file:///srv/kv"}).settings
    assert settings.object.url == "file:///srv/kv"


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIA:hunter2hunter2@cache/team",
        "s3://cache/team?X-Amz-Signature=hunter2hunter2",
        "https://cache.example/hunter2hunter2",
        "s3:///hunter2hunter2",
        "file://hunter2hunter2/srv",
        "hunter2hunter2",
        "s3://[hunter2hunter2",
    ],
)
def test_a_url_that_is_none_is_refused_and_never_shown(tmp_path: Path, url: str) -> None:
    (problem,) = problems(tmp_path, f'[object]\nurl = "{url}"\n')
    assert problem.startswith("object.url (")
    assert "hunter2" not in problem


def test_a_password_in_the_endpoint_is_refused_and_never_shown(tmp_path: Path) -> None:
    text = '[object]\nurl = "s3://b"\nendpoint = "https://me:hunter2hunter2@host:1"\n'
    (problem,) = problems(tmp_path, text)
    assert problem.startswith("object.endpoint (")
    assert "hunter2" not in problem


def test_plain_http_has_to_be_meant(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, '[object]\nurl = "s3://b"\nendpoint = "http://h:1"\n')
    assert "object.allow_http" in problem


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ('range_bytes = "16MiB"', "range_bytes"),
        ('write_back = "most"', "write_back"),
        ("parallel = 0", "parallel"),
        ("max_backlog_bytes = 0", "max_backlog_bytes"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, setting: str, key: str) -> None:
    (problem,) = problems(tmp_path, f'[object]\nurl = "s3://b"\n{setting}\n')
    assert problem.startswith(f"object.{key} ")
