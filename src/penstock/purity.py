"""`PENSTOCK_PURE=1`: run the Python sources even where compiled modules lie beside them.

The import system prefers an extension module to a source of the same name, so a
finder that offers only sources is installed before the others.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType


class _SourcesOnly(PathFinder):
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("penstock.") or path is None:
            return None
        for folder in path:
            spec = FileFinder(folder, (SourceFileLoader, [".py"])).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


def install() -> None:
    """Make every later import of a Penstock module take its source."""
    if not any(isinstance(f, type) and issubclass(f, _SourcesOnly) for f in sys.meta_path):
        sys.meta_path.insert(0, _SourcesOnly)
