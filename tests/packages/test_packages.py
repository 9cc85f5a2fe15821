"""The wheel and the sdist: built without the network, installed where nothing else is, and run from there."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*words: str | Path, cwd: Path) -> str:
    """Without anything of the checkout on the path. What it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def build(source: Path, target: str, to: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", to, cwd=source)
    (built,) = to.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


def contents(wheel: Path) -> dict[str, int]:
    """Checksum by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def needed(requirements: list[str], found: dict[str, metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """What an installation without extras brings along, by the names of this environment."""
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        if each.name not in found:
            found[each.name] = metadata.distribution(each.name)
            needed(found[each.name].requires or [], found)
    return found


def environment_with(wheel: Path, directory: Path) -> Path:
    """A new environment with the wheel and what it asks for, nothing else. Its folder of commands."""
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=directory.parent)
    python = directory / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=directory).strip())
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
        requirements = metadata.PathDistribution(zipfile.Path(archive, name.partition("/")[0] + "/")).requires or []
    for each in needed(requirements, {}).values():
        for top in {file.parts[0] for file in each.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(Path(str(each.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=directory)
    run(*pip, "check", cwd=directory)
    return python.parent


def test_the_wheel_runs_the_hello_example_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    commands = environment_with(wheel, tmp_path / "environment")
    script = tmp_path / "hello.py"
    script.write_text((ROOT / "examples/hello/hello.py").read_text())
    where = run(commands / "python", "-c", "import dlrover; print(dlrover.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(tmp_path), "not the checkout"
    assert run(commands / "dlrover", "version", cwd=tmp_path).strip() == VERSION
    shown = run(commands / "dlrover-run", "--standalone", "--nproc-per-node=2", script, cwd=tmp_path)
    assert "hello from worker 0 of 2" in shown
    assert "hello from worker 1 of 2" in shown


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dlrover"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    packed = {name for name in contents(wheel) if not name.startswith(f"dlrover-{VERSION}.dist-info/")}
    assert packed == {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    again = build(source, "wheel", tmp_path / "dist")
    assert contents(again) == contents(wheel)
    assert {"README.md", "LICENSE", "CHANGELOG.md"} <= {path.name for path in source.iterdir()}


def test_the_version_stands_in_one_place() -> None:
    import dlrover

    assert dlrover.__version__ == metadata.version("dlrover")
    sources = [path for path in ROOT.glob("dlrover/**/*.py") if VERSION in path.read_text()]
    assert sources == [], "pyproject.toml has it; others ask importlib.metadata"
