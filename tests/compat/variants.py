"""Which Java clients a test runs with: the release, and how its headers are serialized.

At the depth of CI every release and both serializations occur, each where it matters; a proof runs
every test with all variants that can do it.

    @any_client                 5.x and 4.x, one of them with binary headers
    @each_release               also RocketMQ 5.5, whose JSON library is another
    @v5_client, @each_v5        what 4.x does not have
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import pytest

from tests.depth import DEPTH

from . import maven


class Variant(NamedTuple):
    """A release of the Java client and the serialization of its headers."""

    version: str
    binary: bool


VARIANTS = {
    f"{version}-{'binary' if binary else 'json'}": Variant(version, binary)
    for version in maven.VERSIONS
    for binary in (False, True)
}
V5 = [name for name, variant in VARIANTS.items() if variant.version != maven.V4_9]
DEFAULT = {maven.V5_4: "5.4.0-json", maven.V5_5: "5.5.1-json", maven.V4_9: "4.9.8-binary"}
"""The variant for a test that wants a release and leaves the rest open."""


def at_depth(*ci: str, among: Iterable[str] = VARIANTS) -> list[str]:
    """These variants on CI; at the depth of a proof all of `among`, these first."""
    return [*ci, *(name for name in among if name not in ci)] if DEPTH == "proof" else list(ci)


def clients(names: list[str]) -> pytest.MarkDecorator:
    """Run a test with the fixture `client` of each of these variants."""
    return pytest.mark.parametrize("client", names, indirect=True)


any_client = clients(at_depth("5.4.0-json", "4.9.8-binary"))
each_release = clients(at_depth("5.4.0-json", "4.9.8-binary", "5.5.1-json"))
v5_client = clients(at_depth("5.4.0-json", among=V5))
each_v5 = clients(at_depth("5.4.0-binary", "5.5.1-json", among=V5))
server_versions = pytest.mark.parametrize("version", maven.SERVER_VERSIONS)
"""For a test against Apache's servers."""
