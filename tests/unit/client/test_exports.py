"""What `penstock` exports, and what importing it costs."""

import logging

import pytest

from tests.unit.client.sync.test_loop_thread import run


def test_importing_penstock_loads_nothing_big() -> None:
    out = run(
        """
        import sys
        before = set(sys.modules)
        import penstock
        print(*sorted(set(sys.modules) - before))
        assert "Producer" in dir(penstock)
        assert penstock.Message.__module__ == "penstock.client.messages"
        assert "penstock.server.server" not in sys.modules
        """
    )
    assert out.split() == ["penstock"]


def test_every_export_can_be_had() -> None:
    import penstock
    import penstock.client

    for package in (penstock, penstock.client):
        for name in package.__all__:
            assert getattr(package, name) is not None
    assert set(penstock.client.__all__) <= set(penstock.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = penstock.Nonsense
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = penstock.client.Nonsense


def test_every_asynchronous_method_has_its_blocking_twin() -> None:
    import inspect

    import penstock

    session = {
        "handle_request",
        "consumers",
        "producers",
        "route_changed",
        "topics",
    }  # for its session
    transaction = {"begun", "end", "left"}  # for `Transaction`
    building = {"from_each", "ask_each", "tell_each", "change_each", "for_each", "bare_queue",
                "full_queue", "is_ours"}  # fmt: skip
    for name in [name for name in penstock.__all__ if name.startswith("Async")]:
        asynchronous, face = getattr(penstock, name), getattr(penstock, name.removeprefix("Async"))
        public = {
            member
            for member, value in inspect.getmembers(asynchronous)
            if inspect.isfunction(value) and not member.startswith("_")
        }
        missing = {member for member in public if not hasattr(face, member)}
        assert missing <= session | building | transaction, name
        wanted = inspect.signature(asynchronous.__init__)
        given = inspect.signature(face.__init__)
        assert given == wanted, f"{name} takes other options than its twin"


def test_the_library_keeps_quiet_without_logging() -> None:
    import penstock.client  # noqa: F401

    handlers = logging.getLogger("penstock").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
