"""
From a forked (or executed) process to `python script.py`.

Two halves. `become` turns a child of the zygote into the process that the agent ordered: parent, session, signals,
descriptors, directory, environment. `run` executes the user's entry so that the script cannot tell it from a plain
`python -u script.py`: same `__main__`, same `sys.argv` and `sys.path[0]`, same traceback, same exit code. What a
forked child inherits and a fresh interpreter would not have (random state, thread counts, standard streams, its name
in `ps`) is put right in between.

Runs as `python -m dlrover.trainer.worker KIND TARGET ARGS...` where an entry needs us but no zygote is warm.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import sys
import time
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

from dlrover.agreed.lost_peers import tells_of_lost_peer
from dlrover.host.edges import attempt
from dlrover.host.lifeline import follow_parent
from dlrover.host.processes import look_up
from dlrover.protocol.messages.spawning import ForkWorker
from dlrover.trainer import environment
from dlrover.trainer.worker import hooks as worker_hooks

EXIT_CANNOT_START = 127
_COLD_CODE = (
    b"import sys; sys.path[:1] = [p for p in sys.path[:1] if p]; from dlrover.trainer.worker.entry import main; main()"
)

_OWN_FILE = __file__
_DEFAULT_ON_START = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""torchrun handles these itself when it starts workers, so they begin with the default action even under nohup."""
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
"""Python ignores these for itself; a program that we execute must not inherit that."""
_KEPT_CHARACTERS = 8 * 1024
"""Of either end of what an exception says in the error file. Some name every weight of a model, and it stands there twice."""

_STARTERS = ("dlrover.trainer", "dlrover.trainer.entry.local_entry")
"""Modules that know by themselves what a process of a parameter-server job does."""
_MOST_CHAINED = 64
"""Exceptions that led to one another; loops of a thousand retries chain theirs."""


def become(order: ForkWorker, descriptors: Sequence[int], keep: Collection[int], *, is_warm: bool) -> None:
    """
    Turn this fresh child into the ordered worker. Returns only if the entry shall run inside this interpreter.

    `keep` are descriptors that imported libraries opened: a cold process would have them too.
    """
    stdin, stdout, stderr, leash = descriptors
    # First of all: a copy of the zygote's own socket here would hide its death from the agent.
    close_all_but({0, 1, 2, *descriptors, *keep})
    if not os.read(leash, 1):
        os._exit(0)  # nobody knows of us: the agent has asked another zygote, or is gone
    try:
        # Only now, after the adoption: the signal belongs to whoever is our parent when it is asked for.
        if not follow_parent(signal.SIGKILL, order.agent_pid):
            os._exit(0)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in _DEFAULT_ON_START:
            signal.signal(number, signal.SIG_DFL)
        for target, source in enumerate((stdin, stdout, stderr)):
            os.dup2(source, target, inheritable=True)
        close_all_but({0, 1, 2, leash, *keep})
        os.umask(order.umask)
        os.chdir(order.cwd)
        if not is_warm:
            _execute(order)
        _settle(order)
    except OSError as error:
        _refuse(leash, f"{error.strerror or error}: {os.fsdecode(error.filename or order.target)}")
    except Exception as error:
        # The edge of the new process: nobody above could tell the agent.
        _refuse(leash, f"{type(error).__name__}: {error}")
    os.close(leash)


def open_descriptors() -> set[int]:
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return {descriptor for descriptor in listed if _is_open(descriptor)}  # the listing names its own, too


def _identity(descriptor: int) -> tuple[int, ...]:
    """The same for two descriptors of one file, pipe or terminal; empty for none."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_rdev


def _is_open(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def close_all_but(keep: Collection[int]) -> None:
    """One by one: without the system call for ranges Python would try every number up to the limit, often a million."""
    for descriptor in open_descriptors().difference(keep):
        os.closerange(descriptor, descriptor + 1)  # unlike `close` it ignores what a device or a network disk answers


def command_line(order: ForkWorker) -> list[bytes]:
    """What to execute where the entry does not run inside a fork of ours."""
    match order.kind:
        case "program":
            return [order.target, *order.args]
        case "script":
            return [order.interpreter, b"-u", order.target, *order.args]
        case "module":
            return [order.interpreter, b"-u", b"-m", order.target, *order.args]
        case _:
            # torchrun too runs these in its own interpreter, whatever PYTHON_EXEC says.
            own = [os.fsencode(sys.executable), b"-u", b"-m", b"dlrover.trainer.worker"]
            return [*own, order.kind.encode(), order.target, *order.args]


def _execute(order: ForkWorker) -> NoReturn:
    for number in _IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    command = command_line(order)
    is_ours = order.kind in ("script", "module") and os.fsdecode(order.interpreter) == sys.executable
    if is_ours and b"DLROVER_PROGRESS_PAGE" in order.environ:
        # Through our own entry, because somebody watches: the script sees no difference.
        command = [order.interpreter, b"-u", b"-c", _COLD_CODE, order.kind.encode(), order.target, *order.args]
    os.execvpe(command[0], command, order.environ)


def _refuse(leash: int, message: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(leash, message.encode("utf-8", "replace")[:4096] or b"unknown error")
    os._exit(EXIT_CANNOT_START)


def _settle(order: ForkWorker) -> None:
    """Make the forked interpreter look freshly started."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environb.clear()
    os.environb.update(order.environ)
    if "TZ" in os.environ:
        time.tzset()
    reopen_standard_streams()
    reseed()
    restore_thread_counts(before)
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)
        multiprocessing.ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]
    importlib.invalidate_caches()
    shown = command_line(order)
    sys.orig_argv[:] = [os.fsdecode(word) for word in shown]
    show_as(b" ".join(shown))


