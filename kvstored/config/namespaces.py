"""[[namespace]] tables: trust domains with their tokens and caps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstored.config.reader import Report, Section
from kvstored.config.secret import Secret
from kvstored.config.settings import (
    DEFAULT_NAMESPACE,
    NamespaceSettings,
    NvmeSettings,
    RamSettings,
)
from kvstored.config.sources import Given, Table

LEAST_TOKEN_CHARACTERS = 8
LEAST_CAP_BYTES = 4096
LONGEST_TTL_S = 10 * 365 * 86_400

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_TOKEN = re.compile(r"[!-~]+", re.ASCII)


def build_namespaces(
    tables: Sequence[Table],
    ram: RamSettings,
    nvme: NvmeSettings,
    environ: Mapping[str, str],
    report: Report,
    *,
    implicit_default: bool,
) -> tuple[NamespaceSettings, ...]:
    """Settings of every namespace; first an implicit "default", if that is wanted."""
    named = [str(table["name"].value) for table in tables if "name" in table]
    for name in sorted({name for name in named if named.count(name) > 1}):
        report.problems.append(
            f'namespace "{name}": given {named.count(name)} times; each name may stand once'
        )
    numbered = list(enumerate(tables, start=1))
    if implicit_default and DEFAULT_NAMESPACE not in named:
        numbered.insert(0, (0, {"name": Given(DEFAULT_NAMESPACE, "default")}))
    if not numbered:
        report.problems.append(
            "namespace: there is none; give one, or leave daemon.default_namespace at true"
        )
    return tuple(_build(i, table, ram, nvme, environ, report) for i, table in numbered)


def _build(
    number: int,
    table: Table,
    ram: RamSettings,
    nvme: NvmeSettings,
    environ: Mapping[str, str],
    report: Report,
) -> NamespaceSettings:
    label = str(table["name"].value) if "name" in table else f"#{number}"
    section = Section(f"namespace.{label}", table, report, "[[namespace]]")
    name = section.text("name", f"#{number}", str, "write a text in quotes")
    if not NAME.fullmatch(name):
        section.complain(
            "name", "give a name of 1 to 64 letters, digits, dots, dashes and underscores"
        )
    tokens = _tokens(section, environ)
    admin = section.boolean("admin", default=False)
    if admin and not tokens:
        section.complain("admin", "only tokens can be marked admin, and this namespace has none")
    built = NamespaceSettings(
        name=name,
        tokens=tokens,
        admin=admin,
        ram_cap_bytes=section.size(
            "ram_cap_bytes", ram.cap_bytes, least=LEAST_CAP_BYTES, most=ram.cap_bytes
        ),
        nvme_cap_bytes=_nvme_cap(section, nvme),
        default_ttl_ms=round(
            1000 * section.seconds("default_ttl_s", 0.0, least=0.0, most=LONGEST_TTL_S)
        ),
    )
    section.finish()
    return built


def _nvme_cap(section: Section, nvme: NvmeSettings) -> int:
    if nvme.enabled:
        return section.size(
            "nvme_cap_bytes", nvme.cap_bytes, least=LEAST_CAP_BYTES, most=nvme.cap_bytes
        )
    section.size("nvme_cap_bytes", 0, least=0)
    return 0


def _tokens(section: Section, environ: Mapping[str, str]) -> tuple[Secret, ...]:
    """Tokens as given, one per token file, one per environment variable named."""
    tokens = [(f"tokens[{i}]", t) for i, t in enumerate(section.secret_texts("tokens"))]
    for i, file in enumerate(section.texts("token_files")):
        try:
            text = Path(file).expanduser().read_text().strip()
            tokens.append((f"token_files[{i}]", text))
        except (OSError, UnicodeDecodeError) as error:
            section.complain("token_files", f"cannot be read: {error}")
    for i, variable in enumerate(section.texts("token_env")):
        if variable in environ:
            tokens.append((f"token_env[{i}]", environ[variable].strip()))
        else:
            section.complain("token_env", f"the environment has no variable {variable}")
    for place, text in tokens:
        if len(text) < LEAST_TOKEN_CHARACTERS or not _TOKEN.fullmatch(text):
            section.complain_secret(
                place,
                f"a token needs at least {LEAST_TOKEN_CHARACTERS} printable ASCII characters "
                "without spaces, such as `openssl rand -hex 16` makes",
            )
    return tuple(Secret(text) for _, text in tokens)
