"""
The launchers we compare ourselves with, each as a user would install and start it.

torchrun comes with the torch of the environment that runs the benchmark. dlrover 0.6.1 shares our package name, so it
gets a private virtual environment under `.peers/` (git-ignored), made on first use, with the same torch and numpy. A
peer that cannot be installed raises `PeerUnavailableError`, and the benchmark prints the reason.

dlrover 0.6.1 was written for an older torch and its `--standalone` cannot start its master on torch 2.13: torch's
private `SubprocessHandler` got one more positional argument (`numa_options`). We pass `None` there, in the private
environment only. That is the whole patch; it is not on the path that is measured, and the report says that it was
applied.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher_log import OURS_DETECTED, OURS_MET, TORCH_DETECTED, LogLine

PEERS_DIR = Path(__file__).resolve().parent.parent / ".peers"
TORCH = "torch==2.13.0"

UNPATCHED_CALL = 'SubprocessHandler(cmd, args, {}, "", "", 0)'
PATCHED_CALL = 'SubprocessHandler(cmd, args, {}, "", "", 0, None)'

# One budget for all, far above any number of kills we send: what is measured is speed, not when a launcher gives up.
RESTARTS = 1000


class PeerUnavailableError(Exception):
    """This launcher cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Launcher:
    name: str
    command: tuple[str, ...]
    """Everything before the script's path."""
    options: tuple[str, ...] = field(default=(), kw_only=True)
    """For the script itself."""
    python: Path
    """Interpreter of its environment, to warm the file cache with."""
    environment: dict[str, str] = field(default_factory=dict)
    note: str = ""
    detected: LogLine | None = None
    """What it logs when it has noticed that a worker is dead."""
    met: LogLine | None = None
    """What it logs when it has its new world."""
    traces: tuple[tuple[Path, str], ...] = ()
    """Places (folder, part of a name) where it leaves things behind that the next run must not see."""


