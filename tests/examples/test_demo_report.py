"""The demonstration's report: what counts as useful, as redone and as lost."""

import io

import pytest
from demo import Report, Step, find_problem, make_report, recovery_seconds, render_report
from rich.console import Console


def steps(*rows: tuple[int, float, int]) -> list[Step]:
    """(number, end, pid); each step lasts 0.1 s."""
    return [Step(number, at, 0.1, 3.0, pid) for number, at, pid in rows]


def test_without_a_kill_all_step_time_is_useful() -> None:
    report = make_report(steps((1, 5.1, 7), (2, 5.2, 7)), began_at=0.0, killed_at=None, num_restarts=0)
    assert report.start_up == pytest.approx(5.0)
    assert report.wall == pytest.approx(0.2)
    assert report.goodput == pytest.approx(1.0)
    assert report.goodput_with_start_up == pytest.approx(0.2 / 5.2)
    assert (report.num_redone_steps, report.recovery) == (0, None)


def test_a_step_done_twice_is_useful_once() -> None:
    recorded = steps((1, 1.1, 7), (2, 1.2, 7), (2, 1.9, 8), (3, 2.0, 8))
    report = make_report(recorded, began_at=0.0, killed_at=1.25, num_restarts=1)
    assert report.num_steps == 3
    assert report.num_redone_steps == 1
    assert report.redone == pytest.approx(0.1)
    assert report.useful == pytest.approx(0.3)
    assert report.wall == pytest.approx(1.0)
    assert report.goodput == pytest.approx(0.3)
    assert report.recovery == pytest.approx(0.75)  # not 0.65: step 2 was not new


def test_a_survivors_late_step_is_no_recovery() -> None:
    assert recovery_seconds(steps((1, 1.0, 7), (2, 1.3, 7)), killed_at=1.1) is None


def test_nothing_recorded_gives_a_report_of_nothing() -> None:
    report = make_report([], began_at=1.0, killed_at=None, num_restarts=0)
    assert (report.num_steps, report.wall, report.goodput, report.goodput_with_start_up) == (0, 0.0, 0.0, 0.0)


def test_what_checkpoints_cost_is_compared_with_what_torch_save_would_have_cost() -> None:
    recorded = [Step(number, float(number), 0.1, 3.0, 7, saving=0.002 * number) for number in (1, 2, 3)]
    report = make_report(recorded, began_at=0.0, killed_at=None, num_restarts=0, torch_saves=[0.5, 0.01, 0.02])
    assert report.saving == pytest.approx(0.012)
    assert report.median_saving == pytest.approx(0.004)
    assert report.torch_save == 0.02
    assert report.saved == pytest.approx(3 * 0.02 - 0.012)
    assert make_report(recorded, began_at=0.0, killed_at=None, num_restarts=0).saved is None
    assert "0.05 s more for 3 checkpoints" in shown(report)
    slow = make_report(recorded, began_at=0.0, killed_at=None, num_restarts=0, torch_saves=[0.001])
    assert "0.01 s less for 3 checkpoints" in shown(slow), "also when it is not to our credit"


def shown(report: Report) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_report(report, 0))
    return console.export_text()


def test_a_launcher_without_our_memory_may_lose_steps() -> None:
    assert find_problem(good_report(num_redone_steps=2), 0, 3, may_lose_steps=True) is None


def good_report(**changes: object) -> Report:
    values: dict[str, object] = {
        "num_steps": 3,
        "num_restarts": 1,
        "start_up": 1.0,
        "wall": 1.0,
        "useful": 0.3,
        "redone": 0.0,
        "num_redone_steps": 0,
        "recovery": 0.75,
    }
    return Report(**(values | changes))  # type: ignore[arg-type]


def test_a_recovered_job_has_no_problem() -> None:
    assert find_problem(good_report(), 0, 3) is None


@pytest.mark.parametrize(
    ("report", "exit_code", "words"),
    [
        (good_report(), None, "not done in time"),
        (good_report(), 1, "exit code 1"),
        (good_report(recovery=None), 0, "no new step"),
        (good_report(num_restarts=0), 0, "never restarted"),
        (good_report(num_steps=2), 0, "2 of 3 steps"),
        (good_report(num_redone_steps=2, redone=0.2), 0, "2 steps had to be done again"),
    ],
)
def test_what_went_wrong_is_named(report: Report, exit_code: int | None, words: str) -> None:
    problem = find_problem(report, exit_code, 3)
    assert problem is not None
    assert words in problem
