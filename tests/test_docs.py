"""The docs match the code: settings, commands, requests, errors, packages, links."""

import re
from pathlib import Path

import click
import pytest

from penstock.broker.admin.settings_admin import UNSUPPORTED
from penstock.cli.main import COMMANDS, cli
from penstock.cli.schemas.registry import OUTPUTS
from penstock.config.doc import settings_of
from penstock.config.settings import TABLES
from penstock.wire.codes import RequestCode, request_name
from tests import errors_page, json_page, settings_page
from tests.unit.broker.broker_kit import broker_fixture
from tests.unit.controller.controller_kit import ControllerFixture
from tests.unit.nameserver.nameserver_kit import NameServerFixture

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
SOURCE = ROOT / "src" / "penstock"


def test_the_settings_page_is_up_to_date() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page(), (
        "run: python -m tests.settings_page"
    )


def test_the_page_of_errors_is_up_to_date() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), "run: python -m tests.errors_page"


def test_the_page_of_json_output_is_up_to_date() -> None:
    assert json_page.PAGE.read_text() == json_page.page(), "run: python -m tests.json_page"


@pytest.mark.parametrize("table", TABLES)
def test_every_setting_is_documented(table: str) -> None:
    text = settings_page.PAGE.read_text().partition(f"`[{table}]`")[2].partition("\n## ")[0]
    for setting in settings_of(TABLES[table]):
        assert f"| `{setting.name}` |" in text
        assert len(setting.doc.text) > 10, f"{setting.name} needs a line of text"


CLI_NOUNS = (
    "send",
    "tail",
    "topic",
    "cluster",
    "context",
    "group",
    "check",
    "doctor",
    "export",
    "import",
    "scheduled",
    "transaction",
    "completion",
    "bench",
    "top",
)

# --- commands ------------------------------------------------------------------------------------


def commands() -> dict[str, click.Command]:
    """All commands by their full name."""
    found = {}
    with click.Context(cli) as context:
        for name in COMMANDS:
            command = cli.get_command(context, name)
            assert command is not None
            if isinstance(command, click.Group):
                for sub, inner in command.commands.items():
                    found[f"penstock {name} {sub}"] = inner
            else:
                found[f"penstock {name}"] = command
    return found


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {
        name.removeprefix("penstock ")
        for name, command in commands().items()
        if any("--json" in option.opts for option in command.params)
    }
    always_json = {"export", "dlq export"}
    assert set(OUTPUTS) == with_json | always_json


@pytest.mark.parametrize("command", commands())
def test_every_command_is_on_a_page(command: str) -> None:
    assert any(command in path.read_text() for path in PAGES)


@pytest.mark.parametrize(
    ("page", "nouns"),
    [
        ("store.md", ("store",)),
        ("running.md", ("up", "nameserver", "broker", "controller")),
        ("security.md", ("user", "acl")),
        ("messages.md", ("message", "explain", "dlq")),
        ("console.md", ("console",)),
        ("cli.md", CLI_NOUNS),
    ],
)
def test_every_option_of_a_command_is_on_its_page(page: str, nouns: tuple[str, ...]) -> None:
    text = (DOCS / page).read_text()
    if page == "messages.md":  # it refers to the options that choose servers
        text += (DOCS / "cli.md").read_text().partition("## Which servers")[2].partition("\n## ")[0]
    for name, command in commands().items():
        if name.split()[1] not in nouns:
            continue
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                for spelling in (*option.opts, *option.secondary_opts):
                    shown = re.search(rf"[`/]{spelling}\b", text)
                    assert shown, f"docs/{page} lacks {spelling} of {name}"


# --- requests ------------------------------------------------------------------------------------


def codes_in(page: str, heading: str) -> set[str]:
    """The request codes under a heading, up to the next one of its level."""
    level = heading.split()[0]
    section = (DOCS / page).read_text().partition(f"\n{heading}\n")[2]
    section = re.split(rf"^#{{2,{len(level)}}} ", section, maxsplit=1, flags=re.MULTILINE)[0]
    listed = re.findall(r"`([A-Z][A-Z0-9_]+)`", section)
    assert len(listed) == len(set(listed)), f"docs/{page}: a code stands twice under {heading}"
    return set(listed)


def test_the_brokers_requests_are_on_its_page(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as home:
        rows = {request_name(code) for code in home.broker.router.rows}
    refused = {code.name for code in (*UNSUPPORTED, RequestCode.UPDATE_AND_CREATE_STATIC_TOPIC)}
    assert refused <= rows
    assert codes_in("broker.md", "### Served") == rows - refused
    assert codes_in("broker.md", "### Refused") == refused


def test_the_nameservers_requests_are_on_its_page() -> None:
    rows = {request_name(code) for code in NameServerFixture().names.router.rows}
    assert codes_in("nameserver.md", "## Requests") == rows


def test_the_controllers_requests_are_on_its_page() -> None:
    rows = {request_name(code) for code in ControllerFixture().controller.router.rows}
    assert codes_in("controller.md", "## Requests") == rows


# --- architecture --------------------------------------------------------------------------------


def test_every_package_has_a_row_in_the_architecture_page() -> None:
    """And no row names a package that does not exist."""
    text = (DOCS / "architecture.md").read_text()
    rows = set(re.findall(r"^\| `([\w/]+)/` \|", text, flags=re.MULTILINE))
    packages = {
        str(path.parent.relative_to(SOURCE))
        for path in SOURCE.rglob("__init__.py")
        if path.parent != SOURCE
    }
    assert packages - rows == set(), "docs/architecture.md has no row for these packages"
    assert rows - packages == set(), "docs/architecture.md has rows for packages that are gone"


def test_modules_named_in_the_architecture_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*/(?:[a-z_]+\.py)?)`", text))
    gone = {
        name for name in named if not name.startswith("tests/") and not (SOURCE / name).exists()
    }
    assert gone == set(), "docs/architecture.md names modules that are gone"


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_are_valid(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" in target:
            continue
        page = path.parent / target if target else path
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page), f"{target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (path.parent / target).resolve()
        for path in PAGES
        for target in re.findall(r"\]\(([^)#:]+\.md)", path.read_text())
        if (path.parent / target).resolve() != path
    }
    assert {page for page in PAGES if page.name != "README.md"} <= linked


def test_every_known_fault_of_failovers_has_tests() -> None:
    """Each row of the table names a test at least, and all of them exist."""
    table = (DOCS / "failover.md").read_text().partition("\n## Known faults of RocketMQ")[2]
    rows = re.findall(r"^\| (?!Fault|-).*$", table.partition("\n## ")[0], flags=re.MULTILINE)
    assert rows
    for row in rows:
        named = re.findall(r"`tests/([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, test in named:
            text = (ROOT / "tests" / path).read_text()
            assert re.search(rf"^(?:async )?def {test}\(", text, flags=re.MULTILINE), test
