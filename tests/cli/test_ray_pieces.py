"""Parts of the Ray commands that need no Ray: what drivers are told, command lines, and a master that moves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dlrover.cli.options.parser import parse
from dlrover.cli.ray.bulletin import Bulletin
from dlrover.cli.ray.launch_options import VARIABLE, as_ray_run
from dlrover.cli.ray.messages import JobOver, Said, ShownLine
from dlrover.cli.ray.plan import read_run
from dlrover.platforms.ray.access import connect, load_ray
from dlrover.platforms.ray.store import JobStore
from dlrover.protocol.errors import ConfigError


async def test_a_driver_gets_each_item_once_and_then_the_end():
    bulletin = Bulletin(host_epoch=3)
    bulletin.say("hello")
    bulletin.line("worker-0", b"x\n", False)
    first = await bulletin.news("me", 0, 0, 1.0)
    assert (first.host_epoch, first.items) == (3, (Said("hello"), ShownLine("worker-0", b"x\n", False)))
    waiting = asyncio.ensure_future(bulletin.news("me", 3, first.next, 10.0))
    await asyncio.sleep(0)
    bulletin.close(JobOver(0, ""))
    last = await waiting
    assert (last.items, last.over) == ((), JobOver(0, ""))
    assert not await bulletin.delivered(0.0), "the driver has not said that it has it"
    bulletin.taken("me")
    assert await bulletin.delivered(10.0)


async def test_a_driver_of_a_former_host_begins_anew():
    bulletin = Bulletin(host_epoch=2)
    bulletin.say("again")
    assert (await bulletin.news("me", 1, 57, 1.0)).items == (Said("again"),)


async def test_old_items_are_dropped_and_counted():
    bulletin = Bulletin(host_epoch=1, kept_bytes=1000)
    for number in range(100):
        bulletin.line("worker-0", b"%d\n" % number, False)
    news = await bulletin.news("me", 1, 0, 1.0)
    assert news.num_lost == 100 - len(news.items) > 0
    assert news.items[-1] == ShownLine("worker-0", b"99\n", False)


async def test_a_driver_that_is_far_behind_holds_the_output_up():
    bulletin = Bulletin(host_epoch=1)
    told: list[str] = []
    bulletin.hold, bulletin.release = lambda: told.append("hold"), lambda: told.append("release")
    bulletin.line("worker-0", bytes(2 << 20), False)
    assert told == [], "without a driver nothing is held up"
    await bulletin.news("me", 0, 0, 1.0)
    bulletin.line("worker-0", bytes(1 << 20), False)
    bulletin.line("worker-0", bytes(1 << 20), False)
    assert told == ["hold"]
    await bulletin.news("me", 1, 3, 0.0)
    assert told == ["hold", "release"]


def test_the_launchers_options_become_those_of_a_job_on_ray():
    words = [
        "--platform",
        "ray",
        "--nnodes",
        "2:4",
        "--standby",
        "1",
        "--max-restarts",
        "3",
        "--no-warm",
        "train.py",
        "--lr",
        "1",
    ]
    parsed = parse(words, {})
    assert as_ray_run(parsed, {VARIABLE: "--gpus 8"}) == [
        *("--gpus", "8", "--nodes=2:4", "--standby=1"),
        *("--", "--max-restarts=3", "--no-warm", "train.py", "--lr", "1"),
    ]


def test_the_plan_of_a_job_holds_no_variable_of_the_user(tmp_path: Path):
    script = tmp_path / "train.py"
    script.touch()
    run = read_run(
        ["--nodes=2", "--env", "KEY=secret", "--", str(script), "--x"], {"DLROVER_LOG_LEVEL": "INFO", "HOME": "/h"}
    )
    assert run.secrets().environ == {"KEY": "secret"}
    assert "secret" not in repr(run.plan)
    assert run.plan.has_variables
    assert run.plan.nodes.environ["DLROVER_LOG_LEVEL"] == "INFO"
    assert "HOME" not in run.plan.nodes.environ, "machines have their own"
    assert run.plan.nodes.argv[-2:] == (str(script), "--x")


def test_a_script_that_is_nowhere_is_refused():
    with pytest.raises(ConfigError, match="--working-dir"):
        read_run(["--", "nowhere.py"], {})


def test_ray_that_is_not_installed_or_too_old_gets_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import sys

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="dlrover\\[ray\\]"):
        load_ray()
    (tmp_path / "ray.py").write_text("__version__ = '2.9.3'\n")
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"Ray 2\.9\.3 is too old"):
        load_ray()
    assert JobStore("x") is not None, "the store itself needs no Ray until it is asked"


def test_an_address_of_rays_client_is_refused_with_what_to_give_instead():
    """Before the library is asked for anything: `ray` is no module here."""
    with pytest.raises(ConfigError, match=r"HOST:PORT of the head .* ray job submit -- dlrover ray run"):
        connect(None, "ray://127.0.0.1:10001")
