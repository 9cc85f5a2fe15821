"""
Batch and loader settings of the workers, while they run.

The micro-batch grows into the memory of the device, and the accumulation shrinks with it: the records of a step, and so the learning rate, stay. Memory follows a line
in the micro-batch. Before two points of it are known, growing in proportion is safe, because what does not depend on the batch cannot be below 0.
"""

from __future__ import annotations

import math

from dlrover.core.scaling.allreduce import LEAST_GAIN
from dlrover.core.scaling.brakes import TUNING, refusal_of
from dlrover.core.scaling.facts import ScaleFacts
from dlrover.core.scaling.state import MeasuredRun, Scaling
from dlrover.core.scaling.verdict import TOLERANCE, ScaleVerdict
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.scaling import (
    Configuration,
    ModelCard,
    RunMeasured,
    ScaleOutcome,
    SizePlan,
    TuneOffered,
    Tuner,
    TypeUse,
)
from dlrover.protocol.messages.watch import StepShape
from dlrover.protocol.units import MIB

MOST_DEVICE_USE = 0.9
MOST_GROWTH = 2
MOST_DATA_WAIT = 0.1
MOST_LOADERS = 16
MOST_BATCHES = 16
LEAST_FREE_MIB = 2400
"""Of the historical tuner: with less free memory it changes nothing."""


def is_tuning(plan: SizePlan) -> bool:
    return plan.micro_batch is not None or plan.loader_workers is not None


def decide(scaling: Scaling, facts: ScaleFacts) -> ScaleVerdict | None:
    """None: the settings stay."""
    newest, tuner = scaling.newest, scaling.terms.tuner
    if tuner is Tuner.OFF or scaling.probation is not None or facts.configuration is None or newest is None:
        return None
    last = scaling.changed_kinds.get(TUNING)
    if last is not None and facts.now < last + micros(scaling.terms.worker_pause):
        return None
    if tuner is Tuner.HISTORICAL:
        return _historical(scaling, newest)
    return _larger_batch(scaling, facts, newest) or _more_loaders(scaling, facts, newest)


def offered(former: TuneOffered, plan: SizePlan, last_batch: int, rate_factor: float) -> TuneOffered:
    """The next version."""
    batch = former.micro_batch if plan.micro_batch is None else plan.micro_batch
    loaders = former.loader_workers if plan.loader_workers is None else plan.loader_workers
    return TuneOffered(
        version=former.version + 1,
        micro_batch=batch,
        accumulation=former.accumulation if plan.accumulation is None else plan.accumulation,
        loader_workers=loaders,
        last_batch=last_batch if plan.micro_batch is not None else former.last_batch,
        rate_factor=rate_factor,
    )


def keep_memory(scaling: Scaling, told: RunMeasured) -> None:
    """The greatest device memory of each micro-batch."""
    use, batch = device_use(told), told.configuration.micro_batch
    if use is not None and batch:
        scaling.batch_memory[batch] = max(use.device_memory_mb, scaling.batch_memory.get(batch, 0.0))
        while len(scaling.batch_memory) > MOST_BATCHES:
            del scaling.batch_memory[next(iter(scaling.batch_memory))]


def device_use(told: RunMeasured) -> TypeUse | None:
    return next(
        (
            use
            for use in told.types
            if use.node_type is NodeType.WORKER and use.device_total_mb and use.device_memory_mb
        ),
        None,
    )


def _larger_batch(scaling: Scaling, facts: ScaleFacts, newest: RunMeasured) -> ScaleVerdict | None:
    configuration, use = newest.configuration, device_use(newest)
    batch = configuration.micro_batch
    if use is None or not batch or configuration.accumulation < 2:
        return None
    most = min(MOST_GROWTH * batch, fitting_batch(scaling.batch_memory, batch, MOST_DEVICE_USE * use.device_total_mb))
    if scaling.refused_batch:
        most = min(most, scaling.refused_batch - 1)
    records = batch * configuration.accumulation
    larger = largest_divisor(records, most)
    if larger <= batch:
        return None
    plan = SizePlan(micro_batch=larger, accumulation=records // larger)
    gain = _promised(scaling, configuration, larger)
    refused = refusal_of(scaling, plan)
    if (refused is not None and facts.now < refused.until) or (gain is not None and gain < LEAST_GAIN):
        return None
    promise = "to see what that brings" if gain is None else f"{gain:+.0%} speed is expected"
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=(
            f"A micro-batch of {larger} instead of {batch} and {records // larger} passes instead of "
            f"{configuration.accumulation}: {promise}; {use.device_memory_mb:.0f} of {use.device_total_mb:.0f} MiB are used."
        ),
        plan=plan,
        kind=TUNING,
        nodes=facts.nodes,
        expected_speed=0.0 if gain is None else facts.speed * (1 + gain),
        least_ratio=TOLERANCE,
    )


