"""The wheels and the sdist: built without the network, installed where nothing else is, and run from there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.build_hook import LIBRARY, compile_loop

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def run(*words: str | Path, cwd: Path, **variables: str) -> str:
    """Without anything of the checkout on the path. What it prints."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


def build(source: Path, target: str, to: Path, **variables: str) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", to, cwd=source, **variables)
    (built,) = to.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="session")
def has_compiler(tmp_path_factory: pytest.TempPathFactory) -> bool:
    return compile_loop(ROOT, tmp_path_factory.mktemp("compiled") / LIBRARY.name)


def without_compiler(folder: Path, kind: str) -> dict[str, str]:
    """Variables of a machine where a build finds none, or one that does not work."""
    if kind == "no":
        return {"CC": str(folder / "no-such-compiler")}
    broken = folder / "cc"
    broken.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    broken.chmod(0o755)
    return {"CC": str(broken)}


@pytest.fixture(scope="module", params=["compiler", "no compiler", "broken compiler"])
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, has_compiler: bool) -> Path:
    if request.param == "compiler":
        if not has_compiler:
            pytest.skip(f"no C compiler for {platform.machine()} here (install gcc)")
        return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"))
    variables = without_compiler(tmp_path_factory.mktemp("compiler"), request.param.split()[0])
    return build(ROOT, "wheel", tmp_path_factory.mktemp("wheel"), **variables)


def has_library(wheel: Path) -> bool:
    return str(LIBRARY) in contents(wheel)


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
    copies = "from dlrover.snapshot.copy.copying import Copier; print(Copier(1).is_streaming)"
    assert run(commands / "python", "-c", copies, cwd=tmp_path).strip() == str(has_library(wheel))


def test_a_wheel_with_the_extension_has_the_platform_in_its_name_and_any_other_runs_everywhere(wheel: Path) -> None:
    tag = wheel.stem.removeprefix(f"dlrover-{VERSION}-")
    assert tag == ("py3-none-linux_x86_64" if has_library(wheel) else "py3-none-any")
    with zipfile.ZipFile(wheel) as archive:
        described = archive.read(f"dlrover-{VERSION}.dist-info/WHEEL").decode()
    assert f"Tag: {tag}\n" in described
    assert f"Root-Is-Purelib: {str(not has_library(wheel)).lower()}\n" in described


def test_a_wheel_has_the_extension_where_there_is_a_compiler_and_not_elsewhere(
    request: pytest.FixtureRequest, wheel: Path
) -> None:
    assert has_library(wheel) is ("[compiler]" in request.node.name)


def copy_of_the_tree(to: Path) -> Path:
    """What a fresh clone has."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "dlrover", "tools", "*.toml", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).exists():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    shutil.copy(ROOT / "LICENSE", to)
    shutil.copy(ROOT / ".gitignore", to)
    return to


def build_editable(source: Path, to: Path, *prefix: str, **variables: str) -> Path:
    """What `pip install -e` has built before it installs it. The build must say nothing of its own."""
    to.mkdir()
    build_it = f"from hatchling.build import build_editable; print(build_editable({str(to)!r}))"
    printed = run(*prefix, sys.executable, "-c", build_it, cwd=source, **variables)
    (built,) = to.iterdir()
    assert printed == f"{built.name}\n", "silent, whatever the compiler said"
    return built


@pytest.mark.parametrize("kind", ["compiler", "no", "broken"])
def test_an_editable_installation_has_the_extension_where_there_is_a_compiler(
    kind: str, tmp_path: Path, has_compiler: bool
) -> None:
    if kind == "compiler" and not has_compiler:
        pytest.skip(f"no C compiler for {platform.machine()} here (install gcc)")
    source = copy_of_the_tree(tmp_path / "source")
    if kind != "compiler":
        (source / LIBRARY).write_bytes(b"of another source")
    variables = {} if kind == "compiler" else without_compiler(tmp_path, kind)
    commands = environment_with(build_editable(source, tmp_path / "built", **variables), tmp_path / "environment")
    assert (source / LIBRARY).exists() is (kind == "compiler")
    where = "import dlrover; print(dlrover.__file__)"
    found = run(commands / "python", "-c", where, cwd=tmp_path).strip()
    assert found == str(source / "dlrover" / "__init__.py")


def test_an_editable_installation_of_a_tree_that_is_read_only_changes_nothing_there(tmp_path: Path) -> None:
    source = copy_of_the_tree(tmp_path / "source")
    (source / LIBRARY).write_bytes(b"what its owner built")
    (source / LIBRARY).parent.chmod(0o555)
    # Root may write everywhere; without this capability it may not.
    prefix = ["setpriv", "--bounding-set=-dac_override"] if os.geteuid() == 0 else []
    if prefix and shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing (util-linux): root cannot play a user who may not write")
    build_editable(source, tmp_path / "built", *prefix)
    assert (source / LIBRARY).read_bytes() == b"what its owner built"
    assert [path.name for path in (source / LIBRARY).parent.glob(".streaming*")] == []


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "dlrover"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    packed = {name for name in contents(wheel) if not name.startswith(f"dlrover-{VERSION}.dist-info/")} - {str(LIBRARY)}
    assert packed == {name for name in tracked.stdout.splitlines() if (ROOT / name).exists()}


def test_a_wheel_built_from_the_sdist_is_the_same(sdist: Path, tmp_path: Path) -> None:
    """The library in it, too: it does not know where its source lay."""
    wheel = build(ROOT, "wheel", tmp_path / "from the checkout")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "sdist", filter="data")
    (source,) = (tmp_path / "sdist").iterdir()
    again = build(source, "wheel", tmp_path / "dist")
    assert contents(again) == contents(wheel)
    assert {"README.md", "LICENSE", "CHANGELOG.md"} <= {path.name for path in source.iterdir()}


def test_the_version_stands_in_one_place() -> None:
    import dlrover

    assert dlrover.__version__ == metadata.version("dlrover")
    sources = [path for path in ROOT.glob("dlrover/**/*.py") if VERSION in path.read_text()]
    assert sources == [], "pyproject.toml has it; others ask importlib.metadata"
