"""Writes docs/settings.md from penstock.config: `python -m tests.settings_page`."""

from pathlib import Path

import msgspec

from penstock.config import StoreConfig, describe

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
CONFIGS: tuple[tuple[str, type[msgspec.Struct]], ...] = (("The storage engine", StoreConfig),)
HEAD = """# Settings

<!-- Written by `python -m tests.settings_page` from src/penstock/config.py: change it there. -->

Every setting has a default, a unit in its name, and is either *live* (may change while a broker
runs) or *fixed* (read at start). The last column is its name in RocketMQ's `broker.conf`, where it
has one. Today settings are given in Python, as fields of the struct; files, environment and flags
come with the broker.
"""


def page() -> str:
    """The whole page."""
    text = HEAD
    for title, config in CONFIGS:
        text += f"\n## {title}: `{config.__name__}`\n\n"
        text += "| Setting | Default | | What it is | In broker.conf |\n|---|---|---|---|---|\n"
        for name, default, doc in describe(config):
            live = "live" if doc.live else "fixed"
            apache = f"`{doc.apache}`" if doc.apache else ""
            what = doc.text.replace("|", "\\|")
            text += f"| `{name}` | {_default(default)} | {live} | {what} | {apache} |\n"
    return text


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        for shift, unit in ((30, "GiB"), (20, "MiB")):
            if value >= 1 << shift and value % (1 << shift) == 0:
                return f"{value >> shift} {unit}"
        return f"{value:,}"
    return f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(page())
