"""The file operations of a lake, on any file system that Spark supports.

Paths are relative to a root and use `/`. A lake uses only these operations, so that its commit
protocol can be tested on a file system in memory that fails at any step.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.errors import BadSetting, PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILTER_FILE_SYSTEM: Final = "org.apache.hadoop.fs.FilterFileSystem"


class File(NamedTuple):
    """The path and the size of a file."""

    path: str
    size: int


class LakeFiles(Protocol):
    """The operations of the file system that a lake needs."""

    def size(self, path: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""

    def walk(self, path: str) -> list[File]:
        """All files below a directory, sorted; empty if it does not exist."""

    def read(self, path: str) -> bytes:
        """The content of a small file."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Create a small file by one rename; False if it exists already."""

    def move(self, source: str, target: str) -> None:
        """Rename a file to a path that does not exist; creates the parent directories."""

    def remove(self, path: str) -> None:
        """Delete a file or a directory with its content, if it exists."""


class HadoopFiles:
    """A directory on any file system that Spark supports, accessed through the driver's JVM."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        from py4j.java_gateway import is_instance_of

        jvm = getattr(spark, "_jvm", None)
        if jvm is None:
            raise BadSetting(
                "a lake can't be written through Spark Connect",
                hint="use a master such as local[*], spark://…, yarn or k8s://…",
            )
        self._path = jvm.org.apache.hadoop.fs.Path
        self._read_all = jvm.org.apache.commons.io.IOUtils.toByteArray
        with _file_errors(root):
            path = self._path(root)
            system = path.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
            self._root = system.makeQualified(path)
        # On local disks Hadoop writes a checksum file beside each file; other tools do not use it.
        gateway = spark.sparkContext._gateway
        if self.local is not None:
            while is_instance_of(gateway, system, _FILTER_FILE_SYSTEM):
                system = system.getRawFileSystem()
        self._system = system
        self._last_parent: str | None = None

    def url(self, path: str = "") -> str:
        """The path for Spark's readers and writers."""
        return str(self._at(path).toString())

    @property
    def local(self) -> str | None:
        """The root as a local path; None on other file systems."""
        at = self._root.toUri()
        return str(at.getPath()) if at.getScheme() == "file" else None

    def size(self, path: str) -> int | None:
        at = self._at(path)
        with _file_errors(path):
            if not self._system.exists(at):
                return None
            return int(self._system.getFileStatus(at).getLen())

    def walk(self, path: str) -> list[File]:
        at = self._at(path)
        prefix_length = len(self._root.toUri().getPath().rstrip("/")) + 1
        found = []
        with _file_errors(path):
            if not self._system.exists(at):
                return []
            each = self._system.listFiles(at, True)
            while each.hasNext():
                status = each.next()
                found.append(
                    File(status.getPath().toUri().getPath()[prefix_length:], status.getLen())
                )
        return sorted(found)

    def read(self, path: str) -> bytes:
        with _file_errors(path):
            stream = self._system.open(self._at(path))
            try:
                return bytes(self._read_all(stream))
            finally:
                stream.close()

    def write_new(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        parent, slash, name = path.rpartition("/")
        temporary = f"{parent}{slash}.{name}.{uuid.uuid4().hex[:8]}"
        with _file_errors(path):
            stream = self._system.create(self._at(temporary), True)
            try:
                stream.write(bytearray(data))
            finally:
                stream.close()
        self.move(temporary, path)
        return True

    def move(self, source: str, target: str) -> None:
        parent = target.rpartition("/")[0]
        with _file_errors(target):
            if parent != self._last_parent:  # files of a directory come together
                self._system.mkdirs(self._at(parent))
                self._last_parent = parent
            if not self._system.rename(self._at(source), self._at(target)):
                raise PipelineFailed(
                    f"{self.url(source)} can't be renamed to {self.url(target)}",
                    hint="check the permissions of the directory and start again",
                )

    def remove(self, path: str) -> None:
        with _file_errors(path):
            self._system.delete(self._at(path), True)

    def _at(self, path: str) -> Any:
        return self._path(self._root, path) if path else self._root


@contextmanager
def _file_errors(path: str) -> Iterator[None]:
    """Raise errors of the file system without their Java stack."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JJavaError as error:
        cause = error.java_exception
        raise PipelineFailed(f"{path}: {cause.getMessage() or cause.toString()}") from error
    except PySparkException as error:
        raise PipelineFailed(f"{path}: {error}") from error
