"""
What the build of the package does beyond packing files: it compiles the copy loop of snapshots, where there is a C compiler.

An editable installation gets the library into the source tree, a wheel gets it packed and then carries the platform in its name. The library calls
nothing but the C library's `memcpy` and no Python, so one wheel is for every version of Python, and neither Python's headers nor setuptools are needed.
Without a compiler, or with one that fails, or in a source tree that is read-only, the installation is the same without the library: it copies with
`ctypes.memmove`, which takes longer. `CC` names another compiler; `CC=false` builds the wheel that runs everywhere.

    python -m tools.build_hook        compile into this source tree, and say what came of it
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent.parent
SOURCE = Path("dlrover/snapshot/copy/streaming.c")
LIBRARY = Path("dlrover/snapshot/copy/libstreaming.so.1")
FLAGS = ("-std=c11", "-O2", "-shared", "-fPIC", "-s")
"""Without debugging information and symbols of no use, so that the same source gives the same library wherever it lies."""
DEADLINE = 60.0
"""Seconds for a compiler to answer; it needs a tenth of one."""


class StreamingBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Called by hatchling before and after it packs a wheel."""

    _made: str | None = None
    """The folder with the library of a wheel; an editable installation has none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            with suppress(OSError):  # a source tree that is read-only has what its owner built
                compile_in_place(Path(self.root))
            return
        self._made = tempfile.mkdtemp()
        library = Path(self._made, LIBRARY.name)
        if compile_loop(Path(self.root), library):
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
            build_data["force_include"][str(library)] = str(LIBRARY)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)


def compile_in_place(root: Path) -> bool:
    """
    Into the source tree. Afterwards there is a library of this source or none. Processes that have the old one open keep it. Raises `OSError` for a tree
    that is read-only.
    """
    with tempfile.TemporaryDirectory(dir=(root / LIBRARY).parent, prefix=".streaming-") as beside:
        made = Path(beside, LIBRARY.name)
        if compile_loop(root, made):
            made.replace(root / LIBRARY)
            return True
    (root / LIBRARY).unlink(missing_ok=True)
    return False


def compile_loop(root: Path, library: Path) -> bool:
    """Whether a compiler was found that made the library."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return any(_compiles([*shlex.split(each), *FLAGS], root / SOURCE, library) for each in _compilers())


def _compilers() -> tuple[str, ...]:
    """The user's choice alone, or else Python's own and the system's. Python's may be one of the machine where Python was built."""
    chosen = os.environ.get("CC")
    return (chosen,) if chosen else (sysconfig.get_config_var("CC") or "cc", "cc")


def _compiles(command: list[str], source: Path, library: Path) -> bool:
    try:
        done = subprocess.run(
            [*command, "-o", library, source.name], cwd=source.parent, capture_output=True, timeout=DEADLINE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and library.exists()


def main() -> int:
    if compile_in_place(ROOT):
        print(f"Compiled {SOURCE} to {LIBRARY}.")
        return 0
    print("No compiler here could make the library: snapshots are copied with memmove. Set CC to your C compiler.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
