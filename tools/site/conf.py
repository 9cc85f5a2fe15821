"""
The site of docs/, for Sphinx: `make docs`.

Pages are plain Markdown, so that they read well in the repository, too. What only the site needs (the tree of pages, links into the repository) is added
while it is built.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.site.links import rewritten  # noqa: E402  the builder knows no packages of ours

project = "DLRover"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
myst_heading_anchors = 6
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = f"DLRover {version}"
html_copy_source = False

FOLDERS = {"tutorials": "Tutorials", "how-to": "How to", "reference": "Reference", "explanation": "Explanation"}


def setup(app: Any) -> None:
    app.connect("source-read", _read)


def _read(app: Any, name: str, source: list[str]) -> None:
    text = rewritten(source[0], f"{name}.md").replace("```mermaid", "```text")
    if name == "index":
        text += "".join(
            f"\n```{{toctree}}\n:hidden:\n:glob:\n:caption: {title}\n\n{folder}/*\n```\n"
            for folder, title in FOLDERS.items()
        )
    source[0] = text
