"""
Write the plain manifests in `deploy/` from the charts there, for people who use kustomize or kubectl alone.

    python tools/render_chart.py

A test compares them for each version of Kubernetes that we name, so a chart that was changed without this is noticed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "chart"
BRAIN_CHART = DEPLOY / "brain" / "chart"
BRAIN_PLAIN = DEPLOY / "brain" / "plain"
FILES = (
    "roles/master.yaml",
    "roles/master-plans.yaml",
    "roles/operator.yaml",
    "roles/people.yaml",
    "operator/operator.yaml",
)
BRAIN_FILES = ("brain.yaml", "monitor.yaml")
VERSIONS = ("1.31.0", "1.33.0", "1.36.0")
"""Of Kubernetes: the oldest that has what the definitions need, one between, and the newest that we tested with."""
HEADER = "# Rendered from {chart} by tools/render_chart.py; change the chart, not this file.\n"


def helm() -> Path:
    """From the package helm-binary, beside the interpreter."""
    return Path(sys.executable).parent / "helm"


def template(*options: str, version: str = VERSIONS[-1], plain: bool = True, chart: Path = CHART) -> str:
    """What `helm install` would send."""
    command = [str(helm()), "template", "dlrover", str(chart), "--namespace", "dlrover", "--kube-version", version]
    if plain:
        command += ["--values", str(chart / "plain.yaml")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


def main() -> int:
    for name in FILES:
        _write(CHART, name, DEPLOY / name)
    for name in BRAIN_FILES:
        _write(BRAIN_CHART, name, BRAIN_PLAIN / name)
    return 0


def _write(chart: Path, name: str, target: Path) -> None:
    lines = template("--show-only", f"templates/{name}", chart=chart).splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("# Source:") and line.strip())
    header = HEADER.format(chart=chart.relative_to(DEPLOY.parent))
    target.write_text(header + text.removeprefix("---\n"))


if __name__ == "__main__":
    sys.exit(main())
