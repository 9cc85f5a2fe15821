"""A worker forked from the zygote must not be distinguishable from one that `python -u script.py` started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

from dlrover.agent.config import EntryKind
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.spawner import Spawner, StartFailed
from dlrover.trainer.worker import entry as worker_entry
from dlrover.trainer.worker import function
from tests.agent.lab import environment, run_plainly, run_worker, write

FACTS = """
    import ctypes, json, os, signal, sys
    known = sorted(globals())

    def describe(stream):
        return [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.isatty(),
                stream.name, stream.mode, stream.fileno(), type(stream.buffer).__name__]

    import numpy, torch
    with open("/proc/self/maps") as file:
        blas = next(line.split()[-1] for line in file if "openblas" in line)
    with open("/proc/self/status") as file:
        status = dict(line.rstrip().split(":", 1) for line in file)
    umask = os.umask(0)
    print(json.dumps({
        "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": list(sys.flags),
        "file": __file__, "name": __name__, "spec": __spec__, "package": __package__, "cached": __cached__,
        "loader": type(__loader__).__name__, "doc": __doc__, "globals": known,
        "is main": sys.modules["__main__"].__dict__ is globals(), "builtins": type(__builtins__).__name__,
        "streams": [describe(sys.stdin), describe(sys.stdout), describe(sys.stderr)],
        "originals": [sys.stdin is sys.__stdin__, sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__],
        "umask": umask, "cwd": os.getcwd(), "leads session": os.getsid(0) == os.getpid() == os.getpgid(0),
        "signals": [str(signal.getsignal(number)).split(" at ")[0] for number in sorted(signal.valid_signals())],
        "masks": [status["SigBlk"], status["SigIgn"], status["SigCgt"]],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "blas threads": ctypes.CDLL(blas).scipy_openblas_get_num_threads64_(),
        "environment": dict(os.environ), "executable": sys.executable,
    }))
