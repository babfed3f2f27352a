"""For tests: an in-process broker with a virtual clock, and a disk that fails on demand.

`penstock_broker` and others are pytest fixtures of `penstock.testing.plugin`, which pytest loads
automatically. `InProcessBroker` is the same broker without pytest.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from penstock.testing.broker import InProcessBroker
    from penstock.testing.clock import BrokerClock
    from penstock.testing.disk import FaultyDisk, PowerCut

_MODULES = {
    "BrokerClock": "clock",
    "FaultyDisk": "disk",
    "InProcessBroker": "broker",
    "PowerCut": "disk",
}

__all__ = ["BrokerClock", "FaultyDisk", "InProcessBroker", "PowerCut"]


def __getattr__(name: str) -> object:
    """Import on first use: pytest imports this package wherever Penstock is installed."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
