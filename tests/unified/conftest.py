"""Packages that bring extensions of the conductor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

InstallExtension = Callable[..., None]


@pytest.fixture
def install_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InstallExtension:
    """Source and names of the classes that it registers, as pip would leave the package."""

    def install(source: str, *names: str) -> None:
        module = f"extension_of_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{module}.py").write_text(source)
        about = tmp_path / "brought-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        points = "".join(f"{name} = {module}:{name}\n" for name in names)
        (about / "entry_points.txt").write_text(f"[dlrover.unified.extension]\n{points}")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, module, raising=False)

    return install
