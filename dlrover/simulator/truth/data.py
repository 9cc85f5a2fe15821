"""
Data that workers read while things go wrong, and what has to be true of it (I3).

The workers of a world take shards, consume them step by step, say so, and take snapshots of their model once all of that is confirmed.
When a world ends its model is gone but for its newest snapshot, or for a checkpoint in storage; the next world goes on with one of
these, says which, and reads. What is in each model is kept here, by what its workers really read: the books of the job
have no say in it.

So whenever ranks agree on a model, and at the end, everything that the model contains and everything that the books still have to
give out must be the epochs so far, each place exactly once. And no worker of a world that goes on is ever told that its lease is
not its own.

Steps here are beats of the data, not those of `training`: a few dozen of them read a dataset to its end, and the fault that is about
to happen finds some of their messages under way.
"""

from __future__ import annotations

import random
from typing import Any

from msgspec import Struct

from dlrover.core.commit_order import walk
from dlrover.core.data.audit import Audit
from dlrover.core.data.checkpoint_text import write_states
from dlrover.core.data.commands import new_dataset
from dlrover.core.data.dataset import Dataset
from dlrover.core.data.leases import LeaseHolder as CoreReader
from dlrover.core.data.ranges import Range, overlapping, said, subtract
from dlrover.core.job import Job
from dlrover.protocol.messages.data import (
    Claim,
    Consumption,
    DataCommand,
    DatasetSpec,
    ExchangeShards,
    LeasedShard,
    RegisterDataset,
    RestoreAgreed,
    ShardError,
    ShardsGiven,
    Supply,
    last_shared,
)
from dlrover.protocol.messages.identity import Incarnation, NodeId
from dlrover.protocol.messages.job import AgentCommand, Command, ExitReason, Micros, Reply, Round
from dlrover.simulator.parts import AgentPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import micros, span

NUM_BEATS = 60
"""Of a job that nothing disturbs."""
MOST_READERS = 3
"""That read in one step; the others' turn comes in another one."""
MOST_LOCAL_RANKS = 2
ERROR_ODDS = 0.01
"""How often the data of a shard cannot be read."""
GATHER_ODDS = 0.2
"""How often what was consumed is not told at once."""
IMPATIENT_ODDS = 0.2
"""How often a snapshot is taken before the master has confirmed what was read for it."""
SAVE_ODDS = 0.3
"""How often a storage save is under way when something goes wrong."""
GO_BACK_ODDS = 0.05
"""How often a person wants a world to begin with an older checkpoint."""
SAYS_LOADED_ODDS = 0.8
"""How often the scripts of a job are of those that say when they have loaded a model."""
FORMER_ODDS = 0.3
"""How often a job begins with the checkpoint of another."""
NUM_STORED = 3
"""Checkpoints that the storage keeps."""


class Model(Struct, frozen=True, kw_only=True):
    """The state of one step, with everything that it has seen."""

    step: int
    round: int
    content: tuple[tuple[int, Range], ...]
    claims: tuple[Claim, ...] = ()
    """What of it the job may not know, because the master had not confirmed it."""


SCRATCH = Model(step=-1, round=0, content=())


class StoredRead(Struct, frozen=True):
    model: Model
    text: str
    """What it has not seen, as its manifest says."""


class Kept(Struct, frozen=True):
    """The newest snapshot of a round."""

    model: Model
    holders: dict[int, None]
    """Launches in whose memory it is."""


class VirtualReader:
    """One worker."""

    def __init__(self, agent: AgentPart, local_rank: int) -> None:
        self.agent = agent
        self.incarnation = agent.incarnation
        self.local_rank = local_rank
        self.shards: list[LeasedShard] = []
        self.done: dict[int, int] = {}
        self.untold: list[Consumption] = []
        self.unconfirmed: list[Claim] = []
        self.failed: list[ShardError] = []
        self.unused: list[int] = []
        self.num_told = 0
        """Consumption that is under way to the master."""
        self.is_asking = False
        self.has_registered = False
        self.is_ended = False
        """There is nothing more to read."""


