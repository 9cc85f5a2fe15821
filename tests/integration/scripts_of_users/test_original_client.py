"""A script that uses the original's `MasterClient`, in a real job whose workers restart once."""

from __future__ import annotations

import json

from tests.integration.jobs import SCRIPTS


def test_a_script_speaks_to_the_master_by_the_original_client(jobs, tmp_path):
    job = jobs.run("--nproc-per-node=2", SCRIPTS / "original_client.py", tmp_path)
    assert job.process.returncode == 0, job.err
    results = [json.loads((tmp_path / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    ranges = [line.split() for file in tmp_path.glob("read-*") for line in file.read_text().splitlines()]
    read = {number for start, end in ranges for number in range(int(start), int(end))}
    assert read == set(range(64)), "also what the dead worker had taken"
    assert results[0]["port"] == results[1]["port"] > 0
    for result in results:
        assert result["lives"] == 4, "two ranks, two lives"
        assert result["world"] == [2, 0, {"0": 2}]
        assert result["nodes"] == [[True, 0, "Running"]]
        assert (result["waiting"], result["status"], result["has_grpc"]) == (0, 1, False)
    assert "[INFO] [original_client.py:" in job.err, "its logger writes to stderr"
