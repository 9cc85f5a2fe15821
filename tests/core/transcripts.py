"""
Transcripts: a story in a text file, with what the core said to it.

Lines before `----` are commands, lines after it are what came out, up to an empty line. `python -m tests.core.transcripts`
rewrites what came out; the difference is reviewed like any other.

    limits min=2 max=3 last_call=30      terms of the job (also restarts=N standby=N pend_timeout=S check={...} strategy=ps)
    attach a b rank=0 procs=2            agents present themselves (also group=N, place=ROW/RACK)
    join a b | fail a kind=signal | finish a | leave a reason=preempted
    fail a exceptions=NameError rank=0 ranks=2     an exception in two ranks, before any step
    break a | silent a | restart-agent a | restart-master | stop
    scale min=2 max=4 | block a lease=60 | unblock a
    check a b                            nodes come to the node check; `a: ReportCheck exit_class=0 elapsed_ms=5` tells how it went
    tick                                 deadlines that have passed have their effect
    next                                 when the next deadline passes
    show data.datasets.d.held            a part of the state, as a snapshot has it
    ... at=35                            any of them at that second

Every message of the protocol can be sent by its name, with the fields that matter; a field with parts is JSON:

    a: ExchangeShards dataset=d want=2   from the agent of node a, which adds its node, its life and the newest round
    ScaleReplicas replicas={"worker":3}  from a person, the platform or the master itself
    ? AskDataset dataset=d               a question
    a? AwaitSaveDuties                   a question of an agent
    a: ExchangeShards dataset=x*257      a text of 257 letters
    keep k                               the text of the last answer, to be sent later as `content=@k`

`= ...` is the reply, with the fields that are not as usual; `> a: ...` is what a node shall do now; `> ...` is another effect; `! ...` is a refusal.
In stories with a platform its nodes are called by their number, and the agent on node 3 is n3:

    node 0 1 phase=Running host=h0       the platform tells that nodes have changed; `vanish 1`: that one was deleted
    list                                 the platform tells everything that it has
    train 0 1                            nodes run, their agents attach and join
    come 0 1                             nodes run, and their agents attach

With parameter servers (`strategy=ps`) an agent adds the start of its process in place of the round: `n0: ServerBound address=h0:1`.

What workers tell of their phases goes through the ledger of progress: `tell a step=7 forward=3.5 phase=data` is a report of a worker (`rank=1`: of the second),
`book` is what the ledger makes of all of them by then, and books it (`book now`: before its time).
In stories about goodput `account a step=7 compute=20 redo=3` is what a node's workers did since their round began, in seconds, `goodput` shows where the
time went, and after `events` it is shown what people are told of each command, as `* ...`.
In stories about ranks that stand still (`watch`, see `tests.core.diagnosis.watch_story`) there is no job: the watch is told what agents see.
"""

from __future__ import annotations

import enum
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, get_args

import msgspec

from dlrover.core.commit_order import decode_record
from dlrover.core.goodput.events import EventTeller
from dlrover.core.goodput.progress_ledger import ProgressLedger
from dlrover.core.job import Outcome
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import CheckTerms, ReportCheck
from dlrover.protocol.messages.cluster import ClusterTask
from dlrover.protocol.messages.data import DatasetSpec
from dlrover.protocol.messages.fleet import NodeExit, NodePhase, Strategy
from dlrover.protocol.messages.goodput import SPLIT, AccountGoodput, JobEvent, NodeAccount
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    Check,
    Command,
    Done,
    End,
    FailureKind,
    FinishJob,
    Idle,
    JobTerms,
    Join,
    JoinCheck,
    Leave,
    LeaveReason,
    Query,
    RestartPolicy,
    Round,
    Run,
    TellNode,
    Wait,
    Wish,
    WorldSpec,
)
from dlrover.protocol.messages.watch import Phase, ProgressReport
from tests.core.diagnosis.watch_story import WatchStory
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import failure, terms

LONGEST_LINE = 160
DIRECTORY = pathlib.Path(__file__).parent / "transcripts"
MESSAGES = {class_.__name__: class_ for class_ in (*get_args(Command), *get_args(Query))}


def play(text: str) -> str:
    """The transcript with what comes out now."""
    return _played(text, _story_of(text))


def told_by(text: str) -> Story | WatchStory:
    """The stage after the story."""
    story = _story_of(text)
    _played(text, story)
    return story


def _story_of(text: str) -> Story | WatchStory:
    return WatchStory() if "\nwatch " in text else Story()


def _played(text: str, story: Story | WatchStory) -> str:
    lines: list[str] = []
    said: list[str] = []
    is_output = False
    for line in text.splitlines():
        if is_output and line.strip():
            continue
        if not line.strip():
            is_output = False
        elif line.strip() == "----":
            lines += ["----", *said]
            said, is_output = [], True
            continue
        elif not line.startswith("#"):
            said += story.perform(*words_of(line))
        lines.append(line)
    return "\n".join(lines) + "\n"


