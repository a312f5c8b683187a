"""[[nvme.volumes]]: what is taken, what is refused and why, and what is only missing."""

from __future__ import annotations

import os
import threading
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from config.config_helpers import GIB, load, problems

from kvstored import config
from kvstored.config import VolumeSettings, disks
from kvstored.config import host as hosts
from kvstored.config.disks import Disk

MIB = 1 << 20


def listed(*tables: str) -> str:
    return "".join(f"[[nvme.volumes]]\n{table}\n" for table in tables)


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return made(tmp_path / "a")


@pytest.fixture
def b(tmp_path: Path) -> Path:
    return made(tmp_path / "b")


def made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def system(
    monkeypatch: pytest.MonkeyPatch,
    device_of: dict[Path, int],
    free_bytes: int,
    held_bytes: int,
    used: Sequence[Path] = (),
) -> None:
    """Let directories be on file systems of a size of the test's own."""

    def look_at(paths: Iterable[Path]) -> dict[Path, Disk]:
        return {
            path: Disk(
                path, "", "", device_of[path], hash(path), free_bytes, held_bytes, path in used
            )
            for path in paths
        }

    monkeypatch.setattr(disks, "look_at", look_at)


def test_without_a_list_there_is_one_in_the_data_directory(tmp_path: Path) -> None:
    nvme = load(tmp_path, '[nvme]\ncap_bytes = "32MiB"').settings.nvme
    (volume,) = nvme.volumes
    path = tmp_path / "state/nvme"
    assert volume == VolumeSettings("nvme", path, 32 * MIB, drain=False, listed=False)
    assert nvme.cap_bytes == 32 * MIB
    auto, silent = (load(tmp_path, toml).settings.nvme for toml in ('[nvme]\ncap_bytes="auto"', ""))
    assert auto == silent
    off = load(tmp_path, "[nvme]\nenabled = false").settings.nvme
    assert (off.volumes, off.scrub_bytes_per_s) == ((), 0)
    assert nvme.scrub_bytes_per_s == 8 * MIB
    assert load(tmp_path, "[nvme]\nscrub_bytes_per_s = 0").settings.nvme.scrub_bytes_per_s == 0


def test_volumes_are_what_the_list_says_in_its_order(tmp_path: Path, a: Path, b: Path) -> None:
    toml = listed(
        f'path = "{b}"\nname = "fast"\ncap_bytes = "48MiB"\ndrain = true',
        f'path = "{a}"\ncap_bytes = 16777216',
    )
    nvme = load(tmp_path, toml).settings.nvme
    assert nvme.volumes == (
        VolumeSettings("fast", b, 48 * MIB, drain=True),
        VolumeSettings("a", a, 16 * MIB, drain=False),
    )
    assert (nvme.enabled, nvme.cap_bytes) == (True, 64 * MIB)
    off = load(tmp_path, "[nvme]\nenabled = false\n" + toml).settings.nvme
    assert (off.cap_bytes, off.volumes) == (0, ())


def test_namespaces_may_have_all_of_them(tmp_path: Path, a: Path, b: Path) -> None:
    both = [f'path = "{path}"\ncap_bytes = "16MiB"' for path in (a, b)]
    toml = listed(*both) + '[[namespace]]\nname = "n"\n'
    by_name = {n.name: n for n in load(tmp_path, toml).settings.namespaces}
    assert by_name["n"].nvme_cap_bytes == 32 * MIB
    assert load(tmp_path, toml + 'nvme_cap_bytes = "20MiB"').settings.namespaces
    assert "to 32 MiB" in problems(tmp_path, toml + 'nvme_cap_bytes = "40MiB"')[0]


