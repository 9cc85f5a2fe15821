"""
What this project installs: the hashes of the pinned files, and the licences of their packages.

    make lock        # constraints.txt -> constraints.locked.txt
    make licences    # constraints.txt -> docs/reference/licences.md

Both are made from what pip and the installed packages say of themselves, never by hand.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
PINS, LOCK, TABLE = (
    ROOT / "constraints.txt",
    ROOT / "constraints.locked.txt",
    ROOT / "docs" / "reference" / "licences.md",
)
EXTRAS = "dev,torch,data,frameworks,dashboard,stacks,brain"
BUILD = ("hatchling", "editables")
"""What pip needs besides to install this project from its sources."""
UNLOCKED = ("torch",)
"""One version of it has a file for each accelerator, with a hash of its own: a hash here would force one of them on everybody."""

LOCK_HEAD = """\
# The files behind constraints.txt, by hash. Made by `make lock`, used by `make setup LOCKED=1`.
# For {machine} and CPython {python}: other ones need other files of the packages that are compiled. Without torch: each accelerator
# has a file of its own of the same version.
"""
TABLE_HEAD = """\
# Licences

What this project installs, from `constraints.txt`, and what each package says of its licence. Made by `make licences`.

"Asked for by" names the extra of this project that asks for a package. `core` is what every installation has, and an
empty cell is a package that another one asks for. Nothing here is distributed with this project: pip fetches it. These
packages have a licence that asks for something in return (GPL, LGPL, MPL, EPL) and are used as they are:

{named}

| Package | Version | Licence | Asked for by |
|---|---|---|---|
"""
_GIVES_BACK = re.compile(r"GPL|MPL|EPL|Mozilla", re.IGNORECASE)


def main() -> None:
    parser = argparse.ArgumentParser(description="What this project installs.")
    parser.add_argument("what", choices=("lock", "licences"))
    if parser.parse_args().what == "lock":
        LOCK.write_text(lock(), encoding="utf-8")
    else:
        TABLE.write_text(licences(), encoding="utf-8")


def pins() -> dict[str, str]:
    """Version by name, as in constraints.txt."""
    lines = PINS.read_text(encoding="utf-8").splitlines()
    found = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, _, version in found}


def lock() -> str:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
                *("--report", report.name, "-c", str(PINS), "-e", f"{ROOT}[{EXTRAS}]", *BUILD),
            ],
            check=True,
        )
        chosen = json.load(report)["install"]
    lines = []
    for each in chosen:
        name, version = each["metadata"]["name"], each["metadata"]["version"].partition("+")[0]
        hashes = each["download_info"].get("archive_info", {}).get("hashes", {})
        if hashes and name not in UNLOCKED:
            lines.append(f"{name}=={version} --hash=sha256:{hashes['sha256']}\n")
    head = LOCK_HEAD.format(
        machine=f"{platform.system()} {platform.machine()}", python=".".join(platform.python_version_tuple()[:2])
    )
    return head + "".join(sorted(lines, key=str.lower))


def licences() -> str:
    asked = _asked_for_by()
    installed = {_normal(each.metadata["Name"]) for each in metadata.distributions()}
    rows = [
        (name, version, licence_of(name), asked.get(_normal(name), ""))
        for name, version in pins().items()
        if _normal(name) in installed
    ]
    named = "\n".join(f"* {name}: {licence}" for name, _, licence, _ in rows if _GIVES_BACK.search(licence))
    return TABLE_HEAD.format(named=named) + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def licence_of(name: str) -> str:
    """By the field that new packages have, else their classifiers, else the first line of the old field."""
    about = metadata.metadata(name)
    if expression := about.get("License-Expression"):
        return expression
    classified = [
        each.rpartition(" :: ")[2] for each in about.get_all("Classifier", []) if each.startswith("License :: ")
    ]
    if names := [each for each in classified if each != "OSI Approved"]:
        return ", ".join(names)
    return (about.get("License") or "unknown").strip().splitlines()[0][:60]


def _asked_for_by() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = {}
    for extra, requirements in {"core": project["dependencies"], **project["optional-dependencies"]}.items():
        for each in requirements:
            found.setdefault(_normal(re.split(r"[^A-Za-z0-9._-]", each, maxsplit=1)[0]), []).append(extra)
    return {name: ", ".join(extras) for name, extras in found.items()}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()
