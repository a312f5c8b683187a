"""Who has a segment's descriptor can read it and nothing else, whoever they are."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import ram_seal_trial as trial

from kvstored.errors import DataDirectoryError
from kvstored.tiers.ram import RamTier, probe, segment
from kvstored.tiers.ram.segment import F_SEAL_FUTURE_WRITE, SEALS

ROOT, DAEMON, OTHER = 0, 65_533, 65_534
WITHOUT_FUTURE_WRITE = SEALS & ~F_SEAL_FUTURE_WRITE

Report = dict[str, object]


def run_trial(owner_uid: int, client_uid: int, seals: int = SEALS) -> tuple[Report, Report]:
    """What the owner saw of its segment, and what the client could do to it."""
    if os.getuid() != ROOT and {owner_uid, client_uid} != {os.getuid()}:
        pytest.skip("only root can become another user")
    ends = socket.socketpair()
    roles = (["owner", owner_uid, seals], ["client", client_uid])
    # Both start as root, as the other user may not be able to read the interpreter.
    processes = [
        subprocess.Popen(
            [sys.executable, trial.__file__, role, str(end.fileno()), *map(str, arguments)],
            pass_fds=[end.fileno()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(segment.__file__).parents[3])},
        )
        for end, (role, *arguments) in zip(ends, roles, strict=True)
    ]
    for end in ends:
        end.close()
    owner, client = (json.loads(p.communicate(timeout=60)[0]) for p in processes)
    return owner, client


@pytest.mark.parametrize(
    ("owner_uid", "client_uid"),
    [
        pytest.param(os.getuid(), os.getuid(), id="same-user-as-here"),
        pytest.param(ROOT, OTHER, id="other-user"),
        pytest.param(DAEMON, DAEMON, id="same-user"),
        pytest.param(DAEMON, OTHER, id="other-user-of-plain-user"),
        pytest.param(DAEMON, ROOT, id="root"),
    ],
)
def test_a_client_can_only_read(owner_uid: int, client_uid: int) -> None:
    owner, client = run_trial(owner_uid, client_uid)
    assert client == {"readable": True, "done": []}
    assert owner == {
        "mode": 0o600,
        "content": True,
        "size": trial.SIZE_BYTES,
        "allocated": trial.SIZE_BYTES,
        "seals": SEALS,
    }


def test_the_trial_would_notice_missing_seals() -> None:
    """Control: the same attempts go through where the seals that stop them are left off."""
    _, client = run_trial(os.getuid(), os.getuid(), seals=0)
    assert isinstance(client["done"], list)
    assert {"pwrite", "map writable", "truncate", "grow", "punch", "add a seal"} <= {
        *client["done"]
    }
    owner, client = run_trial(os.getuid(), os.getuid(), seals=WITHOUT_FUTURE_WRITE)
    assert isinstance(client["done"], list)
    assert {"pwrite", "reopen and write", "reopen and map", "punch"} <= {*client["done"]}
    assert not owner["content"]


async def test_every_segment_of_a_tier_is_sealed_before_it_can_be_had() -> None:
    tier = RamTier(8 << 20)
    await tier.open()
    for length_bytes in (4096, 5000, 1 << 20):
        (place,) = await tier.reserve("one", [length_bytes])
        assert isinstance(place, int)
        where = tier.locate(place)
        fd = tier.segment_fd(where.segment_id)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert not os.get_inheritable(fd)
        tier.view(place)[:4] = b"mine"
        assert os.pread(fd, 4, where.offset) == b"mine"
    await tier.close()


@pytest.mark.parametrize("seals", [0, WITHOUT_FUTURE_WRITE])
async def test_open_refuses_a_kernel_whose_seals_do_not_hold(
    monkeypatch: pytest.MonkeyPatch, seals: int
) -> None:
    monkeypatch.setattr(segment, "SEALS", seals)
    with pytest.raises(DataDirectoryError, match="seals were taken but are not there"):
        await RamTier(8 << 20).open()
    monkeypatch.setattr(probe, "SEALS", seals)
    with pytest.raises(DataDirectoryError, match="sealed memory could be written"):
        await RamTier(8 << 20).open()
