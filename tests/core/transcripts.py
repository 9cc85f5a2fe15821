"""
Transcripts: a story in a text file, with what the core said to it.

Lines before `----` are commands, lines after it are what came out, up to an empty line. `python -m tests.core.transcripts`
rewrites what came out; the difference is reviewed like any other.

    limits min=2 max=3 last_call=30      terms of the job (also restarts=N standby=N)
    attach a b rank=0 procs=2            agents present themselves
    join a b | fail a kind=signal | finish a | leave a reason=preempted
    fail a exceptions=NameError rank=0 ranks=2     an exception in two ranks, before any step
    break a | silent a | restart-agent a | restart-master | stop
    scale min=2 max=4 | block a lease=60 | unblock a
    tick                                 deadlines that have passed have their effect
    ... at=35                            any of them at that second
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from dlrover.core.job import Outcome
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import (
    End,
    FailureKind,
    FinishJob,
    Idle,
    JobTerms,
    Join,
    Leave,
    LeaveReason,
    RestartPolicy,
    Run,
    TellNode,
    Wait,
    Wish,
)
from tests.core.scene import Scene, failure, terms

DIRECTORY = pathlib.Path(__file__).parent / "transcripts"


def play(text: str) -> str:
    """The transcript with what comes out now."""
    scene = Scene()
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
            said += _perform(scene, line)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _perform(scene: Scene, line: str) -> list[str]:
    verb, *words = line.split()
    options = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if "at" in options:
        scene.at(float(options.pop("at")))
    if verb == "limits":
        scene.terms = _terms(options)
        return []
    said: list[str] = []
    for name in names or [""]:
        already = len(scene.outcomes)
        try:
            _act(scene, verb, name, options)
        except Rejected as error:
            said.append(f"! {error.code}: {error}")
        for outcome in scene.outcomes[already:]:
            said += _describe(scene, outcome)
    return said


def _terms(options: dict[str, str]) -> JobTerms:
    restarts = RestartPolicy(max_restarts=int(options.pop("restarts"))) if "restarts" in options else None
    min_nodes, max_nodes, node_unit = (int(options.pop(name, "1")) for name in ("min", "max", "unit"))
    standby = int(options.pop("standby", "0"))
    limits = {name: float(value) for name, value in options.items()}
    return terms(min_nodes, max_nodes, restarts, node_unit=node_unit, standby=standby, **limits)


def _act(scene: Scene, verb: str, name: str, options: dict[str, str]) -> None:
    numbers: dict[str, Any] = {key: int(value) for key, value in options.items() if value.lstrip("-").isdigit()}
    match verb:
        case "attach":
            scene.attach(name, **numbers)
        case "restart-agent":
            scene.restart_agent(name)
        case "join":
            scene.join(name, round_=numbers.get("round"), offer=options.get("offer"))
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
        case "finish":
            scene.finish(name)
        case "leave":
            scene.leave(name, LeaveReason(options.get("reason", "job-ended")))
        case "break":
            scene.break_stream(name)
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


def _describe(scene: Scene, outcome: Outcome) -> list[str]:
    names = {agent.node: agent.name for agent in scene.agents.values()}
    said = list(outcome.verdicts)
    for effect in outcome.effects:
        match effect:
            case TellNode(node):
                said.append(f"> {names.get(node, node)}: {_wish(scene.job.desired(node).wish)}")
            case FinishJob(end):
                said.append(f"> the master may exit with {end.exit_code}")
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
        case Run(world):
            last = world.first_global_rank + world.local_world_size - 1
            return (
                f"run round {world.round} as {world.group_rank} of {world.group_world_size}, global ranks "
                f"{world.first_global_rank}-{last} of {world.world_size}, coordinator {world.coordinator}, "
                f"restart {world.restart_count}"
            )


if __name__ == "__main__":
    for path in sorted(DIRECTORY.glob("*.txt")):
        path.write_text(play(path.read_text()))
        sys.stdout.write(f"{path.name}\n")
