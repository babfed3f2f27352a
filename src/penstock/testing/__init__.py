"""For tests: a broker in this process whose time is moved by hand, and a disk that fails.

`penstock_broker` and its kin are pytest fixtures (`penstock.testing.plugin`, which pytest finds by
itself); `InProcessBroker` is the same without pytest.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from penstock.testing.broker import InProcessBroker
    from penstock.testing.clock import BrokerClock
    from penstock.testing.disk import FaultyDisk, PowerCut

_HOMES = {
    "BrokerClock": "clock", "FaultyDisk": "disk", "InProcessBroker": "broker", "PowerCut": "disk",
}  # fmt: skip

__all__ = ["BrokerClock", "FaultyDisk", "InProcessBroker", "PowerCut"]


def __getattr__(name: str) -> object:
    """Loads what is asked for: pytest loads this package wherever Penstock is installed."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
