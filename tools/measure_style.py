"""
How the code is built, in figures: what a newcomer meets, counted the same way each time.

    make measure-style                                  # our package
    python tools/measure_style.py --package PATH        # another one; what has to run is left out

All but two figures come from the syntax trees of the sources, so the tool measures any package without importing it. The
exceptions are those of our own package: the row of switches, for which a two-node job applies one `ReportFailure` under
a tracer, and the row of patches, which is read from our tests. Goals stand beside the figures; the tool prints both and
judges nothing.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeGuard

ROOT = Path(__file__).parent.parent
FULL_CLASS = 20
SMALL_MODULE = 130
BROAD = ("Exception", "BaseException")
OURS = ("dlrover", "tests", "tools", "benchmarks")
PRONOUNS = ("nobody", "somebody", "whoever", "anybody")
GIVEN_NAMES = ("compat", "unified.api")
"""Rooms whose class names scripts of the original give us."""
GIVEN_TWICE = ("KeepLatestStepStrategy", "KeepStepIntervalStrategy")
"""Names of the original that a script imports from two places and that mean two things there."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    def is_in(self, room: str) -> bool:
        return f".{room}." in f"{self.name}."


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    point: str
    found: str
    goal: str


def main() -> None:
    parser = argparse.ArgumentParser(description="Print how the code is built, in figures.")
    parser.add_argument("--package", type=Path, default=ROOT / "dlrover", help="folder of the package to measure")
    package: Path = parser.parse_args().package
    modules = read_package(package)
    if not modules:
        sys.exit(f"--package {package}: there is no Python file. Name the folder of a package.")
    rows = static_rows(modules)
    if package.resolve() == ROOT / "dlrover":
        sys.path.insert(0, str(ROOT))
        rows += [switches_row(), patches_row(read_package(ROOT / "tests"))]
    print("| Point | Found | Goal |\n|---|---|---|")
    for row in rows:
        print(f"| {row.point} | {row.found} | {row.goal} |")


def static_rows(modules: Sequence[Module]) -> list[Row]:
    """Every row of the table that needs the sources only."""
    functions = [each for module in modules for each in functions_of(module.tree)]
    lengths = sorted(length_of(each) for each in functions) or [0]
    typed = sum(is_typed(each) for each in functions)
    written = [module for module in modules if module.text.strip()]
    documented = sum(ast.get_docstring(module.tree) is not None for module in written)
    methods = num_methods(modules)
    most = max(methods, key=lambda name: methods[name], default="none")
    full = sum(count >= FULL_CLASS for count in methods.values())
    folders = files_in_folders(modules)
    imports = imports_of(modules)
    cycles = cycles_of(imports)
    twice = class_names_twice(modules)
    lonely = imported_once(imports)
    small = sum(module.num_lines < SMALL_MODULE for module in modules if module.name in lonely)
    codes = free_error_codes(modules)
    deciding = imports_from(imports, ("agent", "trainer"), "core")
    return [
        Row("functions with all types", share(typed, len(functions)), "100 %"),
        Row("modules with a docstring", share(documented, len(written)), "100 %"),
        Row(
            "lines of a function: median, p95, most",
            f"{statistics.median(lengths):g}, {lengths[int(len(lengths) * 0.95)]}, {lengths[-1]}",
            "6, 25, 110",
        ),
        Row(
            "most methods in a class",
            f"{methods.get(most, 0)} (`{most.rpartition('.')[2]}`); {full} classes have {FULL_CLASS} or more",
            f"at most {FULL_CLASS}",
        ),
        Row("broad `except` that never raises again", str(len(swallowing_handlers(modules))), "at most 20"),
        Row(
            "files in one folder",
            ", ".join(f"{count}" for _, count in folders.most_common(6)),
            "at most 16 (20 in `protocol/messages`)",
        ),
        Row("modules in import cycles, typing-only imports included", told_cycles(cycles), "0"),
        Row("class names that mean two things", named(sorted(twice)), "0"),
        Row(
            "modules that exactly one other imports", f"{len(lonely)} of {len(modules)}, {small} under 130 lines", "few"
        ),
        Row(
            f'"{", ".join(PRONOUNS)}" per 1,000 words of docstrings',
            f"{pronouns_per_thousand(modules):.2f}",
            "under 0.3",
        ),
        Row("error codes that are free strings", str(len(codes)), "0"),
        Row("modules of `core` that `agent` and `trainer` import", named(deciding), "those of `trainer.stand_in`"),
    ]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} % ({part} of {whole})" if whole else "0 of 0"


def named(names: Sequence[str]) -> str:
    return f"{len(names)}: " + ", ".join(f"`{name}`" for name in names) if names else "0"


