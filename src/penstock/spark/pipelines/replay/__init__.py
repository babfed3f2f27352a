"""Pipeline `replay`: sends messages of a lake, a commit log or a topic again."""

from typing import TYPE_CHECKING

from penstock.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.spark.pipelines.replay.replay_pipeline import replay

__all__ = ["replay"]

__getattr__ = lazy_exports(
    __name__,
    {"replay": "replay_pipeline"},
)
