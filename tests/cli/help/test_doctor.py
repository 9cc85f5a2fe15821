"""`dlrover doctor` has a sentence for everything that a job needs, and an exit code for scripts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from dlrover.cli.help.doctor import (
    PURPOSES,
    DoctorFinding,
    FindingState,
    examine,
    is_within,
    lines_of,
    packages_by_extra,
)
from dlrover.protocol.errors import ConfigError
from tests.cli.launch.test_check_env_and_commands import run

ROOT = Path(__file__).parents[3]


def found(environ: dict[str, str], *needed: str) -> dict[tuple[str, str], DoctorFinding]:
    return {(each.area, each.name): each for each in examine(environ, needed)}


@pytest.fixture
def environ(short_dir: Path) -> dict[str, str]:
    return {"TMPDIR": str(short_dir), "HOME": str(short_dir)}


def test_every_extra_and_every_platform_has_a_finding_with_a_sentence(environ: dict[str, str]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    findings = found(environ)
    assert {name for area, name in findings if area == "extras"} == set(declared) == set(PURPOSES)
    assert {name for area, name in findings if area == "platforms"} == {"local", "kubernetes", "ray"}
    assert [each for each in findings.values() if not each.sentence.endswith(".")] == []


def test_what_an_extra_needs_is_read_as_it_is_declared() -> None:
    extras = packages_by_extra()
    assert ("pyarrow", ">=16") in extras["data"]
    assert dict(extras["tensorflow-estimator"])["tensorflow-cpu"].replace(" ", "") in ("<2.16,>=2.15", ">=2.15,<2.16")


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.10.1", ">=2.9", True),
        ("2.8", ">=2.9", False),
        ("2.15.0.post1", ">=2.15,<2.16", True),
        ("2.16", ">=2.15,<2.16", False),
        ("2.13.0+cpu", ">=2.4", True),
        ("1.0.0", "==1", True),
        ("1.0", "!=1.0", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, bounds: str, expected: bool) -> None:
    assert is_within(version, bounds) is expected


def test_an_extra_that_is_missing_is_a_note_unless_it_is_needed(environ: dict[str, str]) -> None:
    missing = [each for each in examine(environ) if each.area == "extras" and each.state is not FindingState.OK]
    if not missing:
        pytest.skip("this environment has every extra")
    extra = missing[0].name
    assert missing[0].state is FindingState.NOTE
    assert f"pip install 'dlrover[{extra}]'" in missing[0].sentence
    assert found(environ, extra)["extras", extra].state is FindingState.PROBLEM
    assert f"Problems: {extra}." in list(lines_of(examine(environ, [extra])))[-1]


def test_an_extra_that_does_not_exist_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"no extra gpus.*torch"):
        examine(environ, ["gpus"])


@pytest.mark.parametrize(
    ("variable", "value", "state"),
    [
        ("NODE_RANK", "first", FindingState.PROBLEM),
        ("PET_MAX_RESTARTS", "many", FindingState.PROBLEM),
        ("DLROVER_LOG_LEVEL", "LOUD", FindingState.NOTE),
        ("DLROVER_MASTER_SERVICE_TYPE", "ray", FindingState.NOTE),
    ],
)
def test_a_variable_that_a_job_would_trip_over_is_named(
    variable: str, value: str, state: FindingState, environ: dict[str, str]
) -> None:
    finding = found(environ | {variable: value})["environment", "variables"]
    assert finding.state is state
    assert f"{variable}={value}" in finding.sentence


def test_a_cluster_that_is_configured_is_seen_and_one_that_cannot_be_read_is_told(
    environ: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "config"
    environ |= {"KUBECONFIG": str(config)}
    assert str(config) in found(environ)["platforms", "kubernetes"].sentence
    config.write_text(
        "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
        "clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: x}}]\n"
    )
    assert found(environ)["platforms", "kubernetes"].state is FindingState.OK


def test_the_command_prints_it_and_its_exit_code_says_whether_there_is_a_problem(short_dir: Path) -> None:
    done = run("doctor", runtime=short_dir)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No problem was found." in done.stdout
    broken = run("doctor", "--json", runtime=short_dir, NODE_RANK="first")
    assert broken.returncode == 1
    assert "problem" in {each["state"] for each in json.loads(broken.stdout)}
    assert run("doctor", "--need", "gpus", runtime=short_dir).returncode == 2
