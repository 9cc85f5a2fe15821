"""What the samples of the control-plane benchmark say: tables, ratios and budgets. Pure, so that it can be tested."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from figures import Summary, quietness, ratio, seconds, summarise, table, times

OURS = "ours"
OLD = "dlrover-0.6.1"
KV = ("set", "get", "multi-set", "multi-get")


@dataclass(frozen=True)
class Sample:
    what: str
    system: str
    size: int
    """Nodes of a rendezvous, or clients."""
    figures: dict[str, float]

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        told = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{self.what} ({self.size}), {self.system}: {told}"


Figure = Callable[[Sample], float]


def rate(sample: Sample) -> float:
    return sample.figures["num"] / sample.figures["seconds"]


def cpu_each(sample: Sample) -> float:
    """Milliseconds of the server's CPU for one call."""
    return 1000 * sample.figures["cpu"] / sample.figures["num"]


def figure(name: str) -> Figure:
    return lambda sample: sample.figures[name]


class Samples:
    """All that was measured, by what, of whom and how large."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def of(self, what: str, system: str, size: int, value: Figure) -> Summary | None:
        """None: not measured, or that system has no such figure."""
        found = []
        for sample in self._samples:
            if (sample.what, sample.system, sample.size) == (what, system, size):
                try:
                    found.append(value(sample))
                except KeyError:
                    continue
        return summarise(found)

    def cases(self, what: str) -> list[tuple[int, str]]:
        """(size, system), in the order of size."""
        cases = dict.fromkeys((sample.size, sample.system) for sample in self._samples if sample.what == what)
        return sorted(cases, key=lambda case: case[0])

    def whats(self) -> list[str]:
        return list(dict.fromkeys(sample.what for sample in self._samples))


def report(samples: Sequence[Sample], errors: Sequence[str], strangers: Sequence[float], num_rounds: int = 1) -> str:
    all_ = Samples(samples)
    parts = [
        machine(num_rounds),
        quietness(strangers),
        rendezvous_part(all_),
        reattach_part(all_),
        door_part(all_),
        heartbeat_part(all_),
        kv_part(all_),
        stream_part(all_),
        budget_part(all_),
        "\n".join(f"NOT MEASURED: {error}" for error in dict.fromkeys(errors)),
    ]
    return "\n\n".join(part for part in parts if part)


def machine(num_rounds: int) -> str:
    rounds = f"{num_rounds} round{'s' if num_rounds != 1 else ''}"
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {rounds}"


def rendezvous_part(all_: Samples) -> str:
    rows = []
    for size, system in all_.cases("rendezvous"):
        took = all_.of("rendezvous", system, size, figure("seconds"))
        rows.append(
            [
                f"{size:,}",
                system,
                seconds(took.median if took else None),
                spread(took),
                times(ratio(took, all_.of("rendezvous", OURS, size, figure("seconds")))),
                shown(all_.of("rendezvous", system, size, figure("cpu")), ".2f"),
                shown(all_.of("rendezvous", system, size, figure("gathering")), ".2f"),
                shown(all_.of("rendezvous", system, size, figure("rss_mb")), ".0f"),
                shown(all_.of("rendezvous", system, size, figure("message_bytes")), ",.0f"),
                shown(all_.of("rendezvous", system, size, figure("bytes_per_agent")), ",.0f"),
            ]
        )
    head = ["nodes", "system", "after the last join, median s", "min-max", "/ ours", "master CPU s", "before it, s"]
    head += ["RSS MB", "world message bytes", "bytes per agent in all"]
    return titled("Rendezvous: from the last join until everybody has the world", head, rows)


def reattach_part(all_: Samples) -> str:
    rows = []
    for size, system in all_.cases("reattach"):
        took = all_.of("reattach", system, size, figure("seconds"))
        cpu = all_.of("reattach", system, size, figure("cpu"))
        rows.append(
            [
                f"{size:,}",
                shown(all_.of("reattach", system, size, figure("serving")), ".3f"),
                seconds(took.median if took else None),
                spread(took),
                "-" if cpu is None else f"{1000 * cpu.median / size:.2f}",
                shown(all_.of("reattach", system, size, figure("rss_mb")), ".0f"),
            ]
        )
    head = ["agents", "serving again, s", "all attached, median s", "min-max", "CPU ms per agent, start included"]
    return titled("Our master killed: until all agents are attached to the next one", [*head, "RSS MB"], rows)


def door_part(all_: Samples) -> str:
    rows = []
    for size, company in all_.cases("door"):
        took = all_.of("door", company, size, figure("seconds"))
        rows.append(
            [
                f"{size:,}",
                company,
                seconds(took.median if took else None),
                spread(took),
                shown(all_.of("door", company, size, figure("num_lost")), ",.0f"),
                shown(all_.of("door", company, size, figure("cpu")), ".2f"),
                shown(all_.of("door", company, size, figure("rss_mb")), ".0f"),
            ]
        )
    head = [
        "agents",
        "who else comes",
        "all attached, median s",
        "min-max",
        "connections lost",
        "master CPU s",
        "RSS MB",
    ]
    return titled("All agents come at once, from one address", head, rows)


def heartbeat_part(all_: Samples) -> str:
    ours = next(((size, system) for size, system in all_.cases("heartbeat") if system == OURS), None)
    rows = []
    for size, system in all_.cases("heartbeat"):
        speed = all_.of("heartbeat", system, size, rate)
        cpu = all_.of("heartbeat", system, size, cpu_each)
        base_speed = all_.of("heartbeat", OURS, ours[0], rate) if ours else None
        base_cpu = all_.of("heartbeat", OURS, ours[0], cpu_each) if ours else None
        rows.append(
            [
                system,
                f"{size}",
                shown(speed, ",.0f"),
                spread(speed, ",.0f"),
                times(ratio(base_speed, speed)),
                shown(cpu, ".3f"),
                times(ratio(base_cpu, cpu)),
            ]
        )
    head = ["system", "clients", "a second, median", "min-max", "ours / it", "master CPU ms each", "ours / it"]
    return titled("Heartbeats", head, rows)


def kv_part(all_: Samples) -> str:
    rows = []
    for what in KV:
        for size, system in all_.cases(what):
            speed, cpu = all_.of(what, system, size, rate), all_.of(what, system, size, cpu_each)
            rows.append(
                [
                    what,
                    f"{size}",
                    system,
                    shown(speed, ",.0f"),
                    spread(speed, ",.0f"),
                    times(ratio(all_.of(what, OURS, size, rate), speed)),
                    shown(cpu, ".4f"),
                ]
            )
    head = ["operation", "clients", "system", "keys a second, median", "min-max", "ours / it", "server CPU ms a key"]
    note = (
        "Ours goes through the worker's socket, the agent and the master's journal: a set is on disk when it returns. "
        "torch's set returns before the server has it; 'multi' carries 32 keys a call."
    )
    text = titled("Keys and values through the public clients", head, rows)
    return f"{text}\n\n{note}" if text else ""


def stream_part(all_: Samples) -> str:
    rows = []
    for what in all_.whats():
        if not what.endswith("at a time"):
            continue
        for size, system in all_.cases(what):
            speed = all_.of(what, system, size, rate)
            cpu = all_.of(what, system, size, cpu_each)
            rows.append([what, f"{size}", shown(speed, ",.0f"), spread(speed, ",.0f"), shown(cpu, ".3f")])
    head = ["calls", "agents", "a second, median", "min-max", "master CPU ms each"]
    return titled("Directly on the agents' streams", head, rows)


@dataclass(frozen=True)
class Budget:
    text: str
    value: float | None
    limit: float
    is_at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        is_met = self.value >= self.limit if self.is_at_least else self.value <= self.limit
        return "met" if is_met else "NOT MET"


def budgets(all_: Samples) -> list[Budget]:
    """Rendezvous in seconds and megabytes; rates and CPU as ratios against dlrover 0.6.1, both with their better count of clients."""
    found = []
    for size, limit in ((1_000, 1.0), (10_000, 10.0)):
        took = all_.of("rendezvous", OURS, size, figure("seconds"))
        rss = all_.of("rendezvous", OURS, size, figure("rss_mb"))
        found.append(Budget(f"rendezvous of {size:,}, s after the last join", took.median if took else None, limit))
        found.append(Budget(f"rendezvous of {size:,}, RSS in MB", rss.median if rss else None, 1000))
    smallest, largest = world_message_bytes(all_)
    growth = None if smallest is None or largest is None else largest - smallest
    found.append(Budget("growth of the world message with the world, bytes (digits of numbers)", growth, 32))
    for what in ("heartbeat", "multi-set", "multi-get"):
        ours, old = best(all_, what, OURS), best(all_, what, OLD)
        faster = None if ours is None or old is None else ours[0] / old[0]
        cheaper = None if ours is None or old is None else ours[1] / old[1]
        found.append(Budget(f"{what}: rate / dlrover 0.6.1's", faster, 3.0, is_at_least=True))
        found.append(Budget(f"{what}: master CPU / dlrover 0.6.1's", cheaper, 1 / 3))
    return found


def best(all_: Samples, what: str, system: str) -> tuple[float, float] | None:
    """Highest rate and lowest CPU over the numbers of clients."""
    sizes = [size for size, other in all_.cases(what) if other == system]
    rates = [summary.median for size in sizes if (summary := all_.of(what, system, size, rate))]
    cpus = [summary.median for size in sizes if (summary := all_.of(what, system, size, cpu_each))]
    return (max(rates), min(cpus)) if rates and cpus and min(cpus) > 0 else None


def world_message_bytes(all_: Samples) -> tuple[float | None, float | None]:
    """Of the smallest and the largest rendezvous on sockets."""
    sizes = [size for size, system in all_.cases("rendezvous") if system == OURS]
    if len(sizes) < 2:
        return None, None
    first = all_.of("rendezvous", OURS, sizes[0], figure("message_bytes"))
    last = all_.of("rendezvous", OURS, sizes[-1], figure("message_bytes"))
    return (first.median if first else None), (last.median if last else None)


def budget_part(all_: Samples) -> str:
    rows = []
    for budget in budgets(all_):
        bound = f"{'at least' if budget.is_at_least else 'at most'} {budget.limit:.4g}"
        rows.append([budget.text, "-" if budget.value is None else f"{budget.value:.4g}", bound, budget.verdict])
    return titled("Budgets", ["what", "measured", "budget", "verdict"], rows)


def titled(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"{title}:\n\n{table(head, rows)}" if rows else ""


def shown(summary: Summary | None, form: str) -> str:
    return "-" if summary is None else format(summary.median, form)


def spread(summary: Summary | None, form: str = ".3f") -> str:
    return "-" if summary is None else f"{summary.lowest:{form}}-{summary.highest:{form}}"