def fitting_batch(memory: dict[int, float], batch: int, most_mb: float) -> int:
    """The largest micro-batch whose memory, by the line through what was seen, stays below this."""
    known = sorted(memory.items())
    if not known or memory.get(batch, 0.0) <= 0:
        return batch
    (small, least), (large, most) = known[0], known[-1]
    slope = (most - least) / (large - small) if large > small else 0.0
    if slope <= 0:
        return int(batch * most_mb / memory[batch])
    fixed = max(0.0, least - slope * small)
    return int((most_mb - fixed) / slope)


def largest_divisor(number: int, most: int) -> int:
    """Of `number`, at most `most`; 1 at least."""
    return next((each for each in range(min(number, most), 0, -1) if number % each == 0), 1)


def _promised(scaling: Scaling, configuration: Configuration, batch: int) -> float | None:
    """Share of more speed by the line of a pass's time in its batch; None: one batch alone was seen."""
    passes: dict[int, float] = {}
    for run in scaling.runs:
        if _is_alike(run, configuration):
            passes[run.configuration.micro_batch] = run.step_time / run.configuration.accumulation
    if len(passes) < 2:
        return None
    (small, short), (large, long_) = min(passes.items()), max(passes.items())
    slope = max(0.0, (long_ - short) / (large - small))
    now = passes[configuration.micro_batch] / configuration.micro_batch
    then = (max(0.0, short - slope * small) + slope * batch) / batch
    return now / then - 1 if then > 0 else None


def _is_alike(run: MeasuredRun, configuration: Configuration) -> bool:
    return (run.configuration.groups, run.configuration.workers_per_node) == (
        configuration.groups,
        configuration.workers_per_node,
    ) and run.configuration.micro_batch > 0


def _more_loaders(scaling: Scaling, facts: ScaleFacts, newest: RunMeasured) -> ScaleVerdict | None:
    group = newest.configuration.group(NodeType.WORKER)
    cores = MOST_LOADERS if group is None or not group.cpu else max(1, int(group.cpu))
    most = min(MOST_LOADERS, cores)
    if newest.data_wait <= MOST_DATA_WAIT or not 0 <= newest.loader_workers < most:
        return None
    if scaling.tuning.loader_workers > newest.loader_workers:
        return None  # it counts from the next epoch on
    plan = SizePlan(loader_workers=newest.loader_workers + 1)
    refused = refusal_of(scaling, plan)
    if refused is not None and facts.now < refused.until:
        return None
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=f"{newest.loader_workers + 1} loader processes: workers wait for data {newest.data_wait:.0%} of the time.",
        plan=plan,
        kind=TUNING,
        nodes=facts.nodes,
        least_ratio=TOLERANCE,
    )


def failed_batch(scaling: Scaling, told: StepShape | None) -> tuple[int, int]:
    """
    The micro-batch for which the memory did not suffice, and the records of a worker in one step. By the word of that worker, for it may fail in its
    first step; else by what was offered and measured last. 0 records: not known, or the script alone decides what a step is.
    """
    if told is not None and told.micro_batch:
        return told.micro_batch, told.micro_batch * told.accumulation if told.total_batch else 0
    if scaling.newest is None:
        return 0, 0
    configuration = scaling.newest.configuration
    batch = scaling.tuning.micro_batch or configuration.micro_batch
    return batch, configuration.micro_batch * configuration.accumulation


def halved(batch: int, records: int) -> SizePlan | None:
    """After a device ran out of memory; None: the micro-batch cannot be smaller, or a step would not be the same."""
    if batch < 2 or not records:
        return None
    smaller = largest_divisor(records, batch // 2)
    return SizePlan(micro_batch=smaller, accumulation=records // smaller)


def activation_mib(batch: int, card: ModelCard) -> float:
    """Of a transformer, by the formula of the original (spec 07 §15)."""
    s, h, a = card.block_size, card.embedding, card.num_heads
    return (34 * batch * s * h + 5 * batch * s * s * a) * card.num_layers / MIB


def historical_batch(batch: int, free_mib: float, card: ModelCard) -> int | None:
    """None: too little is free."""
    if free_mib <= LEAST_FREE_MIB or batch < 1:
        return None
    return int(batch + batch * free_mib / activation_mib(batch, card))


def rate_factor(batch: int, last_batch: int) -> float:
    return math.sqrt(batch / last_batch)


def _historical(scaling: Scaling, newest: RunMeasured) -> ScaleVerdict | None:
    use, batch = device_use(newest), newest.configuration.micro_batch
    if use is None or not batch or scaling.tuning.micro_batch not in (0, batch):
        return None  # the last offer has not been taken yet
    larger = historical_batch(batch, use.device_total_mb - use.device_memory_mb, scaling.terms.model_card)
    if larger is None or larger <= batch:
        return None
    return ScaleVerdict(
        outcome=ScaleOutcome.PLANNED,
        sentence=f"A batch of {larger} instead of {batch}, and a learning rate of {rate_factor(larger, batch):.3f} times the former.",
        plan=SizePlan(micro_batch=larger, accumulation=newest.configuration.accumulation),
        kind=TUNING,
        nodes=newest.configuration.num_workers,
        least_ratio=0.0,
    )
