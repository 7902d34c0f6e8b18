"""Take what driver and executors need to reach a store from the Hadoop settings of the Spark session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlparse

if TYPE_CHECKING:
    Setting = Callable[[str], str | None]

_WEBHDFS_PORTS: Final = {"http": "9870", "https": "9871"}


def store_options(setting: Setting, user: Callable[[], str], place: str, given: Mapping[str, Any]) -> str:
    """Return the settings for a place, as JSON: those of the session, replaced by those that the user gave.

    ``setting`` returns a Hadoop setting of the session's by name, ``user`` the name of Hadoop's user.
    """
    target = urlparse(place)
    if target.scheme in ("s3", "s3a", "s3n"):
        settings = _s3(target.netloc, setting)
    elif target.scheme == "gs":
        settings = _gcs(setting)
    elif target.scheme in ("abfs", "abfss", "az"):
        settings = _azure(target.netloc.partition("@")[2], setting)
    elif target.scheme == "hdfs":
        settings = {"addresses": _name_nodes(target.netloc, setting), "user": user()}
        return json.dumps(settings)
    else:
        return "{}"
    return json.dumps({**{name: value for name, value in settings.items() if value is not None}, **given})


def _s3(bucket: str, setting: Setting) -> dict[str, Any]:
    def of_bucket(name: str) -> str | None:
        return setting(f"fs.s3a.bucket.{bucket}.{name}") or setting(f"fs.s3a.{name}")

    settings: dict[str, Any] = {
        "access_key_id": of_bucket("access.key"),
        "secret_access_key": of_bucket("secret.key"),
        "session_token": of_bucket("session.token"),
        "region": of_bucket("endpoint.region"),
    }
    if endpoint := of_bucket("endpoint"):
        plain = of_bucket("connection.ssl.enabled") == "false"
        settings["endpoint"] = endpoint if "://" in endpoint else f"http{'' if plain else 's'}://{endpoint}"
        # a private store seldom has a host name for each bucket, and Hadoop's default does not say whether it has
        settings["virtual_hosted_style_request"] = of_bucket("path.style.access") == "false"
        settings["region"] = settings["region"] or "us-east-1"
    if "AnonymousAWSCredentialsProvider" in (of_bucket("aws.credentials.provider") or ""):
        settings["skip_signature"] = True
    return settings


def _gcs(setting: Setting) -> dict[str, Any]:
    names = ("fs.gs.auth.service.account.json.keyfile", "google.cloud.auth.service.account.json.keyfile")
    return {"service_account": next(filter(None, map(setting, names)), None)}


def _azure(host: str, setting: Setting) -> dict[str, Any]:
    def of_account(name: str) -> str | None:
        return setting(f"{name}.{host}") or setting(name)

    # https://login.microsoftonline.com/<tenant>/oauth2/token
    tenant = urlparse(of_account("fs.azure.account.oauth2.client.endpoint") or "").path.strip("/").partition("/")[0]
    return {
        "account_key": of_account("fs.azure.account.key"),
        "sas_key": of_account("fs.azure.sas.fixed.token"),
        "client_id": of_account("fs.azure.account.oauth2.client.id"),
        "client_secret": of_account("fs.azure.account.oauth2.client.secret"),
        "tenant_id": tenant or None,
    }


def _name_nodes(authority: str, setting: Setting) -> list[str]:
    """Return the HTTP addresses of a cluster's NameNodes: the active one and its standbys."""
    secure = setting("dfs.http.policy") == "HTTPS_ONLY"
    scheme = "https" if secure else "http"
    host = authority.partition(":")[0]
    nodes = setting(f"dfs.ha.namenodes.{authority}")
    suffixes = [f".{authority}.{node.strip()}" for node in nodes.split(",")] if nodes else [f".{authority}", ""]
    addresses = [setting(f"dfs.namenode.{scheme}-address{suffix}") for suffix in suffixes]
    # the default address has no host
    known = [each.replace("0.0.0.0", host) for each in addresses if each]  # noqa: S104 - not bound to
    return [f"{scheme}://{each}" for each in known or [f"{host}:{_WEBHDFS_PORTS[scheme]}"]]
