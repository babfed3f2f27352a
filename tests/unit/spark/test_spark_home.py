"""A Spark home without the zip of pyspark's sources."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from penstock.spark import spark_home


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed pyspark."""
    package = tmp_path / "site-packages" / "pyspark"
    for name in ("bin", "jars", "python/lib"):
        (package / name).mkdir(parents=True)
    (package / "python" / "lib" / "pyspark.zip").touch()
    module = ModuleType("pyspark")
    module.__file__ = str(package / "__init__.py")
    module.__version__ = "4.3.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", module)
    monkeypatch.setattr("site.getsitepackages", lambda: [str(package.parent)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    return package


def test_the_spark_home_has_everything_except_the_zip(package: Path, tmp_path: Path) -> None:
    home = spark_home.spark_home()
    assert home is not None
    assert home.parent == tmp_path / "cache" / "penstock" / "spark"
    assert (home / "jars").resolve() == package / "jars"
    assert sorted(entry.name for entry in home.iterdir()) == ["bin", "jars"]
    assert spark_home.spark_home() == home


def test_a_damaged_spark_home_is_created_again(package: Path) -> None:
    home = spark_home.spark_home()
    assert home is not None
    (home / "jars").unlink()
    assert spark_home.spark_home() == home
    assert (home / "jars").is_dir()
    assert [entry.name for entry in home.parent.iterdir()] == [home.name]


def test_a_configured_spark_home_is_kept(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_home.spark_home() is None


def test_a_pyspark_outside_of_site_packages_gets_no_spark_home(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("site.getsitepackages", lambda: [str(package.parent.parent / "other")])
    assert spark_home.spark_home() is None