def read_package(package: Path) -> list[Module]:
    """Every module below the folder, with its dotted name."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules.append(Module(name, path, text, ast.parse(text)))
    return modules


def functions_of(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def length_of(function: Function) -> int:
    """Lines from `def` to the last one, docstring included, decorators not."""
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def is_typed(function: Function) -> bool:
    """Each parameter and the result have a type; the object or class itself needs none."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    if positional and positional[0].arg in ("self", "cls"):
        del positional[0]
    others = [*given.kwonlyargs, *(each for each in (given.vararg, given.kwarg) if each is not None)]
    return function.returns is not None and all(each.annotation is not None for each in (*positional, *others))


def classes_of(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def num_methods(modules: Sequence[Module]) -> dict[str, int]:
    """Methods in the body of each class; what it inherits counts where it is written."""
    return {
        f"{module.name}.{node.name}": sum(isinstance(each, Function) for each in node.body)
        for module in modules
        for node in classes_of(module.tree)
    }


def swallowing_handlers(modules: Sequence[Module]) -> list[str]:
    """Places of handlers that catch everything and raise nothing."""
    return [
        f"{module.name}:{node.lineno}" for module in modules for node in ast.walk(module.tree) if is_swallowing(node)
    ]


def is_swallowing(node: ast.AST) -> TypeGuard[ast.ExceptHandler]:
    """Whether it is a handler that catches everything and raises nothing."""
    return isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises(node)


def _is_broad(caught: ast.expr | None) -> bool:
    match caught:
        case None:
            return True
        case ast.Tuple(elts=kinds):
            return any(map(_is_broad, kinds))
        case _:
            return ast.unparse(caught) in BROAD


def _raises(handler: ast.ExceptHandler) -> bool:
    """Somewhere in its body; a function defined there runs at another time."""
    waiting: list[ast.AST] = list(handler.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return False


def files_in_folders(modules: Sequence[Module]) -> Counter[str]:
    """Modules of each folder; `__init__.py` is the folder itself."""
    return Counter(module.name.rpartition(".")[0] for module in modules if not module.is_package)


def imports_of(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Modules of the package that each one imports, wherever the import stands."""
    known = {module.name for module in modules}
    return {
        module.name: {
            target for node in ast.walk(module.tree) for target in _targets(node, module, known) if target in known
        }
        - {module.name}
        for module in modules
    }


def _targets(node: ast.AST, module: Module, known: set[str]) -> Iterator[str]:
    """`from a import b` imports `a.b` if that is a module, else a name in `a`."""
    match node:
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.ImportFrom(names=names, level=level, module=given):
            source = _absolute(given, level, module)
            for each in names:
                inner = f"{source}.{each.name}"
                yield inner if inner in known else source


def _absolute(given: str | None, level: int, module: Module) -> str:
    if not level:
        return given or ""
    parts = module.name.split(".")
    upward = level - 1 if module.is_package else level
    return ".".join([*parts[: len(parts) - upward], *([given] if given else [])])


def cycles_of(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other, the largest first (Tarjan, without recursion)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []
    for start in sorted(imports):
        work = [(start, iter(sorted(imports[start])))] if start not in order else []
        if work:
            order[start] = lowest[start] = len(order)
            path.append(start)
        while work:
            module, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[module])
                if lowest[module] == order[module]:
                    at = path.index(module)
                    found.append(set(path[at:]))
                    del path[at:]
            elif target not in order:
                order[target] = lowest[target] = len(order)
                path.append(target)
                work.append((target, iter(sorted(imports[target]))))
            elif target in path:
                lowest[module] = min(lowest[module], order[target])
    return sorted((group for group in found if len(group) > 1), key=len, reverse=True)


def told_cycles(cycles: Sequence[set[str]]) -> str:
    told = [f"{len(group)} under `{_common(group)}`" for group in cycles]
    return f"{sum(map(len, cycles))}: " + ", ".join(told) if told else "0"


def _common(names: set[str]) -> str:
    columns = zip(*(name.split(".") for name in sorted(names)), strict=False)
    return ".".join(column[0] for column in columns if len(set(column)) == 1)


def class_names_twice(modules: Sequence[Module]) -> set[str]:
    names = Counter(
        node.name
        for module in modules
        if not any(module.is_in(room) for room in GIVEN_NAMES)
        for node in classes_of(module.tree)
    )
    return {name for name, count in names.items() if count > 1} - set(GIVEN_TWICE)


def imported_once(imports: Mapping[str, set[str]]) -> set[str]:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for module, targets in imports.items():
        for target in targets:
            importers[target].add(module)
    packages = {module.rpartition(".")[0] for module in imports}
    return {module for module, found in importers.items() if len(found) == 1 and module not in packages}


def pronouns_per_thousand(modules: Sequence[Module]) -> float:
    """In the docstrings of modules, classes, functions and fields."""
    words = Counter(word for text in docstrings(modules) for word in re.findall(r"[a-z']+", text.lower()))
    return 1000 * sum(words[each] for each in PRONOUNS) / max(1, words.total())


def docstrings(modules: Sequence[Module]) -> Iterator[str]:
    """Texts that stand alone as a statement."""
    for module in modules:
        for node in ast.walk(module.tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text


def free_error_codes(modules: Sequence[Module]) -> set[str]:
    """Texts that are given as `code`, or taken where none is given."""
    return {text for module in modules for node in ast.walk(module.tree) for text in _codes(node)}


def _codes(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.keyword) and node.arg == "code":
        yield from _texts(node.value)
    elif isinstance(node, ast.arguments):
        positional = [*node.posonlyargs, *node.args]
        defaults = zip(positional[len(positional) - len(node.defaults) :], node.defaults, strict=True)
        for parameter, default in (*defaults, *zip(node.kwonlyargs, node.kw_defaults, strict=True)):
            if parameter.arg == "code" and default is not None:
                yield from _texts(default)


def _texts(value: ast.expr) -> Iterator[str]:
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.IfExp(body=one, orelse=other):
            yield from (*_texts(one), *_texts(other))


def imports_from(imports: Mapping[str, set[str]], sources: Sequence[str], room: str) -> list[str]:
    """Modules of a room that these other rooms import, in order."""
    root = min(imports, key=len, default="")
    inside = f"{root}.{room}"
    return sorted(
        {
            target
            for module, targets in imports.items()
            if any(f"{module}.".startswith(f"{root}.{source}.") for source in sources)
            for target in targets
            if f"{target}.".startswith(f"{inside}.")
        }
    )


def switches_row() -> Row:
    """A two-node job trains, a worker of one node fails, its agent reports it: where that one command goes."""
    visited = modules_visited(apply_one_failure, prefix="dlrover.core.")
    found = f"{len(visited) - 1}, over {len(set(visited))} modules"
    return Row("switches between core modules for one `ReportFailure` in a two-node job", found, "at most 25")


def apply_one_failure() -> Callable[[], object]:
    """Prepare the job; what is returned applies the command."""
    from dlrover.protocol.messages.job import ReportFailure, Run
    from tests.core.scene import Scene, failure, micros, terms

    scene = Scene(terms(2)).gather("a", "b")
    agent = scene.agents["a"]
    desired = scene.job.desired(agent.node).wish
    assert isinstance(desired, Run), f"the job of two nodes does not train: {desired}"
    report = ReportFailure(
        node=agent.node, incarnation=agent.incarnation, round=desired.world.round, failures=(failure(at=1.0),)
    )
    return lambda: scene.job.apply(report, micros(2.0))


def patches_row(tests: Sequence[Module]) -> Row:
    """Mutations of the simulator's tests break the code on purpose, to see that the invariants notice: they are named apart."""
    counts = Counter(module.is_in("simulator") for module in tests for _ in own_patches(module))
    return Row(
        "tests that patch our own code (`setattr` of a `MonkeyPatch`)",
        f"{counts[False]}, and {counts[True]} mutations that the simulator has to notice",
        "at most 10",
    )


def own_patches(module: Module) -> Iterator[str]:
    """What the module patches and did not import from elsewhere: modules and classes of ours, and objects of them."""
    foreign = _imported_from_elsewhere(module.tree)
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(path)), *_]):
                if path.partition(".")[0] in OURS:
                    yield path
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[target, ast.expr() as name, *_]):
                if _root(target) not in foreign:
                    yield f"{ast.unparse(target)}.{ast.unparse(name)}"


