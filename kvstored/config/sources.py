"""Where settings come from: a TOML file and the environment, merged into one tree.

Every value keeps its source, so that a complaint can say where the value stands.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

PREFIX = "KVSTORED_"
CONFIG_VARIABLE = "KVSTORED_CONFIG"
NAMESPACE_TABLE = "namespace"
NVME_TABLE = "nvme"
VOLUMES_KEY = "volumes"


@dataclass(frozen=True, slots=True)
class Given:
    """A value somebody gave. `text`: it comes from the environment and is yet to be parsed."""

    value: object
    source: str
    text: bool = False


Table = dict[str, Given]


@dataclass(slots=True)
class Tree:
    """Sections by name, [[namespace]] and [[nvme.volumes]] tables in order, and what was wrong with
    the sources.
    """

    sections: dict[str, Table] = field(default_factory=dict)
    volumes: list[Table] = field(default_factory=list)
    namespaces: list[Table] = field(default_factory=list)
    strays: Table = field(default_factory=dict)  # keys outside any section
    problems: list[str] = field(default_factory=list)


def find_file(chosen: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The configuration file: the one chosen, $KVSTORED_CONFIG, or systemd's if it exists."""
    if chosen is not None:
        return chosen
    if named := environ.get(CONFIG_VARIABLE):
        return Path(named)
    if folder := environ.get("CONFIGURATION_DIRECTORY"):
        file = Path(folder.split(":")[0]) / "kvstored.toml"
        return file if file.exists() else None
    return None


def read(file: Path | None, environ: Mapping[str, str]) -> Tree:
    """Merge the file and the environment, which wins. Faults are in the tree's `problems`."""
    tree = Tree()
    if file is not None:
        _add_file(tree, file)
    for variable, text in sorted(environ.items()):
        if variable.startswith(PREFIX) and "__" in variable and text:
            _add_variable(tree, variable, text)
    return tree


def _add_file(tree: Tree, file: Path) -> None:
    try:
        document: dict[str, object] = tomllib.loads(file.read_text())
    except OSError as error:
        tree.problems.append(f"{file}: the configuration file cannot be read: {error.strerror}")
        return
    except UnicodeDecodeError:
        tree.problems.append(f"{file}: the configuration file is not UTF-8 text")
        return
    except tomllib.TOMLDecodeError as error:
        tree.problems.append(f"{file}: not valid TOML: {error}")
        return
    for name, value in document.items():
        if name == NAMESPACE_TABLE:
            tree.namespaces += _tables(tree, NAMESPACE_TABLE, "namespace", value, str(file))
        elif isinstance(value, dict):
            tree.sections[name] = _table(value, str(file))
        else:
            tree.strays[name] = Given(value, str(file))
    volumes = tree.sections.get(NVME_TABLE, {}).pop(VOLUMES_KEY, None)
    if volumes is not None:
        name = f"{NVME_TABLE}.{VOLUMES_KEY}"
        tree.volumes += _tables(tree, name, "volume", volumes.value, volumes.source)


def _tables(tree: Tree, name: str, what: str, value: object, source: str) -> list[Table]:
    if isinstance(value, list) and all(isinstance(table, dict) for table in value):
        return [_table(table, source) for table in value]
    tree.problems.append(f"{name} ({source}): write each {what} as a table headed [[{name}]]")
    return []


def _table(values: dict[str, object], source: str) -> Table:
    return {key: Given(value, source) for key, value in values.items()}


def _add_variable(tree: Tree, variable: str, text: str) -> None:
    """KVSTORED_SECTION__KEY, KVSTORED_NAMESPACE__NAME__KEY or KVSTORED_NVME__VOLUMES__NAME__KEY."""
    given = Given(text, variable, text=True)
    section, *rest = variable.removeprefix(PREFIX).lower().split("__")
    form = "SECTION__KEY"
    if section == NAMESPACE_TABLE:
        form, tables, listed = "NAMESPACE__NAME__KEY", tree.namespaces, rest
    elif section == NVME_TABLE and rest[0] == VOLUMES_KEY:
        form, tables, listed = "NVME__VOLUMES__NAME__KEY", tree.volumes, rest[1:]
    elif len(rest) == 1:
        tree.sections.setdefault(section, {})[rest[0]] = given
        return
    else:
        tables, listed = [], []
    if len(listed) == 2 and all(listed):
        _table_named(tables, listed[0], given)[listed[1]] = given
    else:
        tree.problems.append(f"{variable}: write {PREFIX}{form}")


def _table_named(tables: list[Table], name: str, given: Given) -> Table:
    """The table of the namespace or volume that a variable names, made if there is none.

    Variables know capitals, digits and underscores only, so "team-a" is TEAM_A.
    """
    for table in tables:
        if _as_variable(name_of(table)) == _as_variable(name):
            return table
    table = {"name": Given(name, given.source)}
    tables.append(table)
    return table


def name_of(table: Table) -> str:
    """The name of a namespace or volume; a volume's is by default the last component of its path.
    "" where there is neither.
    """
    if "name" in table:
        return str(table["name"].value)
    return PurePath(str(table["path"].value)).name if "path" in table else ""


def _as_variable(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name).lower()