def reopen_standard_streams() -> None:
    """As `python -u` opens them: the objects remember what kind of file they were made for."""
    old = (sys.stdin, sys.stdout, sys.stderr)
    flavours = [(stream.encoding, stream.errors or "strict") for stream in old]
    raw = io.FileIO(0, "r", closefd=False)
    raw.name = "<stdin>"
    stdin = io.TextIOWrapper(io.BufferedReader(raw), encoding=flavours[0][0], errors=flavours[0][1], write_through=True)
    stdin.mode = "r"  # type: ignore[misc]
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"
        encoding, errors = flavours[number]
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)
        stream.mode = "w"  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def reseed() -> None:
    """Global generators were seeded before the fork; all ranks would draw the same numbers. `random` sees to itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()  # a cold process draws it at import as well; devices keep their constant


def restore_thread_counts(before: Mapping[str, str | None]) -> None:
    """
    Give OpenMP, MKL and OpenBLAS the threads that a cold start with our present environment would have.

    The zygote imports with the user's OMP and MKL values, so mostly only the rule "1 where several workers share a
    node" is left to apply. OpenBLAS starts its threads at import, so there it always had one.
    """
    changed = [name for name, value in before.items() if os.environ.get(name) != value]
    torch = sys.modules.get("torch")
    if changed and torch is not None:
        wanted = _thread_count("MKL_NUM_THREADS") or _thread_count("OMP_NUM_THREADS")
        if wanted:
            torch.set_num_threads(wanted)
    num_cpus = len(os.sched_getaffinity(0))
    names = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
    blas = min(next(filter(None, map(_thread_count, names)), num_cpus), num_cpus)
    if blas > 1 and "numpy" in sys.modules:
        _set_openblas_threads(blas)


def _thread_count(name: str) -> int | None:
    first = os.environ.get(name, "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def _set_openblas_threads(count: int) -> None:
    with open("/proc/self/maps") as maps:
        libraries = {line.rstrip().rsplit(" ", 1)[-1] for line in maps if "openblas" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                setter = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
                if setter is not None:
                    setter(count)


def show_as(title: bytes) -> None:
    """Overwrite the command line that `ps` and `pgrep -f` show; the zygote's starter left room for it."""
    me = look_up(os.getpid())
    start, end = me.command_line if me is not None else (0, 0)
    room = end - start
    if not start or room < 2:
        return
    text = title.replace(b"\0", b" ")[: room - 2]
    # A last byte other than zero tells the kernel that the area holds one string up to its first zero.
    ctypes.memmove(start, text + b"\0" * (room - 1 - len(text)) + b".", room)


