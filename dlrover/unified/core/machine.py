"""
The decisions about a multi-role job: which instances live, in which order they start, and whom a failure drags along.

Deterministic: commands and the time in, effects and sentences out. How an elastic role recovers inside itself is decided by its own job;
here it is one instance that fails only when that job has given up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, assert_never

import msgspec

from dlrover.core.outcome import Origin
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.unified.core.messages import (
    BeginEnsemble,
    BundlesPlaced,
    Command,
    ConductorTook,
    CreateInstance,
    Effect,
    EndInstance,
    EnsembleDeadline,
    EnsembleOutcome,
    EnsembleStatus,
    EnsembleWait,
    FinishEnsemble,
    InstanceBlamed,
    InstanceFailed,
    InstanceGone,
    InstanceId,
    InstanceReady,
    InstanceStatus,
    InstanceSucceeded,
    MachineReplaced,
    PlaceBundles,
    ReplaceMachine,
    RestartEnsemble,
    RoleStatus,
    RunInstance,
    StageOfJob,
    StopEnsemble,
    TimePassed,
)
from dlrover.unified.core.spec import ESCALATION, OnFailure, check_spec
from dlrover.unified.core.state import (
    ALIVE,
    SAME_IN_A_ROW,
    USABLE,
    EnsembleState,
    Instance,
    InstanceLife,
    RoleState,
)

EXIT_FAILED = 1
AT_ONCE = Micros(0)
EXIT_NO_ROOM = 22


class EnsembleMachine:
    """`apply` changes it, everything else only looks."""

    def __init__(self, state: EnsembleState | None = None) -> None:
        self._state = EnsembleState() if state is None else state
        self._effects: list[Effect] = []
        self._verdicts: list[str] = []

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> EnsembleOutcome:
        """Apply the command whole, or raise `Rejected` with nothing changed."""
        state = self._state
        assert now >= state.now, f"the clock went back from {state.now} to {now}"
        assert not self._effects
        assert not self._verdicts
        self._check(command)
        state.now = now
        state.number += 1
        self._react(command)
        self._advance()
        outcome = EnsembleOutcome(tuple(self._effects), tuple(self._verdicts))
        self._effects, self._verdicts = [], []
        if outcome.verdicts:
            state.verdict = outcome.verdicts[-1]
        return outcome

    def due(self, now: Micros) -> list[TimePassed]:
        return [deadline.command for deadline in self._deadlines() if deadline.at <= now]

    def next_deadline(self) -> Micros | None:
        return min((deadline.at for deadline in self._deadlines()), default=None)

    def open_effects(self) -> list[Effect]:
        """What was asked for and is not known to be done: for a conductor that took over. Each may be done twice."""
        state = self._state
        if state.stage is StageOfJob.STOPPED:
            return [FinishEnsemble(state.exit_code, state.reason)]
        effects: list[Effect] = [] if state.is_placed or state.stage is StageOfJob.STOPPING else [PlaceBundles()]
        for instance_id, instance in self.instances():
            if instance.life is InstanceLife.STARTING:
                effects.append(CreateInstance(instance_id))
            elif instance.life is InstanceLife.RUNNING:
                effects.append(RunInstance(instance_id))
            elif instance.life is InstanceLife.ENDING:
                effects.append(EndInstance(instance_id, instance.is_killed))
            if instance.awaits_machine and state.stage is not StageOfJob.STOPPING:
                effects.append(ReplaceMachine(instance_id))
        return effects

    def status(self) -> EnsembleStatus:
        state = self._state
        return EnsembleStatus(
            name=state.spec.name if state.spec else "",
            stage=state.stage,
            exit_code=state.exit_code,
            num_job_restarts=state.num_job_restarts,
            verdict=state.verdict,
            roles=tuple(
                RoleStatus(
                    name=name,
                    instances=tuple(
                        InstanceStatus(
                            name=f"{name}-{rank}",
                            incarnation=each.incarnation,
                            state=each.life.value,
                            num_restarts=each.num_restarts,
                            cause=each.cause,
                            failed_at=each.failed_at,
                            is_usable=each.life in USABLE,
                        )
                        for rank, each in enumerate(role.instances)
                    ),
                )
                for name, role in state.roles.items()
            ),
        )

    def instances(self) -> Iterable[tuple[InstanceId, Instance]]:
        for name, role in self._state.roles.items():
            for rank, instance in enumerate(role.instances):
                yield InstanceId(name, rank, instance.incarnation), instance

    @property
    def state(self) -> EnsembleState:
        """Read only."""
        return self._state

    @property
    def number(self) -> int:
        return self._state.number

    @property
    def master_epoch(self) -> int:
        return self._state.epoch

    @property
    def stage(self) -> StageOfJob:
        return self._state.stage

    def digest(self) -> bytes:
        return hashlib.blake2b(_ENCODER.encode(self._state), digest_size=16).digest()

    def encode(self) -> bytes:
        return _ENCODER.encode(self._state)

    @classmethod
    def decode(cls, data: bytes) -> EnsembleMachine:
        return cls(_DECODER.decode(data))

    # Whether a command fits.

    def _check(self, command: Command) -> None:
        """Raises `Rejected`."""
        state = self._state
        name = type(command).__name__
        if isinstance(command, BeginEnsemble):
            if state.spec is not None:
                raise Rejected(f"Job {state.spec.name} has begun already.")
            try:
                check_spec(command.spec)
            except ConfigError as error:
                raise Rejected(str(error)) from error
            return
        if state.spec is None:
            raise Rejected(f"{name} before the job has begun.")
        if isinstance(command, ConductorTook):
            if command.epoch <= state.epoch:
                raise Rejected(f"Conductor {command.epoch} was replaced by conductor {state.epoch}.")
        elif state.stage is StageOfJob.STOPPED:
            raise Rejected(f"{name}: the job is over.")
        elif isinstance(command, InstanceReady | InstanceSucceeded | InstanceFailed | InstanceGone):
            self._check_report(command.instance, LIVES[type(command)], name)
        elif isinstance(command, InstanceBlamed):
            self._check_report(command.instance, tuple(InstanceLife), name)
        elif isinstance(command, MachineReplaced):
            found = state.find(command.instance)
            if found is None or not found[1].awaits_machine or found[1].incarnation != command.instance.incarnation:
                raise Rejected(f"{name}: {command.instance} does not wait for a machine.")
        elif isinstance(command, BundlesPlaced) and (state.is_placed or state.stage is not StageOfJob.INIT):
            raise Rejected("The bundles were placed already, or the job ends.")
        elif isinstance(command, StopEnsemble | RestartEnsemble) and state.stage is StageOfJob.STOPPING:
            raise Rejected("The job is stopping already.")
        elif isinstance(command, RestartEnsemble) and state.stage is not StageOfJob.RUNNING:
            raise Rejected(f"A job can be restarted while it is RUNNING; it is {state.stage}.")
        elif isinstance(command, TimePassed) and all(command != each.command for each in self._deadlines()):
            raise Rejected(f"{command.what}: it is not waited for any more.")

    def _check_report(self, instance_id: InstanceId, lives: tuple[InstanceLife, ...], name: str) -> None:
        found = self._state.find(instance_id)
        if found is None:
            raise Rejected(f"{name}: job has no instance {instance_id}.")
        _, instance = found
        if instance.incarnation != instance_id.incarnation or instance.life not in lives:
            raise Rejected(
                f"{name} of {instance_id}: incarnation {instance_id.incarnation} came too late; incarnation "
                f"{instance.incarnation} is {instance.life}."
            )

    # What a command does.

    def _react(self, command: Command) -> None:
        state = self._state
        match command:
            case BeginEnsemble():
                spec = state.spec = command.spec
                state.roles = {
                    role.name: RoleState(spec=role, instances=[Instance() for _ in range(role.count)])
                    for role in spec.roles
                }
                state.place_until = Micros(state.now + micros(spec.placement_timeout))
                self._effects.append(PlaceBundles())
            case ConductorTook():
                state.epoch = command.epoch
                if state.number > 2:
                    self._verdicts.append(f"Conductor {command.epoch} took over; nothing restarts for that.")
            case BundlesPlaced():
                state.is_placed = True
            case InstanceReady():
                self._instance(command.instance).life = InstanceLife.READY
            case InstanceSucceeded():
                self._instance(command.instance).life = InstanceLife.SUCCEEDED
            case InstanceFailed():
                self._on_failed(command.instance, command.cause, command.traceback or command.cause)
            case InstanceGone():
                self._on_gone(command)
            case InstanceBlamed():
                self._instance(command.instance).blame = command.reason
                self._verdicts.append(f"A diagnosis names {command.instance} as a cause: {command.reason}")
            case MachineReplaced():
                self._on_machine(command)
            case StopEnsemble():
                self._stop(command.exit_code, command.reason)
            case RestartEnsemble():
                self._verdicts.append(f"The job restarts: {command.reason}")
                self._restart_job()
            case TimePassed():
                self._on_time(command)
            case _:
                assert_never(command)

    def _on_gone(self, command: InstanceGone) -> None:
        instance = self._instance(command.instance)
        if instance.life is InstanceLife.SUCCEEDED:
            instance.life = InstanceLife.FINISHED
        elif instance.life is InstanceLife.ENDING:
            instance.life = InstanceLife.ABSENT
            instance.is_killed = False
        else:
            instance.life = InstanceLife.ABSENT
            self._on_failed(command.instance, command.cause or "its process died", command.cause or "died")

    def _on_failed(self, instance_id: InstanceId, cause: str, fingerprint: str) -> None:
        role, instance = self._state.roles[instance_id.role], self._instance(instance_id)
        print_of = hashlib.blake2b(fingerprint.encode(), digest_size=8).hexdigest()
        instance.num_same = instance.num_same + 1 if instance.fingerprint == print_of else 1
        instance.fingerprint, instance.cause, instance.failed_at = print_of, cause, self._state.now
        if self._state.stage is StageOfJob.STOPPING:
            self._end(instance_id)
            return
        blamed = [(each, known) for each, known in self.instances() if known.blame]
        for each, known in blamed or [(instance_id, instance)]:
            if not self._count_on_machine(each, known):
                return
        causes = [f"{each}: {known.blame}" for each, known in blamed]
        for _, known in blamed:
            known.blame = ""
        why = instance.cause + (f"; the cause is {', '.join(causes)}" if causes else "")
        self._recover(role, instance_id, instance, why)

    def _count_on_machine(self, instance_id: InstanceId, instance: Instance) -> bool:
        """False: the job ends."""
        instance.num_failures_here += 1
        limit = self._state.roles[instance_id.role].spec.max_failures_per_machine
        is_too_much = limit is not None and instance.num_failures_here > limit and not instance.awaits_machine
        return not is_too_much or self._replace_machine(instance_id, instance)

    def _replace_machine(self, instance_id: InstanceId, instance: Instance) -> bool:
        """Beside the recovery, which is the same as always: only the creation of this instance waits. False: the job ends."""
        state = self._state
        assert state.spec is not None
        times = f"{instance_id} failed {instance.num_failures_here} times on one machine"
        most = state.spec.max_machine_replacements
        if state.num_machine_replacements >= most:
            self._stop(EXIT_FAILED, f"{times}, and {most} machines were replaced before: {instance.cause}")
            return False
        instance.awaits_machine = True
        self._verdicts.append(f"{times}: the machine is to be replaced.")
        self._effects.append(ReplaceMachine(instance_id))
        return True

    def _on_machine(self, command: MachineReplaced) -> None:
        instance = self._instance(command.instance)
        instance.awaits_machine = False
        instance.num_failures_here = 0
        if command.is_replaced:
            self._state.num_machine_replacements += 1
        self._verdicts.append(
            f"The machine of {command.instance} was {'' if command.is_replaced else 'not '}replaced; the instance may start."
        )

    def _recover(self, role: RoleState, instance_id: InstanceId, instance: Instance, why: str) -> None:
        """By the cheapest way that is allowed and has budget left."""
        state, spec = self._state, self._state.spec
        assert spec is not None
        limit = role.spec.max_restarts
        way: OnFailure = role.spec.on_failure
        if way is OnFailure.SELF:
            way = ESCALATION[way]
        if instance.num_same > SAME_IN_A_ROW and way in ESCALATION:
            way = ESCALATION[way]  # once more would end in the same way
        if way is OnFailure.INSTANCE:
            if instance.budget.take(limit, state.now):
                self._verdicts.append(f"{instance_id} failed ({why}): it restarts alone.")
                self._restart(instance_id, pause=instance.budget.pause(role.spec.restart_pause))
                return
            way = ESCALATION[way]
        if way is OnFailure.ROLE:
            if role.budget.take(limit, state.now):
                self._verdicts.append(f"{instance_id} failed ({why}): role {instance_id.role} restarts.")
                self._restart_role(instance_id.role, role, pause=role.budget.pause(role.spec.restart_pause))
                return
            way = ESCALATION[way]
        if way is OnFailure.JOB and state.budget.take(spec.max_job_restarts, state.now):
            self._verdicts.append(f"{instance_id} failed ({why}): the whole job restarts.")
            self._restart_job(pause=state.budget.pause())
            return
        self._stop(EXIT_FAILED, f"{instance_id} failed: {why}")

    def _restart(self, instance_id: InstanceId, *, pause: Micros = AT_ONCE) -> None:
        instance = self._instance(instance_id)
        instance.num_restarts += 1
        instance.start_at = Micros(self._state.now + pause)
        if instance.life is InstanceLife.FINISHED:
            instance.life = InstanceLife.ABSENT
        self._end(instance_id)

    def _restart_role(self, name: str, role: RoleState, *, pause: Micros = AT_ONCE) -> None:
        role.is_gathering = True
        for rank, instance in enumerate(role.instances):
            self._restart(InstanceId(name, rank, instance.incarnation), pause=pause)

    def _restart_job(self, *, pause: Micros = AT_ONCE) -> None:
        self._state.num_job_restarts += 1
        self._state.stage = StageOfJob.READY if self._state.is_placed else StageOfJob.INIT
        for name, role in self._state.roles.items():
            self._restart_role(name, role, pause=pause)

    def _end(self, instance_id: InstanceId) -> None:
        """Nothing, if no process of it is there or it ends already."""
        instance = self._instance(instance_id)
        if instance.life not in ALIVE or instance.life is InstanceLife.ENDING:
            return
        assert self._state.spec is not None
        instance.life = InstanceLife.ENDING
        instance.kill_at = Micros(self._state.now + micros(self._state.spec.stop_grace))
        self._effects.append(EndInstance(instance_id))

    def _stop(self, exit_code: int, reason: str) -> None:
        state = self._state
        state.stage, state.exit_code, state.reason = StageOfJob.STOPPING, exit_code, reason
        self._verdicts.append(f"The job ends with exit code {exit_code}: {reason}")
        for instance_id, _ in list(self.instances()):
            self._end(instance_id)

    def _on_time(self, command: TimePassed) -> None:
        match command.what:
            case EnsembleWait.PAUSE:
                assert command.instance is not None
                self._instance(command.instance).start_at = Micros(0)
            case EnsembleWait.PLACEMENT:
                assert self._state.spec is not None
                limit = self._state.spec.placement_timeout
                self._stop(EXIT_NO_ROOM, f"no room for all its instances within {limit:g} s")
            case EnsembleWait.GRACE:
                assert command.instance is not None
                instance = self._instance(command.instance)
                instance.is_killed = True
                self._effects.append(EndInstance(command.instance, is_kill=True))
            case _:
                assert_never(command.what)

    # What goes on by itself.

    def _advance(self) -> None:
        state = self._state
        if state.stage is StageOfJob.STOPPING:
            if not any(instance.life in ALIVE for _, instance in self.instances()):
                state.stage = StageOfJob.STOPPED
                self._effects.append(FinishEnsemble(state.exit_code, state.reason))
            return
        if state.stage is StageOfJob.STOPPED or not state.is_placed:
            return
        self._create()
        if state.stage is StageOfJob.INIT and self._are_all(USABLE):
            state.stage = StageOfJob.READY
        if state.stage is StageOfJob.READY and self._are_all(USABLE):
            state.stage = StageOfJob.RUNNING
            self._verdicts.append("All instances are ready; their entry points start.")
        if state.stage is StageOfJob.RUNNING:
            self._run()
            if self._is_over():
                self._stop(0, "all drivers ended well")
                self._advance()

    def _create(self) -> None:
        for name, role in self._state.roles.items():
            if not all(self._is_usable(needed) for needed in role.spec.needs):
                continue
            for rank, instance in enumerate(role.instances):
                is_due = instance.start_at <= self._state.now and not instance.awaits_machine
                if instance.life is InstanceLife.ABSENT and is_due:
                    instance.incarnation += 1
                    instance.blame = ""
                    instance.life = InstanceLife.STARTING
                    self._effects.append(CreateInstance(InstanceId(name, rank, instance.incarnation)))

    def _run(self) -> None:
        for name, role in self._state.roles.items():
            if role.is_gathering and not self._is_usable(name):
                continue
            role.is_gathering = False
            for rank, instance in enumerate(role.instances):
                if instance.life is InstanceLife.READY:
                    instance.life = InstanceLife.RUNNING
                    self._effects.append(RunInstance(InstanceId(name, rank, instance.incarnation)))

    def _is_over(self) -> bool:
        ended = (InstanceLife.SUCCEEDED, InstanceLife.FINISHED)
        drivers = [role for role in self._state.roles.values() if role.spec.is_driver]
        return all(instance.life in ended for role in drivers for instance in role.instances)

    def _is_usable(self, role: str) -> bool:
        return all(instance.life in USABLE for instance in self._state.roles[role].instances)

    def _are_all(self, lives: tuple[InstanceLife, ...]) -> bool:
        return all(instance.life in lives for _, instance in self.instances())

    def _deadlines(self) -> list[EnsembleDeadline]:
        state = self._state
        found = []
        if state.stage is StageOfJob.INIT and not state.is_placed and state.spec is not None:
            found.append(EnsembleDeadline(state.place_until, TimePassed(EnsembleWait.PLACEMENT)))
        for instance_id, instance in self.instances():
            if instance.life is InstanceLife.ENDING and not instance.is_killed:
                found.append(EnsembleDeadline(instance.kill_at, TimePassed(EnsembleWait.GRACE, instance_id)))
            is_waiting = instance.life is InstanceLife.ABSENT and instance.start_at > state.now
            if is_waiting and state.stage not in (StageOfJob.STOPPING, StageOfJob.STOPPED):
                found.append(EnsembleDeadline(instance.start_at, TimePassed(EnsembleWait.PAUSE, instance_id)))
        return sorted(found, key=lambda deadline: deadline.at)

    def _instance(self, instance_id: InstanceId) -> Instance:
        return self._state.roles[instance_id.role].instances[instance_id.rank]


LIVES: dict[type[Any], tuple[InstanceLife, ...]] = {
    InstanceReady: (InstanceLife.STARTING,),
    InstanceSucceeded: (InstanceLife.RUNNING,),
    InstanceFailed: (InstanceLife.STARTING, InstanceLife.READY, InstanceLife.RUNNING),
    InstanceGone: ALIVE,
}
"""In which lives an instance can report this."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[EnsembleState] = msgspec.msgpack.Decoder(EnsembleState)
