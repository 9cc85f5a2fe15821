"""What the checkpoint benchmark says about its samples, and the small readers it is built from."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint
import pytest
from checkpoint_memory import field_bytes
from checkpoint_report import Case, Cases, against_peers, budgets, case_from_json, lazy_budget, report
from checkpoint_state import shape_for

LIMITS = {"memcpy_1": [0.2, 0.3], "memcpy_2": [0.1, 0.1], "dd": [1.0]}


def case(system: str, round_: int = 0, workers: int = 1, **samples: list[float]) -> Case:
    return Case(round_, system, 1.0, workers, 1_000, samples)


def verdicts(*cases: Case) -> dict[str, str]:
    return {budget.text: budget.verdict for _, budget in budgets(Cases(cases))}


def test_ratios_are_taken_within_a_round_against_the_best_copy():
    cases = Cases(
        [
            case("limits", 0, **LIMITS),
            case("limits", 1, memcpy_1=[0.4], memcpy_2=[0.5], dd=[1.0]),  # a slow minute of the machine
            case("ours", 0, warm_block=[0.1, 0.2, 0.11]),
            case("ours", 1, warm_block=[0.44]),
        ]
    )
    found = cases.ratio("warm_block", "memcpy", "ours", 1.0)
    assert found is not None
    assert (found.lowest, found.highest) == pytest.approx((1.1, 1.1))


def test_a_figure_that_nobody_measured_has_no_ratio_and_no_verdict():
    cases = [case("limits", **LIMITS), case("ours", first_block=[0.2])]
    assert Cases(cases).ratio("warm_block", "memcpy", "ours", 1.0) is None
    assert set(verdicts(*cases).values()) == {"not measured"}
    assert verdicts(case("ours", warm_block=[0.1]))["warm save, call + wait / memcpy"] == "not measured"  # no limits


def test_budgets_are_met_and_missed():
    ours = case(
        "ours", first_block=[0.3], warm_block=[0.11], persist=[1.05], persist_extra=[3.5], restore_memory=[0.13]
    )
    found = verdicts(case("limits", **LIMITS), ours)
    assert found["warm save, call + wait / memcpy"] == "met"
    assert found["first save / warm save"] == "NOT MET"
    assert found["persist, idle trainer / dd"] == "met"
    assert found["training lost to a save to storage every 60 s"] == "NOT MET"
    assert found["restore from memory / memcpy"] == "NOT MET"


def test_a_lazy_save_may_wait_for_what_the_computation_does_not_cover():
    assert lazy_budget(1.5) == lazy_budget(None) == 0.05
    assert lazy_budget(0.4) == pytest.approx(0.6)
    assert lazy_budget(0.99) == 0.05


def test_lazy_is_compared_with_the_fastest_peer_and_not_with_ourselves():
    cases = [case("ours", warm_block=[0.001]), case("ours lazy", warm_block=[0.004])]
    cases += [case("torch.save", warm_block=[1.0]), case("dcp.save", warm_block=[0.008])]
    assert against_peers(Cases(cases), 1.0) == pytest.approx(0.5)
    assert against_peers(Cases(cases[:2]), 1.0) is None


def test_a_step_is_longer_by_what_a_plain_one_lasts_less():
    found = Cases([case("ours", warm_step=[1.5, 1.7, 1.6], plain_step=[1.0])]).figure("longer", "ours", 1.0)
    assert found is not None
    assert found.median == pytest.approx(0.6)


def test_the_report_shows_both_numbers_of_workers_and_names_what_failed():
    text = report(
        [case("limits", **LIMITS), case("ours", warm_block=[0.1]), case("ours", workers=2, warm_block=[0.2])],
        ["dlrover-0.6.1: cannot be installed", "dlrover-0.6.1: cannot be installed"],
        [3.0, 97.0],
        machine="a machine",
    )
    assert "one worker" in text
    assert "2 workers" in text
    assert text.count("NOT MEASURED: dlrover-0.6.1: cannot be installed") == 1
    assert "NOT FOR PUBLICATION" in text


def test_a_call_of_microseconds_is_not_shown_as_nothing():
    text = report([case("ours lazy", warm_call=[0.000012])], [], [], machine="")
    assert "0.000012" in text


def test_tables_can_be_printed_again_from_the_file(tmp_path: Path):
    cases = [case("limits", **LIMITS), case("ours", warm_block=[0.115], durable=[1.1])]
    written = {"machine": "m", "others_percent": [1.0], "errors": [], "cases": [each.as_json() for each in cases]}
    file = tmp_path / "run.json"
    file.write_text(json.dumps(written))
    assert [case_from_json(each) for each in json.loads(file.read_text())["cases"]] == cases
    assert checkpoint.report_of_file(file, 60.0) == report(cases, [], [1.0], machine="m", interval=60.0)


@pytest.mark.parametrize("gigabytes", [0.016, 0.25, 1.0, 4.0])
def test_states_have_the_size_that_was_asked_for(gigabytes: float):
    shape = shape_for(int(gigabytes * 1e9))
    assert shape.num_bytes == pytest.approx(gigabytes * 1e9, rel=0.05)
    assert shape.width % 64 == 0


def test_the_size_of_a_state_is_known_without_building_it():
    from checkpoint_state import build, tensors_of

    shape = shape_for(8_000_000)
    training = build(shape, seed=0, num_threads=1, is_distributed=False)
    training.forward_and_backward(0)
    training.optimizer.step()
    tensors = list(tensors_of(training.state(0)))
    large = [tensor for tensor in tensors if tensor.numel() > 1]
    assert sum(tensor.numel() * tensor.element_size() for tensor in large) == shape.num_bytes
    assert len(large) == shape.num_tensors


def test_fields_of_proc_files():
    assert field_bytes("Name: x\nRssAnon:\t   12 kB\nRssFile: 3 kB\n", "RssAnon") == 12 * 1024
    assert field_bytes("Name: zombie\n", "RssAnon") == 0


def test_bad_options_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for options, part in (
        (["--systems", "ours;nobody"], "unknown nobody"),
        (["--sizes", "1,x"], "numbers with commas"),
        (["--sizes", "0"], "above 0"),
    ):
        monkeypatch.setattr("sys.argv", ["checkpoint.py", *options])
        with pytest.raises(SystemExit):
            checkpoint.parse_args()
        assert part in capsys.readouterr().err