def run(kind: str, target: str, args: Sequence[str]) -> None:
    """Execute the entry as `__main__`. Returns after a normal end; leaves with SystemExit after any other."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = module
    where = environment.read(os.environ)
    worker_hooks.install(where)
    stderr = _identity(2)
    try:
        if where is not None and where.task_type and not (kind == "module" and target in _STARTERS):
            _join_cluster()
        if where is not None and where.framework == "tensorflow":
            importlib.import_module("dlrover.trainer.tensorflow.mirrored").join_world(where)
        match kind:
            case "script":
                _run_script(module, target, args)
            case "module":
                _run_module(target, args)
            case "run-path":
                _run_path(target, args)
            case "function":
                from dlrover.trainer.worker import function

                function.call(target)
            case _:
                raise AssertionError(f"unknown kind of entry point: {kind!r}")
    except SystemExit:
        raise
    except BaseException as error:
        uncaught: BaseException | None = error
    else:
        uncaught = None
    # Not inside the handler: what a hook raises would be shown as raised "during handling" of the first.
    if uncaught is not None:
        _end_badly(uncaught, stderr)


def _join_cluster() -> None:
    """A script of the user's own in a parameter-server job: it finds what TensorFlow's programs expect, or, on a server, never runs."""
    if importlib.util.find_spec("tensorflow") is not None:
        importlib.import_module("dlrover.trainer.tensorflow.process").prepare_script()


def _end_badly(error: BaseException, stderr: tuple[int, ...]) -> NoReturn:
    """`stderr`: what our stream was in the beginning."""
    error.__traceback__ = _without_own_frames(error.__traceback__)
    if isinstance(error, Exception):
        write_error_file(error)
    is_consequence = isinstance(error, KeyboardInterrupt) or tells_of_lost_peer(_say(error))
    if is_consequence and _identity(2) == stderr:  # a script that has sent its stream elsewhere wants it there
        hold_stderr(os.environ.get("DLROVER_HELD_STDERR", ""))
    report_uncaught(error)
    if isinstance(error, KeyboardInterrupt):
        # Has been shown; now the interpreter shall end the way it does for Ctrl-C: by the signal itself.
        sys.excepthook = _say_nothing
        raise error
    sys.exit(1)


def _run_script(module: types.ModuleType, target: str, args: Sequence[str]) -> None:
    import pkgutil

    sys.argv = [target, *args]
    path = _absolute(target)
    if os.path.isdir(path) or _is_archive(path):
        import runpy

        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
        return
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader: Any
    try:
        with io.open_code(path) as file:
            compiled = pkgutil.read_code(file) if path.endswith(".pyc") else None
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    if compiled is not None:
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        compiled = compile(source, path, "exec", dont_inherit=True)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    exec(compiled, module.__dict__)


def _absolute(path: str) -> str:
    """As the interpreter does it: joined to the current directory, but not cleaned."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path.removeprefix("./"))


def _is_archive(path: str) -> bool:
    import zipfile

    return os.path.isfile(path) and not path.endswith((".py", ".pyc")) and zipfile.is_zipfile(path)


def _run_module(target: str, args: Sequence[str]) -> None:
    import runpy

    sys.argv = ["-m", *args]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    runpy._run_module_as_main(target)  # type: ignore[attr-defined]


def _run_path(target: str, args: Sequence[str]) -> None:
    import runpy

    sys.argv = [target, *args]
    runpy.run_path(target, run_name="__main__")


def _without_own_frames(frames: types.TracebackType | None) -> types.TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename == _OWN_FILE:
        frames = frames.tb_next
    return frames


def write_error_file(error: Exception) -> None:
    """In the shape of torch's `@record`, which has written its own already where the script uses it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or os.path.exists(path):
        return
    import traceback

    said = _say(error).removeprefix(f"{type(error).__name__}: ")
    stack = "".join(traceback.format_exception(error))
    if len(said) > 2 * _KEPT_CHARACTERS:
        short = f"{said[:_KEPT_CHARACTERS]} … {said[-_KEPT_CHARACTERS:]}"
        said, stack = short, stack.replace(said, short)
    details: dict[str, object] = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    details["exceptions"] = exception_types(error)
    data = {"message": {"message": f"{type(error).__name__}: {said}", "extraInfo": details}}
    # A full or vanished directory must not replace the user's error by ours.
    with contextlib.suppress(OSError):
        with open(path, "w") as file:
            json.dump(data, file)


def exception_types(error: BaseException) -> list[str]:
    """Names of all types of the error and of what led to it, bases included: whether it may pass follows from any of them."""
    names: dict[str, None] = {}
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen or len(seen) >= _MOST_CHAINED:
            continue
        seen.add(id(each))
        names |= dict.fromkeys(kind.__name__ for kind in type(each).__mro__ if kind is not object)
        left += [each.__cause__, None if each.__suppress_context__ else each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return list(names)


def _say(error: BaseException) -> str:
    name = type(error).__name__
    return attempt(lambda: f"{name}: {error}", lambda _error: f"{name}: <exception str() failed>")  # as Python says it


def hold_stderr(path: str) -> None:
    """
    Let the agent have the rest of our stderr, to show it or not: we ended because another worker is gone, or because a person
    pressed Ctrl-C, and only the agent can know that this has been told already.
    """
    if not path:
        return
    with contextlib.suppress(
        OSError, ValueError
    ):  # the agent is gone, or the script has closed its stream: then as usual
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            sys.stderr.flush()
            os.dup2(descriptor, 2)
        finally:
            os.close(descriptor)


def report_uncaught(error: BaseException) -> None:
    """What the interpreter does with an exception that no code caught, up to the point of leaving."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as second:
        second.__traceback__ = _without_own_frames(second.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _say_nothing(*_details: object) -> None:
    return None


def main() -> None:
    """In a process of its own: KIND TARGET ARGS."""
    from dlrover.trainer.worker import sigterm

    sigterm.announce()
    kind, target, args = sys.argv[1], sys.argv[2], sys.argv[3:]
    if kind in ("script", "module"):
        shown = [sys.executable, "-u", *(["-m"] if kind == "module" else []), target, *args]
        sys.orig_argv[:] = shown
        show_as(b" ".join(map(os.fsencode, shown)))
    run(kind, target, args)
