"""Artifacts are fetched once, whole and as recorded, or not at all."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from epochsink.errors import ServiceError
from epochsink_devkit.services import artifacts, cache, spark_ivy_settings, versions
from epochsink_devkit.services.versions import Artifact, Bundle

CONTENT = b"a jar"
GOOD = Artifact("org.example", "thing", "1.0", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def ivy_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for Java: fails as often as the file `failures` says, then writes the jar."""
    failures = tmp_path / "failures"
    program = tmp_path / "java"
    program.write_text(
        textwrap.dedent(f"""\
        #!{sys.executable}
        import pathlib, sys
        left = pathlib.Path({str(failures)!r})
        count = int(left.read_text())
        left.write_text(str(count - 1))
        if count > 0:
            print(":: UNRESOLVED DEPENDENCIES ::")
            print(left.with_name("told").read_text() if left.with_name("told").exists() else "the registry is away")
            sys.exit(0)
        target = pathlib.Path(sys.argv[sys.argv.index("-retrieve") + 1]).parent
        (target / "thing-1.0.jar").write_bytes({CONTENT!r})
        """)
    )
    program.chmod(0o755)
    monkeypatch.setattr(artifacts, "java", lambda: str(program))
    monkeypatch.setattr(artifacts, "FIRST_PAUSE_SECONDS", 0.0)
    return failures


@pytest.mark.parametrize(
    ("lacking", "installed", "hint"),
    [
        ("org.apache.spark:spark-sql-kafka-0-10_2.13:4.3.0", "4.3.0", f"pip install pyspark=={versions.LOCKED_SPARK}"),
        (f"org.apache.spark:spark-avro_2.13:{versions.LOCKED_SPARK}", versions.LOCKED_SPARK, "mirror"),
        ("org.example:thing:1.0", "4.3.0", "mirror"),
    ],
)
def test_an_artifact_that_the_registry_lacks_is_named(
    ivy_that_fails: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, installed: str, hint: str
) -> None:
    """And what to install is a version that has it: the next older one may lack it, too."""
    monkeypatch.setattr("pyspark.__version__", installed)
    organisation, name, version = lacking.split(":")
    ivy_that_fails.write_text("99")
    ivy_that_fails.with_name("told").write_text(f":: {organisation}#{name};{version}: not found")
    with pytest.raises(ServiceError, match=re.escape(f"the registry has no {lacking}")) as caught:
        artifacts.fetch(Bundle("thing-1.0", (GOOD,)))
    assert hint in str(caught.value.hint)


def test_a_registry_that_fails_now_and_then_is_asked_again(ivy_that_fails: Path) -> None:
    ivy_that_fails.write_text("3")
    folder = artifacts.fetch(Bundle("thing-1.0", (GOOD,)))
    assert (folder / "thing-1.0.jar").read_bytes() == CONTENT
    assert ivy_that_fails.read_text() == "-1"
    assert artifacts.fetch(Bundle("thing-1.0", (GOOD,))) == folder
    assert ivy_that_fails.read_text() == "-1", "the second call fetches nothing"


def test_a_registry_that_stays_away_is_an_error_that_leaves_nothing(ivy_that_fails: Path) -> None:
    ivy_that_fails.write_text("100")
    with pytest.raises(ServiceError, match=r"(?s)could not fetch thing-1.0 in 5 attempts.*the registry is away"):
        artifacts.fetch(Bundle("thing-1.0", (GOOD,)))
    assert [path.name for path in (cache.cache_folder() / "bundles").iterdir()] == [".lock"]


def test_another_jar_than_the_recorded_one_is_refused(ivy_that_fails: Path) -> None:
    ivy_that_fails.write_text("0")
    other = Artifact("org.example", "thing", "1.0", "0" * 64)
    with pytest.raises(ServiceError, match="expected 0000"):
        artifacts.fetch(Bundle("thing-1.0", (other,)))
    assert [path.name for path in (cache.cache_folder() / "bundles").iterdir()] == [".lock"]


def test_a_jar_that_nobody_has_recorded_is_refused(ivy_that_fails: Path) -> None:
    """Every jar of a bundle is pinned, those that others bring along too."""
    ivy_that_fails.write_text("0")
    unpinned = Artifact("org.example", "thing", "1.0")
    with pytest.raises(ServiceError, match="expected none"):
        artifacts.fetch(Bundle("thing-1.0", (unpinned,)))
    assert artifacts.fetch(Bundle("thing-1.0", (unpinned,), locked=False)).is_dir()


def test_the_demo_installs_a_pyspark_whose_kafka_source_is_published() -> None:
    """Nor do the tests run on another one."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert f"pyspark<={versions.LOCKED_SPARK}" in project["project"]["optional-dependencies"]["demo"]
    assert f"pyspark[connect]=={versions.LOCKED_SPARK}" in project["dependency-groups"]["dev"]


def test_the_recorded_digests_agree() -> None:
    """The bundles' own artifacts have the same digest in both places."""
    recorded = artifacts._locked()
    assert len(recorded) > 100
    named = [versions.KAFKA_BUNDLE, versions.postgres_bundle("x86_64")]
    named += [bundle for release in versions.ELASTICSEARCH.values() for bundle in (release.bundle, release.http_bundle)]
    for bundle in named:
        for artifact in bundle.artifacts:
            assert recorded[artifact.file_name] == artifact.sha256


def test_another_pin_is_another_folder(ivy_that_fails: Path) -> None:
    """What a change of versions.py fetches never mixes with what was fetched before."""
    ivy_that_fails.write_text("0")
    first = artifacts.fetch(Bundle("thing", (GOOD,)))
    second = artifacts.fetch(Bundle("thing", (GOOD,), exclude_modules=("other",)))
    assert first != second


def test_two_processes_fetch_once(tmp_path: Path) -> None:
    script = textwrap.dedent("""\
        import sys, time
        from pathlib import Path
        from epochsink_devkit.services.cache import build_once
        def build(folder):
            with Path(sys.argv[2]).open("a") as log:
                log.write("built\\n")
            time.sleep(0.3)
            (folder / "file").touch()
        assert (build_once(Path(sys.argv[1]), build) / "file").exists()
        """)
    command = [sys.executable, "-c", script, str(tmp_path / "made"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, env=dict(os.environ)) for _ in range(3)]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_the_ivy_settings_have_one_resolver_at_its_default_root() -> None:
    settings = ET.parse(spark_ivy_settings()).getroot()  # noqa: S314 - our own file
    assert [(one.tag, one.attrib) for one in settings.find("resolvers") or []] == [
        ("ibiblio", {"name": "central", "m2compatible": "true"})
    ]


def test_what_pyspark_ships_is_not_fetched_again() -> None:
    shipped = artifacts._shipped_modules()
    assert {"scala-library", "hadoop-client-runtime", "slf4j-api", "snappy-java"} <= set(shipped)
    assert "kafka-clients" not in shipped
