"""Real jobs: real launchers, agents and workers, and a check that nothing of a job remains."""

from __future__ import annotations

import pytest

from tests.integration.jobs import JobFactory


@pytest.fixture
def jobs(tmp_path, request):
    """Starts jobs and, when the test is over, insists that no process, socket or segment of them remains."""
    factory = JobFactory(tmp_path)
    yield factory
    factory.close()
    if not getattr(request.node, "failed_call", False):
        factory.assert_nothing_remains()
    factory.remove()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.when == "call" and outcome.get_result().failed:
        item.failed_call = True
