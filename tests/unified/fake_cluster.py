"""A cluster in memory: instances are objects, and a test decides when one dies, fails or returns."""

from __future__ import annotations

import asyncio

from dlrover.unified.conductor import InstanceBroken
from dlrover.unified.core.messages import InstanceId


class FakeInstance:
    def __init__(self) -> None:
        self.is_running = False
        self.result: asyncio.Future[InstanceBroken | None] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class FakeCluster:
    """Outlives its conductors, as a real one does. Obeys at once, unless it is told to be `stubborn`."""

    def __init__(self) -> None:
        self.made: dict[InstanceId, FakeInstance] = {}
        self.lives: list[InstanceId] = []
        """In the order of their creation."""
        self.ended: set[InstanceId] = set()
        self.broken: dict[str, str] = {}
        """By role: why its instances cannot be made."""
        self.has_room = asyncio.Event()
        self.has_room.set()
        self.stubborn: set[str] = set()
        """Roles that end by a kill only."""
        self.replaceable = asyncio.Event()
        """Another machine has come."""
        self.to_replace: list[InstanceId] = []
        self._news = asyncio.Condition()

    async def place(self) -> None:
        await self.has_room.wait()

    async def create(self, instance: InstanceId) -> None:
        if instance in self.ended:
            await asyncio.Event().wait()
        if instance not in self.made:
            same = [each for each in self.made if (each.role, each.rank) == (instance.role, instance.rank)]
            assert all(self.made[each].gone.done() for each in same), f"{instance} lives twice"
            self.made[instance] = FakeInstance()
            self.lives.append(instance)
            await self._tell()
        if why := self.broken.get(instance.role):
            raise InstanceBroken(why)

    async def run(self, instance: InstanceId) -> None:
        found = self.made[instance]
        if not found.is_running:
            found.is_running = True
            await self._tell()
        error = await asyncio.shield(found.result)
        if error is not None:
            raise error

    async def gone(self, instance: InstanceId) -> str:
        async with self._news:
            await self._news.wait_for(lambda: instance in self.made or instance in self.ended)
        if instance not in self.made:
            return "it was never made"
        return await asyncio.shield(self.made[instance].gone)

    async def end(self, instance: InstanceId, *, is_kill: bool) -> None:
        self.ended.add(instance)
        if instance in self.made and (is_kill or instance.role not in self.stubborn):
            self.kill(instance, "ended")
        await self._tell()

    async def replace_machine(self, instance: InstanceId) -> bool:
        self.to_replace.append(instance)
        await self.replaceable.wait()
        return True

    # What a test does.

    def kill(self, instance: InstanceId, cause: str = "killed") -> None:
        if not self.made[instance].gone.done():
            self.made[instance].gone.set_result(cause)

    def finish(self, instance: InstanceId, error: InstanceBroken | None = None) -> None:
        if not self.made[instance].result.done():
            self.made[instance].result.set_result(error)

    def newest(self, role: str, rank: int = 0) -> InstanceId:
        return next(each for each in reversed(self.lives) if (each.role, each.rank) == (role, rank))

    def running(self) -> list[InstanceId]:
        return [each for each, made in self.made.items() if made.is_running and not made.gone.done()]

    async def until_running(self, *names: str) -> None:
        """As `role-rank#incarnation`."""
        async with self._news:
            await self._news.wait_for(lambda: {f"{e}#{e.incarnation}" for e in self.running()} >= set(names))

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()
