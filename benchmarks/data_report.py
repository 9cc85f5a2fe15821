"""What the samples of the data benchmark say: tables, ratios and budgets. Pure, so that it can be tested."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane_report import (
    OLD,
    OURS,
    Budget,
    Sample,
    Samples,
    cpu_each,
    figure,
    machine,
    rate,
    shown,
    spread,
    titled,
)
from figures import Summary, quietness, ratio, times

TIMES_OLD = 10.0
LONGEST_START = 1.0
LARGEST_MASTER_MB = 100.0
LARGEST_SAMPLER = 1.2


def report(samples: Sequence[Sample], errors: Sequence[str], strangers: Sequence[float], num_rounds: int = 1) -> str:
    all_ = Samples(samples)
    parts = [
        machine(num_rounds),
        quietness(strangers),
        shards_part(all_),
        start_part(all_),
        steps_part(all_),
        sampler_part(all_),
        budget_part(all_),
        "\n".join(f"NOT MEASURED: {error}" for error in dict.fromkeys(errors)),
    ]
    return "\n\n".join(part for part in parts if part)


def shards_part(all_: Samples) -> str:
    rows = []
    for size, system in all_.cases("shards"):
        speed = all_.of("shards", system, size, rate)
        rows.append(
            [
                f"{size}",
                system,
                whole(speed),
                spread(speed, ",.0f"),
                times(ratio(speed, all_.of("shards", OLD, size, rate))),
                shown(all_.of("shards", system, size, cpu_each), ".3f"),
            ]
        )
    head = ["clients", "system", "shards taken and done a second", "range", "against 0.6.1", "master CPU ms each"]
    return titled("Shards of one batch, taken and reported as done", head, rows)


def start_part(all_: Samples) -> str:
    rows = []
    for what in [what for what in all_.whats() if what.startswith("start")]:
        for size, system in all_.cases(what):
            took = all_.of(what, system, size, figure("seconds"))
            memory = all_.of(what, system, size, figure("rss_mb"))
            grown = all_.of(what, system, size, figure("grown_mb"))
            kind = what.removeprefix("start ")
            rows.append([f"{size:,}", kind, system, shown(took, ".3f"), shown(memory, ".0f"), shown(grown, ".1f")])
    head = ["records, shuffled", "storage", "system", "s to the first shard", "master MB", "of them for this"]
    return titled("Beginning with a large dataset", head, rows)


def steps_part(all_: Samples) -> str:
    rows = []
    for size, system in all_.cases("steps"):
        found = [all_.of("steps", system, size, figure(name)) for name in ("mean_us", "p99_us", "most_us")]
        rows.append([system, *(whole(each) for each in found)])
    head = ["system", "mean us", "p99 us", "longest us"]
    what = "What the training thread pays for its data, per step of 5 ms (a shard lasts ten steps)"
    return titled(what, head, rows)


def sampler_part(all_: Samples) -> str:
    rows = []
    for size, system in all_.cases("sampler"):
        base = all_.of("sampler", system, size, figure("torch_ns"))
        for name, label in (("elastic", system), ("resumed", f"{system}, resumed"), ("played", f"{system}, in turn")):
            each = all_.of("sampler", system, size, figure(f"{name}_ns"))
            if each is not None:
                rows.append([label, whole(each), whole(base), times(ratio(each, base))])
    head = ["sampler", "ns per index", "torch's in the same process", "ratio"]
    return titled("The order of a million records", head, rows)


def budgets(all_: Samples) -> list[Budget]:
    starts = [what for what in all_.whats() if what.startswith("start")]

    def worst(name: str) -> float | None:
        sizes = [(what, size) for what in starts for size, system in all_.cases(what) if system == OURS]
        found = [all_.of(what, OURS, size, figure(name)) for what, size in sizes]
        return max((each.median for each in found if each is not None), default=None)

    old, ours = all_.of("shards", OLD, 16, rate), all_.of("shards", OURS, 16, rate)
    sampler = all_.of("sampler", OURS, 1, figure("elastic_ns"))
    resumed = all_.of("sampler", OURS, 1, figure("resumed_ns"))
    torchs = all_.of("sampler", OURS, 1, figure("torch_ns"))
    return [
        Budget("shards of 16 clients against dlrover 0.6.1's", ratio(ours, old), TIMES_OLD, is_at_least=True),
        Budget("seconds to the first shard of 1e9 records", worst("seconds"), LONGEST_START),
        Budget("MB of the master with 1e9 records", worst("rss_mb"), LARGEST_MASTER_MB),
        Budget("sampler against torch's, per index", ratio(sampler, torchs), LARGEST_SAMPLER),
        Budget("sampler that goes on in an epoch, against torch's", ratio(resumed, torchs), LARGEST_SAMPLER),
    ]


def budget_part(all_: Samples) -> str:
    rows = []
    for budget in budgets(all_):
        bound = f"{'at least' if budget.is_at_least else 'at most'} {budget.limit:.4g}"
        rows.append([budget.text, "-" if budget.value is None else f"{budget.value:.4g}", bound, budget.verdict])
    return titled("Budgets", ["what", "measured", "budget", "verdict"], rows)


def whole(value: Summary | None) -> str:
    return shown(value, ",.0f")
