"""`dlrover checkpoint`: what people learn about their checkpoints, and that nothing is lost by asking."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dlrover.cli.checkpoint.listing import list_checkpoints, open_place
from dlrover.cli.checkpoint.verify import verify
from dlrover.cli.main import app
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.commit import committed_checkpoints
from dlrover.snapshot.storage.storage import LocalStorage

torch = pytest.importorskip("torch")
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer  # noqa: E402

RUNNER = CliRunner()
LONG_AGO = 1_600_000_000


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "memory"
    place.mkdir()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(place))
    monkeypatch.setenv("COLUMNS", "200")


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"weight": torch.randn(40, 30, generator=generator), "bias": torch.ones(3)}, "step": step}


def save(directory: Path | str, *steps: int) -> None:
    checkpointer = DdpCheckpointer(directory)
    for step in steps:
        assert checkpointer.save_checkpoint(step, state_of(step), on_busy="block")
    checkpointer.close()


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """Three checkpoints of ours, the tracker on the newest."""
    save(tmp_path / "run", 5, 10, 15)
    return tmp_path / "run"


@pytest.fixture
def originals(tmp_path: Path) -> Path:
    """As the original DLRover leaves them: no manifests, a tracker."""
    for step in (100, 200, 300):
        (tmp_path / "old" / str(step)).mkdir(parents=True)
        torch.save(state_of(step), tmp_path / "old" / str(step) / "rank_0.pt")
    (tmp_path / "old" / "dlrover_latest.txt").write_text("300")
    (tmp_path / "old" / "._dlrover_ckpt_stage").mkdir()
    return tmp_path / "old"


def run(*arguments: object, exit_code: int = 0) -> Result:
    done = RUNNER.invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == exit_code, (done.output, done.exception)
    return done


def refused(*arguments: object) -> str:
    """The sentence; the console script turns it into exit code 2."""
    done = RUNNER.invoke(app, ["checkpoint", *map(str, arguments)])
    assert isinstance(done.exception, ConfigError), (done.output, done.exception)
    return str(done.exception)


def flip(path: Path, place: int, bit: int = 0x10) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def grow_old(path: Path) -> Path:
    """As if nobody had written there for years."""
    for each in [path, *path.rglob("*")]:
        os.utime(each, (LONG_AGO, LONG_AGO))
    return path


# ls


def test_ls_shows_steps_states_and_the_tracker(ours: Path) -> None:
    shutil.copytree(ours / "15", ours / "20.tmp-abc-1")
    (ours / "20.tmp-abc-1" / ".dlrover" / "manifest.json").unlink()
    (ours / "my notes").mkdir()
    found = json.loads(run("ls", ours, "--json").output)
    rows = {each["name"]: each for each in found["checkpoints"]}
    assert list(rows) == ["5", "10", "15", "20.tmp-abc-1"], "by step; what is nobody's checkpoint is not listed"
    assert [row["state"] for row in rows.values()] == ["complete", "complete", "complete", "staged"]
    assert [row["trackers"] for row in rows.values()] == [[], [], ["dlrover_latest.txt"], []]
    assert rows["15"]["num_shards"] == rows["15"]["num_files"] == 1
    assert rows["15"]["size_bytes"] > 40 * 30 * 4
    assert rows["15"]["saved_at"] > LONG_AGO
    text = run("ls", ours).output
    for word in ("complete", "staged", "dlrover_latest.txt", "15", "kB"):
        assert word in text


def test_ls_takes_the_originals_directories_and_single_checkpoints(originals: Path, ours: Path) -> None:
    rows = json.loads(run("ls", originals, "--json").output)["checkpoints"]
    assert [(row["step"], row["state"], row["num_shards"]) for row in rows] == [
        (100, "no manifest", 1), (200, "no manifest", 1), (300, "no manifest", 1),
    ]  # fmt: skip
    assert rows[2]["trackers"] == ["dlrover_latest.txt"]
    for path, state in ((originals / "100", "no manifest"), (ours / "5", "complete")):
        (row,) = json.loads(run("ls", path, "--json").output)["checkpoints"]
        assert row["state"] == state
    (row,) = json.loads(run("ls", originals / "100" / "rank_0.pt", "--json").output)["checkpoints"]
    assert row["state"] == "file"


def test_ls_tells_of_a_tracker_that_names_nothing(ours: Path) -> None:
    (ours / "latest_checkpointed_iteration.txt").write_text("99")
    assert "names '99'" in run("ls", ours).output


def test_without_the_tracker_the_newest_complete_checkpoint_is_meant(ours: Path) -> None:
    """Decision 46, for those who look: what a restore takes is what the tools take."""
    (ours / "dlrover_latest.txt").unlink()
    assert "A restore takes the newest complete checkpoint: step 15." in run("ls", ours).output
    assert json.loads(run("ls", ours, "--json").output)["untracked"] == 15
    assert "0 different" in run("diff", ours, ours / "15").output
    (ours / "dlrover_latest.txt").write_text("15")
    shutil.rmtree(ours / "15")
    assert "0 different" in run("diff", ours, ours / "10").output


def test_ls_and_verify_reach_through_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    directory = f"memory://{tmp_path.name}/run"
    save(directory, 5, 10)
    rows = json.loads(run("ls", directory, "--json").output)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(5, "complete"), (10, "complete")]
    assert run("verify", directory).output.count("good") == 2
    run("gc", directory, "--keep-latest", 1, "--yes")
    rows = json.loads(run("ls", directory, "--json").output)["checkpoints"]
    assert [row["step"] for row in rows] == [10]


@pytest.mark.parametrize("command", ["ls", "verify", "gc"])
def test_what_is_not_there_or_holds_no_checkpoints_is_said(command: str, tmp_path: Path) -> None:
    assert "does not exist" in refused(command, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no checkpoint")
    assert "holds no checkpoints" in refused(command, tmp_path / "empty")


def test_the_console_script_ends_with_2_for_bad_input(tmp_path: Path) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "dlrover.cli.main", "checkpoint", "ls", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("dlrover: error: ")
    assert "does not exist" in done.stderr


def test_ls_knows_the_frameworks_directories_and_trackers(tmp_path: Path) -> None:
    for name in ("iter_0000100/mp_rank_00", "global_step7", "checkpoint-500", "release/mp_rank_00"):
        (tmp_path / name).mkdir(parents=True)
        torch.save({"w": torch.ones(1)}, tmp_path / name / "model_optim_rng.pt")
    (tmp_path / "latest").write_text("global_step7")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    listing = json.loads(run("ls", tmp_path, "--json").output)
    assert [(row["step"], row["trackers"]) for row in listing["checkpoints"]] == [
        (7, ["latest"]), (100, []), (500, []),
    ]  # fmt: skip
    assert listing["dangling"] == []
    run("verify", tmp_path)


# verify


def test_verify_finds_nothing_wrong_with_what_was_just_written(ours: Path, originals: Path) -> None:
    assert run("verify", ours).output.count("good") == 3
    assert run("verify", originals).output.count("good") == 3
    assert "no manifest" in run("verify", originals).output
    run("verify", ours, "--quick")
    run("verify", ours / "5")
    run("verify", ours, "--step", 10)
    assert "no checkpoint of step 11" in refused("verify", ours, "--step", 11)


def test_verify_finds_every_flipped_bit_and_names_the_file(ours: Path) -> None:
    """At random places of every file of a checkpoint, manifests included."""
    dice = random.Random(7)
    files = [path for path in sorted((ours / "10").rglob("*")) if path.is_file()]
    assert len(files) == 3
    for file in files:
        for place in [dice.randrange(file.stat().st_size) for _ in range(12)]:
            flip(file, place, bit := 1 << dice.randrange(8))
            done = run("verify", ours, exit_code=1)
            assert str(ours / "10") in done.output, f"{file} at {place}"
            assert "good" in done.output, "the others are not to blame"
            flip(file, place, bit)
    run("verify", ours)


def test_verify_finds_what_is_cut_off_or_missing(ours: Path) -> None:
    file = ours / "5" / "rank_0.pt"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert "bytes instead of" in run("verify", ours, "--quick", exit_code=1).output
    file.unlink()
    assert f"{file} is missing" in run("verify", ours, exit_code=1).output.replace("\n", "")
    file.write_bytes(content)
    (ours / "dlrover_latest.txt").write_text("16")
    assert "but no such checkpoint exists" in run("verify", ours, exit_code=1).output


def test_what_a_running_job_deletes_or_replaces_meanwhile_is_not_called_damaged(ours: Path) -> None:
    place = open_place(str(ours))
    found = next(each for each in list_checkpoints(place).checkpoints if each.step == 5)
    deleted = verify(place, found, on_bytes=lambda count: shutil.rmtree(ours / "5", ignore_errors=True))
    assert deleted.is_good
    assert deleted.num_checked == 0
    assert "while this command read it" in deleted.note


def test_verify_checks_the_entries_of_plain_torch_files(originals: Path) -> None:
    file = originals / "200" / "rank_0.pt"
    flip(file, file.read_bytes().index(state_of(200)["model"]["weight"].numpy().tobytes()) + 1000)
    output = run("verify", originals, exit_code=1).output.replace("\n", "")
    assert f"{file}: entry" in output
    assert "is damaged" in output
    assert run("verify", file, exit_code=1)
    file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read as a torch file" in run("verify", file, exit_code=1).output.replace("\n", " ")


def test_verify_measures_safetensors(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "without a checksum" in run("verify", file).output
    file.write_bytes(file.read_bytes()[:-1])
    assert "instead of the" in run("verify", file, exit_code=1).output
    file.write_bytes(b"\xff" * 20)
    run("verify", file, exit_code=1)


# diff


def test_diff_tells_what_changed_and_by_how_much(tmp_path: Path) -> None:
    one = {"same": torch.ones(3), "nan": torch.tensor([float("nan")]), "moved": torch.zeros(4), "gone": torch.ones(1)}
    two = {"same": torch.ones(3), "nan": torch.tensor([float("nan")]), "moved": torch.tensor([0, 0, -2.5, 0])}
    torch.save({"m": one, "grown": torch.ones(2, 3), "kind": torch.ones(1), "step": 1}, tmp_path / "a.pt")
    two_more = {"new": [torch.ones(2)]}
    torch.save(
        {"m": two, "grown": torch.ones(2, 4), "kind": torch.ones(1).half(), "step": 2, **two_more}, tmp_path / "b.pt"
    )
    found = json.loads(run("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json", exit_code=1).output)
    changes = {each["name"]: (each["change"], each["max_abs"]) for each in found["differences"]}
    assert changes == {
        "m.gone": ("removed", None),
        "new.0": ("added", None),
        "m.moved": ("values", 2.5),
        "grown": ("shape", None),
        "kind": ("dtype", None),
        "step": ("values", None),
    }
    assert found["num_same"] == 2
    text = run("diff", tmp_path / "a.pt", tmp_path / "b.pt", exit_code=1).output
    assert "2.5" in text
    assert "6 different, 2 the same" in text
    assert "0 different" in run("diff", tmp_path / "a.pt", tmp_path / "a.pt").output


def test_diff_of_checkpoints_by_step_tracker_and_manifest(ours: Path, originals: Path) -> None:
    found = json.loads(run("diff", ours, ours, "--step", 5, "--json", exit_code=1).output)
    assert {each["name"] for each in found["differences"]} == {"model.weight", "step"}
    run("diff", ours / "15", ours)
    run("diff", originals, originals / "300" / "rank_0.pt")
    by_manifest = json.loads(run("diff", ours / "5", ours, "--manifest-only", "--json", exit_code=1).output)
    assert [(each["name"], each["change"]) for each in by_manifest["differences"]] == [("rank_0.pt", "file")]
    assert by_manifest["num_same"] == 2
    assert "needs torch to read it" in refused("diff", originals / "100", ours, "--manifest-only")


class Thing:
    """Not what torch unpickles without being told to."""


def test_files_with_code_in_them_are_not_opened_without_trust(tmp_path: Path) -> None:
    torch.save({"args": Thing()}, tmp_path / "a.pt")
    assert "--trust-pickle" in refused("diff", tmp_path / "a.pt", tmp_path / "a.pt")
    run("diff", tmp_path / "a.pt", tmp_path / "a.pt", "--trust-pickle", exit_code=1)  # objects equal only themselves


# convert


def test_convert_to_dcp_and_back(ours: Path, tmp_path: Path) -> None:
    run("convert", ours, tmp_path / "dcp", "--step", 5)
    assert (tmp_path / "dcp" / ".metadata").exists()
    assert "--trust-pickle" in refused("convert", tmp_path / "dcp", tmp_path / "back.pt")
    run("convert", tmp_path / "dcp", tmp_path / "back.pt", "--trust-pickle")
    run("diff", ours / "5", tmp_path / "back.pt")
    run("diff", tmp_path / "dcp", tmp_path / "back.pt", "--trust-pickle")
    (row,) = json.loads(run("ls", tmp_path / "dcp", "--json").output)["checkpoints"]
    assert (row["state"], row["num_shards"]) == ("no manifest", 1)


def test_convert_to_safetensors_and_back(ours: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    assert "--tensors-only" in refused("convert", ours, tmp_path / "model.safetensors")
    run("convert", ours, tmp_path / "model.safetensors", "--tensors-only")
    run("convert", tmp_path / "model.safetensors", tmp_path / "flat.pt")
    state = torch.load(tmp_path / "flat.pt")
    assert torch.equal(state["model.weight"], state_of(15)["model"]["weight"])
    assert list(state) == ["model.bias", "model.weight"]


def test_convert_never_overwrites_and_leaves_nothing_behind(ours: Path, tmp_path: Path) -> None:
    target = tmp_path / "out" / "there.pt"
    target.parent.mkdir()
    target.write_text("precious")
    assert "this command overwrites nothing" in refused("convert", ours, target)
    assert "is not a directory" in refused("convert", ours, tmp_path / "nowhere" / "x.pt")
    assert "Or give --to" in refused("convert", ours, tmp_path / "out" / "x.npz")
    assert "--to wood" in refused("convert", ours, tmp_path / "out" / "x.pt", "--to", "wood")
    assert "local path" in refused("convert", ours, "s3://bucket/x.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 and so on")
    assert "cannot be read" in refused("convert", tmp_path / "broken.pt", tmp_path / "out" / "x.pt")
    (tmp_path / "text.txt").write_text("hello")
    assert "neither a torch file" in refused("convert", tmp_path / "text.txt", tmp_path / "out" / "x.pt")
    assert target.read_text() == "precious"
    assert os.listdir(target.parent) == ["there.pt"]


# gc


def steps_left(directory: Path) -> list[int]:
    return [each.manifest.step for each in committed_checkpoints(LocalStorage(), str(directory))]


def test_gc_deletes_nothing_without_yes_and_what_the_rules_give_up_with_it(ours: Path) -> None:
    assert "2 would be deleted" in run("gc", ours, "--keep-latest", 1).output
    assert steps_left(ours) == [5, 10, 15]
    run("gc", ours, "--yes")
    assert steps_left(ours) == [5, 10, 15], "without a rule only leftovers go"
    run("gc", ours, "--keep-latest", 1, "--keep-interval", 10, "--yes")
    assert steps_left(ours) == [10, 15], "what either rule keeps stays"
    run("gc", ours, "--keep-latest", 1, "--yes")
    assert steps_left(ours) == [15]
    run("verify", ours)


def test_gc_never_deletes_the_newest_nor_what_a_tracker_names(ours: Path) -> None:
    (ours / "dlrover_latest.txt").write_text("5")  # somebody went back
    run("gc", ours, "--keep-latest", 1, "--yes")
    assert steps_left(ours) == [5, 15]
    (ours / "15" / "rank_0.pt").unlink()
    run("gc", ours, "--keep-interval", 1000, "--yes")
    assert steps_left(ours) == [5, 15]


def test_gc_removes_what_dead_attempts_left_and_not_what_is_being_written(ours: Path) -> None:
    for name in ("20.tmp-alive-1", "20.tmp-dead-1", "10.old-dead-2"):
        shutil.copytree(ours / "5", ours / name)
    (ours / "20.tmp-alive-1/.dlrover/manifest.json").unlink()
    (ours / "20.tmp-dead-1/.dlrover/manifest.json").unlink()
    for name in ("20.tmp-dead-1", "10.old-dead-2"):
        grow_old(ours / name)
    stub = ours / "dlrover_latest.txt.new-0123abcd"
    stub.write_text("1")
    grow_old(stub)
    (ours / "my.old-notes.txt").write_text("mine")
    output = run("gc", ours, "--yes").output
    assert "perhaps a running job still writes it" in output
    assert sorted(os.listdir(ours)) == ["10", "15", "20.tmp-alive-1", "5", "dlrover_latest.txt", "my.old-notes.txt"]
    run("gc", ours, "--yes", "--older-than", 0)
    assert "20.tmp-alive-1" not in os.listdir(ours)


def test_gc_keeps_a_whole_checkpoint_that_lies_under_a_passing_name(ours: Path) -> None:
    """The power went between the two renames of a step that was saved again."""
    (ours / "15").rename(grow_old(ours / "15").with_name("15.old-x-1"))
    run("verify", ours)
    run("gc", ours, "--keep-latest", 1, "--yes", "--older-than", 0)
    assert sorted(os.listdir(ours)) == ["15.old-x-1", "dlrover_latest.txt"]


def test_gc_leaves_the_originals_alone_unless_asked(originals: Path) -> None:
    assert "0 would be deleted" in run("gc", originals, "--keep-latest", 1).output
    (originals / "7").mkdir()
    (originals / "7" / "notes.txt").write_text("seven things to do")
    run("gc", originals, "--keep-latest", 1, "--foreign", "--yes")
    assert sorted(each.name for each in originals.iterdir() if each.name.isdigit()) == ["300", "7"]


def test_gc_refuses_rules_that_make_no_sense_and_files(ours: Path) -> None:
    assert "--keep-latest 0" in refused("gc", ours, "--keep-latest", 0)
    assert "--keep-interval -1" in refused("gc", ours, "--keep-interval", -1)
    assert "is not a directory" in refused("gc", ours / "5" / "rank_0.pt")