def test_environment_changes_and_makes_volumes(tmp_path: Path, a: Path, b: Path) -> None:
    toml = listed(f'path = "{a}"\ncap_bytes = "48MiB"')
    environ = {
        "KVSTORED_NVME__VOLUMES__A__CAP_BYTES": "16MiB",
        "KVSTORED_NVME__VOLUMES__A__DRAIN": "true",
        "KVSTORED_NVME__VOLUMES__MORE__PATH": str(b),
        "KVSTORED_NVME__VOLUMES__MORE__CAP_BYTES": "32MiB",
    }
    assert load(tmp_path, toml, environ).settings.nvme.volumes == (
        VolumeSettings("a", a, 16 * MIB, drain=True),
        VolumeSettings("more", b, 32 * MIB, drain=False),
    )
    for variable in ("VOLUMES", "VOLUMES__A", "VOLUMES__A__B__C", "VOLUMES____PATH"):
        (problem,) = problems(tmp_path, toml, {f"KVSTORED_NVME__{variable}": str(b)})
        assert problem.endswith("write KVSTORED_NVME__VOLUMES__NAME__KEY")


def test_without_a_cap_volumes_share_half_of_their_file_system(
    tmp_path: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = listed(f'path = "{a}"', f'path = "{b}"\ncap_bytes = "auto"')

    def caps(devices: tuple[int, int], free_bytes: int) -> list[int]:
        system(monkeypatch, dict(zip((a, b), devices, strict=True)), free_bytes, GIB)
        return [v.cap_bytes for v in load(tmp_path, toml).settings.nvme.volumes]

    assert caps((1, 2), 3 * GIB) == [2 * GIB] * 2
    assert caps((1, 1), 3 * GIB) == [1280 * MIB] * 2  # 3 free, and 1 held by each
    assert caps((1, 2), 900 * GIB) == [10 * GIB] * 2


@pytest.mark.parametrize("devices", [(1, 1), (1, 2)])
def test_caps_on_one_file_system_fit_together(
    tmp_path: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[int, int]
) -> None:
    system(monkeypatch, dict(zip((a, b), devices, strict=True)), 3 * GIB, GIB)
    toml = listed(f'path = "{a}"\ncap_bytes = "3GiB"', f'path = "{b}"\ncap_bytes = "3GiB"')
    if devices == (1, 2):
        loaded = load(tmp_path, toml)
        assert loaded.settings.nvme.cap_bytes == 6 * GIB
        assert loaded.warnings == ()
        (problem,) = problems(tmp_path, toml.replace("3GiB", "5GiB", 1))
        assert problem.startswith('nvme.volumes.a.cap_bytes = "5GiB"')
        assert f"5 GiB is above what the file system of {a} can hold: 4 GiB" in problem
        return
    (problem,) = problems(tmp_path, toml)
    assert problem.startswith('nvme.volumes.b.cap_bytes = "3GiB"')
    assert f"6 GiB, with those of a, is above what the file system of {b} can hold: 5" in problem
    loaded = load(tmp_path, toml.replace("3GiB", "2GiB"))
    assert loaded.warnings == (
        "volumes a, b are on one file system: they share its speed, and fail together",
    )


def test_a_disk_that_others_filled_is_a_smaller_cap(
    tmp_path: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a volume already; one that is to be made does not fit, as ever."""
    toml = listed(f'path = "{a}"\ncap_bytes = "5GiB"', f'path = "{b}"\ncap_bytes = "3GiB"')
    system(monkeypatch, {a: 1, b: 2}, 3 * GIB, GIB, used=[a])
    loaded = load(tmp_path, toml)
    assert loaded.settings.nvme.cap_bytes == 8 * GIB
    (warning,) = loaded.warnings
    assert warning.startswith(f"a: 5 GiB is above what the file system of {a} can hold: 4 GiB")
    assert "smaller" in warning
    system(monkeypatch, {a: 1, b: 1}, 3 * GIB, GIB, used=[a])
    assert load(tmp_path, toml).warnings[0].startswith("a, b: 8 GiB is above")
    (problem,) = problems(tmp_path, toml.replace("3GiB", "9GiB"))
    assert "14 GiB, with those of a, is above" in problem
    assert problem.startswith("nvme.volumes.b.cap_bytes")


def test_the_only_volume_may_be_on_a_disk_that_others_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "disk_for", lambda _: 20 * MIB)
    toml = '[nvme]\ncap_bytes = "32MiB"'
    assert "is above what the disk" in problems(tmp_path, toml)[0]
    (made(tmp_path / "state/nvme") / "superblock").touch()
    loaded = load(tmp_path, toml)
    assert loaded.settings.nvme.cap_bytes == 32 * MIB
    assert "32 MiB is above what the file system" in loaded.warnings[0]


def test_one_file_system_is_noticed_by_itself(tmp_path: Path, a: Path, b: Path) -> None:
    toml = listed(f'path = "{a}"\ncap_bytes = "16MiB"', f'path = "{b}"\ncap_bytes = "900PiB"')
    assert "900 PiB, with those of a," in problems(tmp_path, toml)[0]


@pytest.mark.parametrize(
    ("toml", "starts", "says"),
    [
        ('path = "PATH"\nname = "two words"', 'nvme.volumes.two words.name = "two words"', "1 to"),
        ('path = "PATH"\nname = 3', "nvme.volumes.3.name = 3", "write a text in quotes"),
        ('path = "mnt/x"', 'nvme.volumes.x.path = "mnt/x"', "write an absolute path"),
        ('name = "x"', "nvme.volumes.x.path", "give the absolute path"),
        ("drain = true", "nvme.volumes.#1.path", "give the absolute path"),
        ('path = "/a\\u0000b"\nname = "x"', "nvme.volumes.x.path", "cannot hold a NUL"),
        ('path = ""\nname = "x"', 'nvme.volumes.x.path = ""', "give the absolute path"),
        ('path = "PATH"\ncap_byte = 1', "nvme.volumes.a.cap_byte = 1", "did you mean cap_bytes?"),
        ('path = "PATH"\ncap_bytes = "1MiB"', "nvme.volumes.a.cap_bytes", "must be from 16 MiB"),
        ('path = "PATH"\ncap_bytes = "lots"', "nvme.volumes.a.cap_bytes", 'such as "1GiB"'),
        ('path = "PATH"\ndrain = "soon"', "nvme.volumes.a.drain", "write true or false"),
        ('path = "PATH/file"', "nvme.volumes.file.path", "is not a directory"),
        ('path = "PATH/file/x"', "nvme.volumes.x.path", "cannot be used: Not a directory"),
        ('path = "PATH/.."\nname = "x"', "nvme.volumes.x.path", "must not hold daemon.data_dir"),
        ('path = "PATH/../state/volumes/x"', "nvme.volumes.x.path", "is the daemon's own"),
    ],
)
def test_one_fault_of_a_volume_one_message(
    tmp_path: Path, a: Path, toml: str, starts: str, says: str
) -> None:
    (a / "file").touch()
    found = problems(tmp_path, listed(toml.replace("PATH", str(a))))
    assert len(found) == 1, found
    assert found[0].startswith(starts)
    assert says in found[0]


def test_the_shape_of_the_table_is_named(tmp_path: Path, a: Path) -> None:
    (problem,) = problems(tmp_path, f'[nvme]\nvolumes = ["{a}"]')
    assert problem.endswith("write each volume as a table headed [[nvme.volumes]]")
    (problem,) = problems(tmp_path, f'[nvme.volumes]\npath = "{a}"')
    assert problem.endswith("write each volume as a table headed [[nvme.volumes]]")
    (problem,) = problems(tmp_path, f'[[nvme.volume]]\npath = "{a}"')
    assert "did you mean volumes?" in problem
    (problem,) = problems(tmp_path, '[nvme]\ncap_bytes = "1GiB"\n' + listed(f'path = "{a}"'))
    assert problem.startswith('nvme.cap_bytes = "1GiB"')
    assert "has a cap_bytes of its own" in problem


def test_names_differ(tmp_path: Path) -> None:
    paths = [made(tmp_path / folder / "kvstored") for folder in ("0", "1")]
    toml = listed(*(f'path = "{path}"\ncap_bytes = "16MiB"' for path in paths))
    (problem,) = problems(tmp_path, toml)
    assert problem.startswith('nvme.volumes "kvstored": 2 volumes of that name')
    assert load(tmp_path, toml + 'name = "other"').settings.nvme.volumes[1].name == "other"


def test_no_two_volumes_share_a_directory(tmp_path: Path, a: Path) -> None:
    inner = made(a / "inner")
    (tmp_path / "link").symlink_to(a)
    for other, says in (
        (a, "is the directory of another volume"),
        (tmp_path / "link", "is the directory of another volume"),
        (inner, f"lies in another volume's, {a}"),
        (tmp_path / "link/inner", f"lies in another volume's, {a}"),
        (tmp_path / "link/not-there", f"lies in another volume's, {a}"),
    ):
        tables = [f'path = "{path}"\ncap_bytes = "16MiB"' for path in (a, other)]
        (problem,) = problems(tmp_path, listed(tables[0], tables[1] + '\nname = "other"'))
        assert problem.startswith(f'nvme.volumes.other.path = "{other}"')
        assert says in problem
    tables = [f'path = "{path}"\ncap_bytes = "16MiB"' for path in (inner, a)]
    assert "lies above another volume's" in problems(tmp_path, listed(*tables))[0]


def test_one_directory_mounted_twice_is_noticed(
    tmp_path: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = {p: Disk(p, "", "", 1, 7, GIB, 0) for p in (a, b)}
    monkeypatch.setattr(disks, "look_at", lambda paths: {p: twice[p] for p in paths})
    tables = [f'path = "{path}"\ncap_bytes = "16MiB"' for path in (a, b)]
    assert f"is the directory of another volume, {a}" in problems(tmp_path, listed(*tables))[0]


def test_too_many_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / f"v{i}" for i in range(65)]
    tables = [f'path = "{path}"\ncap_bytes = "16MiB"' for path in paths]
    assert problems(tmp_path, listed(*tables)) == [
        "nvme.volumes: 65 volumes; at most 64 can be used"
    ]
    assert len(load(tmp_path, listed(*tables[1:])).settings.nvme.volumes) == 64


def test_a_missing_directory_is_no_mistake(tmp_path: Path, a: Path) -> None:
    gone = tmp_path / "mnt/gone"
    toml = listed(
        f'path = "{gone}"\ncap_bytes = "900PiB"', f'path = "{a}"\ncap_bytes = "16MiB"\ndrain = true'
    )
    loaded = load(tmp_path, toml)
    assert [v.path for v in loaded.settings.nvme.volumes] == [gone, a]
    (warning,) = loaded.warnings
    assert warning.startswith(f"volume gone: {gone} is not there")
    assert not gone.exists()
    assert os.listdir(a) == []
    (_, warning) = load(tmp_path, toml + "[[nvme.volumes]]\n" + f'path = "{gone}2"').warnings
    assert "gone2" in warning
    loaded = load(tmp_path, listed(f'path = "{gone}"'))
    assert loaded.settings.nvme.cap_bytes == 10 * GIB


def test_a_read_only_file_system_is_missing_and_others_do_not_wait(
    tmp_path: Path, a: Path, b: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cannot be used" in disks.look_at([Path("/proc/self")])[Path("/proc/self")].missing
    ends = threading.Event()
    real_ask = disks._ask

    def ask(path: Path) -> Disk:
        if path == a:
            ends.wait()
        return real_ask(path)

    monkeypatch.setattr(disks, "_ask", ask)
    try:
        found = disks.look_at([a, b], within_s=0.2)
    finally:
        ends.set()
    assert found[a].missing == "does not answer within 0.2 s: see its device"
    assert found[b].known


def test_check_config_shows_what_can_be_given_back(tmp_path: Path, a: Path, b: Path) -> None:
    tables = [
        f'path = "{path}"\ncap_bytes = "{size}"' for path, size in ((a, "16MiB"), (b, "auto"))
    ]
    environ = {"KVSTORED_NVME__VOLUMES__A__DRAIN": "true"}
    first = load(tmp_path, listed(*tables), environ)
    shown = config.render(first.effective)
    assert "KVSTORED_NVME__VOLUMES__A__DRAIN" in shown
    nvme = tomllib.loads(shown)["nvme"]
    assert [v["name"] for v in nvme["volumes"]] == ["a", "b"]
    again = "\n".join(line for line in shown.splitlines() if "secret" not in line)
    assert load(tmp_path, again).settings == first.settings
