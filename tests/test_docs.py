"""The pages keep up with the code: settings, commands, rooms, links."""

import re
from pathlib import Path

import click
import pytest

from penstock.cli.main import COMMANDS, cli
from penstock.config import StoreConfig, describe
from tests.settings_page import PAGE, page

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_settings_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.settings_page"


def test_every_setting_is_documented() -> None:
    text = PAGE.read_text()
    for name, default, doc in describe(StoreConfig):
        assert f"| `{name}` |" in text
        assert len(doc.text) > 10, f"{name} needs a line of text"
        assert default is not None


def commands() -> list[str]:
    found = []
    with click.Context(cli) as context:
        for name in COMMANDS:
            command = cli.get_command(context, name)
            if isinstance(command, click.Group):
                found += [f"penstock {name} {sub}" for sub in command.list_commands(context)]
            else:
                found.append(f"penstock {name}")
    return found


@pytest.mark.parametrize("command", commands())
def test_every_command_is_on_a_page(command: str) -> None:
    assert any(command in path.read_text() for path in PAGES)


def test_every_option_of_the_store_tools_is_on_their_page() -> None:
    text = (ROOT / "docs" / "store.md").read_text()
    with click.Context(cli) as context:
        group = cli.get_command(context, "store")
        assert isinstance(group, click.Group)
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            for option in command.params:
                if isinstance(option, click.Option):
                    assert f"`{option.opts[0]}" in text, f"{name} {option.opts[0]}"


def test_every_module_has_its_place_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    source = ROOT / "src" / "penstock"
    for path in sorted(source.rglob("*.py")):
        if path.name != "__init__.py":
            name = path.name if path.parent == source else f"{path.parent.name}/{path.name}"
            assert f"`{name}`" in text, f"docs/architecture.md does not say what {name} is for"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target
