"""
Random walks of an ensemble through faults, from a seed: `python -m tests.unified.core.walks 100000 [FIRST_SEED] [--digests]`.

A cluster that keeps its own books drives the machine: it makes instances, loses them, lets them fail, forgets what a killed conductor
had not done yet, and lets time pass. It checks each effect against its books. Then the faults stop, and the job must come to its end.
"""

from __future__ import annotations

import random
import sys
from collections import Counter

import msgspec

from dlrover.core.machine_journal import MachineRecord, MachineSequence, walk_records
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.unified.core.machine import EnsembleMachine
from dlrover.unified.core.messages import (
    BeginEnsemble,
    BundlesPlaced,
    Command,
    ConductorTook,
    CreateInstance,
    Effect,
    EndInstance,
    EnsembleOutcome,
    FinishEnsemble,
    InstanceBlamed,
    InstanceFailed,
    InstanceGone,
    InstanceId,
    InstanceReady,
    InstanceSucceeded,
    MachineReplaced,
    PlaceBundles,
    ReplaceMachine,
    RestartEnsemble,
    RunInstance,
    StageOfJob,
    StopEnsemble,
)
from dlrover.unified.core.spec import EnsembleSpec, OnFailure, RoleSpec

Slot = tuple[str, int]
RECORD = msgspec.msgpack.Decoder(MachineRecord[Command])
NUM_FAULTY_EVENTS = 40
HOUR = 3600.0


