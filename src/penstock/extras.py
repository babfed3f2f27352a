"""The optional dependencies of the package: the extras in `pyproject.toml`."""


def how_to_install(extra: str) -> str:
    """What to do if the packages of an extra are missing. Penstock is on no package index."""
    wheel = f"pip install 'WHEEL[{extra}]' with the path of its wheel"
    return f"run pip install '.[{extra}]' in a clone of Penstock, or {wheel}"
