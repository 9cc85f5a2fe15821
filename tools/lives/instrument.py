"""
The core with a probe at each place where it could be wrong: what a run touches is what it can notice.

A probe notes on which side of a comparison a value was and whether it was at its edge, which operand settled a condition, whether a loop ran never, once or
more often, whether an addend was 0, and whether an assignment changed anything. A life that touches something new can tell a mistake there from the real thing.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import pairwise
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

CODES = 64
touched: set[int] = set()
"""Site and code of each thing that was seen."""
places: list[str] = []
"""File and line of each site."""

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
_SIGNS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_OPERATORS = list(_COMPARE.items())
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_CALCULATIONS = list(_ARITHMETIC.items())


def reached(site: int) -> None:
    touched.add(site * CODES)


def tested(site: int, value: Any) -> Any:
    touched.add(site * CODES + (2 if value else 1))
    return value


def operand(site: int, index: int, value: Any) -> Any:
    touched.add(site * CODES + 2 * min(index, 12) + (4 if value else 3))
    return value


def compared(site: int, index: int, one: Any, other: Any) -> Any:
    kind, function = _OPERATORS[index]
    found = function(one, other)
    touched.add(site * CODES + (2 if found else 1))
    if kind in _SIGNS:
        try:
            sign = 1 if one > other else 2 if one < other else 3
            touched.add(site * CODES + 3 + sign)
            if isinstance(one, int) and isinstance(other, int) and abs(one - other) == 1:
                touched.add(site * CODES + (8 if one > other else 9))
        except TypeError:
            pass
    return found


def chained(site: int, indices: Sequence[int], one: Any, *others: Callable[[], Any]) -> Any:
    found: Any = True
    for place, (index, later) in enumerate(zip(indices, others, strict=True)):
        other = later()
        found = compared(site + place, index, one, other)
        if not found:
            return found
        one = other
    return found


def looped(site: int, values: Iterable[Any]) -> Iterator[Any]:
    count = 0
    try:
        for value in values:
            count += 1
            yield value
        touched.add(site * CODES + 1 + min(count, 3))
    finally:
        touched.add(site * CODES + 5 + min(count, 3))


def calculated(site: int, index: int, one: Any, other: Any) -> Any:
    kind, function = _CALCULATIONS[index]
    found = function(one, other)
    base = site * CODES
    if isinstance(other, int | float):
        touched.add(base + (1 if other == 0 else 2 if other == 1 else 3))
        if one == 0:
            touched.add(base + 4)
        if kind in (ast.FloorDiv, ast.Mod) and one % other:
            touched.add(base + 5)
    else:
        touched.add(base + (6 if other else 7))
    return found


def assigned(site: int, former: Callable[[], Any], value: Any) -> Any:
    try:
        is_same = former() == value
    except (AttributeError, LookupError, TypeError):
        is_same = False
    touched.add(site * CODES + (1 if is_same else 2))
    return value


def chosen(site: int, function: Any, one: Any, other: Any) -> Any:
    try:
        touched.add(site * CODES + (1 if one < other else 2 if other < one else 3))
        if isinstance(one, int) and isinstance(other, int) and abs(one - other) == 1:
            touched.add(site * CODES + 4)
    except TypeError:
        pass
    return function(one, other)


def had(site: int, mapping: Any, key: Any, other: Any) -> Any:
    try:
        touched.add(site * CODES + (1 if key in mapping else 2))
    except TypeError:
        pass
    return mapping.get(key, other)


def kept(site: int, mapping: Any, key: Any, value: Any) -> Any:
    touched.add(site * CODES + (1 if key in mapping else 2))
    return mapping.setdefault(key, value)


def ordered(site: int, function: Any, values: Iterable[Any], **options: Any) -> Any:
    values = list(values)
    key = options.get("key")
    keys = values if key is None else [key(each) for each in values]
    touched.add(site * CODES + 1 + min(len(values), 3))
    if len(values) > 1:
        has_equals = any(one == other for one, other in pairwise(sorted(keys)))
        touched.add(site * CODES + (6 if has_equals else 7))
        is_in_order = all(one <= other for one, other in pairwise(keys))
        touched.add(site * CODES + (8 if is_in_order else 9))
    return function(values, **options)


_PROBES = {
    f"_probe_{each.__name__}": each for each in (reached, tested, operand, compared, chained, looped, calculated)
}
_PROBES |= {f"_probe_{each.__name__}": each for each in (assigned, chosen, had, kept, ordered)}


class _Instrument(ast.NodeTransformer):
    def __init__(self, path: str) -> None:
        self.path = path
        self.depth = 0

    def _site(self, node: ast.AST, count: int = 1) -> ast.Constant:
        first = len(places)
        places.extend([f"{self.path}:{getattr(node, 'lineno', 0)}"] * count)
        return ast.Constant(first)

    def _call(self, name: str, *arguments: ast.expr) -> ast.Call:
        return ast.Call(ast.Name(f"_probe_{name}", ast.Load()), list(arguments), [])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = [self.visit(each) if isinstance(each, ast.FunctionDef) else each for each in node.body]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.depth += 1
        docstring = node.body[:1] if ast.get_docstring(node) is not None else []
        rest = node.body[len(docstring) :]
        site = self._site(node)
        body = [each for statement in rest for each in _listed(self.visit(statement))]
        node.body = [*docstring, ast.Expr(self._call("reached", site)), *body]
        self.depth -= 1
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if self.depth and node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if not self.depth:
            return node
        self.generic_visit(node)
        kinds = [next(i for i, (kind, _) in enumerate(_OPERATORS) if kind is type(op)) for op in node.ops]
        if len(kinds) == 1:
            return self._call("compared", self._site(node), ast.Constant(kinds[0]), node.left, node.comparators[0])
        if any(isinstance(each, ast.NamedExpr) for part in node.comparators for each in ast.walk(part)):
            return node
        no_arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        later = [ast.Lambda(no_arguments, part) for part in node.comparators]
        indices = ast.Constant(tuple(kinds))
        return self._call("chained", self._site(node, len(kinds)), indices, node.left, *later)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if not self.depth:
            return node
        self.generic_visit(node)
        site = self._site(node)
        node.values = [self._call("operand", site, ast.Constant(i), each) for i, each in enumerate(node.values)]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not self.depth or (isinstance(node.left, ast.Constant | ast.JoinedStr) and isinstance(node.op, ast.Mod)):
            return node
        self.generic_visit(node)
        if type(node.op) not in _ARITHMETIC:
            return node
        index = next(i for i, (kind, _) in enumerate(_CALCULATIONS) if kind is type(node.op))
        return self._call("calculated", self._site(node), ast.Constant(index), node.left, node.right)

    def _visit_test(self, node: Any) -> ast.AST:
        self.generic_visit(node)
        if self.depth and not isinstance(node.test, ast.Constant):
            node.test = self._call("tested", self._site(node), node.test)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._visit_test(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._visit_test(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._visit_test(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        if self.depth:
            node.iter = self._call("looped", self._site(node), node.iter)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        self.generic_visit(node)
        if self.depth:
            site = self._site(node.iter)
            node.iter = self._call("looped", site, node.iter)
            node.ifs = [self._call("tested", self._site(each), each) for each in node.ifs]
        return node

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        if node.guard is not None:
            node.guard = self.visit(node.guard)
        site = self._site(node.body[0])
        body = [each for statement in node.body for each in _listed(self.visit(statement))]
        node.body = [ast.Expr(self._call("reached", site)), *body]
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self.visit(node.value)
        target = node.targets[0]
        is_simple = isinstance(target, ast.Attribute) or (
            isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Slice)
        )
        if not self.depth or len(node.targets) > 1 or not is_simple:
            return node
        if any(isinstance(each, ast.NamedExpr | ast.Call) for each in ast.walk(target)):
            return node
        former = ast.parse(ast.unparse(target), mode="eval").body
        no_arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        node.value = self._call("assigned", self._site(node), ast.Lambda(no_arguments, former), node.value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        if self.depth and node.value is not None:
            node.value = self._call("tested", self._site(node), self.visit(node.value))
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if self.depth:
            node.value = self._call("tested", self._site(node), self.visit(node.value))
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        is_one = len(node.args) == 1 and not isinstance(node.args[0], ast.Starred)
        is_ordering = isinstance(node.func, ast.Name) and node.func.id in ("sorted", "min", "max")
        if self.depth and is_one and is_ordering and all(each.arg is not None for each in node.keywords):
            site, function = self._site(node), node.func
            return ast.Call(ast.Name("_probe_ordered", ast.Load()), [site, function, node.args[0]], node.keywords)
        is_plain = len(node.args) == 2 and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
        if not self.depth or not is_plain:
            return node
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            return self._call("chosen", self._site(node), node.func, *node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get":
            return self._call("had", self._site(node), node.func.value, *node.args)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "setdefault":
            return self._call("kept", self._site(node), node.func.value, *node.args)
        return node


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = Path(self.get_filename(fullname))
        tree = _Instrument(str(path).split("dlrover/core/")[-1]).visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_PROBES)
        super().exec_module(module)


class _Finder(MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("dlrover.core."):
            return None
        file = self.root / (fullname.replace(".", "/") + ".py")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, str(file))) if file.exists() else None


def install(root: Path) -> None:
    """From now on the core is imported with probes."""
    assert not any(name.startswith("dlrover.core.") for name in sys.modules), "the core is loaded already"
    sys.meta_path.insert(0, _Finder(root))