"""


@pytest.mark.parametrize(
    "variables", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, {"OPENBLAS_NUM_THREADS": "1"}], ids=str
)
async def test_a_warm_worker_looks_like_a_cold_one(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, variables: dict[str, str]
) -> None:
    script = write(tmp_path / "facts.py", FACTS)
    relative = os.path.relpath(script)
    environ = environment(ODD="a=b", **variables)
    warm = await run_worker(spawner, tree, relative, "--x", "1 2", scratch=tmp_path, environ=environ)
    cold = run_plainly(relative, "--x", "1 2", scratch=tmp_path, environ=environ)
    assert (warm.stderr, warm.code) == (cold.stderr, cold.code) == ("", 0)
    assert json.loads(warm.stdout) == json.loads(cold.stdout)


ENDS = {
    "falls off the end": "print('done')",
    "sys.exit": "import sys; sys.exit(3)",
    "SystemExit with a text": "raise SystemExit('enough of this')",
    "SystemExit without": "raise SystemExit",
    "SystemExit far down": "def f():\n    raise SystemExit(7)\ntry:\n    f()\nfinally:\n    print('cleanup')",
    "exception": "def f():\n    raise ValueError('bad')\nf()",
    "chained exception": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "exception while handling": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    undefined",
    "exception group": "raise ExceptionGroup('several', [ValueError(1), TypeError(2)])",
    "syntax error": "x = (1,\ny = 2",
    "syntax error in exec": "exec('x = = 1')",
    "hard exit": "import os; print('a'); os._exit(5)",
    "abort": "import os; os.abort()",
    "segmentation fault": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "keyboard interrupt": "raise KeyboardInterrupt",
    "real SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0",
    "hook that fails": "import sys\ndef hook(*a):\n    raise TypeError('no')\nsys.excepthook = hook\n1 / 0",
    "atexit in order": "import atexit\nfor i in 1, 2: atexit.register(print, i)\nraise ValueError('last words')",
    "exit with failing atexit": "import atexit, sys\natexit.register(lambda: 1 / 0)\nsys.exit(4)",
    "thread outlives main": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')",
    "unbuffered": "import os\nprint('no newline', end='')\nos._exit(0)",
    "warning": "import warnings\nwarnings.warn('careful')",
    "finalizer at exit": "class A:\n    def __del__(self): print('gone')\na = A()",
}


@pytest.mark.parametrize("name", ENDS)
async def test_every_end_is_the_same_as_under_plain_python(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, name: str
) -> None:
    script = write(tmp_path / "end.py", ENDS[name])
    warm = await run_worker(spawner, tree, script, scratch=tmp_path)
    cold = run_plainly(script, scratch=tmp_path)
    assert (warm.code, warm.stdout) == (cold.code, cold.stdout)
    assert re.sub("0x[0-9a-f]+", "0x", warm.stderr) == re.sub("0x[0-9a-f]+", "0x", cold.stderr)


async def test_a_missing_or_unreadable_script_is_told_as_python_tells_it(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    warm = await run_worker(spawner, tree, str(tmp_path / "no.py"), scratch=tmp_path)
    cold = run_plainly(str(tmp_path / "no.py"), scratch=tmp_path)
    assert (warm.code, warm.stdout, warm.stderr) == (cold.code, cold.stdout, cold.stderr)
    assert warm.code == 2


async def test_modules_run_as_with_dash_m(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    write(tmp_path / "pkg" / "__init__.py", "")
    write(tmp_path / "pkg" / "__main__.py", "import sys; print(__name__, __spec__.name, __package__, sys.argv); 1 / 0")
    write(tmp_path / "pkg" / "mod.py", "import sys; print(__name__, __spec__.name, __file__, sys.argv, sys.path[0])")
    for target in ("pkg", "pkg.mod", "pkg.none"):
        warm = await run_worker(spawner, tree, target, "a", scratch=tmp_path, kind=EntryKind.MODULE, cwd=str(tmp_path))
        cold = run_plainly(target, "a", scratch=tmp_path, options=["-m"], cwd=str(tmp_path))
        assert (warm.code, warm.stdout, warm.stderr) == (cold.code, cold.stdout, cold.stderr), target


async def test_directories_and_archives_run_too(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    write(tmp_path / "app" / "__main__.py", "import sys, other; print(__file__, sys.argv, other.x, sys.path[0])")
    write(tmp_path / "app" / "other.py", "x = 1")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.write(tmp_path / "app" / "__main__.py", "__main__.py")
        archive.write(tmp_path / "app" / "other.py", "other.py")
    for target in ("app", "app.pyz"):
        warm = await run_worker(spawner, tree, target, scratch=tmp_path, cwd=str(tmp_path))
        cold = run_plainly(target, scratch=tmp_path, cwd=str(tmp_path))
        assert (warm.code, warm.stdout, warm.stderr) == (cold.code, cold.stdout, cold.stderr)


async def test_a_script_behind_a_link_finds_its_neighbours(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    write(tmp_path / "real" / "neighbour.py", "x = 5")
    script = write(tmp_path / "real" / "script.py", "import neighbour; print(__file__, neighbour.x)")
    (tmp_path / "link.py").symlink_to(script)
    warm = await run_worker(spawner, tree, str(tmp_path / "link.py"), scratch=tmp_path)
    cold = run_plainly(str(tmp_path / "link.py"), scratch=tmp_path)
    assert (warm.code, warm.stdout, warm.stderr) == (cold.code, cold.stdout, cold.stderr)


async def test_ranks_draw_different_random_numbers(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(
        tmp_path / "dice.py",
        """
        import json, multiprocessing, random, uuid
        import numpy, torch
        draws = [random.random(), float(numpy.random.rand()), torch.rand(1).item(), torch.initial_seed(), str(uuid.uuid4()),
                 multiprocessing.current_process().authkey.hex()]
        print(json.dumps(draws))
        """,
    )
    draws = [json.loads((await run_worker(spawner, tree, script, scratch=tmp_path)).stdout) for _ in range(3)]
    for values in zip(*draws, strict=True):
        assert len(set(values)) == 3, values


async def test_multiprocessing_and_data_loaders_work(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(
        tmp_path / "loader.py",
        """
        import multiprocessing, pickle
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Numbers(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return torch.tensor(index)

        def square(x): return x * x

        if __name__ == "__main__":
            assert pickle.loads(pickle.dumps(Numbers())).__class__ is Numbers
            for method in "fork", "spawn":
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(method, pool.map(square, [1, 2, 3]))
                loader = DataLoader(Numbers(), num_workers=1, batch_size=4, multiprocessing_context=method)
                print([batch.tolist() for batch in loader])
        """,
    )
    ended = await run_worker(spawner, tree, script, scratch=tmp_path, deadline=120)  # torch is imported twice anew
    assert ended.code == 0, ended.stderr
    numbers = "[[0, 1, 2, 3], [4, 5, 6, 7]]"
    assert ended.stdout.splitlines() == ["fork [1, 4, 9]", numbers, "spawn [1, 4, 9]", numbers]


async def test_an_uncaught_exception_leaves_torchs_error_file(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "fail.py", "def f():\n    raise ValueError('bad')\nf()")
    error_file = tmp_path / "error.json"
    environ = environment(TORCHELASTIC_ERROR_FILE=str(error_file))
    ended = await run_worker(spawner, tree, script, scratch=tmp_path, environ=environ)
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: bad"
    assert message["extraInfo"]["py_callstack"] == ended.stderr
    assert message["extraInfo"]["timestamp"].isdecimal()


async def test_a_long_message_leaves_room_for_the_frames_in_the_error_file(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "fail.py", "def f():\n    raise ValueError('bad' * 1_000_000 + ' end')\nf()")
    error_file = tmp_path / "error.json"
    environ = environment(TORCHELASTIC_ERROR_FILE=str(error_file))
    ended = await run_worker(spawner, tree, script, scratch=tmp_path, environ=environ)
    message = json.loads(error_file.read_text())["message"]
    assert message["message"].startswith("ValueError: badbadbad")
    assert message["message"].endswith("badbad end")
    stack = message["extraInfo"]["py_callstack"]
    assert len(stack) < 32 * 1024
    assert stack.partition("ValueError: ")[0] == ended.stderr.partition("ValueError: ")[0]
    assert stack.endswith("badbad end\n")


async def test_an_exception_that_cannot_say_what_it_is_is_shown_as_python_shows_it(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    source = "class Shy(Exception):\n    def __str__(self):\n        return self.args[1]\n\nraise Shy('no second one')"
    script = write(tmp_path / "fail.py", source)
    error_file = tmp_path / "error.json"
    environ = environment(TORCHELASTIC_ERROR_FILE=str(error_file))
    ended = await run_worker(spawner, tree, script, scratch=tmp_path, environ=environ)
    assert ended.stderr.endswith("Shy: <exception str() failed>\n")
    assert "dlrover" not in ended.stderr
    assert json.loads(error_file.read_text())["message"]["message"] == "Shy: <exception str() failed>"


async def test_the_scripts_own_record_is_left_alone(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(
        tmp_path / "recorded.py",
        """
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise ValueError("bad")
        main()
        """,
    )
    error_file = tmp_path / "error.json"
    environ = environment(TORCHELASTIC_ERROR_FILE=str(error_file))
    await run_worker(spawner, tree, script, scratch=tmp_path, environ=environ)
    recorded = error_file.read_text()
    assert "in wrapper" in recorded
    cold = tmp_path / "cold.json"
    run_plainly(script, scratch=tmp_path, environ=environment(TORCHELASTIC_ERROR_FILE=str(cold)))
    assert set(json.loads(recorded)["message"]) == set(json.loads(cold.read_text())["message"])


async def test_run_path_and_functions(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(tmp_path / "path.py", "import sys; print(__name__, sys.argv); sys.exit(6)")
    ended = await run_worker(spawner, tree, script, "x", scratch=tmp_path, kind=EntryKind.RUN_PATH)
    assert (ended.code, ended.stdout) == (6, f"__main__ ['{script}', 'x']\n")

    call, result = str(tmp_path / "call"), str(tmp_path / "result")
    function.write_call(call, os.path.join, ("a", "b"))
    environ = environment(DLROVER_RESULT_FILE=result)
    ended = await run_worker(spawner, tree, call, scratch=tmp_path, kind=EntryKind.FUNCTION, environ=environ)
    assert ended.code == 0, ended.stderr
    assert function.read_result(result) == "a/b"


async def test_programs_get_their_arguments_and_default_signals(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    program = write(tmp_path / "prog", '#!/bin/sh\necho "$1|$2|$ODD"; grep SigIgn /proc/self/status; exit 9\n')
    os.chmod(program, 0o755)
    ended = await run_worker(
        spawner, tree, program, "a b", "", scratch=tmp_path, kind=EntryKind.PROGRAM, environ=environment(ODD="yes")
    )
    said, ignored = ended.stdout.split("\nSigIgn:")
    assert (ended.code, said) == (9, "a b||yes")
    # The C library keeps 32 and 33 to itself; whoever ignores those before us is nobody's business.
    assert int(ignored, 16) & 0x7FFFFFFF == 0


@pytest.mark.parametrize(
    ("kind", "target", "cwd", "expected"),
    [
        (EntryKind.PROGRAM, "/no/such/program", "", "No such file or directory"),
        (EntryKind.PROGRAM, "/etc/passwd", "", "Permission denied"),
        (EntryKind.SCRIPT, "x.py", "/no/such/place", "No such file or directory"),
    ],
)
async def test_what_cannot_be_started_says_why(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, kind: EntryKind, target: str, cwd: str, expected: str
) -> None:
    with pytest.raises(StartFailed, match=expected):
        await run_worker(spawner, tree, target, scratch=tmp_path, kind=kind, cwd=cwd)


async def test_bytes_that_are_no_text_arrive_unchanged(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(tmp_path / "raw.py", "import os, sys; print(os.environb[b'RAW'], os.fsencode(sys.argv[1]))")
    raw = os.fsdecode(b"\xff\xfe")
    ended = await run_worker(spawner, tree, script, raw, scratch=tmp_path, environ=environment(RAW=raw))
    assert ended.stdout == "b'\\xff\\xfe' b'\\xff\\xfe'\n"


async def test_other_variables_read_at_import_mean_a_cold_start(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path
) -> None:
    script = write(tmp_path / "cold.py", "import sys; print('torch' in sys.modules)")
    warm = await run_worker(spawner, tree, script, scratch=tmp_path)
    cold = await run_worker(spawner, tree, script, scratch=tmp_path, environ=environment(MALLOC_ARENA_MAX="1"))
    assert (warm.stdout, cold.stdout) == ("True\n", "False\n")


async def test_ps_shows_the_script(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    script = write(tmp_path / "named.py", "print(open('/proc/self/cmdline').read().split('\\0')[0])")
    ended = await run_worker(spawner, tree, script, "--lr", "1", scratch=tmp_path)
    assert ended.stdout == f"{sys.executable} -u {script} --lr 1\n"


def run_apart(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """For what no test process survives."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **options)


def test_a_flash_checkpoint_that_cannot_be_imported_does_not_end_the_zygote() -> None:
    done = run_apart(
        """
        import argparse, sys
        from dlrover.trainer.worker import zygote
        sys.modules["torch"] = None  # as if it were broken: the import of Flash Checkpoint fails
        own = object.__new__(zygote._Zygote)
        own._is_warm, own._has_flash_checkpoint = True, False
        own._arguments = argparse.Namespace(preload="")
        own._import_flash_checkpoint()
        print("goes on")
        """
    )
    assert done.stdout == "goes on\n", done.stderr
    assert "dlrover.trainer.torch.flash_checkpoint.ddp could not be preloaded" in done.stderr


def test_closing_finds_descriptors_above_the_limit() -> None:
    done = run_apart(
        """
        import os, resource
        from dlrover.trainer.worker.entry import close_all_but, open_descriptors
        os.dup2(1, 700)
        os.dup2(1, 20)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        close_all_but({0, 1, 2, 20, 30})
        print(sorted(open_descriptors()))
        """
    )
    assert done.stdout == "[0, 1, 2, 20]\n", done.stderr


def test_only_open_descriptors_are_listed() -> None:
    for descriptor in worker_entry.open_descriptors():
        os.fstat(descriptor)


def test_a_worker_that_could_outlive_its_agent_does_not_start() -> None:
    """As in a sandbox that forbids prctl."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"!")
        done = run_apart(
            f"""
            import os, types
            from dlrover.host import lifeline
            from dlrover.protocol.messages.spawning import ForkWorker
            from dlrover.trainer.worker import entry
            order = ForkWorker(
                id=1, agent_pid=os.getppid(), kind="program", target=b"/bin/echo", args=(b"ran",), environ={{}}, cwd=b"/",
                umask=0, interpreter=b"", is_warm=False,
            )
            lifeline.ctypes.CDLL = lambda *_, **__: types.SimpleNamespace(prctl=lambda *_: -1)
            entry.become(order, (0, 1, 2, {theirs.fileno()}), (), is_warm=False)
            """,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        assert (done.returncode, done.stdout) == (worker_entry.EXIT_CANNOT_START, "")
        assert b"prctl(PR_SET_PDEATHSIG)" in ours.recv(4096)
