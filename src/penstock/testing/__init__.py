"""For tests: an in-process broker with a virtual clock, and a disk that fails on demand.

`penstock_broker` and others are pytest fixtures of `penstock.testing.plugin`, which pytest loads
automatically. `InProcessBroker` is the same broker without pytest.
"""

from penstock.lazy import lazy_exports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from penstock.testing.faulty_disk import FaultyDisk, PowerCut
    from penstock.testing.in_process_broker import InProcessBroker
    from penstock.testing.virtual_clock import BrokerClock

_MODULES = {
    "BrokerClock": "virtual_clock",
    "FaultyDisk": "faulty_disk",
    "InProcessBroker": "in_process_broker",
    "PowerCut": "faulty_disk",
}

__all__ = ["BrokerClock", "FaultyDisk", "InProcessBroker", "PowerCut"]


__getattr__ = lazy_exports(__name__, _MODULES)
