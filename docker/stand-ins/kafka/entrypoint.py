"""What apache/kafka does with its environment: properties from KAFKA_*, storage formatted once, then the broker."""

import os
import shlex
import subprocess
from pathlib import Path

LIBS = "/opt/kafka/libs/*"
HOME = Path("/tmp/kraft-combined-logs")  # noqa: S108 - the official image's own folder
CLUSTER = os.environ.get("CLUSTER_ID", "5L6g3nShT-eMCtK--X86sw")
NOT_PROPERTIES = {"KAFKA_HEAP_OPTS", "KAFKA_OPTS", "KAFKA_JVM_PERFORMANCE_OPTS", "KAFKA_VERSION"}
LOGGING = """\
status = warn
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = [%d] %p %m (%c)%n
rootLogger.level = info
rootLogger.appenderRef.out.ref = out
"""


def property_name(variable: str) -> str:
    """Return the server property that a variable stands for: `_` is a dot, `__` an underscore, `___` a dash."""
    name = variable.removeprefix("KAFKA_").lower()
    return name.replace("___", "-").replace("__", "\0").replace("_", ".").replace("\0", "_")


def main() -> None:
    """Write the configuration, format the storage if it is new, and become the broker."""
    given = {k: v for k, v in os.environ.items() if k.startswith("KAFKA_") and k not in NOT_PROPERTIES}
    properties = {"log.dirs": str(HOME / "data"), **{property_name(name): value for name, value in given.items()}}
    configuration = HOME / "server.properties"
    configuration.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
    logging = HOME / "log4j2.properties"
    logging.write_text(LOGGING)
    java = ["java", f"-Dlog4j2.configurationFile={logging}", "-cp", LIBS]
    subprocess.run(
        [*java, "kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", CLUSTER, "-c", str(configuration)],
        check=True,
    )
    options = shlex.split(os.environ.get("KAFKA_HEAP_OPTS", "-Xmx512m")) + shlex.split(os.environ.get("KAFKA_OPTS", ""))
    command = [java[0], *options, *java[1:], "kafka.Kafka", str(configuration)]
    os.execvp(command[0], command)  # noqa: S606 - becomes process 1, so that signals reach the broker


if __name__ == "__main__":
    main()
