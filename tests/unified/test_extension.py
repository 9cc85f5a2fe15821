"""Extensions of a deployment: how they are found, and machines that they replace (spec 11, §14, and scenario 9 of §18)."""

from __future__ import annotations

import asyncio

import pytest
from dlrover.python.unified.controller.extension import ManagerExtension as HistoricalName

from dlrover.protocol.errors import ConfigError
from dlrover.unified.extension import ManagerExtension, NodeInfo, load_extension
from dlrover.unified.plan import GroupRule
from dlrover.unified.shell.machine_replacement import LivingMachine, MachineReplacement
from tests.unified.conftest import InstallExtension
from tests.unified.key_values import FakeKeyValues

BAD = "machine-2"


class Cloud(ManagerExtension):
    """Its machines are objects."""

    def __init__(self) -> None:
        self.machines = {
            f"machine-{n}": LivingMachine(
                node=NodeInfo(id=f"machine-{n}", host=f"host-{n}"), labels={"rack": "a" if n < 3 else "b"}
            )
            for n in (1, 2, 3)
        }
        self.asked: list[list[str]] = []
        self.delivers = True
        self.broken = False

    async def relaunch_nodes_impl(self, nodes: list[NodeInfo]) -> list[NodeInfo]:
        self.asked.append([node.id for node in nodes])
        if self.broken:
            raise OSError("the cloud does not answer")
        for node in nodes:
            del self.machines[node.id]
            if self.delivers or len(nodes) > 1:
                self.machines[f"{node.id}b"] = LivingMachine(node=NodeInfo(id=f"{node.id}b"))
        return nodes


class Replacing:
    def __init__(self, extension: ManagerExtension | None, machines: dict[str, LivingMachine]) -> None:
        self.said: list[str] = []
        self.store = FakeKeyValues()
        self.replacement = MachineReplacement(
            extension, lambda: machines, self.store, "uid", say=self.said.append, poll=0.0
        )


async def test_without_an_extension_or_with_one_that_replaces_none_no_machine_counts_as_removed():
    for extension in (None, ManagerExtension()):
        lab = Replacing(extension, Cloud().machines)
        assert not await lab.replacement.replace(BAD, GroupRule())
        assert lab.replacement.removed() == []
    assert lab.said == ["The extension did not replace these machines: host-2."]


async def test_a_machine_that_was_replaced_stays_marked():
    cloud = Cloud()
    lab = Replacing(cloud, cloud.machines)
    assert await lab.replacement.replace(BAD, GroupRule())
    assert lab.replacement.removed() == [BAD]
    assert not await lab.replacement.replace(BAD, GroupRule()), "it is not there any more"
    assert cloud.asked == [[BAD]]


async def test_a_machine_that_does_not_come_in_time_is_not_waited_for_and_the_old_one_stays_marked():
    cloud = Cloud()
    cloud.delivers = False
    lab = Replacing(cloud, cloud.machines)
    assert not await lab.replacement.replace(BAD, GroupRule(), limit=0.01)
    assert lab.replacement.removed() == [BAD]
    assert lab.said == ["Not replaced within 0.01 s: host-2."]


async def test_an_extension_that_raises_changes_nothing():
    cloud = Cloud()
    cloud.broken = True
    lab = Replacing(cloud, cloud.machines)
    assert not await lab.replacement.replace(BAD, GroupRule())
    assert lab.replacement.removed() == []
    assert lab.said == ["The extension failed to replace host-2: OSError: the cloud does not answer"]


async def test_the_group_of_a_machine_goes_with_it_when_it_is_not_replaced_in_time():
    cloud = Cloud()
    lab = Replacing(cloud, cloud.machines)
    real = cloud.relaunch_nodes_impl

    async def first_hangs(nodes: list[NodeInfo]) -> list[NodeInfo]:
        if not cloud.asked:
            cloud.asked.append([node.id for node in nodes])
            await asyncio.Event().wait()
        return await real(nodes)

    cloud.relaunch_nodes_impl = first_hangs  # type: ignore[method-assign]
    assert await lab.replacement.replace(BAD, GroupRule(label="rack", timeout=0.01))
    assert cloud.asked == [[BAD], ["machine-1", BAD]]
    assert lab.replacement.removed() == ["machine-1", BAD]
    assert "All 2 machines with rack=a must be replaced." in lab.said


HEAD = "from dlrover.python.unified.controller.extension import ManagerExtension\n"


def test_no_package_brings_an_extension():
    assert load_extension() is None
    assert HistoricalName is ManagerExtension


def test_extensions_are_mixed_into_one_object(install_extension: InstallExtension):
    install_extension(
        HEAD + "class One(ManagerExtension):\n    def one(self): return 1\n"
        "class Two(ManagerExtension):\n    async def relaunch_nodes_impl(self, nodes): return nodes\n",
        "One",
        "Two",
    )
    both = load_extension()
    assert both is not None
    assert both.one() == 1  # type: ignore[attr-defined]
    assert asyncio.run(both.relaunch_nodes_impl([NodeInfo(id="x")])) == [NodeInfo(id="x")]


@pytest.mark.parametrize(
    ("source", "names", "why"),
    [
        (
            "class One(ManagerExtension):\n    def same(self): return 1\nclass Two(ManagerExtension):\n    def same(self): return 2\n",
            ("One", "Two"),
            r"Two extensions define same: .*\.One and .*\.Two",
        ),
        ("class One: pass\n", ("One",), "must be a subclass of ManagerExtension"),
        ("raise OSError('no licence')\n", ("One",), "cannot be loaded: OSError: no licence"),
        ("", ("Absent",), "cannot be loaded: AttributeError"),
    ],
)
def test_extensions_that_make_no_sense_are_refused(
    install_extension: InstallExtension, source: str, names: tuple[str, ...], why: str
):
    install_extension(HEAD + source, *names)
    with pytest.raises(ConfigError, match=why):
        load_extension()
