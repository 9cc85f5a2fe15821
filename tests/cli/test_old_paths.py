"""The import paths of the original that exist here."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dlrover.python import ALIASES


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in ALIASES.items() for name in names])
def test_an_old_path_gives_what_lives_elsewhere_now(module: str, name: str) -> None:
    target_module, _, attribute = ALIASES[module][name].partition(":")
    old = getattr(importlib.import_module(module), name)
    assert old is getattr(importlib.import_module(target_module), attribute)
    assert name in dir(importlib.import_module(module))


def test_from_import_works_as_in_users_scripts() -> None:
    from dlrover.python.elastic_agent.torch.training import ElasticLaunchConfig, launch_agent  # type: ignore[import-not-found]

    assert callable(launch_agent)
    assert ElasticLaunchConfig().max_nodes == 1


def test_what_is_not_in_the_table_does_not_exist() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dlrover.python.no_such")
    with pytest.raises(ImportError):
        from dlrover.python.elastic_agent.torch.training import NoSuchThing  # noqa: F401


def test_an_old_path_costs_nothing_until_it_is_used() -> None:
    code = "import dlrover.python.elastic_agent.torch.training, sys; print('dlrover.cli.programmatic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "False"


def test_the_old_master_module_runs() -> None:
    command = [sys.executable, "-m", "dlrover.python.master.main", "--job_name", "j", "--platform", "pyk8s"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "--platform pyk8s is not yet available" in done.stderr
