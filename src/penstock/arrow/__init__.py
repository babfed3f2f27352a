"""Topics and log files of a store as Arrow tables and record batches; needs no Spark and no Java.

    import penstock.arrow

    table = penstock.arrow.read("orders", nameserver="localhost:9876")
    reader = penstock.arrow.open_reader("orders", nameserver="localhost:9876")

Needs the extra `arrow`. The Spark source is built on the same modules.
"""

from typing import TYPE_CHECKING

from penstock.extras import how_to_install
from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.arrow.reading import open_reader, read

__all__ = ["open_reader", "read"]

_load = lazy_exports(__name__, {"open_reader": "reading", "read": "reading"})


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ModuleNotFoundError(
            f"penstock.arrow needs pyarrow, which is not installed: {how_to_install('arrow')}",
            name=error.name,
        ) from None