class Walk:
    def __init__(self, seed: int, machine: type[EnsembleMachine] = EnsembleMachine) -> None:
        self.chance = random.Random(seed)
        self.spec = random_spec(self.chance)
        self.machine = machine()
        self.order: MachineSequence[Command, EnsembleOutcome] = MachineSequence(
            self.machine, master_epoch=0, next_number=1
        )
        self.records: list[bytes] = []
        self.now = Micros(0)
        self.epoch = 0
        self.todo: list[Effect] = []
        self.living: dict[Slot, InstanceId] = {}
        """Processes that are there."""
        self.running: set[InstanceId] = set()
        self.asked_to_end: set[InstanceId] = set()
        self.created: Counter[Slot] = Counter()
        self.awaiting_machines: set[Slot] = set()
        self.num_machines = 0
        self.num_restarts_by_person = 0
        self.finished: FinishEnsemble | None = None

    def run(self) -> None:
        self.tell(BeginEnsemble(self.spec))
        self.take_over()
        for _ in range(self.chance.randrange(NUM_FAULTY_EVENTS)):
            if self.machine.stage is StageOfJob.STOPPED:
                break
            self.one_event()
        self.calm_down()
        assert self.finished is not None, f"the job does not end: {self.machine.status()}"
        assert not self.living, f"the job is over, and these run: {self.living}"
        self.check_replay()

    def digest(self) -> str:
        return self.machine.digest().hex()

    # Events.

    def one_event(self) -> None:
        chance = self.chance.random()
        if chance < 0.45 and self.todo:
            self.do(self.todo.pop(self.chance.randrange(len(self.todo))))
        elif chance < 0.6 and self.living:
            self.lose(self.chance.choice(sorted(self.living.values())))
        elif chance < 0.75 and self.running:
            self.end_running(self.chance.choice(sorted(self.running)), has_failed=self.chance.random() < 0.7)
        elif chance < 0.8:
            self.crash_conductor()
        elif chance < 0.82:
            self.tell_if_fitting(RestartEnsemble("a person wants it"))
        elif chance < 0.83:
            self.tell_if_fitting(StopEnsemble("a person wants it"))
        elif chance < 0.86:
            self.tell_late_report()
        elif chance < 0.88:
            self.tell_if_fitting(InstanceBlamed(self.chance.choice(list(self.machine.instances()))[0], "a bad device"))
        else:
            self.pass_time(self.chance.choice([0.0, 0.5, 3.0, 40.0, 700.0, 2 * HOUR]))

    def calm_down(self) -> None:
        """No fault any more: what is asked for is done, and every entry point returns."""
        for _ in range(20 * (5 + sum(role.count for role in self.spec.roles))):
            if self.finished is not None:
                return
            if self.todo:
                self.do(self.todo.pop(0))
            elif self.running:
                self.end_running(min(self.running), has_failed=False)
            else:
                self.pass_time(40.0)

    def do(self, effect: Effect) -> None:
        match effect:
            case PlaceBundles():
                self.tell_if_fitting(BundlesPlaced())
            case CreateInstance(instance):
                self.create(instance)
            case RunInstance(instance):
                if self.living.get(slot(instance)) == instance:
                    self.running.add(instance)
            case EndInstance(instance):
                self.asked_to_end.add(instance)
                if self.living.get(slot(instance)) == instance:
                    self.lose(instance)
                else:  # it was gone before it was asked
                    self.tell_if_fitting(InstanceGone(instance))
            case ReplaceMachine(instance):
                self.replace_machine(instance)
            case FinishEnsemble():
                self.finished = effect

    def create(self, instance: InstanceId) -> None:
        there = self.living.get(slot(instance))
        if there == instance:
            return  # asked for twice, by two conductors
        newest = self.machine.state.roles[instance.role].instances[instance.rank].incarnation
        if newest != instance.incarnation or instance in self.asked_to_end:
            return  # overtaken by its own end
        assert there is None, f"{instance} is made while incarnation {there} of it lives"
        self.living[slot(instance)] = instance
        if self.chance.random() < 0.1 and self.finished is None:
            self.tell_if_fitting(InstanceFailed(instance, "it cannot be imported"))
        else:
            self.tell_if_fitting(InstanceReady(instance))

    def replace_machine(self, instance: InstanceId) -> None:
        self.awaiting_machines.discard(slot(instance))
        is_replaced = self.chance.random() < 0.5
        if self.tell_if_fitting(MachineReplaced(instance, is_replaced)):
            self.num_machines += is_replaced

    def lose(self, instance: InstanceId) -> None:
        """Its process ends."""
        del self.living[slot(instance)]
        self.running.discard(instance)
        self.tell_if_fitting(InstanceGone(instance, self.chance.choice(["", "the machine is gone", "killed"])))

    def end_running(self, instance: InstanceId, *, has_failed: bool) -> None:
        self.running.discard(instance)
        if has_failed:
            self.tell_if_fitting(InstanceFailed(instance, self.chance.choice(["ValueError", "KeyError"])))
        else:
            self.tell_if_fitting(InstanceSucceeded(instance))

    def crash_conductor(self) -> None:
        """What it had not done is forgotten, but for what is asked for again."""
        self.todo = []
        self.take_over()

    def take_over(self) -> None:
        before = self.lives()
        self.epoch += 1
        if self.machine.stage is not StageOfJob.STOPPED:
            self.tell(ConductorTook(self.epoch))
        assert self.lives() == before, "a new conductor changes nothing of what runs"
        self.todo = self.machine.open_effects()

    def lives(self) -> dict[InstanceId, str]:
        return {instance_id: instance.life for instance_id, instance in self.machine.instances()}

    def tell_late_report(self) -> None:
        """Of a life before: it changes nothing."""
        [(instance, _), *_] = self.chance.sample(list(self.machine.instances()), 1)
        late = InstanceId(instance.role, instance.rank, instance.incarnation - 1)
        before = self.machine.digest()
        assert not self.tell_if_fitting(self.chance.choice([InstanceReady, InstanceSucceeded, InstanceGone])(late))
        assert self.machine.digest() == before

    def pass_time(self, seconds: float) -> None:
        self.now = Micros(self.now + micros(seconds))
        for command in self.machine.due(self.now):
            self.tell_if_fitting(command)

    # The machine.

    def tell_if_fitting(self, command: Command) -> bool:
        try:
            self.tell(command)
        except Rejected:
            return False
        return True

    def tell(self, command: Command) -> None:
        self.order.stage(command, self.now)
        batch = self.order.take()
        assert batch is not None
        self.records += batch.records
        for released in self.order.committed(batch):
            for effect in released.outcome.effects:
                self.look_at(effect)
                self.todo.append(effect)
        self.num_restarts_by_person += isinstance(command, RestartEnsemble)
        self.check_budgets()

    def look_at(self, effect: Effect) -> None:
        if isinstance(effect, CreateInstance):
            role = self.spec.role(effect.instance.role)
            for needed in role.needs:
                for rank in range(self.spec.role(needed).count):
                    life = self.machine.state.roles[needed].instances[rank].life
                    assert life in ("ready", "running", "succeeded", "finished"), f"{effect} needs {needed}-{rank}"
            assert slot(effect.instance) not in self.awaiting_machines, f"{effect} before its machine was replaced"
            self.created[slot(effect.instance)] += 1
        if isinstance(effect, ReplaceMachine):
            assert slot(effect.instance) not in self.awaiting_machines, f"{effect} is asked for twice"
            assert self.num_machines < self.spec.max_machine_replacements, "more machines than the job may have"
            self.awaiting_machines.add(slot(effect.instance))
        if isinstance(effect, FinishEnsemble):
            assert self.machine.stage is StageOfJob.STOPPED

    def check_budgets(self) -> None:
        """By the number of creations alone, whatever the machine counts."""
        state = self.machine.state
        hours = int(self.now / micros(HOUR))
        most_restarts = self.spec.max_job_restarts + hours + self.num_restarts_by_person
        assert state.num_job_restarts <= most_restarts, f"{state.num_job_restarts} restarts of the job"
        for role in self.spec.roles:
            own = 0 if role.on_failure in (OnFailure.JOB, OnFailure.STOP) else role.max_restarts + hours
            alone = role.max_restarts + hours if role.on_failure is OnFailure.INSTANCE else 0
            for rank in range(role.count):
                most = 1 + own + alone + state.num_job_restarts
                assert self.created[role.name, rank] <= most, f"{role.name}-{rank}: more than {most} lives"

    def check_replay(self) -> None:
        again = type(self.machine)()
        num = sum(1 for _ in walk_records(again, self.records, RECORD.decode))
        assert num == len(self.records)
        assert again.encode() == self.machine.encode()
        assert EnsembleMachine.decode(again.encode()).digest() == self.machine.digest()


