"""The data benchmark's report: ratios the right way round, budgets judged, and nothing invented."""

from control_plane_report import Sample, Samples
from data import parse_args
from data_report import budgets, report


def shards(system: str, clients: int, num: float) -> Sample:
    return Sample("shards", system, clients, {"num": num, "seconds": 2.0, "cpu": 1.0, "rss_mb": 50.0})


def verdicts(*samples: Sample) -> dict[str, str]:
    return {budget.text: budget.verdict for budget in budgets(Samples(samples))}


def test_shards_are_held_against_those_of_the_original_with_as_many_clients() -> None:
    old = shards("dlrover-0.6.1", 16, 1000)
    name = "shards of 16 clients against dlrover 0.6.1's"
    assert verdicts(shards("ours", 16, 11_000), old)[name] == "met"
    assert verdicts(shards("ours", 16, 9_000), shards("ours", 1, 90_000), old)[name] == "NOT MET"
    assert verdicts(shards("ours", 16, 9_000))[name] == "not measured"
    assert "11.00x" in report([shards("ours", 16, 11_000), old], [], [1.0])


def test_the_worst_of_several_large_datasets_counts() -> None:
    table = Sample("start table", "ours", 10**9, {"seconds": 0.1, "rss_mb": 60.0, "grown_mb": 1.0})
    text = Sample("start text", "ours", 10**9, {"seconds": 1.1, "rss_mb": 110.0, "grown_mb": 60.0})
    found = verdicts(table, text)
    assert found["seconds to the first shard of 1e9 records"] == "NOT MET"
    assert found["MB of the master with 1e9 records"] == "NOT MET"
    assert verdicts(table)["MB of the master with 1e9 records"] == "met"


def test_samplers_are_held_against_torchs_in_the_same_process() -> None:
    sample = Sample("sampler", "ours", 1, {"elastic_ns": 110.0, "torch_ns": 100.0, "resumed_ns": 130.0})
    found = verdicts(sample)
    assert found["sampler against torch's, per index"] == "met"
    assert found["sampler that goes on in an epoch, against torch's"] == "NOT MET"


def test_what_could_not_be_measured_is_named_and_others_are_blamed() -> None:
    text = report([], ["shards, dlrover-0.6.1: no network"], [30.0])
    assert "NOT MEASURED: shards, dlrover-0.6.1: no network" in text
    assert "NOT FOR PUBLICATION" in text


def test_the_quick_run_is_short(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["data.py", "--quick"])
    args = parse_args()
    assert (args.rounds, args.clients) == (1, [1, 16])