def _imported_from_elsewhere(tree: ast.AST) -> set[str]:
    """Names that stand for modules of others or for something in them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found |= {each.asname or each.name.partition(".")[0] for each in names if _is_foreign(each.name)}
            case ast.ImportFrom(names=names, module=str(source), level=0) if _is_foreign(source):
                found |= {each.asname or each.name for each in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(attr="importorskip"))):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(value=ast.Name(id=source)))):
                if source in found:  # an object of theirs: `loop = asyncio.get_running_loop()`
                    found.add(name)
    return found


def _is_foreign(name: str) -> bool:
    return name.partition(".")[0] not in OURS


def _root(target: ast.expr) -> str:
    """The name with which `a.b.c` begins; of `type(a)` it is `a`."""
    match target:
        case ast.Attribute(value=inner) | ast.Call(func=ast.Name(id="type"), args=[inner]):
            return _root(inner)
        case ast.Name(id=name):
            return name
    return ""


def modules_visited(prepare: Callable[[], Callable[[], object]], prefix: str) -> list[str]:
    """Modules below the prefix whose functions the run calls, in order; calls within one module follow each other as one."""
    run = prepare()
    visited: list[str] = []

    def trace(frame: FrameType, event: str, _: object) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event == "call" and module.startswith(prefix) and (not visited or visited[-1] != module):
            visited.append(module)

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return visited


if __name__ == "__main__":
    main()
