"""The ledger's text, and what entries do to it. (Its writes are tested against an API server, in tests/kubernetes.)"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.platforms.kubernetes.job.ledger_state import MAX_PLANS, LedgerState, decode_state, encode_state
from dlrover.protocol.errors import Unavailable


@pytest.mark.parametrize("used", ["", "0", "0+", "0-6,7+", "0-1023,1031", "0-2+,3,5-9+"])
def test_a_ledger_reads_as_it_was_written(used):
    data = {"epoch": "4", "used": used, "plans": "a,b", "sizes": "ps=1,worker=3"}
    assert encode_state(decode_state(data)) == data


def test_an_empty_ledger_is_that_of_a_job_that_begins():
    assert decode_state({}) == LedgerState()
    assert LedgerState().next_id == 0


@pytest.mark.parametrize("used", ["x", "3-1", "0-5,5", "5,3", "1-", "-1", "1++", "0-2-4"])
def test_a_ledger_that_was_changed_by_hand_is_not_believed(used):
    with pytest.raises(Unavailable, match="damaged"):
        decode_state({"used": used})


def test_an_epoch_that_is_no_number_is_not_believed():
    with pytest.raises(Unavailable, match="damaged"):
        decode_state({"epoch": "newest"})


def test_marks_come_and_go():
    state = LedgerState().marked([0, 1, 2], is_open=True)
    assert encode_state(state)["used"] == "0-2+"
    state = state.marked([1], is_open=False)
    assert encode_state(state)["used"] == "0+,1,2+"
    assert [span.is_open for node in range(3) if (span := state.span_of(node))] == [True, False, True]
    assert state.span_of(3) is None
    assert encode_state(state.marked([0, 2], is_open=False))["used"] == "0-2"


def test_the_newest_plans_are_remembered():
    state = LedgerState()
    for number in range(MAX_PLANS + 5):
        state = state.with_plan(f"uid-{number}")
    assert len(state.plans) == MAX_PLANS
    assert state.plans[-1] == f"uid-{MAX_PLANS + 4}"
    assert state.with_plan("uid-50") is state


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=8), st.booleans()), max_size=8))
def test_spans_say_the_same_as_a_table_of_ids(changes):
    state, table = LedgerState(), {}
    for ids, is_open in changes:
        state = state.marked(ids, is_open=is_open)
        table |= dict.fromkeys(ids, is_open)
    found = {node: span.is_open for node in range(40) if (span := state.span_of(node))}
    assert found == table
    assert state.next_id == max(table, default=-1) + 1
    assert decode_state(encode_state(state)) == state
