"""
What can go wrong on a node, on command: eviction, images, silence, late statuses, cut cables.

A command is one line of JSON on the kubelet's socket, `{"do": "evict", "pod": "default/a"}`; the answer is one line, too.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path

from tests.kubernetes.kubelet.client import Body
from tests.kubernetes.kubelet.host import Host
from tests.kubernetes.kubelet.node import NodeKeeper
from tests.kubernetes.kubelet.pod import PodRun
from tests.kubernetes.kubelet.status import Verdict

_TIMEOUT = 30.0
BY_KUBELET = "TerminationByKubelet"


class Faults:
    """Each public method is a command."""

    def __init__(self, host: Host, keeper: NodeKeeper, runs: Mapping[str, PodRun]) -> None:
        self._host = host
        self._keeper = keeper
        self._runs = runs
        self._commands = {
            "evict": self.evict,
            "preempt": self.preempt,
            "shut-down": self.shut_down,
            "signal": self.signal,
            "break-image": self.break_image,
            "mend-image": self.mend_image,
            "silence": self.silence,
            "speak": self.speak,
            "not-ready": self.not_ready,
            "late": self.late,
            "cut": self.cut,
            "heal": self.heal,
        }

    def evict(self, pod: str, resource: str = "memory", grace: float = 0.0) -> None:
        """The node lacks memory or disk. Hard eviction gives no grace."""
        message = f"The node was low on resource: {resource}. "
        verdict = Verdict(reason="Evicted", message=message, disruption=BY_KUBELET)
        self._run_of(pod).end(verdict, grace)

    def preempt(self, pod: str, grace: float = 0.0) -> None:
        """A critical pod needs the room on this node; the scheduler's preemption is a deletion."""
        message = "Preempted in order to admit critical pod"
        self._run_of(pod).end(Verdict(reason="Preempting", message=message, disruption=BY_KUBELET), grace)

    def shut_down(self, grace: float = 30.0) -> None:
        """Graceful shutdown of the node: all pods end."""
        self.not_ready("node is shutting down")
        message = "Pod was terminated in response to imminent node shutdown."
        for run in self._runs.values():
            run.end(Verdict(reason="Terminated", message=message, disruption=BY_KUBELET), grace)

    def signal(self, pod: str, number: int = 9) -> None:
        """To the first process of each container of the pod."""
        self._run_of(pod).kill_main(number)

    def break_image(self, image: str) -> None:
        self._host.broken_images.add(image)

    def mend_image(self, image: str) -> None:
        self._host.broken_images.discard(image)

    def silence(self) -> None:
        """The kubelet reaches the API server no more. Leases stop, processes run on."""
        self._host.cluster.reachable.clear()

    def speak(self) -> None:
        self._host.cluster.reachable.set()

    def not_ready(self, message: str) -> None:
        """An empty message: ready again."""
        self._keeper.say(message)

    def late(self, seconds: float) -> None:
        self._host.lateness = seconds

    def cut(self) -> None:
        """The pods' cables are pulled."""
        for run in self._runs.values():
            if run.facts.pod_ip:
                self._host.network.cut(run.facts.pod_ip)

    def heal(self) -> None:
        for run in self._runs.values():
            if run.facts.pod_ip:
                self._host.network.heal(run.facts.pod_ip)

    def _run_of(self, pod: str) -> PodRun:
        for run in self._runs.values():
            if f"{run.namespace}/{run.name}" == pod:
                return run
        raise LookupError(f"no pod {pod} runs on node {self._host.name}")

    async def serve(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._answer, path)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: Body = {}
        try:
            command = json.loads(await reader.readline())
            name = command.pop("do")
            if name not in self._commands:
                raise LookupError(f"no command {name!r}; known are {', '.join(self._commands)}")
            self._commands[name](**command)
        except (LookupError, TypeError, ValueError) as error:
            answer = {"error": str(error)}
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        writer.close()


def tell(path: Path, do: str, **arguments: object) -> None:
    """Give a command to the kubelet at this socket."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_TIMEOUT)
        line.connect(str(path))
        line.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        with line.makefile("rb") as answers:
            answer = json.loads(answers.readline())
    if "error" in answer:
        raise LookupError(answer["error"])
