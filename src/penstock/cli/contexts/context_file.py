"""Named contexts: the servers and credentials of clusters, in `contexts.toml`.

    current = "prod"

    [contexts.prod]
    nameserver = "10.0.0.1:9876;10.0.0.2:9876"
    access_key = "ops"
    secret_key = "…"
    tls = true

A command uses the context of `--context`, else of PENSTOCK_CONTEXT, else the current one. An empty
name means none. An option or an environment variable replaces the value of the context.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli.contexts.config_directory import config_directory, write_private
from penstock.errors import BadSetting

VARIABLE = "PENSTOCK_CONTEXT"
TEXTS = ("nameserver", "namespace", "access_key", "secret_key", "tls_ca")
FLAGS = ("strict_signing", "tls")
SECRETS = frozenset({"secret_key"})

Values = dict[str, str | bool]
"""The values of a context that are set, by the names of the options."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts and the name of the current one."""

    current: str | None = None
    contexts: Mapping[str, Values] = field(default_factory=dict)

    def get(self, name: str) -> Values:
        """The values of a context; raises BadSetting."""
        if name not in self.contexts:
            known = ", ".join(sorted(self.contexts)) or "none"
            raise BadSetting(
                f"there is no context {name!r} in {contexts_path()} (contexts: {known})",
                hint="add it with penstock context add, or choose another one",
            )
        return self.contexts[name]


def contexts_path() -> Path:
    """The file with the contexts; it may not exist yet."""
    return config_directory() / "contexts.toml"


def read_contexts() -> Contexts:
    """The contexts in the file; raises BadSetting if it is not valid."""
    path = contexts_path()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Contexts()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting(f"{path} is not valid TOML: {error}", hint="correct the file") from None
    current = table.pop("current", None)
    contexts = table.pop("contexts", {})
    if table or not isinstance(current, str | None) or not isinstance(contexts, dict):
        raise BadSetting(
            f"{path} has unknown entries: {', '.join(table) or 'current, contexts'}",
            hint="it holds current = NAME and one table [contexts.NAME] per context",
        )
    return Contexts(current, {name: _check(path, name, found) for name, found in contexts.items()})


def write_contexts(contexts: Contexts) -> None:
    """Replace the file."""
    lines = [f"current = {_quote(contexts.current)}"] if contexts.current else []
    for name, values in sorted(contexts.contexts.items()):
        lines += ["", f"[contexts.{_quote(name)}]"]
        lines += [f"{key} = {_value(values[key])}" for key in (*TEXTS, *FLAGS) if key in values]
    write_private(contexts_path(), "\n".join(lines).lstrip() + "\n")


def chosen_context(name: str | None) -> tuple[str, Values] | None:
    """The context that a command uses; None if it uses none. `name` is the one of `--context`."""
    wanted = os.environ.get(VARIABLE) if name is None else name
    if wanted == "":
        return None
    contexts = read_contexts()
    found = contexts.current if wanted is None else wanted
    return None if found is None else (found, contexts.get(found))


def _check(path: Path, name: str, found: object) -> Values:
    values: Values = {}
    for key, value in (found if isinstance(found, dict) else {"": found}).items():
        kind = str if key in TEXTS else bool if key in FLAGS else None
        if kind is None or not isinstance(value, kind):
            raise BadSetting(
                f"{path}: [contexts.{name}] has the invalid entry {key} = {value!r}"[:200],
                hint=f"texts: {', '.join(TEXTS)}; true or false: {', '.join(FLAGS)}",
            )
        values[key] = value
    return values


def _value(value: str | bool) -> str:
    return _quote(value) if isinstance(value, str) else "true" if value else "false"


def _quote(text: str) -> str:
    # A JSON string is a TOML string, except for this one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
