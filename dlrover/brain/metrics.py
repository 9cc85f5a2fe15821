"""What Brain tells Prometheus about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class BrainMetrics:
    """`Listener` of the server."""

    def __init__(self, absurd: Callable[[], Mapping[str, int]], commits: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._questions = Counter(
            "dlrover_brain_questions", "Questions by kind and outcome.", ("kind", "outcome"), registry=self._registry
        )
        self._seconds = Histogram(
            "dlrover_brain_question_seconds",
            "Seconds from a question to its answer.",
            ("kind",),
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._registry.register(_Figures(absurd, commits))

    def note(self, question: str, outcome: str, seconds: float) -> None:
        self._questions.labels(question, outcome).inc()
        self._seconds.labels(question).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Figures(Collector):
    """Numbers that are kept elsewhere."""

    def __init__(self, absurd: Callable[[], Mapping[str, int]], commits: Callable[[], int]) -> None:
        self._absurd = absurd
        self._commits = commits

    def collect(self) -> list[Metric]:
        absurd = CounterMetricFamily(
            "dlrover_brain_absurd_reports", "Reports with impossible values, which Brain ignored.", labels=("kind",)
        )
        for kind, count in self._absurd().items():
            absurd.add_metric((kind,), count)
        return [absurd, GaugeMetricFamily("dlrover_brain_commits", "Commits to the database.", value=self._commits())]
