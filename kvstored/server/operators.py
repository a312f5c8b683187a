"""The operators' verbs that are about volumes: list them, drain one, scrub them.

On the verbs' loop. Draining and scrubbing are the tier's work and go on by themselves: a call
begins or looks, and never waits for a device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstored.errors import BadRequest, Draining
from kvstored.server.auth import Caller
from kvstored.server.ports import OperatorHost, VolumesPort
from kvstored.tiers.nvme.drains import LastVolume, UnknownVolume
from kvstored.tiers.nvme.scrub import PassEnd, ScrubStatus
from kvstored.tiers.nvme.status import VolumeState, VolumeStatus
from kvstored_client.proto import admin_pb2 as admin

_log = logging.getLogger(__name__)

RUNS_KEPT = 16
MAX_PURGE_S = 110.0
"""What a purge may take, for callers that give it longer."""


@dataclass(slots=True)
class _Part:
    """One volume of a run. `ended` None: it was away when the run began."""

    volume: str
    ended: asyncio.Future[ScrubStatus] | None
    before: ScrubStatus
    latest: ScrubStatus

    @property
    def state(self) -> str:
        """See ScrubProgress.state."""
        if self.ended is None:
            return "away"
        if not self.ended.done():
            return "running"
        end = self.latest.last_end
        # A scrub that ended before its first pass did has no end to show.
        word: str = (PassEnd.CUT_SHORT if end is PassEnd.NONE else end).value
        return word


@dataclass(slots=True)
class _Runs:
    """The scrubs that were asked for, the last of them."""

    parts: dict[int, list[_Part]] = field(default_factory=dict)
    last: int = 0

    def add(self, parts: list[_Part]) -> int:
        """Keep one; its number."""
        self.last += 1
        self.parts[self.last] = parts
        self.parts.pop(self.last - RUNS_KEPT, None)
        return self.last


class Operators:
    """Serves Admin.ListVolumes, DrainVolume, Scrub and Purge. `volumes` None: there is no NVMe
    tier.
    """

    def __init__(self, host: OperatorHost, volumes: VolumesPort | None) -> None:
        self._host = host
        self._volumes = volumes
        self._runs = _Runs()

    async def list_volumes(
        self, _request: admin.ListVolumesRequest, caller: Caller
    ) -> admin.ListVolumesReply:
        """Every volume as it is now; also while the daemon drains."""
        with self._host.observed("list_volumes", caller):
            self._host.auth.require_admin(caller.token, caller.transport)
            return volumes_reply(self._volumes)

    async def drain_volume(
        self, request: admin.DrainVolumeRequest, caller: Caller
    ) -> admin.DrainVolumeReply:
        """Begin to drain one."""
        with self._host.observed("drain_volume", caller):
            volumes = self._allowed(caller)
            try:
                await self._host.finish(volumes.drain(request.name))
            except (UnknownVolume, LastVolume) as error:
                raise BadRequest(error.message, error.hint) from error
            _log.info("draining a volume", extra={"fields": {"volume": request.name}})
            return admin.DrainVolumeReply()

    async def scrub(self, request: admin.ScrubRequest, caller: Caller) -> admin.ScrubReply:
        """Begin a run, or tell how far one is."""
        with self._host.observed("scrub", caller):
            volumes = self._allowed(caller)
            run = request.run or self._begin(volumes, request)
            parts = self._runs.parts.get(run)
            if parts is None:
                raise BadRequest(f"there is no scrub {run}", "begin one, with run 0")
            return _progress(volumes, run, parts)

    async def purge(self, request: admin.PurgeRequest, caller: Caller) -> admin.PurgeReply:
        """Drop everything of a namespace or tenant. Runs to its end once begun."""
        with self._host.observed("purge", caller):
            self._admit(caller)
            deadline = min(caller.deadline, caller.started + MAX_PURGE_S)
            named = {"namespace": request.namespace, "tenant": request.tenant}
            _log.info("purging", extra={"fields": named})
            work = self._host.store.purge(request.namespace, request.tenant, deadline)
            chunks, objects = await self._host.finish(work)
            return admin.PurgeReply(chunks=chunks, bucket_objects=objects)

    def _admit(self, caller: Caller) -> None:
        """Raises Unauthenticated or Draining."""
        self._host.auth.require_admin(caller.token, caller.transport)
        if self._host.draining:
            raise Draining("the daemon is stopping", "call again after a restart")

    def _allowed(self, caller: Caller) -> VolumesPort:
        """The volumes. Raises Unauthenticated, Draining or BadRequest."""
        self._admit(caller)
        if self._volumes is None:
            raise BadRequest("there is no NVMe tier, hence no volume", "set nvme.enabled")
        return self._volumes

    def _begin(self, volumes: VolumesPort, request: admin.ScrubRequest) -> int:
        known = volumes.volumes()
        chosen = [v for v in known if request.volume == v.name]
        if not request.volume:
            chosen = [v for v in known if v.state is not VolumeState.DRAINED]
        elif not chosen:
            names = ", ".join(v.name for v in known)
            raise BadRequest(f"there is no volume {request.volume}", f"the volumes are: {names}")
        _log.info("scrubbing", extra={"fields": {"volumes": ",".join(v.name for v in chosen)}})
        return self._runs.add([_part(volumes, v, request.rate_bytes_per_s) for v in chosen])


def _part(volumes: VolumesPort, volume: VolumeStatus, rate_bytes_per_s: int) -> _Part:
    before = volumes.scrub_status(volume.number) or ScrubStatus()
    return _Part(volume.name, volumes.scrub(volume.number, rate_bytes_per_s), before, before)


def _progress(volumes: VolumesPort, run: int, parts: Iterable[_Part]) -> admin.ScrubReply:
    reply = admin.ScrubReply(run=run, done=True)
    known = {v.name: v for v in volumes.volumes()}
    for part in parts:
        volume = known[part.volume]
        _update(part, volumes.scrub_status(volume.number))
        now, before = part.latest, part.before
        state = part.state
        reply.done &= state != "running"
        reply.volumes.add(
            volume=part.volume,
            state=state,
            objects=volume.objects,
            scrubbed_objects=now.scrubbed_objects - before.scrubbed_objects,
            scrubbed_bytes=now.scrubbed_bytes - before.scrubbed_bytes,
            dropped_objects=now.dropped_objects - before.dropped_objects,
            dropped_bytes=now.dropped_bytes - before.dropped_bytes,
            unreadable_objects=now.unreadable_objects - before.unreadable_objects,
        )
    return reply


def _update(part: _Part, now: ScrubStatus | None) -> None:
    if part.ended is None:
        return
    if part.ended.done():
        part.latest = part.ended.result()
    elif now is not None and now.scrubbed_objects >= part.latest.scrubbed_objects:
        part.latest = now  # less would be the scrub of a volume that was away in between


def volumes_reply(volumes: VolumesPort | None) -> admin.ListVolumesReply:
    """The picture of all volumes."""
    reply = admin.ListVolumesReply()
    statuses = volumes.volumes() if volumes is not None else []
    for volume in statuses:
        message = reply.volumes.add(
            number=volume.number,
            name=volume.name,
            directory=str(volume.directory),
            state=volume.state.value,
            detail=volume.detail,
            mode=volume.mode,
            cap_bytes=volume.cap_bytes,
            footprint_bytes=volume.footprint_bytes,
            charged_bytes=volume.charged_bytes,
            objects=volume.objects,
            read_bytes_per_s=volume.read_bytes_per_s,
            write_bytes_per_s=volume.write_bytes_per_s,
            errors=[
                admin.VolumeErrors(stage=stage, count=count)
                for stage, count in sorted(volume.errors.items())
            ],
            read_bytes=volume.read_bytes,
            written_bytes=volume.written_bytes,
            accepted_bytes=volume.accepted_bytes,
            regions_total=volume.regions_total,
            regions_free=volume.regions_free,
            regions_abandoned=volume.regions_abandoned,
        )
        assert volumes is not None
        scrub = volumes.scrub_status(volume.number)
        if scrub is not None:
            message.scrub.CopyFrom(_scrub_message(scrub))
    accepted_bytes = sum(v.accepted_bytes for v in statuses)
    if accepted_bytes:
        reply.write_amplification = sum(v.written_bytes for v in statuses) / accepted_bytes
    return reply


def _scrub_message(scrub: ScrubStatus) -> admin.ScrubStatus:
    return admin.ScrubStatus(
        running=scrub.running,
        on_demand=scrub.on_demand,
        last_end=scrub.last_end.value,
        last_done_ms=scrub.last_done_ms,
        passes_done=scrub.passes_done,
        pass_objects=scrub.pass_objects,
        pass_bytes=scrub.pass_bytes,
        scrubbed_objects=scrub.scrubbed_objects,
        scrubbed_bytes=scrub.scrubbed_bytes,
        dropped_objects=scrub.dropped_objects,
        dropped_bytes=scrub.dropped_bytes,
        unreadable_objects=scrub.unreadable_objects,
    )
