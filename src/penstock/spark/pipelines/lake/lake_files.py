"""The file system of a lake: a few operations with their promises, on local disk, HDFS or S3.

Paths are relative to a root, with `/` between. `write_new` is whole or not at all: it goes by way
of a temporary name and a rename. Everything else that a lake does is built on these operations
alone, so its steps are tested on a file system in memory that fails anywhere.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.errors import BadSetting, PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_LAYER: Final = "org.apache.hadoop.fs.FilterFileSystem"


class File(NamedTuple):
    """A file below some directory."""

    path: str
    size: int


class Files(Protocol):
    """What a lake asks of its file system."""

    def size(self, path: str) -> int | None:
        """The bytes of a file; None if it is not there."""

    def walk(self, path: str) -> list[File]:
        """All files below a directory, by name; none if it is not there."""

    def read(self, path: str) -> bytes:
        """A small file."""

    def write_new(self, path: str, data: bytes) -> bool:
        """Make a small file, whole or not at all; False if there is one already."""

    def move(self, source: str, target: str) -> None:
        """Rename a file; makes the directories above the target, which must not exist."""

    def remove(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it; nothing happens if it is gone."""


class HadoopFiles:
    """A directory on any file system that Spark knows, through the driver's JVM."""

    def __init__(self, spark: "SparkSession", root: str) -> None:
        from py4j.java_gateway import is_instance_of

        jvm = getattr(spark, "_jvm", None)
        if jvm is None:
            raise BadSetting(
                "a lake is written by the driver, and through Spark Connect there is none here",
                hint="run it with --master local[*], spark://…, yarn or k8s://…",
            )
        self._path = jvm.org.apache.hadoop.fs.Path
        self._drain = jvm.org.apache.commons.io.IOUtils.toByteArray
        with _for_people(root):
            plain = self._path(root)
            system = plain.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
            self._root = system.makeQualified(plain)
        # Checksums in files beside each file are Hadoop's for local disks only: who reads a lake
        # with other tools has no use for them.
        gateway = spark.sparkContext._gateway
        if self.local is not None:
            while is_instance_of(gateway, system, _LAYER):
                system = system.getRawFileSystem()
        self._system = system
        self._made: str | None = None

    def url(self, path: str = "") -> str:
        """The path as Spark's readers and writers take it."""
        return str(self._at(path).toString())

    @property
    def local(self) -> str | None:
        """The root as programs that know of local disks only take it; None for other systems."""
        at = self._root.toUri()
        return str(at.getPath()) if at.getScheme() == "file" else None

    def size(self, path: str) -> int | None:
        at = self._at(path)
        with _for_people(path):
            if not self._system.exists(at):
                return None
            return int(self._system.getFileStatus(at).getLen())

    def walk(self, path: str) -> list[File]:
        at = self._at(path)
        begin = len(self._root.toUri().getPath().rstrip("/")) + 1
        found = []
        with _for_people(path):
            if not self._system.exists(at):
                return []
            each = self._system.listFiles(at, True)
            while each.hasNext():
                status = each.next()
                found.append(File(status.getPath().toUri().getPath()[begin:], status.getLen()))
        return sorted(found)

    def read(self, path: str) -> bytes:
        with _for_people(path):
            stream = self._system.open(self._at(path))
            try:
                return bytes(self._drain(stream))
            finally:
                stream.close()

    def write_new(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        parent, slash, name = path.rpartition("/")
        temporary = f"{parent}{slash}.{name}.{uuid.uuid4().hex[:8]}"
        with _for_people(path):
            stream = self._system.create(self._at(temporary), True)
            try:
                stream.write(bytearray(data))
            finally:
                stream.close()
        self.move(temporary, path)
        return True

    def move(self, source: str, target: str) -> None:
        parent = target.rpartition("/")[0]
        with _for_people(target):
            if parent != self._made:  # files come by directory
                self._system.mkdirs(self._at(parent))
                self._made = parent
            if not self._system.rename(self._at(source), self._at(target)):
                raise PipelineFailed(
                    f"{self.url(source)} could not be renamed to {self.url(target)}",
                    hint="check the rights on the directory; start again to go on where it stopped",
                )

    def remove(self, path: str) -> None:
        with _for_people(path):
            self._system.delete(self._at(path), True)

    def _at(self, path: str) -> Any:
        return self._path(self._root, path) if path else self._root


@contextmanager
def _for_people(path: str) -> Iterator[None]:
    """Errors of the file system without their Java stack."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except Py4JJavaError as error:
        cause = error.java_exception
        raise PipelineFailed(f"{path}: {cause.getMessage() or cause.toString()}") from error
    except PySparkException as error:
        raise PipelineFailed(f"{path}: {error}") from error
