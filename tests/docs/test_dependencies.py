"""The pinned versions, their hashes and their licences are one list."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(line.split("==")[0]): line.split("==")[1] for line in lines if not line.startswith("#")}


def test_every_locked_file_has_a_hash_and_the_pinned_version() -> None:
    lines = (ROOT / "constraints.locked.txt").read_text().splitlines()
    found = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines if line[0] != "#"]
    assert all(found)
    locked = {normal(each[1]): each[2] for each in found if each is not None}
    versions = {name: version for name, version in pins().items() if name in locked}
    assert {name: locked[name] for name in versions} == versions, "run `make lock`"
    installed = {normal(each.metadata["Name"]) for each in metadata.distributions()}
    needed = pins().keys() & installed
    assert needed - set(locked) == {"torch"}, "each accelerator has a file of its own of torch; run `make lock`"
    assert "://" not in (ROOT / "constraints.locked.txt").read_text(), "from whatever index: the hash decides"


def test_every_installed_package_has_a_known_licence() -> None:
    text = (ROOT / "docs/reference/licences.md").read_text()
    rows = {
        normal(name): (version, licence)
        for name, version, licence in re.findall(r"^\| (\S+) \| (\S+) \| (.+?) \|", text, re.M)
    }
    del rows["package"]
    assert {name: version for name, (version, _) in rows.items()}.items() <= pins().items(), "run `make licences`"
    assert [name for name, (_, licence) in rows.items() if licence == "unknown"] == []
    installed = {normal(each.metadata["Name"]) for each in metadata.distributions()}
    assert sorted((pins().keys() & installed) - set(rows)) == [], "run `make licences`"
    named = [normal(name) for name in re.findall(r"^\* (\S+):", text, re.M)]
    assert named == [name for name, (_, licence) in rows.items() if re.search(r"GPL|MPL|EPL|Mozilla", licence)]
    drivers = {
        "psycopg",
        "psycopg-binary",
    }  # of PostgreSQL, in an extra of its own, used as they are: that is what the LGPL asks for
    copyleft = {name for name, (_, licence) in rows.items() if "GPL" in licence}
    assert copyleft <= drivers, "not one that we ask for"
