"""Tell the JVM of Elasticsearch or OpenSearch, through its py4j gateway, to start the node; run once per start.

Reads one JSON object from standard input: `port` and `token` of the gateway, `home`, `settings`, and `product`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from py4j.java_gateway import GatewayParameters, JavaGateway
from py4j.protocol import Py4JError, Py4JJavaError


def boot(jvm: Any, home: Path, settings: dict[str, str], product: str = "elasticsearch") -> None:
    """Start a node with these settings. It shuts down in order when the JVM gets SIGTERM."""
    es = getattr(jvm.org, product)
    node_settings = es.common.settings.Settings.builder()
    for name, value in settings.items():
        node_settings.put(name, value)
    jvm.java.lang.System.setProperty(f"{'es' if product == 'elasticsearch' else product}.path.home", str(home))
    environment = es.env.Environment(node_settings.build(), _path(jvm, home / "config"))
    es.common.logging.LogConfigurator.setNodeName(settings["node.name"])
    if product == "elasticsearch":
        es.common.logging.LogConfigurator.configure(environment, True)  # noqa: FBT003 - a Java method
        node = es.node.Node(environment, _plugins(jvm, environment))
    else:
        es.common.logging.LogConfigurator.configure(environment)
        node = es.node.Node(environment)
    _close_at_exit(jvm, node)
    node.start()


def _path(jvm: Any, path: Path) -> Any:
    return jvm.java.io.File(str(path)).toPath()


def _plugins(jvm: Any, environment: Any) -> Any:
    loader = jvm.org.elasticsearch.plugins.PluginsLoader
    methods = jvm.java.lang.Class.forName("org.elasticsearch.plugins.PluginsLoader").getMethods()
    (parameters,) = (each.getParameterCount() for each in methods if each.getName() == "loadModulesBundles")
    # a newer server asks whether the node is stateless, too
    stateless = [False] * (parameters - 1)
    return loader.createPluginsLoader(
        loader.loadModulesBundles(environment.modulesDir(), *stateless),
        loader.loadPluginsBundles(environment.pluginsDir(), *stateless),
        jvm.java.util.HashMap(),
        False,  # noqa: FBT003 - a Java method: whether the server is a module
    )


def _close_at_exit(jvm: Any, node: Any) -> None:
    """Register `node.close()` as a shutdown hook. A method handle becomes the Runnable, so no Java code is needed."""
    invoke = jvm.java.lang.invoke
    close = invoke.MethodHandles.publicLookup().findVirtual(
        jvm.java.lang.Class.forName("java.io.Closeable"),
        "close",
        invoke.MethodType.methodType(jvm.java.lang.Void.TYPE),
    )
    runnable = jvm.java.lang.Class.forName("java.lang.Runnable")
    hook = invoke.MethodHandleProxies.asInterfaceInstance(runnable, close.bindTo(node))
    jvm.java.lang.Runtime.getRuntime().addShutdownHook(jvm.java.lang.Thread(hook))


def main() -> None:
    """Boot as standard input says. A Java exception is printed on standard error, with status 1."""
    order = json.load(sys.stdin)
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(port=order["port"], auth_token=order["token"], auto_convert=True)
    )
    try:
        boot(gateway.jvm, Path(order["home"]), order["settings"], order.get("product", "elasticsearch"))
    except Py4JJavaError as error:
        sys.exit(str(error.java_exception))
    except Py4JError as error:
        sys.exit(str(error))
    finally:
        gateway.close()


if __name__ == "__main__":
    main()