class ReadingWorld:
    """The workers of one round."""

    def __init__(
        self, first: AgentPart, model: Model, text: str, readers: list[VirtualReader], *, is_explicit: bool
    ) -> None:
        self.first = first
        """On its node is global rank 0, which speaks for all."""
        assert first.workers.group is not None, "no worker runs"
        self.round = first.workers.group.world.round
        self.model = model
        self.text = text
        """Of a checkpoint in storage."""
        self.is_explicit = is_explicit
        """A person named that checkpoint."""
        self.step = max(0, model.step)
        self.content = list(model.content)
        self.readers = readers
        self.has_told = False
        self.is_restored = False
        """The job knows the model."""
        self.is_spoiled = False
        """A worker was refused: no snapshot is taken any more."""

    @property
    def is_confirmed(self) -> bool:
        return not any(reader.unconfirmed for reader in self.readers)


class DataTraffic:
    """Owned by the simulation of a job that has a dataset."""

    def __init__(self, simulation: SimulationPart, spec: DatasetSpec) -> None:
        self._sim = simulation
        self._spec = spec
        self._chance = random.Random(f"{simulation.plan.seed}/data")
        self._pace = micros(simulation.plan.hours * 3600 / NUM_BEATS * self._chance.choice([0.3, 1.0, 2.0]))
        self._worlds: dict[str, ReadingWorld] = {}
        """By coordinator, the newest last."""
        self._models: dict[Round, Model] = {}
        """With which the ranks of a round go on."""
        self._told: dict[tuple[str, int], tuple[ReadingWorld, VirtualReader | None]] = {}
        """By agent process and number of the command: who waits for the answer."""
        self._kept: dict[Round, Kept] = {}
        """In memory. A world that was cut off takes snapshots, too, while others have gone on without it."""
        self._stored: dict[str, StoredRead] = {}
        """Checkpoints in storage, by attempt."""
        self._saving: dict[str, Model] = {}
        self._goal: StoredRead | None = None
        """A person wants this one: worlds begin with it until one has taken a snapshot."""
        self._has_confirmed = False
        """Whether the job has heard that steps are named."""
        script = random.Random(f"{simulation.plan.seed}/script")
        self._says_loaded = script.random() < SAYS_LOADED_ODDS
        """Whether workers tell that they have loaded a model: else those of a named one, or of another job, have to wait by themselves."""
        self._take_over(script)

    def _take_over(self, chance: random.Random) -> None:
        """Some jobs begin in the middle of an epoch, with a checkpoint of a former job: named, or the newest of the directory."""
        if chance.random() > FORMER_ODDS:
            return
        books = new_dataset(self._spec)
        reader = CoreReader(NodeId(1), 0, Incarnation(1), Round(1), Micros(0))
        content = []
        for step in range(1, 2 + chance.randrange(4)):
            shards = books.take(reader, chance.randint(1, 3))
            for shard in chance.sample(shards, chance.randint(0, len(shards))):
                books.consume(shard.id, count := chance.randint(1, shard.end - shard.start), step)
                place = Range(shard.epoch, shard.start, shard.start + count, shard.partition, shard.listing)
                content.append((step, place))
        model = Model(step=step, round=0, content=tuple(content))
        former = StoredRead(model, write_states([books], step))
        self._stored["former"] = former
        self._goal = former if chance.random() < 0.5 else None

    # Worlds.

    def world_began(self, coordinator: str) -> None:
        """All its workers run and have found a model."""
        agents = [node.agent for node in self._sim.machines.nodes if node.agent is not None]
        spoken_for = [agent for agent in agents if agent.workers.runs(coordinator)]
        first = next((agent for agent in spoken_for if _is_first(agent)), None)
        if first is None or first.workers.group is None:
            return
        num_ranks = min(MOST_LOCAL_RANKS, self._sim.shape.local_world_size)
        readers = [VirtualReader(agent, rank) for agent in spoken_for for rank in range(num_ranks)]
        started = self._sim.training.worlds[coordinator].started
        model, text = self._choose(started, first.workers.group.world.turns)
        world = ReadingWorld(first, model, text, readers, is_explicit=self._goal is not None)
        self._worlds[coordinator] = world
        for old in list(self._worlds)[:-4]:
            del self._worlds[old]
        self._models[world.round] = model
        self._sim.note(f"round {world.round} goes on with the model of step {model.step}{' and its text' * bool(text)}")
        self._sim.events.after(span(self._chance, 0.0, 1.0), self._beat, coordinator, world)

    def _choose(self, started: dict[int, None], turns: tuple[tuple[Round, int], ...]) -> tuple[Model, str]:
        """The model of a new world, and what its checkpoint says of the data: nothing if it is from memory."""
        if not self._sim.shape.has_replicas:
            is_lost = {round_: any(each not in started for each in kept.holders) for round_, kept in self._kept.items()}
            self._kept = {round_: kept for round_, kept in self._kept.items() if not is_lost[round_]}
        self._forget_given_up(turns)
        if self._goal is None and self._stored and self._chance.random() < GO_BACK_ODDS:
            told = [each for each in self._stored.values() if each.text]
            self._goal = self._chance.choice(told) if told else None
        if self._goal is not None:
            self._kept = {}
            return self._goal.model, self._goal.text
        model, newest = self._memory, self._newest_stored
        return (model, "") if model is not SCRATCH or newest is None else (newest.model, newest.text)

    def _forget_given_up(self, turns: tuple[tuple[Round, int], ...]) -> None:
        """Ranks take no model that others have gone back behind."""
        for round_, kept in list(self._kept.items()):
            if last_shared(kept.model.step, round_, turns) < kept.model.step:
                del self._kept[round_]

    @property
    def _memory(self) -> Model:
        """The snapshot to go on with; `SCRATCH`: there is none that is as new as the storage."""
        model, stored = (
            max((kept.model for kept in self._kept.values()), key=_order, default=SCRATCH),
            self._newest_stored,
        )
        return SCRATCH if stored is not None and _order(stored.model) > _order(model) else model

    @property
    def _newest_stored(self) -> StoredRead | None:
        return max(self._stored.values(), key=lambda each: _order(each.model), default=None)

    # Reading.

    def stir(self) -> None:
        """Something is about to go wrong: be in the middle of something."""
        if not self._worlds:
            return
        coordinator, world = next(reversed(self._worlds.items()))
        if self._sim.training.is_training(coordinator):
            self._step(world)
            if self._chance.random() < SAVE_ODDS:
                self._begin_save(world)

    def _beat(self, coordinator: str, world: ReadingWorld) -> None:
        running = self._sim.training.worlds.get(coordinator)
        if running is None or running.is_over or world.is_spoiled:
            return
        if self._sim.training.is_training(coordinator):
            self._step(world)
        if not (world.is_confirmed and all(reader.is_ended for reader in world.readers)):
            self._sim.events.after(
                span(self._chance, 0.5, 1.5) * self._pace // 1_000_000, self._beat, coordinator, world
            )

    def _step(self, world: ReadingWorld) -> None:
        """One step of the model, in which some workers read."""
        if world.is_spoiled:
            return
        if not world.has_told:
            self._tell_model(world)
        world.step += world.is_restored
        is_impatient = (self._has_confirmed or self._says_loaded) and self._chance.random() < IMPATIENT_ODDS
        readers = world.readers
        for reader in readers if len(readers) <= MOST_READERS else self._chance.sample(readers, MOST_READERS):
            if reader.agent.sleep.since is not None or reader.agent.incarnation != reader.incarnation:
                continue
            if world.is_restored and reader.shards:
                self._read(world, reader)
            if not reader.is_asking and (not reader.untold or self._chance.random() > GATHER_ODDS):
                self._exchange(world, reader)
        if is_impatient:
            self._take_snapshot(world.first, world)

    def _tell_model(self, world: ReadingWorld) -> None:
        world.has_told = True
        self._tell(world, None, world.first, self._register(world.first, world, 0))
        told = RestoreAgreed(
            step=world.model.step,
            claims={self._spec.name: world.model.claims} if world.model.claims else {},
            data_state=world.text,
            is_explicit=world.is_explicit,
            **_who(world.first, world),
        )
        self._tell(world, None, world.first, told)

    def _read(self, world: ReadingWorld, reader: VirtualReader) -> None:
        shard = reader.shards[0]
        start = shard.start + reader.done.get(shard.id, 0)
        if self._chance.random() < ERROR_ODDS:
            reader.shards.pop(0)
            reader.failed.append(ShardError(shard.id, "cannot be read"))
            reader.is_ended = False
            return
        count = self._chance.randint(1, shard.end - start)
        place = Range(shard.epoch, start, start + count, shard.partition, shard.listing)
        world.content.append((world.step, place))
        reader.untold.append(Consumption(shard.id, count, world.step))
        reader.unconfirmed.append(Claim(shard.epoch, start, start + count, world.step, shard.partition, shard.listing))
        reader.done[shard.id] = reader.done.get(shard.id, 0) + count
        if start + count == shard.end:
            reader.shards.pop(0)

    def _exchange(self, world: ReadingWorld, reader: VirtualReader) -> None:
        """One message for everything, one at a time, as the real reader does."""
        want = 0 if reader.is_ended else max(0, self._chance.randint(1, 3) - len(reader.shards))
        if not reader.has_registered:
            reader.has_registered = True
            self._tell(world, None, reader.agent, self._register(reader.agent, world, reader.local_rank))
        if not (self._says_loaded or world.is_restored) and (
            world.is_explicit or (world.text and not self._has_confirmed)
        ):
            return
        if not (want or reader.untold or reader.failed or reader.unused):
            return
        message = ExchangeShards(
            dataset=self._spec.name,
            local_rank=reader.local_rank,
            consumed=tuple(reader.untold),
            failed=tuple(reader.failed),
            unused=tuple(reader.unused),
            want=want,
            has_model=self._says_loaded,
            **_who(reader.agent, world),
        )
        reader.num_told = len(reader.untold)
        reader.untold, reader.failed, reader.unused = [], [], []
        reader.is_asking = True
        self._tell(world, reader, reader.agent, message)

    def _register(self, agent: AgentPart, world: ReadingWorld, local_rank: int) -> RegisterDataset:
        return RegisterDataset(dataset=self._spec.name, spec=self._spec, local_rank=local_rank, **_who(agent, world))

    def _tell(self, world: ReadingWorld, reader: VirtualReader | None, agent: AgentPart, command: AgentCommand) -> None:
        self._told[agent.life, agent.outbox.tell(command)] = (world, reader)

    def answered(self, agent: AgentPart, number: int, command: AgentCommand, reply: Reply) -> None:
        world, reader = self._told.pop((agent.life, number), (None, None))
        if world is None or not _is_running(agent, world):
            return  # nobody is left who would hear it
        if isinstance(command, RestoreAgreed):
            world.is_restored = True
        elif reader is not None and isinstance(reply, ShardsGiven):
            self._hear(reader, reply)
            if world.is_confirmed:
                self._take_snapshot(agent, world)

    def _hear(self, reader: VirtualReader, given: ShardsGiven) -> None:
        self._has_confirmed |= reader.num_told > 0
        del reader.unconfirmed[: reader.num_told]
        reader.num_told = 0
        reader.is_asking = False
        reader.is_ended = reader.is_ended or given.supply is Supply.END
        for shard in [each for each in reader.shards if each.id in given.recalled and each.id not in reader.done]:
            reader.shards.remove(shard)
            reader.unused.append(shard.id)
        reader.shards.extend(given.shards)

    def refused(self, agent: AgentPart, number: int) -> None:
        world, _ = self._told.pop((agent.life, number), (None, None))
        if world is not None:
            world.is_spoiled = True

    def was_refused(self, job: Job, command: Command, code: str) -> None:
        """In the core. Workers whose world goes on have done nothing that could be refused."""
        if not isinstance(command, DataCommand):
            return
        node, rdzv = job.state.nodes.live.get(command.node), job.state.rendezvous
        is_current = node is not None and node.incarnation == command.incarnation and rdzv.is_member(node.id)
        if is_current and rdzv.is_active and rdzv.round == command.round and job.end is None:
            raise Violation("I3", f"{type(command).__name__} of a world that goes on was refused: {code}")

    # Models.

    def _take_snapshot(self, agent: AgentPart, world: ReadingWorld) -> None:
        """Of the whole model. What it has seen and the job may not know, it says itself."""
        group = agent.workers.group
        is_training = group is not None and self._sim.training.is_training(group.world.coordinator)
        if not is_training or world.is_spoiled or not world.is_restored or not _is_running(agent, world):
            return
        if group is None or world.step == world.model.step:
            return
        claims = tuple(claim for reader in world.readers for claim in reader.unconfirmed)
        world.model = Model(step=world.step, round=world.round, content=tuple(world.content), claims=claims)
        self._goal, started = None, self._sim.training.worlds[group.world.coordinator].started
        for round_, kept in list(self._kept.items()):
            overwritten = [launch in started for launch in kept.holders]
            if all(overwritten) if self._sim.shape.has_replicas else any(overwritten):
                del self._kept[round_]
        self._kept[world.round] = Kept(world.model, dict(started))

    def _begin_save(self, world: ReadingWorld) -> None:
        if world.model.round == world.round and not world.model.claims:
            attempt = self._sim.saves.begin(step=world.model.step, round_=world.round)
            if attempt:
                self._saving[attempt] = world.model

    def persisted(self, attempt: str, text: str) -> None:
        """The storage has it, perhaps for the second time."""
        if attempt in self._saving:
            self._stored[attempt] = StoredRead(self._saving[attempt], text)
            oldest_first = sorted(self._stored, key=lambda each: _order(self._stored[each].model))
            for old in oldest_first[:-NUM_STORED]:
                del self._stored[old]

    # What must be true.

    def agreed(self, job: Job, command: Command) -> None:
        """The ranks of a round have told their model: it and the books must fit."""
        assert isinstance(command, RestoreAgreed), "no model is told by anything else"
        self._check_fits(job.state.data.datasets[self._spec.name], self._models[command.round])
        if not job.state.data.state_for_manifest(command.step + 1, command.round):
            raise Violation(
                "I3", f"the ranks went back to step {command.step}, and their next checkpoint has no data state"
            )

    @property
    def num_records(self) -> int:
        """In the newest model."""
        return sum(place.size for _, place in self._memory.content)

    @property
    def _num_owed(self) -> int:
        return self._spec.size * max(1, self._spec.num_epochs)

    @property
    def _is_required(self) -> bool:
        return self._spec.is_required is not False

    def is_read_out(self, job: Job) -> bool:
        books = job.state.data.datasets.get(self._spec.name)
        return books is not None and books.is_complete

    def check_end(self, job: Job, *, is_audited: bool) -> None:
        """Of the newest model. No worker reads any more, so what is held counts as unread."""
        if self._spec.name not in job.state.data.datasets:
            return
        self._forget_given_up(job.state.data.turns())
        model = self._memory
        if model is not SCRATCH:
            left = Job.decode(job.encode()).state.data.datasets[self._spec.name]
            left.restore(model.step, model.claims)
            self._check_fits(left, model)
        books, end = job.state.data.datasets[self._spec.name], job.end
        # Virtual workers end by the clock, unlike real ones perhaps before they have told everything: that the job cannot know.
        is_all_told = self.num_records == self._num_owed and not model.claims and not books.set_aside
        if end is not None and end.reason is ExitReason.COMPLETED and not books.is_complete and self._is_required:
            raise Violation("I3", f"the job has completed, and its data are not read: {end.message}")
        if end is not None and end.reason is ExitReason.DATA_UNFINISHED and is_all_told:
            raise Violation("I3", f"all data are in the model: {end.message}")
        if is_audited:
            self._audit()

    def _check_fits(self, books: Dataset, model: Model) -> None:
        held = [each.range for each in books.held.values()]
        left = [*books.returned, *held, *(each.range for each in books.set_aside)]
        left += [] if books.is_stream else books.fresh_ranges()
        seen = [place for _, place in model.content]
        everything = sorted([*seen, *left], key=lambda each: (each.key, each.start))
        if twice := list(overlapping(everything)):
            raise Violation("I3", f"step {model.step} and what is left have records twice: {said(twice[0])}")
        if books.is_stream:
            owed = [Range(0, self._spec.partitions[part], end, part) for part, end in books.offsets.items()]
        else:
            owed = [Range(epoch, 0, self._spec.size) for epoch in range(books.epoch + 1)]
        if missing := subtract(owed, everything):
            raise Violation("I3", f"neither step {model.step} nor what is left has these records: {said(missing[0])}")

    def _audit(self) -> None:
        """What `dlrover data audit` says of the journal."""
        job = Job()
        audit = Audit({})
        for step in walk(job, self._sim.masters.journal.archive):
            audit.follow(step.record.command, step.outcome.reply, job.state.data.datasets)
        for finding in audit.findings(job.state.data.datasets):
            if not finding.is_clean:
                raise Violation("I3", f"the audit finds {finding.repeated or finding.missing}")


def _who(agent: AgentPart, world: ReadingWorld) -> dict[str, Any]:
    return {"node": agent.id, "incarnation": agent.incarnation, "round": world.round}


def _order(model: Model) -> tuple[int, int]:
    """In which models of one history follow each other."""
    return model.round, model.step


def _is_first(agent: AgentPart) -> bool:
    return agent.workers.group is not None and agent.workers.group.world.group_rank == 0


def _is_running(agent: AgentPart, world: ReadingWorld) -> bool:
    """Whether its workers of that world are there."""
    group = agent.workers.group
    return agent.is_alive and group is not None and group.world.round == world.round and not group.is_stopping


def is_of_data(command: AgentCommand | None) -> bool:
    return isinstance(command, DataCommand)
