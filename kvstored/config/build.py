"""From the tree of given values to validated settings. All faults are found in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvstored.config import host as hosts
from kvstored.config.bucket import build_object
from kvstored.config.host import Host
from kvstored.config.namespaces import build_namespaces
from kvstored.config.paths import absolute, absolute_or_none
from kvstored.config.reader import Report, Section, secretive, suggestion
from kvstored.config.secret import Secret
from kvstored.config.settings import (
    DaemonSettings,
    LimitSettings,
    ListenSettings,
    LocalSettings,
    LogSettings,
    RamSettings,
    Settings,
    TcpAddress,
    TenantSettings,
)
from kvstored.config.sizes import format_size
from kvstored.config.sources import (
    CONFIG_VARIABLE,
    NAMESPACE_TABLE,
    NVME_TABLE,
    PREFIX,
    VOLUMES_KEY,
    Tree,
)
from kvstored.config.volumes import build_nvme
from kvstored_client.target import local_socket_path

MIB = 1 << 20
GIB = 1 << 30

SECTIONS = ("daemon", "listen", "ram", "nvme", "object", "limits", "local", "tenants", "log")

LEAST_RAM_BYTES = MIB
DEFAULT_RAM_BYTES = GIB
DEFAULT_HTTP = "127.0.0.1:9441"
_HTTP_WANTED = f"write host:port, such as {DEFAULT_HTTP}, or the absolute path of a Unix socket"
LEAST_OBJECT_BYTES = 4096
LEAST_SECRET_CHARACTERS = 16
LONGEST_SOCKET_PATH_BYTES = 101  # sun_path of unix(7) less its NUL and "-admin"


def build(tree: Tree, host: Host, environ: Mapping[str, str]) -> tuple[Settings, Report]:
    """Settings of a tree of values on a host. They may be used only if `Report.problems` is empty.

    `environ` is where `token_env` looks.
    """
    report = Report(problems=list(tree.problems))
    tables = {name: tree.sections.get(name, {}) for name in SECTIONS}
    section = {name: Section(name, table, report) for name, table in tables.items()}

    daemon = _daemon(section["daemon"], host)
    listen = _listen(section["listen"], host)
    ram = _ram(section["ram"], host)
    nvme = build_nvme(section["nvme"], tree.volumes, daemon.data_dir, report)
    bucket = build_object(section["object"])
    limits = _limits(section["limits"], ram)
    local = _local(section["local"], ram)
    tenants = TenantSettings(section["tenants"].integer("max", 1000, least=1, most=100_000))
    log = LogSettings(
        section["log"].choice("level", "info", ("debug", "info", "warning", "error")),
        section["log"].choice("format", "logfmt", ("logfmt", "json")),
    )
    for name, each in section.items():
        each.finish(*((VOLUMES_KEY,) if name == NVME_TABLE else ()))
    namespaces = build_namespaces(
        tree.namespaces, ram, nvme, environ, report, implicit_default=daemon.default_namespace
    )
    settings = Settings(daemon, listen, ram, nvme, limits, local, tenants, log, namespaces, bucket)
    _unknown_sections(tree, report)
    _near_variables(environ, report)
    _across(settings, section["listen"], report)
    return settings, report


def _daemon(section: Section, host: Host) -> DaemonSettings:
    data_dir = section.text("data_dir", str(host.state_dir), absolute, "write an absolute path")
    if reason := hosts.unusable_reason(data_dir):
        section.complain(
            "data_dir",
            f"{data_dir} cannot be written: {reason}; choose a directory of the daemon's",
        )
    secret = _secret(section)
    stop_timeout_s = section.seconds("stop_timeout_s", 30.0, least=1.0, most=3600.0)
    default_namespace = section.boolean("default_namespace", default=True)
    return DaemonSettings(data_dir, secret, stop_timeout_s, default_namespace)


def _secret(section: Section) -> Secret | None:
    text = section.secret_text("deployment_secret")
    key = "deployment_secret"
    file = section.text("deployment_secret_file", "", absolute_or_none, "write an absolute path")
    if text is not None and file is not None:
        section.complain("deployment_secret_file", "give this or deployment_secret, not both")
    elif file is not None:
        key = "deployment_secret_file"
        try:
            text = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            section.complain(key, f"cannot be read: {error}")
            return None
    if text is None:
        return None
    if len(text) < LEAST_SECRET_CHARACTERS:
        section.complain_secret(
            key, f"too short: give at least {LEAST_SECRET_CHARACTERS} random characters"
        )
    return Secret(text)


def _listen(section: Section, host: Host) -> ListenSettings:
    unix = section.text(
        "unix", str(host.runtime_dir / "kvstored.sock"), _socket_path, "write an absolute path"
    )
    tcp = section.text("tcp", "", _tcp_or_none, "write host:port, or nothing for no TCP listener")
    http = section.text("http", DEFAULT_HTTP, _http, _HTTP_WANTED)
    if http in (unix, local_socket_path(unix), unix.with_name(f"{unix.stem}-admin{unix.suffix}")):
        section.complain("http", "must not be the path of listen.unix or of a socket beside it")
    insecure = section.boolean("insecure", default=False)
    return ListenSettings(unix, tcp, http, insecure)


def _ram(section: Section, host: Host) -> RamSettings:
    default = max(LEAST_RAM_BYTES, min(DEFAULT_RAM_BYTES, host.memory_bytes // 4 // MIB * MIB))
    cap_bytes = section.size("cap_bytes", default, least=LEAST_RAM_BYTES)
    if cap_bytes > host.memory_bytes:
        section.complain(
            "cap_bytes",
            f"above the memory there is: {format_size(host.memory_bytes)} ({host.memory_from}); "
            f"at most half of it is advisable",
        )
    return RamSettings(cap_bytes)


def _limits(section: Section, ram: RamSettings) -> LimitSettings:
    half = max(LEAST_OBJECT_BYTES, ram.cap_bytes // 2)
    return LimitSettings(
        section.size(
            "max_put_bytes", min(256 * MIB, half), least=LEAST_OBJECT_BYTES, most=ram.cap_bytes
        ),
        section.size("max_dirty_bytes", half, least=LEAST_OBJECT_BYTES, most=ram.cap_bytes),
        section.integer("max_calls", 256, least=1, most=65_536),
        section.seconds("stall_timeout_s", 10.0, least=0.1, most=3600.0),
    )


def _local(section: Section, ram: RamSettings) -> LocalSettings:
    return LocalSettings(
        section.boolean("enabled", default=True),
        section.integer("max_sessions", 256, least=1, most=65_536),
        section.integer("max_leased_percent_session", 50, least=1, most=100),
        section.integer("max_leased_percent_namespace", 75, least=1, most=100),
        section.size(
            "max_staging_bytes", min(256 * MIB, ram.cap_bytes // 4), least=LEAST_OBJECT_BYTES
        ),
        section.size(
            "max_total_staging_bytes",
            max(16 * MIB, min(GIB, ram.cap_bytes // 2)),
            least=4 * MIB,
        ),
    )


def _across(settings: Settings, listen: Section, report: Report) -> None:
    """Checks that need more than one section."""
    tokens = any(namespace.tokens for namespace in settings.namespaces)
    if settings.listen.tcp and not tokens and not settings.listen.insecure:
        listen.complain(
            "tcp",
            "a TCP listener needs a namespace with tokens (tokens, token_files or token_env), or "
            "an explicit --insecure",
        )
    http = settings.listen.http
    if isinstance(http, TcpAddress) and not http.loopback:
        report.warnings.append(
            f"listen.http is {http}: metrics are served without a token to whoever reaches it"
        )


def _unknown_sections(tree: Tree, report: Report) -> None:
    known = (*SECTIONS, NAMESPACE_TABLE)
    for name in tree.sections.keys() - set(SECTIONS):
        source = next(iter(tree.sections[name].values())).source if tree.sections[name] else "file"
        what = suggestion(name, known, "unknown section")
        report.problems.append(f"[{name}] ({source}): {what}; sections are {', '.join(known)}")
    for name, given in tree.strays.items():
        homes = [e.table for e in report.effective if e.key == name and e.table[1:-1] in SECTIONS]
        hint = (
            f"it belongs under {homes[0]}" if homes else f"settings stand under {', '.join(known)}"
        )
        value = "" if secretive(name) else f" = {given.value!r}"
        report.problems.append(f"{name}{value} ({given.source}): outside any section; {hint}")


def _near_variables(environ: Mapping[str, str], report: Report) -> None:
    """Complain of KVSTORED_RAM_CAP_BYTES, which lacks an underscore.

    Other variables without "__" are not ours: clients have some, and container platforms set
    KVSTORED_PORT and the like for a service of that name.
    """
    known = {
        f"{PREFIX}{e.table[1:-1]}__{e.key}".upper()
        for e in report.effective
        if e.table[1:-1] in SECTIONS
    }
    flat = {name.replace("__", "_"): name for name in known}
    for name in environ:
        if name != CONFIG_VARIABLE and (meant := flat.get(name)) and meant != name:
            report.problems.append(f"{name}: did you mean {meant}, with two underscores?")


def _socket_path(text: str) -> Path:
    path = absolute(text.removeprefix("unix:"))
    if len(str(path).encode()) > LONGEST_SOCKET_PATH_BYTES:
        raise ValueError(
            f"a socket's path may have at most {LONGEST_SOCKET_PATH_BYTES} bytes: shorten it"
        )
    return path


def _tcp(text: str) -> TcpAddress:
    return _address(text, "write host:port, such as 0.0.0.0:9440")


def _tcp_or_none(text: str) -> TcpAddress | None:
    return _tcp(text) if text else None


def _http(text: str) -> TcpAddress | Path:
    if text.startswith(("/", "unix:")):
        return _socket_path(text)
    return _address(text, _HTTP_WANTED)


def _address(text: str, wanted: str) -> TcpAddress:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or int(port) > 65_535:
        raise ValueError(wanted)
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or (":" in bare and bare == host):
        raise ValueError("write a host before the port: 0.0.0.0 for every one, [::] with IPv6")
    return TcpAddress(bare, int(port))
