"""Answers for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from kvstored_client import States

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Row = Iterable[object]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: float) -> str:
    """Bytes with a unit."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


def table(head: Row, rows: Iterable[Row]) -> str:
    """Columns, left-aligned."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def _rows(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list | tuple)
    return [dict(item) for item in value]


def _bytes(row: dict[str, object], name: str) -> str:
    value = row[name]
    assert isinstance(value, int)
    return size(value)


def _names(value: object) -> str:
    assert isinstance(value, list)
    return ",".join(map(str, value))


def status(answer: dict[str, Json]) -> str:
    """One picture of the daemon."""
    uptime_ms = answer["uptime_ms"]
    assert isinstance(uptime_ms, int)
    head = (
        f"kvstored {answer['version']}, {answer['phase']}, up {uptime_ms / 1000:.0f} s\n"
        f"{answer['chunks']} chunks, {answer['objects']} objects, {answer['families']} families, "
        f"{_bytes(dict(answer), 'dirty_bytes')} not yet durable, "
        f"{_bytes(dict(answer), 'leased_bytes')} leased"
    )
    figures = ("charged_bytes", "footprint_bytes", "cap_bytes")
    tiers = table(
        ("tier", "charged", "footprint", "cap", "objects", "health", "mode"),
        (
            (t["name"], *(_bytes(t, f) for f in figures), t["objects"], t["health"], t["mode"])
            for t in _rows(answer["tiers"])
        ),
    )
    namespaces = table(
        ("namespace", "tier", "charged", "cap"),
        (
            (n["name"], n["tier"], _bytes(n, "charged_bytes"), _bytes(n, "cap_bytes"))
            for n in _rows(answer["namespaces"])
        ),
    )
    return f"{head}\n\n{tiers}\n\n{namespaces}"


def tiers(rows: list[dict[str, Json]], bucket: dict[str, Json] | None) -> str:
    """The tiers, and what passes between this node and the bucket."""
    figures = ("charged_bytes", "footprint_bytes", "cap_bytes")
    lines = table(
        ("tier", "charged", "footprint", "cap", "objects", "health", "mode"),
        (
            (
                t["name"],
                *(_bytes(dict(t), f) for f in figures),
                t["objects"],
                t["health"],
                t["mode"],
            )
            for t in rows
        ),
    )
    if bucket is None:
        return f"{lines}\n\nno bucket (object.url)"
    shown: dict[str, object] = dict(bucket)
    outcomes = table(
        ("request", "outcome", "count"),
        ((o["verb"], o["outcome"], o["count"]) for o in _rows(shown["outcomes"])),
    )
    return (
        f"{lines}\n\n{shown['url']}: {shown['health']}\n"
        f"owed: {shown['backlog_objects']} objects, {_bytes(shown, 'backlog_bytes')}; "
        f"{shown['in_flight']} under way\n"
        f"since the start: {_bytes(shown, 'uploaded_bytes')} up, "
        f"{_bytes(shown, 'fetched_bytes')} down\n"
        f"janitor: {shown['janitor']}\n\n{outcomes}"
    )


def usage(answer: dict[str, Json]) -> str:
    """What a namespace holds."""
    tiers = table(
        ("tier", "charged", "cap", "objects"),
        (
            (t["tier"], _bytes(t, "charged_bytes"), _bytes(t, "cap_bytes"), t["objects"])
            for t in _rows(answer["tiers"])
        ),
    )
    tenants = table(
        ("tenant", "tier", "charged", "byte-seconds"),
        (
            (t["tenant"], t["tier"], _bytes(t, "charged_bytes"), f"{t['byte_seconds']:.3g}")
            for t in _rows(answer["tenants"])
        ),
    )
    return f"{tiers}\n\n{tenants}"


def listing(answer: dict[str, Json]) -> str:
    """Chunks, one a line."""
    lines = table(
        ("key", "family", "depth", "end token", "size", "tier", "tenant", "parts"),
        (
            (
                e["key"],
                str(e["family"])[:16],
                e["depth"],
                e["end_token"],
                _bytes(e, "nbytes"),
                e["tier"],
                e["tenant"],
                _names(e["parts"]),
            )
            for e in _rows(answer["entries"])
        ),
    )
    return lines if answer["complete"] else f"{lines}\n… and more: raise --limit"


def chunks(verb: str, answer: dict[str, Json], states: bytes) -> str:
    """What of a run of chunks is there."""
    nbytes = answer["bytes"]
    assert isinstance(nbytes, int)
    counts = ", ".join(f"{n} {name.lower()}" for name, n in States(states).counts().items())
    reason = f"; the first that is not: {answer['reason']}" if answer["reason"] else ""
    return f"{verb} {answer['chunks']} of {len(states)} chunks, {size(nbytes)}{reason}\n{counts}"


def put(answer: dict[str, Json]) -> str:
    """What became of a put."""
    line = f"stored {answer['stored']}, existed {answer['existed']}, refused {answer['refused']}"
    reason = " ".join(str(answer[k]) for k in ("reason", "detail") if answer[k])
    return f"{line}: {reason}" if reason else line


def volumes(rows: list[dict[str, Json]], write_amplification: float) -> str:
    """The volumes of the NVMe tier."""
    if not rows:
        return "there is no NVMe tier, hence no volume"
    figures = ("charged_bytes", "footprint_bytes", "cap_bytes")
    lines = table(
        ("volume", "state", "charged", "footprint", "cap", "objects", "reads", "writes", "errors",
         "mode", "directory"),
        (
            (
                v["name"], v["state"], *(_bytes(dict(v), f) for f in figures), v["objects"],
                _rate(v["read_bytes_per_s"]), _rate(v["write_bytes_per_s"]), _errors(v["errors"]),
                v["mode"], v["directory"],
            )
            for v in rows
        ),
    )  # fmt: skip
    said = [f"{v['name']}: {v['detail']}" for v in rows if v["detail"]]
    ratio = f"write amplification {write_amplification:.3f}" if write_amplification else ""
    return "\n\n".join(filter(None, (lines, "\n".join(said), ratio)))


def _rate(value: Json) -> str:
    assert isinstance(value, int | float)
    return f"{size(value)}/s" if value else "-"


def _errors(value: Json) -> str:
    return ",".join(f"{row['stage']} {row['count']}" for row in _rows(value)) or "-"


def scrubs(rows: list[dict[str, Json]]) -> str:
    """What became of a scrub."""
    return table(
        ("volume", "scrub", "objects", "read", "rotten", "unreadable"),
        (
            (
                row["volume"],
                row["state"],
                row["scrubbed_objects"],
                _bytes(dict(row), "scrubbed_bytes"),
                row["dropped_objects"],
                row["unreadable_objects"],
            )
            for row in rows
        ),
    )
