"""What `penstock` exports, and what importing it costs."""

import logging

import pytest

from tests.unit.client.sync.test_loop_thread import run


def test_importing_penstock_imports_only_its_version() -> None:
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
    assert out.split() == ["penstock", "penstock.version"]


def test_every_export_exists() -> None:
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


def test_every_asyncio_method_has_a_synchronous_counterpart() -> None:
    import inspect

    import penstock

    session = {"handle_request", "consumers", "producers", "route_changed", "topics"}
    transaction = {"local_transaction_started", "end", "local_transaction_ended"}
    admin = {
        "from_each",
        "ask_each",
        "tell_each",
        "change_each",
        "for_each",
        "bare_queue",
        "full_queue",
        "is_ours",
        "oldest_ages",
    }
    for name in [name for name in penstock.__all__ if name.startswith("Async")]:
        client = getattr(penstock, name)
        sync_client = getattr(penstock, name.removeprefix("Async"))
        public = {
            member
            for member, value in inspect.getmembers(client)
            if inspect.isfunction(value) and not member.startswith("_")
        }
        missing = {member for member in public if not hasattr(sync_client, member)}
        assert missing <= session | admin | transaction, name
        assert inspect.signature(sync_client.__init__) == inspect.signature(client.__init__)


def test_library_is_silent_without_logging_configuration_except_for_failed_handlers() -> None:
    import penstock.client  # noqa: F401

    handlers = logging.getLogger("penstock").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
    out = run(
        """
        import logging, sys
        sys.stderr = sys.stdout
        from penstock.client.handler_failures import HandlerFailures
        from penstock.testing.virtual_clock import VirtualClock
        log = logging.getLogger("penstock.client.test")
        log.error("not shown")
        HandlerFailures(VirtualClock()).report(log, "Orders", "shown", ValueError("no"))
        """
    )
    assert out.splitlines() == ["penstock: shown", "ValueError: no"]
