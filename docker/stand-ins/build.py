"""Builds the stand-ins for the official images, on a machine that can pull none: see README.md beside this file.

    python docker/stand-ins/build.py [--engine podman] [--again] [--pipeline]

With --pipeline also the images of docker/Dockerfile and docker/Dockerfile.tests, on the same base.

Needs root, debootstrap, an engine, and an environment with epochsink[services,elasticsearch].
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import py4j
import pyspark

from epochsink_devkit.services import versions
from epochsink_devkit.services.artifacts import fetch
from epochsink_devkit.services.elasticsearch import install_http_module
from epochsink_devkit.services.postgres import unpack

HERE = Path(__file__).parent
PACKAGES = "ca-certificates,curl,iproute2,openjdk-17-jre-headless,postgresql-client,procps,python3,python3-venv"
MIRROR = "http://deb.debian.org/debian"
ENGINE_PACKAGES = "podman runc netavark aardvark-dns iptables debootstrap"
BASE = "localhost/epochsink/base:bookworm"
CERTIFICATES = "/etc/ssl/certs"


def main() -> int:
    """Build what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="podman", help="podman or docker")
    parser.add_argument("--again", action="store_true", help="build the three images although they exist")
    parser.add_argument("--pipeline", action="store_true", help="build the images of a pipeline and of the tests, too")
    chosen = parser.parse_args()
    for program in (chosen.engine, "debootstrap"):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not installed: apt-get install {ENGINE_PACKAGES}")
    if not _exists(chosen.engine, BASE):
        _make_base(chosen.engine)
    release = versions.elasticsearch()
    for name, version, stage in (
        ("kafka", versions.KAFKA, _stage_kafka),
        ("postgres", versions.POSTGRES, _stage_postgres),
        ("elasticsearch", release.version, _stage_elasticsearch),
    ):
        image = f"localhost/epochsink/{name}:{version}"
        if _exists(chosen.engine, image) and not chosen.again:
            print(f"{image} is there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            context = Path(folder, name)
            shutil.copytree(HERE / name, context)
            stage(context)
            print(f"building {image}")
            subprocess.run([chosen.engine, "build", "--quiet", "--tag", image, str(context)], check=True)
    if chosen.pipeline:
        for name, file, base in (
            ("pipeline", "Dockerfile", BASE),
            ("tests", "Dockerfile.tests", "localhost/epochsink/pipeline"),
        ):
            _build_from_sources(chosen.engine, name, file, base)
    return 0


def _build_from_sources(engine: str, name: str, file: str, base: str) -> None:
    """Build an image of this project, which installs packages: with this machine's network and its certificates."""
    print(f"building localhost/epochsink/{name}: a few minutes")
    machine = ["--network", "host"]
    if engine == "podman":
        # docker has no such option: there the base has to trust a proxy that packs HTTPS anew
        machine += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    project = HERE.parents[1]
    options = ["--quiet", "--file", str(project / "docker" / file), "--build-arg", f"BASE={base}"]
    command = [engine, "build", *machine, *options, "--tag", f"localhost/epochsink/{name}", str(project)]
    subprocess.run(command, check=True)


def _exists(engine: str, image: str) -> bool:
    return subprocess.run([engine, "image", "inspect", image], capture_output=True, check=False).returncode == 0


def _make_base(engine: str) -> None:
    """Make an image of Debian with Java and Python, without an image to begin from."""
    print("making the base from Debian's packages: about a minute")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        made = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root), MIRROR]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
        with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
            subprocess.run([engine, "import", "-", BASE], stdin=packed.stdout, check=True, stdout=subprocess.DEVNULL)


def _stage_kafka(context: Path) -> None:
    _copy_jars(fetch(versions.KAFKA_BUNDLE), context / "libs")


def _stage_postgres(context: Path) -> None:
    programs = context / "programs"
    programs.mkdir()
    unpack(programs)


def _stage_elasticsearch(context: Path) -> None:
    release = versions.elasticsearch()
    _copy_jars(fetch(release.bundle), context / "libs")
    install_http_module(release, context / "module")
    (context / "java.options").write_text("\n".join(release.java_options) + "\n")
    jars = Path(pyspark.__file__).parent / "jars"
    shutil.copy(next(jars.glob("py4j-*.jar")), context / "py4j.jar")
    shutil.copytree(Path(py4j.__file__).parent, context / "py4j", ignore=shutil.ignore_patterns("tests", "__pycache__"))
    boot = Path(versions.__file__).with_name("elasticsearch_boot.py")
    shutil.copy(boot, context / "elasticsearch_boot.py")


def _copy_jars(source: Path, target: Path) -> None:
    target.mkdir()
    for jar in source.glob("*.jar"):
        shutil.copy(jar, target)


if __name__ == "__main__":
    sys.exit(main())