def words_of(line: str) -> tuple[list[str], dict[str, str]]:
    """Words and options. Blanks inside of brackets and quotation marks separate nothing."""
    found, depth, is_quoted = [""], 0, False
    for before, char in pairwise(f" {line}"):
        if char == '"' and before != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (char in "{[") - (char in "}]")
        if char == " " and not depth and not is_quoted:
            found.append("")
        else:
            found[-1] += char
    plain = [word for word in found if word]
    options = dict(word.split("=", 1) for word in plain if "=" in word.split("{")[0])
    return [word for word in plain if "=" not in word.split("{")[0]], options


class Story:
    def __init__(self) -> None:
        self.scene = FleetScene()
        self.teller: EventTeller | None = None
        self.ledger = ProgressLedger()
        self.kept: dict[str, object] = {}
        self.answer: object = None

    def perform(self, names: list[str], options: dict[str, str]) -> list[str]:
        scene = self.scene
        verb, *names = names
        if "at" in options:
            scene.at(float(options.pop("at")))
        match verb:
            case "limits":
                scene.terms = _terms(options)
                return []
            case "restart-master":
                self.ledger = ProgressLedger()
            case "events":
                self.teller = EventTeller(scene.job.state)
                return []
            case "next":
                deadline = scene.job.next_deadline()
                return [f"next deadline: {'none' if deadline is None else f'{deadline / 1e6:g} s'}"]
            case "keep":
                self.kept |= {f"@{name}": getattr(self.answer, "content", None) for name in names}
                return []
            case "goodput":
                return _lines("= ", scene.job.goodput(scene.now))
            case "tell":
                for name in names:
                    self.ledger.heard(_progress(scene, name, options), scene.job.state, scene.now)
                return []
            case "book":
                account = self.ledger.account(scene.now, at_once="now" in names)
                return ["nothing to book"] if account is None else self._booked(account)
            case "show":
                return [line for path in names for line in _lines(f"{path}: ", _part(scene.job.state, path))]
        if verb.endswith("?"):
            return self._watched(lambda: self._ask(verb[:-1], names[0], options))
        if verb.endswith(":") or verb in MESSAGES:
            sender, name = (verb[:-1], names[0]) if verb.endswith(":") else ("", verb)
            return self._watched(lambda: self._send(sender, name, options))
        said: list[str] = []
        for name in names or [""]:
            said += self._watched(lambda name=name: _act(scene, verb, name, options))  # type: ignore[misc]
        return said

    def _watched(self, act: Callable[[], list[str] | None]) -> list[str]:
        """What came out of it, or why it was refused."""
        scene = self.scene
        already, written = len(scene.outcomes), len(scene.journal)
        said: list[str] = []
        try:
            said += act() or []
        except Rejected as error:
            said.append(f"! {error.code}: {error}")
        for outcome in scene.outcomes[already:]:
            said += _describe(scene, outcome)
        if self.teller is not None:
            for outcome, record in zip(scene.outcomes[already:], scene.journal[written:], strict=True):
                command = decode_record(record).command
                told = self.teller.tell(command, outcome, scene.job.state, scene.now)
                said += [f"* {_event(event)}" for event in told]
        return said

    def _booked(self, account: AccountGoodput) -> list[str]:
        self.scene.do(account)
        return [line for each in account.accounts for line in _lines("= ", each)]

    def _send(self, sender: str, name: str, options: dict[str, str]) -> list[str]:
        message = self._message(sender, name, options)
        outcome = self.scene.send(sender, message) if sender else self.scene.do(message)
        return [] if isinstance(outcome.reply, Done) else _lines("= ", outcome.reply)

    def _message(self, sender: str, name: str, options: dict[str, str]) -> Any:
        class_ = MESSAGES[name]
        fields: dict[str, Any] = {key: self.kept.get(value, _value(value)) for key, value in options.items()}
        if sender:
            agent = self.scene.agents[sender]
            state = self.scene.job.state
            newest = state.check.round if class_ is ReportCheck else self.scene.newest_round(sender)
            own = {"node": agent.node, "incarnation": agent.incarnation, "round": newest}
            fields = {key: value for key, value in own.items() if key in class_.__struct_fields__} | fields
        if class_.__name__.startswith("Kv"):  # values are bytes: a story writes them as text
            fields = {key: _as_bytes(key, value) for key, value in fields.items()}
        return msgspec.convert(fields, class_, strict=False)

    def _ask(self, sender: str, name: str, options: dict[str, str]) -> list[str]:
        answer = self.answer = self.scene.job.ask(self._message(sender, name, options))
        if isinstance(answer, NotYet):
            otherwise = answer.otherwise
            told = f"! {otherwise.code}: {otherwise}" if isinstance(otherwise, Rejected) else f"= {compact(otherwise)}"
            return [f"= not yet, look again at {compact(answer.topics)}; at the latest:", told]
        return _lines("= ", answer)


