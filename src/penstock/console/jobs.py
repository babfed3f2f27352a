"""Work that takes longer than a request, such as sending many messages at a limited rate."""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from penstock.errors import PenstockError

JOBS_MAX = 100
REPORT_ROWS_MAX = 1_000
T = TypeVar("T")


@dataclass(slots=True)
class Job:
    """The progress of a job, and a row for each item that is done."""

    title: str
    total: int
    id: str = field(default_factory=lambda: secrets.token_urlsafe(9))
    done: int = 0
    failed: int = 0
    state: str = "running"
    """running, finished or cancelled."""
    rows: list[dict[str, object]] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    def json(self) -> dict[str, object]:
        return {
            "id": self.id,
            "title": self.title,
            "state": self.state,
            "total": self.total,
            "done": self.done,
            "failed": self.failed,
            "rows": self.rows,
            "rows_left_out": max(self.done - REPORT_ROWS_MAX, 0),
        }


class Jobs:
    """The last jobs."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(
        self,
        title: str,
        items: Sequence[T],
        work: Callable[[T], Awaitable[dict[str, object]]],
        *,
        rate: float,
    ) -> Job:
        """Run `work` for each item, at most `rate` per second. It returns a row of the report."""
        job = Job(title, len(items))
        self._jobs[job.id] = job
        while len(self._jobs) > JOBS_MAX:
            self._jobs.popitem(last=False)
        job.task = asyncio.create_task(_run(job, items, work, rate))
        return job

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def cancel(self, job: Job) -> None:
        """Stop after the item in work."""
        job.state = "cancelled" if job.state == "running" else job.state

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs.values() if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    job: Job,
    items: Sequence[T],
    work: Callable[[T], Awaitable[dict[str, object]]],
    rate: float,
) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for number, item in enumerate(items):
        await asyncio.sleep(max(began + number / rate - loop.time(), 0))
        if job.state != "running":
            return
        try:
            row = {"ok": True, **await work(item)}
        except PenstockError as error:
            job.failed += 1
            row = {"ok": False, "problem": error.remark()}
        job.done += 1
        if len(job.rows) < REPORT_ROWS_MAX:
            job.rows.append(row)
    job.state = "finished"
