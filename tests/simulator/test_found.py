"""
Lives that once broke something: each is the shortest list of faults that showed a bug, kept for ever.
"""

from __future__ import annotations

import pytest

from dlrover.protocol.messages import RestartPolicy
from dlrover.simulator.campaign import run_plan
from dlrover.simulator.faults import Fault
from dlrover.simulator.plan import Plan, Result
from dlrover.simulator.shapes import Shape

FOUND = {
    # The last call of the next round ended before the silence of the node was believed, and its peers, who had only
    # lost their connection to it, paid a restart each time.
    "a-node-without-power-is-charged-to-its-peers": Plan(
        seed=16,
        shape=Shape(min_nodes=2, max_nodes=3, spares=1, local_world_size=8, restarts=RestartPolicy(max_restarts=7)),
        faults=(
            Fault(at=457062701, kind="preemption", pick=458563895, amount=0.2122013266869337),
            Fault(at=462737842, kind="worker-crash", pick=1015296256, amount=0.8820382956713625),
            Fault(at=595521212, kind="power-loss", pick=445677477, amount=0.017524976267879633),
        ),
        hours=1.0,
    ),
    # A master slept for some seconds, was replaced, woke up and had nothing to write: so it never met the fence, its
    # agents stayed with it, and the new master waited for them until it gave up. An idle master has to look.
    "a-replaced-master-with-nothing-to-write-keeps-its-agents": Plan(
        seed=20,
        shape=Shape(min_nodes=2, max_nodes=2, node_unit=2, num_steps=2520),
        faults=(Fault(at=1299757748, kind="two-masters", pick=478249108, amount=0.11887009662766057),),
        hours=1.0,
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_broke_once_holds(name: str) -> None:
    outcome = run_plan(FOUND[name])
    assert isinstance(outcome, Result), outcome
