"""For tests: an in-process broker with a virtual clock, and a disk that fails on demand.

`penstock_broker` and others are pytest fixtures of `penstock.testing.plugin`, which pytest loads
automatically. `InProcessBroker` is the same broker without pytest.
"""

from penstock.lazy import lazy_exports

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


__getattr__ = lazy_exports(__name__, _MODULES)
