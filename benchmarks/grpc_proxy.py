"""Apache's gRPC proxy, and a virtual environment with a gRPC client.

PyPI's `rocketmq-python-client` speaks gRPC only. It reaches Apache's and Penstock's brokers through
Apache's proxy.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.compat import apache, maven

CLIENT = "rocketmq-python-client==5.1.2"
_READY = "rocketmq-proxy startup successfully"
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion>
<groupId>io.penstock</groupId><artifactId>proxy</artifactId><version>1</version>
<dependencies><dependency><groupId>org.apache.rocketmq</groupId>
<artifactId>rocketmq-proxy</artifactId><version>{version}</version></dependency></dependencies>
</project>"""


def make_client_environment(folder: Path) -> Path:
    """Make a virtual environment with the gRPC client; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", CLIENT], check=True)
    return python


@contextmanager
def proxy(folder: Path, namesrv: str) -> Iterator[str]:
    """Run a proxy; yields its address."""
    folder.mkdir(parents=True)
    (folder / "pom.xml").write_text(_POM.format(version=maven.V5_4))
    subprocess.run(
        ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath.txt"],
        cwd=folder, check=True,
    )  # fmt: skip
    port = apache.free_port(above=1)
    settings = {
        "rocketMQClusterName": "DefaultCluster", "proxyMode": "CLUSTER", "namesrvAddr": namesrv,
        "grpcServerPort": port, "remotingListenPort": port + 1,
    }  # fmt: skip
    (folder / "proxy.json").write_text(json.dumps(settings))
    flags = (
        "-Xmx1g", f"-Duser.home={folder}",
        f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}",
    )  # fmt: skip
    command = [
        "java", *flags, "org.apache.rocketmq.proxy.ProxyStartup", "-pc",
        str(folder / "proxy.json"), "-pm", "cluster", "-n", namesrv,
    ]  # fmt: skip
    environment = {
        **os.environ,
        "CLASSPATH": (folder / "classpath.txt").read_text().strip(),
        "ROCKETMQ_HOME": str(folder),
    }
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 60
        while _READY not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
