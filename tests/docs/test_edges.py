"""Where an error of any kind ends without being raised again: at an edge that has a name, and nowhere else."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dlrover.host import edges
from tools.measure_style import Module, is_swallowing, read_package, swallowing_handlers

PACKAGE = Path(__file__).parents[2] / "dlrover"
EDGES: dict[str, tuple[str, ...]] = {
    "The end of a process: no caller is left who could be told. It says why and ends.": (
        "agent.__main__:main",
        "master.__main__:main",
        "trainer.tensorflow.graph.hooks:Parking._run",
        "trainer.torch.resilience.last_breath:LastBreath._save",
        "trainer.torch.resilience.last_breath:LastBreath.offer",
        "trainer.worker.entry:become",
        "trainer.worker.entry:report_uncaught",
        "trainer.worker.entry:run",
        "trainer.worker.zygote:_Zygote._count",
        "unified.shell.conductor_actor:ConductorActor._live",
        "unified.shell.instance_actor:_outcome",
    ),
    "The root of a task or thread: an error would be lost with it. It is logged, or told to those who wait.": (
        "agent.checkpoints.commits:NodeCommits._obey",
        "agent.checkpoints.saver:Saver._save",
        "agent.replicas.exchange:ReplicaExchange._push_offered",
        "agent.replicas.exchange:ReplicaExchange.enter",
        "agent.replicas.wire:PeerServer._converse",
        "agent.workers.stream_copies:Pump._copy",
        "agent.workers.stream_copies:Pump._end",
        "agent.workers.stream_copies:Pump._pass_on",
        "agent.workers.stream_copies:Pump._work_off",
        "cli.ray.host:RayHost._live",
        "master.brain.client:BrainClient.run",
        "operator.runner:Runner._keep",
        "platforms.ray.starter:RayNode._live",
        "trainer.data.shard_feed:ShardFeed._run",
        "trainer.data_sources.directory_tail:TailWatch._run",
        "trainer.events.exporters:AsyncExporter._work",
        "trainer.sharding_client:IndexShardingClient._fill",
        "trainer.torch.flash_checkpoint.saving.lazy_saves:LazySaves._settle",
        "trainer.torch.flash_checkpoint.saving.outlets:ThreadOutlet._write",
        "trainer.worker.tf_ray_worker:TFRayWorker._run",
    ),
    "An answer: the error is the answer, and is raised again where it was asked for.": (
        "brain.service:BrainServer.verdict_on",
        "compat.tools.functions:threading_timeout.decorate.limited.run",
        "snapshot.copy.copying:_BundledWork.run",
        "snapshot.files.direct_io:run_in_threads.run",
        "trainer.torch.data.ordered_records:RecordService._serve",
        "trainer.torch.data.shard_service:ShardService._serve",
        "unified.api.queue:DataQueue.put_async.work",
        "unified.runtime.calls:CallFuture.exception",
    ),
    "Code of users, extensions or libraries, which may raise anything: the job goes on without it.": (
        "agent.monitor.collectors:_interval",
        "cli.checkpoint.diff:_differs",
        "compat.launch.global_context:Context.get_pre_check_operators",
        "compat.tools.functions:ignore_exceptions.decorate.ignoring",
        "core.diagnosis.inference:InferenceChain._apply",
        "host.console:ConsoleHandler.emit",
        "host.log_file:RotatingLog.emit",
        "master.diagnosis.pre_check_runner:PreCheckRunner._foreign",
        "master.diagnosis.pre_check_runner:_interval",
        "master.job_glances:JobGlances.show",
        "master.platform_driver:PlatformDriver._attempt",
        "master.platform_driver:PlatformDriver._room_of_platform",
        "master.platform_driver:PlatformDriver._watch",
        "master.service:_close",
        "master.view.event_reporters:_Guarded._send",
        "master.view.event_reporters:_Guarded._work",
        "snapshot.storage.user_deletion:_delete",
        "trainer.events.process:safe.guarded",
        "trainer.events.process:safe.guarded",
        "trainer.late_imports:_call",
        "trainer.torch.flash_checkpoint.encoding.frozen:freeze_again",
        "trainer.torch.flash_checkpoint.encoding.pickle_template:_fixed_of",
        "trainer.torch.node_check.device_memory:main",
        "trainer.worker.entry:_say",
        "trainer.worker.zygote:_preload",
        "unified.runtime.wire:as_error",
        "unified.runtime.wire:raised",
        "unified.shell.machine_replacement:MachineReplacement._relaunch",
    ),
}
"""A new broad `except`, or use of a helper that has one, belongs here; a place that can name its errors does that instead."""
HELPERS = ("attempt", "contained", "exit_contained", "handed_over", "logged")
"""The public functions of `dlrover.host.edges`. Where they are called is an edge, and not in their own module."""
MOST_HANDLERS = 20


def test_a_broad_except_that_raises_nothing_stands_at_a_named_edge() -> None:
    modules = [module for module in read_package(PACKAGE) if module.name != edges.__name__]
    found = Counter(name for module in modules for name in places_of(module))
    named = Counter(name for names in EDGES.values() for name in names)
    assert found - named == Counter(), "not named: name the errors, or the edge"
    assert named - found == Counter(), "named, and not there any more"


def test_few_handlers_catch_everything_and_raise_nothing() -> None:
    assert len(swallowing_handlers(read_package(PACKAGE))) <= MOST_HANDLERS, "use what dlrover.host.edges offers"


def test_the_helpers_are_all_that_the_module_of_edges_offers() -> None:
    offered = {name for name, value in vars(edges).items() if inspect.isfunction(value) and name[0] != "_"}
    assert {name for name in offered if getattr(edges, name).__module__ == edges.__name__} == set(HELPERS)


def places_of(module: Module) -> Iterator[str]:
    """The functions that have such a handler or call a helper, one for each."""
    yield from _places(module.tree, f"{module.name.partition('.')[2]}:", "")


def _is_edge(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name(id="edges"), attr=name)):
            return name in (*HELPERS, "Edge")
    return is_swallowing(node)


def _places(node: ast.AST, prefix: str, path: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        is_named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = f"{path}.{child.name}".lstrip(".") if is_named else path
        if _is_edge(child):
            yield f"{prefix}{path}"
        yield from _places(child, prefix, inner)


def test_the_place_of_a_handler_is_its_function(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(
        "class A:\n    def work(self):\n        try:\n            pass\n        except Exception:\n            pass\n"
        "def narrow():\n    try:\n        pass\n    except OSError:\n        pass\n"
        "def raising():\n    try:\n        pass\n    except Exception:\n        raise\n"
        "def helped():\n    with logged(log, 'bug'):\n        pass\n"
        "def helped_by_name():\n    return edges.attempt(work, str)\n"
    )
    (module,) = read_package(tmp_path)
    assert [name.partition(":")[2] for name in places_of(module)] == ["A.work", "helped", "helped_by_name"]
