"""Paths that are certainly on this machine, which are checked before Spark is started."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from penstock.spark.pipelines.running import PipelineJob


def local_path(job: PipelineJob, path: str) -> Path | None:
    """The path; None if it is on another file system, or if only Spark knows on which."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(path) if job.local_files and not parts.scheme else None
