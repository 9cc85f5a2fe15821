"""The statistics of the original by their historical names, with the vectors of its specification (07 §4, §5)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from dlrover.python.common.comm import DataLoaderConfig, OptimizerConfig, ParallelConfig
from dlrover.python.elastic_agent.config.paral_config_tuner import ParalConfigTuner
from dlrover.python.master.monitor.perf_monitor import PerfMonitor
from dlrover.python.master.monitor.speed_monitor import SpeedMonitor
from dlrover.python.master.stats.job_collector import JobMetricCollector
from dlrover.python.master.stats.reporter import LocalStatsReporter
from dlrover.python.master.stats.training_metrics import RuntimeMetric


def test_vector_of_paragraph_4() -> None:
    monitor = SpeedMonitor()
    monitor.set_target_worker_num(2)
    monitor.add_running_worker("worker", 0)
    monitor.add_running_worker("worker", 1)
    for step, at in ((1, 1), (301, 11), (9001, 301)):
        monitor.collect_global_step(step, at)
    assert monitor.running_speed == 30
    assert monitor.worker_adjustment_finished()
    monitor.remove_running_worker("worker", 1)
    monitor.collect_global_step(18001, 601)
    assert not monitor.worker_adjustment_finished()


def test_a_step_that_did_not_grow_is_a_sample_and_no_record() -> None:
    monitor = SpeedMonitor()
    for _ in range(3):
        monitor.collect_global_step(5, 10)
    assert (monitor.get_sample_count(), monitor.completed_global_step, monitor.running_speed) == (3, 5, 0)


def test_the_target_is_reduced_by_those_that_run_and_never_to_nothing() -> None:
    monitor = PerfMonitor()
    monitor.set_target_worker_num(2)
    monitor.add_running_worker("worker", 0)
    monitor.reduce_target_worker_num([("worker", 0), ("worker", 7)])
    assert monitor.all_worker_joined(), "one runs, and one is wanted"
    monitor.reduce_target_worker_num([("worker", 0)])
    assert monitor.all_worker_joined()


def test_two_runs_of_the_same_size_with_another_between_are_no_stable_run() -> None:
    """The original takes them for one."""
    monitor = SpeedMonitor()
    monitor.set_target_worker_num(1)
    monitor.add_running_worker("worker", 0)
    monitor.collect_global_step(1, 0)
    monitor.add_running_worker("worker", 1)
    monitor.collect_global_step(2, 50)
    monitor.remove_running_worker("worker", 1)
    monitor.collect_global_step(3, 100)
    assert not monitor.worker_adjustment_finished()
    monitor.collect_global_step(4, 161)
    assert monitor.worker_adjustment_finished()


def nodes(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(type="worker", id=number) for number in range(count)]


def test_vector_of_paragraph_5() -> None:
    reporter = LocalStatsReporter()
    for _ in range(3):
        reporter.report_runtime_stats(RuntimeMetric(running_nodes=nodes(4)))
    for _ in range(10):
        reporter.report_runtime_stats(RuntimeMetric(running_nodes=nodes(5)))
    assert [len(each.running_nodes) for each in reporter.get_runtime_stats()] == [4] * 3 + [5] * 5


def test_returning_to_a_former_size_deletes_nothing_between() -> None:
    reporter = LocalStatsReporter()
    for count in (4, 5, 4):
        for _ in range(6):
            reporter.report_runtime_stats(RuntimeMetric(running_nodes=nodes(count)))
    assert [len(each.running_nodes) for each in reporter.get_runtime_stats()] == [4] * 5 + [5] * 5 + [4] * 5


def test_the_collector_waits_for_a_speed_and_for_all_workers() -> None:
    collector, monitor = JobMetricCollector(), SpeedMonitor()
    monitor.set_target_worker_num(1)
    collector.collect_runtime_stats(monitor, nodes(1))
    monitor.collect_global_step(1, 0)
    monitor.collect_global_step(11, 1)
    collector.collect_runtime_stats(monitor, nodes(1))
    assert collector.reporter.get_runtime_stats() == []
    monitor.add_running_worker("worker", 0)
    collector.collect_runtime_stats(monitor, nodes(1))
    [stats] = collector.reporter.get_runtime_stats()
    assert (stats.speed, stats.global_step) == (10, 11)
    collector.collect_dataset_metric("", 5)
    collector.collect_dataset_metric("criteo", 7)
    assert collector.reporter.dataset_metric is not None
    assert (collector.reporter.dataset_metric.name, collector.reporter.dataset_metric.size) == ("criteo", 5)


def test_the_tuner_reads_what_it_wrote_and_skips_what_is_no_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_PARAL_CONFIG_PATH", str(tmp_path / "config.json"))
    tuner = ParalConfigTuner()
    assert tuner.read_paral_config() is None
    tuner.start()
    assert tuner.read_paral_config() == ParallelConfig()
    told = ParallelConfig(DataLoaderConfig(version=2, batch_size=64), OptimizerConfig(learning_rate=0.5), restart=True)
    tuner.write_paral_config(told)
    assert tuner.read_paral_config() == told
    (tmp_path / "config.json").write_text("{half")
    assert tuner.read_paral_config() is None