def torchrun(*, is_store_shared: bool) -> Launcher:
    """By default torch 2.13 lets the workers use the rendezvous store; restarts can then hang in gloo's connect
    phase."""
    return Launcher(
        name="torchrun-default" if is_store_shared else "torchrun",
        command=(_script("torchrun"), "--standalone", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"),
        python=Path(sys.executable),
        environment={} if is_store_shared else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        note=f"torch {importlib.metadata.version('torch')}, "
        + ("default settings" if is_store_shared else "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        detected=TORCH_DETECTED,
    )


def dlrover_061() -> Launcher:
    environment = PEERS_DIR / "dlrover-0.6.1"
    # Its extra `torch` alone lacks grpcio and kubernetes. numpy as ours: torch imports it where it exists, which takes
    # time.
    numpy = f"numpy=={importlib.metadata.version('numpy')}"
    _install(environment, [TORCH, numpy, "dlrover[k8s,torch]==0.6.1", "protobuf"])
    _patch_for_torch_213(environment)
    return Launcher(
        name="dlrover-0.6.1",
        command=(
            str(environment / "bin" / "dlrover-run"),
            "--standalone",
            "--nproc_per_node=2",
            f"--max_restarts={RESTARTS}",
        ),
        python=environment / "bin" / "python",
        note="private environment; patched for torch 2.13: numa_options=None passed to its SubprocessHandler",
        detected=TORCH_DETECTED,
        traces=((Path("/dev/shm"), "ckpt_shm_"), (Path("/tmp/ckpt_sock"), "")),
    )


def torchsnapshot() -> Path:
    """The interpreter of an environment with torchsnapshot; it is a library, so there is no launcher."""
    environment = PEERS_DIR / "torchsnapshot-0.1.0"
    _install(environment, [TORCH, f"numpy=={importlib.metadata.version('numpy')}", "torchsnapshot==0.1.0"])
    return environment / "bin" / "python"


def ours() -> Launcher:
    return Launcher(
        name="ours",
        command=(_script("dlrover-run"), "--standalone", "--nproc-per-node=2", f"--max-restarts={RESTARTS}"),
        python=Path(sys.executable),
        environment={"DLROVER_LOG_LEVEL": "INFO"},
        note=f"dlrover {importlib.metadata.version('dlrover')} of this repository",
        detected=OURS_DETECTED,
        met=OURS_MET,
    )


def of_source(launcher: Launcher, source: Path, name: str) -> Launcher:
    """The same launcher, with another version's modules found first, by every process that it starts."""
    code = "import sys; from dlrover.cli.run import main; sys.exit(main())"
    command = (str(launcher.python), "-c", code, *launcher.command[1:])
    environment = {**launcher.environment, "PYTHONPATH": str(source)}
    return replace(launcher, name=name, command=command, environment=environment)


LAUNCHERS: dict[str, Callable[[], Launcher]] = {
    "torchrun": lambda: torchrun(is_store_shared=False),
    "torchrun-default": lambda: torchrun(is_store_shared=True),
    "dlrover-0.6.1": dlrover_061,
    "ours": ours,
}


@dataclass(frozen=True)
class Leftovers:
    """What already lay in a launcher's places before a run: all else found there afterwards is the run's and is
    removed."""

    launcher: Launcher
    before: frozenset[Path]

    @classmethod
    def note(cls, launcher: Launcher) -> Leftovers:
        return cls(launcher, frozenset(_traces(launcher)))

    def remove(self) -> list[Path]:
        removed = [path for path in _traces(self.launcher) if path not in self.before]
        for path in removed:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return removed


def _traces(launcher: Launcher) -> list[Path]:
    return [
        path for folder, part in launcher.traces if folder.is_dir() for path in folder.iterdir() if part in path.name
    ]


def _script(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise PeerUnavailableError(f"{name} is not installed beside {sys.executable}")
    return str(path)


def _install(environment: Path, requirements: list[str]) -> None:
    """Make the environment unless a complete one with the same requirements exists; a half-made one is made anew."""
    wanted = hashlib.sha256("\n".join([sys.version, *requirements]).encode()).hexdigest()
    stamp = environment / "installed.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"Installing {', '.join(requirements)} into {environment.relative_to(PEERS_DIR.parent)} ...", file=sys.stderr)
    if environment.exists():
        shutil.rmtree(environment)
    try:
        for command in (
            [sys.executable, "-m", "venv", str(environment)],
            [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *requirements],
        ):
            subprocess.run(
                command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800
            )
    except subprocess.CalledProcessError as error:
        last_lines = "; ".join(error.stdout.strip().splitlines()[-3:])
        raise PeerUnavailableError(f"installation failed with exit code {error.returncode}: {last_lines}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailableError(f"installation failed: {error}") from error
    stamp.write_text(wanted)


def _patch_for_torch_213(environment: Path) -> None:
    modules = list(environment.glob("lib/python*/site-packages/dlrover/trainer/torch/elastic_run.py"))
    if len(modules) != 1:
        raise PeerUnavailableError(
            f"expected one elastic_run.py of dlrover 0.6.1 in {environment}, found {len(modules)}"
        )
    text = modules[0].read_text()
    if PATCHED_CALL in text:
        return
    if text.count(UNPATCHED_CALL) != 1:
        raise PeerUnavailableError("dlrover 0.6.1 does not contain the call that must be patched for torch 2.13")
    modules[0].write_text(text.replace(UNPATCHED_CALL, PATCHED_CALL))


def main() -> None:
    parser = argparse.ArgumentParser(description="Install the peers and say which can be measured.")
    parser.add_argument("names", nargs="*", default=list(LAUNCHERS), choices=[*LAUNCHERS, []], metavar="NAME")
    for name in parser.parse_args().names:
        try:
            print(f"{name}: ready ({LAUNCHERS[name]().note})")
        except PeerUnavailableError as error:
            print(f"{name}: cannot be measured: {error}")


if __name__ == "__main__":
    main()
