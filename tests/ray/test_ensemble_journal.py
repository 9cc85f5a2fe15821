"""The journal of a multi-role job in the store of a real cluster."""

from __future__ import annotations

import pytest

from dlrover.platforms.ray.store import ClusterKeyValues
from dlrover.protocol.messages.identity import Micros
from dlrover.unified.core.messages import BeginEnsemble, BundlesPlaced, StopEnsemble
from dlrover.unified.core.spec import EnsembleSpec, RoleSpec
from dlrover.unified.store import ConductorFenced, DurableEnsemble, EnsembleJournal
from tests.ray.lab import RayLab

NOW = Micros(1)


def test_a_second_conductor_takes_over_and_fences_the_first(lab: RayLab):
    journal = EnsembleJournal(ClusterKeyValues(), "journal-test", snapshot_every=4)
    begin = BeginEnsemble(EnsembleSpec(name="job", roles=(RoleSpec(name="worker"),)))
    first = DurableEnsemble.take_over(journal, NOW, first=begin)
    first.decide(BundlesPlaced(), NOW)
    second = DurableEnsemble.take_over(journal, NOW)
    assert second.machine.state.is_placed
    with pytest.raises(ConductorFenced):
        first.decide(StopEnsemble("too late"), NOW)
    second.decide(StopEnsemble("in time"), NOW)
    assert journal.load().digest() == second.machine.digest()
    journal.clear()
    assert lab.keys() == []