def _progress(scene: FleetScene, name: str, options: dict[str, str]) -> ProgressReport:
    agent = scene.agents[name]
    values = {key: _value(value) for key, value in options.items()}
    seconds = {phase.value: values.pop(phase.value) for phase in Phase if phase.value in values}
    rank, round_ = values.pop("rank", 0), values.pop("round", scene.job.state.rendezvous.round)
    worker = {"local_rank": rank, "global_rank": rank, "seconds": seconds} | values
    fields = {"node": agent.node, "incarnation": agent.incarnation, "round": round_, "workers": [worker]}
    return msgspec.convert(fields, ProgressReport, strict=False)


def _event(event: JobEvent) -> str:
    about = {"node": event.node, "rank": event.rank, **event.labels}
    labels = {key: value for key, value in about.items() if value is not None}
    return f"{event.level} {event.name}: {event.text}{f' {compact(labels)}' if labels else ''}"


def _value(text: str) -> object:
    if text[1:2] == "*" and text[2:].isdigit():
        return text[0] * int(text[2:])
    try:
        return json.loads(text)
    except ValueError:
        return text


def _as_bytes(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {key: _as_bytes("value", each) for key, each in value.items()}
    return str(value).encode() if name in ("value", "expected", "desired") else value


def _part(state: object, path: str) -> object:
    for name in path.split("."):
        if isinstance(state, dict):
            state = next(value for key, value in state.items() if str(key) == name)
        else:
            state = getattr(state, name)
    return state


def compact(value: object) -> str:
    """A value on one line; of a message its name and the fields that are not as usual."""
    match value:
        case DatasetSpec():
            return value.name
        case msgspec.Struct():
            fields = " ".join(f"{field}={compact(each)}" for field, each in _told(value))
            return f"{type(value).__name__}({fields})"
        case dict():
            return "{" + ", ".join(f"{compact(key)}: {compact(each)}" for key, each in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(compact, value)) + "]"
        case float():
            return f"{value:.6g}"
        case enum.Enum():
            return str(value.value)
        case bool() | None | int() | bytes():
            return repr(value)
        case str() if len(value) > 200 and len(set(value)) == 1:
            return f"{value[0]}*{len(value)}"
    return str(value)


def _lines(head: str, value: object) -> list[str]:
    """A value with a head before it: on one line, or a line for each of its parts."""
    line = f"{head}{compact(value)}"
    if len(line) <= LONGEST_LINE:
        return [line]
    match value:
        case msgspec.Struct():
            parts = [part for field, each in _told(value) for part in _lines(f"{field}=", each)]
            return [f"{head}{type(value).__name__}", *(f"    {part}" for part in parts)]
        case dict():
            parts = [part for key, each in value.items() for part in _lines(f"{compact(key)}: ", each)]
        case list() | tuple():
            parts = [part for each in value for part in _lines("", each)]
        case _:
            return [line]
    return [head.rstrip(), *(f"    {part}" for part in parts)]


def _told(value: msgspec.Struct) -> Iterator[tuple[str, object]]:
    for field in msgspec.structs.fields(value):
        each = getattr(value, field.name)
        is_usual = each == field.default or (
            field.default_factory is not msgspec.NODEFAULT and each == field.default_factory()
        )
        if not is_usual and field.name != "digest":
            yield field.name, each


def _terms(options: dict[str, str]) -> JobTerms:
    restarts = RestartPolicy(max_restarts=int(options.pop("restarts"))) if "restarts" in options else None
    min_nodes, max_nodes, node_unit = (int(options.pop(name, "1")) for name in ("min", "max", "unit"))
    standby = int(options.pop("standby", "0"))
    check = options.pop("check", None)
    strategy = Strategy[options.pop("strategy", "allreduce").upper()]
    limits = {name: float(value) for name, value in options.items()}
    found = terms(min_nodes, max_nodes, restarts, node_unit=node_unit, standby=standby, **limits)
    found = msgspec.structs.replace(found, strategy=strategy)
    if check is None:
        return found
    return msgspec.structs.replace(found, check=msgspec.convert(json.loads(check), CheckTerms))


def _act(scene: FleetScene, verb: str, name: str, options: dict[str, str]) -> None:
    numbers: dict[str, Any] = {key: int(value) for key, value in options.items() if value.lstrip("-").isdigit()}
    match verb:
        case "attach":
            place = {"place": tuple(options["place"].split("/"))} if "place" in options else {}
            scene.attach(name, **numbers, **place)
        case "restart-agent":
            scene.restart_agent(name)
        case "join":
            scene.join(name, round_=numbers.get("round"), offer=options.get("offer"))
        case "check":
            wish = scene.wish(name)
            round_ = wish.round if isinstance(wish, JoinCheck) else scene.job.state.check.round
            scene.join(name, round_=numbers.get("round", round_), rendezvous=NODE_CHECK_RENDEZVOUS)
        case "account":
            agent = scene.agents[name]
            round_ = Round(numbers.get("round", scene.job.state.rendezvous.round))
            millis = tuple(round(1000 * float(options.get(class_.value, 0))) for class_ in SPLIT)
            is_redo_known = bool(numbers.get("is_redo_known", 1))
            steps = numbers.get("step"), numbers.get("model_step")
            told = NodeAccount(agent.node, agent.incarnation, round_, steps[0], millis, steps[1], is_redo_known)
            scene.do(AccountGoodput(accounts=(told,)))
        case "fail":
            kind = FailureKind(options.get("kind", "exception"))
            details: dict[str, Any] = {name: numbers[name] for name in ("signal", "exit_code") if name in numbers}
            exited = float(options.get("exited", scene.now / 1e6))
            message = "" if kind is FailureKind.SIGNAL else options.get("message", "boom")
            rank = numbers.get("rank", 0)
            if "exceptions" in options:
                exceptions = (*options["exceptions"].split(","), "Exception")
                details |= {"traceback": message, "exceptions": exceptions, "is_before_step": "step" not in numbers}
            ranks = range(rank, rank + numbers.get("ranks", 1))
            died = (failure(kind, at=exited, global_rank=each, message=message, **details) for each in ranks)
            scene.fail(name, *died, round_=numbers.get("round"), step=numbers.get("step"))
        case "node":
            phase = NodePhase(options["phase"]) if "phase" in options else scene.cloud[int(name)].phase
            scene.show(int(name), phase, **_of_platform(options))
        case "vanish":
            scene.vanish(int(name), **_of_platform(options))
        case "list":
            scene.list()
        case "train":
            scene.train(int(name))
        case "come":
            scene.run(int(name)).come(int(name))
        case "finish":
            scene.finish(name)
        case "leave":
            scene.leave(name, LeaveReason(options.get("reason", "job-ended")))
        case "break":
            scene.break_stream(name, numbers.get("step"))
        case "silent":
            scene.silent(name)
        case "scale":
            scene.scale(numbers["min"], numbers["max"])
        case "block":
            scene.block(name, options.get("reason", "it has its reasons"), float(options.get("lease", "600")))
        case "unblock":
            scene.unblock(name)
        case "restart-master":
            scene.restart_master()
        case "stop":
            scene.stop()
        case "tick":
            scene.tick()
        case _:
            raise ValueError(f"unknown verb {verb!r} in a transcript")


def _of_platform(options: dict[str, str]) -> dict[str, Any]:
    told = {key: _value(value) for key, value in options.items() if key not in ("phase", "at")}
    if "exit_reason" in told:
        told["exit_reason"] = NodeExit(options["exit_reason"])
    return told


def _describe(scene: FleetScene, outcome: Outcome) -> list[str]:
    names = {agent.node: agent.name for agent in scene.agents.values()}
    said = list(outcome.verdicts)
    for effect in outcome.effects:
        match effect:
            case TellNode(node):
                said.append(f"> {names.get(node, node)}: {_wish(scene.job.desired(node).wish)}")
            case FinishJob(end):
                said.append(f"> the master may exit with {end.exit_code}")
            case _:
                said += _lines("> ", effect)
    return said


def _wish(wish: Wish) -> str:
    match wish:
        case Join(round_, cause, _):
            return f"join round {round_} ({cause.value})"
        case Wait():
            return "wait"
        case Idle():
            return "idle"
        case Leave(_, exit_code):
            return f"leave ({exit_code})"
        case End(end):
            return f"end ({end.reason.value}, {end.exit_code})"
        case Run(WorldSpec(task=ClusterTask() as task) as world):
            return f"start {world.round} as {task.node_type.value}-{task.rank} of version {task.version}"
        case Run(world):
            return f"run round {world.round} as {_place(world)}, restart {world.restart_count}"
        case JoinCheck(round_, cause, _):
            return f"join check {round_} ({cause.value})"
        case Check(world, phase):
            return f"check {world.round} ({phase}) as {_place(world)}"


def _place(world: WorldSpec) -> str:
    last = world.first_global_rank + world.local_world_size - 1
    return (
        f"{world.group_rank} of {world.group_world_size}, global ranks {world.first_global_rank}-{last} of "
        f"{world.world_size}, coordinator {world.coordinator}"
    )


if __name__ == "__main__":
    for path in map(pathlib.Path, sys.argv[1:] or sorted(DIRECTORY.rglob("*.txt"))):
        sys.stdout.write(f"{path}\n")
        path.write_text(play(path.read_text()))
