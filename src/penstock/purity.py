"""`PENSTOCK_PURE=1`: run the Python sources even if compiled modules are beside them.

The import system prefers an extension module to a source file of the same name. So a finder that
returns only source files is installed before the others.
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
        for directory in path:
            spec = FileFinder(directory, (SourceFileLoader, [".py"])).find_spec(fullname)
            if spec is not None and spec.loader is not None:
                return spec
        return None


def install() -> None:
    """Make later imports of Penstock modules use the source files."""
    if not any(isinstance(f, type) and issubclass(f, _SourcesOnly) for f in sys.meta_path):
        sys.meta_path.insert(0, _SourcesOnly)
