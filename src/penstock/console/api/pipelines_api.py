"""Spark pipelines: the runs that were recorded on this machine, and their last progress."""

import asyncio
import socket
from dataclasses import asdict

from penstock.console.endpoints import ApiCall, endpoint
from penstock.console.pipeline_runs import read_runs


@endpoint("GET", "/pipelines")
async def pipelines(call: ApiCall) -> object:
    """The recorded runs with their batches. Runs on other machines are not known."""
    directory = call.console.settings.pipelines
    if directory is None:
        return {"directory": None, "rows": []}
    runs = await asyncio.to_thread(read_runs, directory, socket.gethostname())
    return {"directory": str(directory), "rows": [asdict(run) for run in runs]}
