"""
What `dlrover status` prints: a job at a glance, its nodes, the nodes of its platform, and why it does what it does.

Free text (verdicts, messages of a platform) is printed as it is: brackets in it are no markup.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from dlrover.protocol.messages.check import CheckResult
from dlrover.protocol.messages.data import DatasetState, StorageKind
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodeExit
from dlrover.protocol.messages.job import JobStatus, NodeStatus
from dlrover.protocol.messages.precheck import PreCheckStage, PreCheckStatus
from dlrover.protocol.messages.watch import PastVerdict

_NOT_THERE = ("gone", "left")
"""Of a node that is one of these the last wish is history."""


def show(status: JobStatus, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(
        f"job {status.job_name}: {status.stage_text}, round {status.round}, {status.world_size} workers, "
        f"{status.num_restarts} restarts, master epoch {status.master_epoch}"
        + (f", started by {status.user}" if status.user else "")
    )
    often = "once" if status.limits_version == 1 else f"{status.limits_version} times"
    scaled = f" (scaled {often})" if status.limits_version else ""
    has_others = status.num_standby or status.num_pending
    beside = f", {status.num_standby} standby, {status.num_pending} pending" if has_others else ""
    say(f"nodes {status.min_nodes}:{status.max_nodes}{scaled}{beside}")
    say(f"because: {status.reason}")
    if status.newest_verdict is not None:
        for line in verdict_lines(status.newest_verdict, status.now):
            say(line)
    for line in pre_check_lines(status.pre_check):
        say(line)
    if status.shortage:
        say(f"waits for the platform: {status.shortage}")
    console.print(_agents(status.nodes))
    if status.left_out.nodes:
        say(_more("nodes", status.left_out.nodes))
    if status.fleet:
        console.print(_platform_nodes(status.fleet))
    if status.left_out.fleet:
        say(_more("platform nodes", status.left_out.fleet))
    for node in status.nodes:
        if node.check is not None and node.check.reason:
            say(f"check of {node.label}: {node.check.status}, {node.check.reason}")
    for failure in status.distinct_failures:
        where = f"first on node rank {failure.node_rank} ({failure.host})"
        say(f"failed {failure.count} times, {where}: {failure.kind}: {failure.message}")
    for line in [*cluster_lines(status), *dataset_lines(status), *checkpoint_lines(status)]:
        say(line)
    if status.end is not None:
        say(f"end: {status.end.reason}: {status.end.message}")


def pre_check_lines(check: PreCheckStatus) -> list[str]:
    """What operators say before training begins; nothing for a job without any."""
    if check.stage is PreCheckStage.DISABLED:
        return []
    lines = [f"pre-check: {check.stage.value}{f': {check.message}' if check.message else ''}"]
    for each in check.results:
        said = f": {each.message}" if each.message else ""
        lines.append(f"pre-check {each.name}: {each.state.value} after {each.num_tries} tries{said}")
    return lines


def cluster_lines(status: JobStatus) -> list[str]:
    """Of a parameter-server job: how far its newest version is."""
    view = status.cluster
    if view is None:
        return []
    words = [f"version {view.version}", view.phase.value]
    if view.servers:
        words.append(f"{len(view.servers)} parameter servers")
    if view.restored_step is not None:
        words.append(
            "started with a new model" if view.restored_step < 0 else f"started from step {view.restored_step}"
        )
    if view.saved_step >= 0:
        words.append(f"step {view.saved_step} is saved")
    return [f"cluster: {', '.join(words)}"]


def dataset_lines(status: JobStatus) -> list[str]:
    """How far the data are read; nothing for a job that does not read shards."""
    return [line for each in status.datasets for line in _dataset_lines(each, status.now)]


def _dataset_lines(data: DatasetState, now: int) -> list[str]:
    spec = data.spec
    of_epochs = f" of {spec.num_epochs}" if spec.num_epochs > 0 else ""
    epoch = "" if spec.storage is StorageKind.STREAM else f"epoch {data.epoch + 1}{of_epochs}, "
    of_all = f" of {data.num_total} ({100 * data.num_consumed / max(1, data.num_total):.0f} %)"
    words = [f"{epoch}{data.num_consumed}{of_all if data.num_total >= 0 else ''} records read"]
    if data.is_complete:
        words.append("complete")
    elif data.speed > 0:
        words.append(f"{data.speed:.0f} records/s{_ago(now, data.consumed_at)}")
        words += [] if data.remaining is None else [f"about {_span(data.remaining)} left"]
    if data.num_doing:
        words.append(f"{data.num_doing} being read by {data.num_readers} workers")
    if data.waived:
        words.append(f"the remaining data are skipped: {data.waived}")
    lines = [f"data {spec.name} ({spec.task_type.name.lower()}): {', '.join(words)}"]
    return lines + [f"data {spec.name}: UNREADABLE, skipped: {each}" for each in data.set_aside]


def verdict_lines(past: PastVerdict, now: int) -> list[str]:
    """What the diagnosis has found last."""
    verdict = past.verdict
    ranks = ", ".join(str(culprit.global_rank) for culprit in verdict.culprits[:8] if culprit.global_rank >= 0)
    who = f" of rank {ranks}" if ranks else ""
    often = f", {past.count} times" if past.count > 1 else ""
    acted = f"; {verdict.action.value}" if past.has_acted else ""
    age = _ago(now, max(past.at, past.last_at))
    head = f"diagnosis: {verdict.fault.value}{who} in round {past.round}{age}{often}{acted} ({verdict.confidence:.0%} sure)"
    return [head, *(f"  {sentence}" for sentence in verdict.evidence[:3])]


def checkpoint_lines(status: JobStatus) -> list[str]:
    """What is known of saving; nothing for a job that does not save."""
    known = status.checkpoints
    lines = []
    if known.snapshot_step is not None:
        lines.append(f"snapshot in memory: step {known.snapshot_step}")
    if known.copied_step is not None:
        lag = max(0, (known.snapshot_step or 0) - known.copied_step)
        lines.append(f"copied to other nodes: step {known.copied_step}" + (f", {lag} steps behind" if lag else ""))
    lines += [
        f"checkpoint: step {each.step} in {each.directory}{_ago(status.now, each.at)}" for each in known.committed
    ]
    if known.num_under_way:
        lines.append(f"checkpoints being written: {known.num_under_way}")
    if (trouble := known.trouble) is not None:
        where = f" on {trouble.host}" if trouble.host else ""
        often = f", {trouble.count} times in a row" if trouble.count > 1 else ""
        age = _ago(status.now, trouble.at)
        lines.append(
            f"checkpoint FAILED: step {trouble.step} in {trouble.directory}{where}{age}{often}: {trouble.reason}"
        )
    return lines


def _ago(now: int, then: int) -> str:
    if not now:
        return ""
    return f", {_span(max(0, now - then) / 1_000_000)} ago"


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def _agents(nodes: tuple[NodeStatus, ...]) -> Table:
    is_checked = any(node.check is not None for node in nodes)
    is_named = any(node.name for node in nodes)
    columns = ["node", "id", "incarnation", *(["name"] if is_named else []), "host", "status", "wish", "step"]
    table = _table(*columns, *(["check", "elapsed"] if is_checked else []))
    for node in nodes:
        step = "" if node.step is None else node.step
        wish = "" if node.status in _NOT_THERE else node.wish
        name = (node.name,) if is_named else ()
        cells = (node.label, node.node, node.incarnation, *name, node.host, node.status, wish, step)
        _add(table, *cells, *(_check_cells(node.check) if is_checked else ()))
    return table


def _platform_nodes(nodes: tuple[FleetNodeStatus, ...]) -> Table:
    table = _table("platform node", "id", "phase", "relaunches", "exit reason", "host", "message")
    for node in nodes:
        phase = f"{node.phase.value}, let go" if node.is_released else node.phase.value
        relaunches = f"{node.num_relaunches} of {node.max_relaunches}"
        if node.num_evictions:
            relaunches += f", {node.num_evictions} free"
        reason = "" if node.exit_reason is NodeExit.NONE else node.exit_reason.value
        _add(table, node.label, node.id, phase, relaunches, reason, node.host, node.message)
    return table


def _more(what: str, counts: dict[str, int]) -> str:
    """Of nodes that the master's message had no room for."""
    return f"and {sum(counts.values())} more {what}: {', '.join(f'{count} {state}' for state, count in counts.items())}"


def _table(*columns: str) -> Table:
    """Cells that are too wide are folded: half of an address is none."""
    return Table(*(Column(name, overflow="fold") for name in columns))


def _add(table: Table, *cells: object) -> None:
    table.add_row(*(Text(str(cell)) for cell in cells))


def _check_cells(check: CheckResult | None) -> tuple[str, str]:
    """Verdict and times of the node check."""
    if check is None:
        return "", ""
    elapsed = f"{check.elapsed_ms:.0f} ms" if check.elapsed_ms else ""
    return check.status, f"{elapsed}, {check.bandwidth_gbps:.2f} GB/s" if check.bandwidth_gbps else elapsed
