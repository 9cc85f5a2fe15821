"""
From the files of the kernel to what people read: memory is never converted twice on its way (units: DECISIONS of the protocol page, `protocol/units.py`).

The cgroup is a directory of this test, so that the numbers are known to the byte. The monitor, the wire, the gatherer, the metrics and the statistics are the real ones.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dlrover.agent.monitor.limits import ResourceLimits
from dlrover.agent.monitor.resources import ResourceMonitor
from dlrover.master.statistics import RunStatistics
from dlrover.master.view.metrics import Families, _tell_usage
from dlrover.protocol.messages.identity import Micros, NodeRank
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import ResourceReport
from dlrover.protocol.units import MIB
from tests.master.test_statistics import Lab

PACKAGE = Path(__file__).resolve().parents[3] / "dlrover"
USED, DROPPABLE, LIMIT = 3_456_789_012, 456_789_000, 8_000_000_000


@pytest.fixture
def cgroup(tmp_path: Path) -> ResourceLimits:
    group = tmp_path / "root" / "node"
    group.mkdir(parents=True)
    (group / "memory.current").write_text(f"{USED}\n")
    (group / "memory.max").write_text(f"{LIMIT}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {DROPPABLE}\n")
    (tmp_path / "cgroup").write_text("0::/node\n")
    return ResourceLimits(str(tmp_path / "cgroup"), str(tmp_path / "root"))


async def report_of(limits: ResourceLimits) -> ResourceReport:
    """As the master receives it."""
    monitor = ResourceMonitor(
        workers=dict, paths=(), observe=lambda _: None, who=lambda: (NodeId(1), Incarnation(1)), limits=limits
    )
    await monitor.sample()
    report = await monitor.sample()
    assert report is not None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ResourceReport)


async def test_the_metric_is_the_bytes_of_the_cgroup(cgroup: ResourceLimits) -> None:
    families = Families()
    _tell_usage(families, NodeRank(0), await report_of(cgroup))
    told = {sample.name: sample.value for family in families for sample in family.samples}
    assert told["dlrover_node_memory_bytes"] == pytest.approx(USED - DROPPABLE, rel=0.01)
    assert told["dlrover_node_memory_limit_bytes"] == pytest.approx(LIMIT, rel=0.01)


async def test_a_run_tells_the_same_memory_in_mib(cgroup: ResourceLimits) -> None:
    report = await report_of(cgroup)
    lab = Lab()
    lab.train(40)
    agent = lab.scene.agents["n0"]
    lab.runs.heard_resources(
        msgspec.structs.replace(report, node=agent.node), lab.scene.job.state, Micros(round(lab.seconds * 1e6))
    )
    lab.train(60)
    assert isinstance(lab.runs, RunStatistics)
    assert lab.told[-1].types[0].memory_mb == pytest.approx((USED - DROPPABLE) / MIB, rel=0.01)


def test_only_one_module_converts_between_bytes_and_mib() -> None:
    """A factor of 2^20 or 10^6 beside a name of memory belongs into `protocol/units.py`."""
    pattern = re.compile(
        r"memory\w*[^\n#]*[*/]\s*(2\s*\*\*\s*20|1_?048_?576|1024\s*\*\s*1024|1e6|10\s*\*\*\s*6|1_?000_?000)"
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "units.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []
