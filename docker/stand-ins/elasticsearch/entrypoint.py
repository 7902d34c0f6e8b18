"""What the official image does with its environment: variables with a dot are node settings; then the node runs."""

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

HOME = Path("/usr/share/elasticsearch")


def node_settings() -> dict[str, str]:
    """Return the settings: the image's defaults under what the environment says."""
    defaults = {
        "path.home": str(HOME),
        "path.data": str(HOME / "data"),
        "cluster.name": "docker-cluster",
        "node.name": os.environ.get("HOSTNAME", "node"),
        "network.host": "0.0.0.0",  # noqa: S104 - in a container
        "http.type": "netty4",
        "transport.type": "netty4",
    }
    # the published core has no security to switch off
    given = {k: v for k, v in os.environ.items() if "." in k and not k.startswith("xpack.")}
    return {**defaults, **given}


def main() -> int:
    """Start the JVM with a gateway, have it start the node, and end as it ends."""
    command = [
        *("java", *shlex.split(os.environ.get("ES_JAVA_OPTS", "-Xms512m -Xmx1g"))),
        *(HOME / "config" / "java.options").read_text().split(),
        *("-Des.networkaddress.cache.ttl=60", "-Dlog4j2.disable.jmx=true", "-Dlog4j.shutdownHookEnabled=false"),
        *("-p", str(HOME / "server"), "--add-modules", "ALL-MODULE-PATH"),
        *("--add-exports", "org.elasticsearch.server/org.elasticsearch.node=ALL-UNNAMED"),
        *("-cp", str(HOME / "py4j.jar"), "py4j.GatewayServer", "--enable-auth", "0"),
    ]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: node.terminate())
    assert node.stdout is not None  # noqa: S101 - it is a pipe
    port, token = int(node.stdout.readline()), node.stdout.readline().strip()
    threading.Thread(target=_pass_on, args=[node.stdout], daemon=True).start()
    order = {"port": port, "token": token, "home": str(HOME), "settings": node_settings()}
    boot = [sys.executable, str(HOME / "python" / "elasticsearch_boot.py")]
    done = subprocess.run(boot, input=json.dumps(order), text=True, check=False)
    if done.returncode:
        node.terminate()
    return node.wait() or done.returncode


def _pass_on(lines: object) -> None:
    for line in lines:  # type: ignore[attr-defined]
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
