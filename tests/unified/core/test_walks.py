"""Whatever happens to an ensemble, in any order: budgets hold, nothing lives twice, nothing starts before what it needs, and the job ends."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest

from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.machine import AT_ONCE, EnsembleMachine
from dlrover.unified.core.messages import CreateInstance, InstanceGone, InstanceId, MachineReplaced
from dlrover.unified.core.state import ENSEMBLE_DECISIONS, Instance, InstanceLife, RoleState
from tests.unified.core.walks import Walk

NUM_WALKS = 1500
RECORDED = {1: "44d06898130d3816"}
"""Of all walks of a replay, by decision version. A conductor of an upgraded package asks by the version whether it may replay a journal."""


def test_random_faults_violate_nothing():
    for seed in range(NUM_WALKS):
        Walk(seed).run()


def test_a_replay_is_equal_in_another_process_with_another_hash_seed():
    words = [sys.executable, "-m", "tests.unified.core.walks", "200", "7", "--digests"]
    told = [
        subprocess.run(
            words, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for seed in ("1", "4711")
    ]
    assert told[0] == told[1]
    assert len(set(told[0].split())) > 150, "the walks differ from each other"
    found = hashlib.blake2b(told[0].encode(), digest_size=8).hexdigest()
    assert {ENSEMBLE_DECISIONS: found} == RECORDED, (
        "The same commands lead to another state. If that is meant, raise ENSEMBLE_DECISIONS by one and record the new digest."
    )


class Spendthrift(EnsembleMachine):
    """Uses no budget up."""

    def _restart_job(self, *, pause: Micros = AT_ONCE) -> None:
        super()._restart_job(pause=pause)
        self._state.budget.used = 0


class SpendthriftOfRoles(EnsembleMachine):
    def _restart_role(self, name: str, role: RoleState, *, pause: Micros = AT_ONCE) -> None:
        super()._restart_role(name, role, pause=pause)
        role.budget.used = 0


class Hasty(EnsembleMachine):
    """Starts everything at once."""

    def _is_usable(self, role: str) -> bool:
        return True


class Impatient(EnsembleMachine):
    """Does not wait for the end of a former life."""

    def _end(self, instance_id: InstanceId) -> None:
        super()._end(instance_id)
        instance = self._instance(instance_id)
        if instance.life is InstanceLife.ENDING and self._state.stage == "RUNNING":
            instance.life = InstanceLife.ABSENT


class Forgetful(EnsembleMachine):
    """Takes a death for nothing."""

    def _on_gone(self, command: InstanceGone) -> None:
        instance = self._instance(command.instance)
        if instance.life is not InstanceLife.RUNNING:
            super()._on_gone(command)


class Restarting(EnsembleMachine):
    """A conductor that takes over forgets what it was about to make."""

    def open_effects(self):
        return [effect for effect in super().open_effects() if not isinstance(effect, CreateInstance)]


class Careless(EnsembleMachine):
    """Does not wait for another machine."""

    def _replace_machine(self, instance_id: InstanceId, instance: Instance) -> bool:
        goes_on = super()._replace_machine(instance_id, instance)
        instance.awaits_machine = False
        return goes_on


class Wasteful(EnsembleMachine):
    """Counts no machine."""

    def _on_machine(self, command: MachineReplaced) -> None:
        super()._on_machine(command)
        self._state.num_machine_replacements = 0


MUTANTS = [Spendthrift, SpendthriftOfRoles, Hasty, Impatient, Forgetful, Restarting, Careless, Wasteful]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_walks_find_a_machine_that_decides_wrongly(mutant: type[EnsembleMachine]):
    found = 0
    for seed in range(NUM_WALKS):
        try:
            Walk(seed, mutant).run()
        except AssertionError:
            found += 1
    assert found, f"{mutant.__name__} passes {NUM_WALKS} walks"