def slot(instance: InstanceId) -> Slot:
    return instance.role, instance.rank


def random_spec(chance: random.Random) -> EnsembleSpec:
    names = ["policy", "rollout", "reward", "judge"][: chance.randint(1, 4)]
    roles = []
    for place, name in enumerate(names):
        needs = tuple(each for each in names[:place] if chance.random() < 0.4)
        roles.append(
            RoleSpec(
                name=name,
                count=chance.randint(1, 3),
                needs=needs,
                is_driver=place == 0 or chance.random() < 0.4,
                on_failure=chance.choice(list(OnFailure)),
                max_restarts=chance.randint(0, 3),
                max_failures_per_machine=chance.choice([None, None, 0, 1]),
            )
        )
    chance.shuffle(roles)
    return EnsembleSpec(
        name="walk",
        roles=tuple(roles),
        max_job_restarts=chance.randint(0, 3),
        max_machine_replacements=chance.randint(0, 2),
    )


def main() -> None:
    num_walks, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    for seed in range(first, first + num_walks):
        walk = Walk(seed)
        try:
            walk.run()
        except AssertionError:
            print(f"seed {seed}", file=sys.stderr)
            raise
        if "--digests" in sys.argv:
            print(walk.digest())
    print(f"{num_walks} walks from seed {first} on, no violation")


if __name__ == "__main__":
    main()
