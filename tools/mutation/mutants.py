"""
What a mutant is: one module with one small mistake in it, and the list of all such mistakes.

The mistakes are those that people make: a comparison off by its edge, a condition turned round, a call forgotten, two
arguments swapped. Texts for people are left alone: a sentence that reads differently decides nothing. So are annotations,
docstrings, decorators and the options of a class, which define and do not decide; and assertions, which a right core never
fails, whatever they say.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

Step = tuple[str, int | None]
"""A field of a node, and the place in it if it is a list."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
DEFINITIONS = ("NewType", "TypeVar", "ParamSpec", "cast", "isinstance", "issubclass")
"""Calls whose arguments are names of types."""
FOR_PEOPLE = ("__repr__", "__str__")


@dataclass(frozen=True)
class Mutant:
    path: str
    """Of the module, from the root of the repository."""
    function: str
    """Qualified name of the outermost function around the mistake; empty if it is in the body of the module or of a class."""
    first_line: int
    """Of that function's code, decorators included."""
    operator: str
    before: str
    after: str
    """The statement around it, without the statements inside that one."""
    lines: range
    """Those of that statement."""
    steps: tuple[Step, ...]
    replacement: ast.AST | None
    """None: what is there is taken away."""

    @property
    def line(self) -> int:
        return self.lines.start

    @property
    def where(self) -> str:
        """A name that survives edits elsewhere in the file."""
        return f"{self.path}::{self.function}" if self.function else self.path

    @property
    def key(self) -> str:
        """Tells a mutant from the others of the same version of the code."""
        steps = ".".join(f"{field}{'' if index is None else index}" for field, index in self.steps)
        text = f"{self.path}\n{steps}\n{self.operator}\n{self.before}\n{self.after}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def compile(self, root: Path) -> CodeType:
        """The whole module with the mistake in it."""
        file = root / self.path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compile(changed(tree, self.steps, self.replacement), str(file), "exec")


def mutants_of(root: Path, path: str) -> list[Mutant]:
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    finder = _Finder(path, tree)
    finder.visit_body(tree, ())
    return finder.found


class _Finder:
    """Walks a module and notes each mistake that can be made in it, in the order of the text."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self.path = path
        self.tree = tree
        self.found: list[Mutant] = []
        self._names: list[str] = []
        self._function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
        self._statement: ast.AST = tree
        self._statement_steps: tuple[Step, ...] = ()
        self._returns: ast.expr | None = None

    def visit_body(self, node: ast.AST, steps: tuple[Step, ...], field: str = "body") -> None:
        for index, statement in enumerate(getattr(node, field)):
            self.visit_statement(statement, (*steps, (field, index)))

    def visit_statement(self, node: ast.stmt, steps: tuple[Step, ...]) -> None:
        outer = self._statement, self._statement_steps
        self._statement, self._statement_steps = node, steps
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Pass() | ast.Global() | ast.Nonlocal() | ast.Assert():
                pass
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
                pass
            case ast.Assign(value=ast.Subscript(value=ast.Name(id=name))) if self._function is None and _names_type(
                name
            ):
                pass  # another name for a type
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._visit_function(node, steps)
            case ast.ClassDef():
                self._names.append(node.name)
                self.visit_body(node, steps)
                self._names.pop()
            case _:
                self._note_statement(node, steps)
                self._visit_parts(node, steps)
        self._statement, self._statement_steps = outer

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, steps: tuple[Step, ...]) -> None:
        if node.name in FOR_PEOPLE:
            return
        for field in ("defaults", "kw_defaults"):
            for index, default in enumerate(getattr(node.args, field)):
                if default is not None:
                    self.visit_expression(default, (*steps, ("args", None), (field, index)))
        outer, self._returns = self._returns, node.returns
        is_outermost = self._function is None
        if is_outermost:
            self._function = node
            self._names.append(node.name)
        self.visit_body(node, steps)
        if is_outermost:
            self._function = None
            self._names.pop()
        self._returns = outer

    def _visit_parts(self, node: ast.AST, steps: tuple[Step, ...]) -> None:
        """The expressions in a node, and the statements in it."""
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "msg", "ctx", "cause", "type_comment"):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                inner = (*steps, (field, index))
                if isinstance(child, ast.stmt):
                    self.visit_statement(child, inner)
                elif isinstance(child, ast.expr):
                    self.visit_expression(child, inner)
                elif isinstance(child, ast.match_case | ast.ExceptHandler | ast.withitem):
                    self._visit_parts(child, inner)
                elif isinstance(child, ast.comprehension):
                    self._note_filters(child, inner)
                    self._visit_parts(child, inner)
                elif isinstance(child, ast.keyword) and child.arg != "strict":  # of `zip`: an assertion
                    self.visit_expression(child.value, (*inner, ("value", None)))

    def visit_expression(self, node: ast.expr, steps: tuple[Step, ...]) -> None:
        if _is_sentence(node):
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DEFINITIONS:
            if node.func.id in ("isinstance", "cast"):
                place = 0 if node.func.id == "isinstance" else 1
                self.visit_expression(node.args[place], (*steps, ("args", place)))
            return
        self._note_expression(node, steps)
        self._visit_parts(node, steps)

    # What can go wrong in a statement.

    def _note_statement(self, node: ast.stmt, steps: tuple[Step, ...]) -> None:
        match node:
            case ast.Expr() | ast.AugAssign() | ast.Delete():
                self._note("statement removed", steps, ast.Pass())
            case ast.Assign(targets=targets) if any(
                isinstance(each, ast.Attribute | ast.Subscript) for each in targets
            ):
                self._note("statement removed", steps, ast.Pass())
            case ast.Assign(targets=[ast.Tuple(elts=elts)]) if any(
                isinstance(each, ast.Attribute | ast.Subscript) for each in elts
            ):
                self._note("statement removed", steps, ast.Pass())
            case ast.AnnAssign(target=ast.Attribute() | ast.Subscript(), value=ast.expr()):
                self._note("statement removed", steps, ast.Pass())
            case ast.Return(value=None):
                self._note("statement removed", steps, ast.Pass())
            case ast.Return(value=ast.expr() as value):
                self._note_return(value, (*steps, ("value", None)))
            case ast.Continue():
                self._note("continue for break", steps, ast.Break())
            case ast.Break():
                self._note("break for continue", steps, ast.Continue())
            case ast.If() | ast.While():
                self._note_negation(node.test, (*steps, ("test", None)))
            case ast.Match(cases=cases) if len(cases) > 1:
                for index, case in enumerate(cases):
                    self._note(
                        "case removed", (*steps, ("cases", index)), None, lines=range(node.lineno, case.body[0].lineno)
                    )
        if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
            self._note("arithmetic", (*steps, ("op", None)), ARITHMETIC[type(node.op)]())

    def _note_return(self, value: ast.expr, steps: tuple[Step, ...]) -> None:
        if self._returns is None or (isinstance(value, ast.Constant) and value.value is None):
            return
        returned = ast.unparse(self._returns)
        if "None" in returned.replace("Callable", "").split("[")[0] or returned.endswith("| None"):
            self._note("None returned", steps, ast.Constant(None))
        elif returned == "bool" and not isinstance(value, ast.Constant | ast.Compare | ast.UnaryOp):
            self._note("condition negated", steps, ast.UnaryOp(ast.Not(), value))

    def _note_negation(self, test: ast.expr, steps: tuple[Step, ...]) -> None:
        is_told_by_operator = isinstance(test, ast.UnaryOp) or (
            isinstance(test, ast.Compare)
            and isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot | ast.In | ast.NotIn)
        )
        if not is_told_by_operator:
            self._note("condition negated", steps, ast.UnaryOp(ast.Not(), test))

    def _note_filters(self, node: ast.comprehension, steps: tuple[Step, ...]) -> None:
        for index, test in enumerate(node.ifs):
            self._note("filter removed", (*steps, ("ifs", index)), None)
            self._note_negation(test, (*steps, ("ifs", index)))

    # What can go wrong in an expression.

    def _note_expression(self, node: ast.expr, steps: tuple[Step, ...]) -> None:
        match node:
            case ast.Compare(ops=ops):
                for index, op in enumerate(ops):
                    self._note("comparison", (*steps, ("ops", index)), COMPARISONS[type(op)]())
            case ast.BinOp(op=op) if type(op) in ARITHMETIC and not self._is_type(node):
                self._note("arithmetic", (*steps, ("op", None)), ARITHMETIC[type(op)]())
            case ast.BoolOp(op=op):
                self._note("and/or", (*steps, ("op", None)), ast.Or() if isinstance(op, ast.And) else ast.And())
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._note("not removed", steps, operand)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                self._note("sign removed", steps, operand)
            case ast.Constant(value=value):
                self._note_constant(value, steps)
            case ast.IfExp(test=test):
                self._note_negation(test, (*steps, ("test", None)))
            case ast.List(elts=elts) | ast.Set(elts=elts) if len(elts) > 0 and not isinstance(
                getattr(node, "ctx", None), ast.Store
            ):
                self._note_items(elts, steps)
            case ast.Tuple(elts=elts, ctx=ast.Load()) if len(elts) > 1 and not self._is_unpacked(node):
                self._note_items(elts, steps)
            case ast.Dict(values=values):
                for index in range(len(values)):
                    kept = copy.deepcopy(node)
                    del kept.keys[index], kept.values[index]
                    self._note("item removed", steps, kept)
            case ast.Call():
                self._note_call(node, steps)

    def _note_constant(self, value: object, steps: tuple[Step, ...]) -> None:
        match value:
            case bool():
                self._note("constant", steps, ast.Constant(not value))
            case int() | float():
                self._note("constant", steps, ast.Constant(value + 1))
            case str():
                self._note("constant", steps, ast.Constant("" if value else "mutated"))
            case bytes():
                self._note("constant", steps, ast.Constant(b"" if value else b"mutated"))

    def _note_items(self, elts: list[ast.expr], steps: tuple[Step, ...]) -> None:
        for index in range(len(elts)):
            self._note("item removed", (*steps, ("elts", index)), None)

    def _note_call(self, node: ast.Call, steps: tuple[Step, ...]) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITES:
            self._note("opposite", (*steps, ("func", None)), ast.Name(OPPOSITES[node.func.id], ast.Load()))
        plain = [each for each in node.args[:2] if not isinstance(each, ast.Starred) and not _is_sentence(each)]
        is_course = (
            bool(plain) and isinstance(plain[0], ast.Name) and plain[0].id in ("course", "self", "state", "fleet")
        )
        is_symmetric = isinstance(node.func, ast.Name) and node.func.id in OPPOSITES
        if len(plain) == 2 and not is_course and not is_symmetric and ast.dump(plain[0]) != ast.dump(plain[1]):
            swapped = copy.deepcopy(node)
            swapped.args[0], swapped.args[1] = swapped.args[1], swapped.args[0]
            self._note("arguments swapped", steps, swapped)
        for index, keyword in enumerate(node.keywords):
            if keyword.arg not in (None, "strict") and not _is_sentence(keyword.value):
                self._note("argument removed", (*steps, ("keywords", index)), None)

    def _is_unpacked(self, node: ast.Tuple) -> bool:
        """`a, b = x, y` with an item less stops every test at once: that tells nothing about the tests."""
        statement = self._statement
        return (
            isinstance(statement, ast.Assign)
            and statement.value is node
            and isinstance(statement.targets[0], ast.Tuple)
        )

    def _is_type(self, node: ast.BinOp) -> bool:
        """`A | B` in the body of a module defines a type; in a function it is a union of values."""
        return isinstance(node.op, ast.BitOr) and self._function is None

    def _note(
        self, operator: str, steps: tuple[Step, ...], replacement: ast.AST | None, lines: range | None = None
    ) -> None:
        inner = steps[len(self._statement_steps) :]
        if inner:
            after = _head(changed(copy.deepcopy(self._statement), inner, replacement))
        else:
            after = "pass" if replacement is None else ast.unparse(replacement)
        before = _head(self._statement)
        if isinstance(self._statement, ast.Match) and operator == "case removed":
            case = self._statement.cases[inner[0][1] or 0]
            before, after = f"case {ast.unparse(case.pattern)}", "no such case"
        if before == after:
            return
        in_default = self._function is not None and any(field in ("defaults", "kw_defaults") for field, _ in inner)
        function = None if in_default else self._function
        self.found.append(
            Mutant(
                path=self.path,
                function=".".join(self._names) if function is not None else "",
                first_line=0
                if function is None
                else min([function.lineno, *(each.lineno for each in function.decorator_list)]),
                operator=operator,
                before=before,
                after=after,
                lines=lines or _own_lines(self._statement),
                steps=steps,
                replacement=replacement,
            )
        )


def _names_type(name: str) -> bool:
    """By its spelling: `tuple[int, ...]`, `Sequence[Node]`; `LIMITS[0]` is a value."""
    return name in ("tuple", "list", "dict", "set", "frozenset", "type") or (name != name.upper() and name[0].isupper())


def _is_sentence(node: ast.expr) -> bool:
    """A text for people: it has a space in it, or is chosen or put together with one that has."""
    match node:
        case ast.Constant(value=str(text)):
            return " " in text or "\n" in text
        case ast.JoinedStr(values=values):
            return any(isinstance(each, ast.Constant) and " " in str(each.value) for each in values)
        case ast.IfExp(
            test=ast.Compare(left=ast.Call(func=ast.Name(id="len")), comparators=[ast.Constant(value=1)]), body=body
        ):
            return _is_text(body)  # singular or plural
        case ast.IfExp(body=body, orelse=orelse):
            return (_is_sentence(body) or _is_sentence(orelse)) and _is_text(body) and _is_text(orelse)
        case ast.BinOp(op=ast.Add() | ast.Mod(), left=left, right=right):
            return _is_sentence(left) or _is_sentence(right)
        case ast.Call(func=ast.Attribute(value=receiver, attr="join")):
            return isinstance(receiver, ast.Constant) and isinstance(receiver.value, str)
    return False


def _is_text(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        or _is_sentence(node)
    )


def changed(tree: ast.AST, steps: tuple[Step, ...], replacement: ast.AST | None) -> ast.AST:
    """The tree itself, with the node at the end of the steps replaced or taken away."""
    node = tree
    for field, index in steps[:-1]:
        value = getattr(node, field)
        node = value if index is None else value[index]
    field, index = steps[-1]
    if index is None:
        assert replacement is not None, "only an element of a list can be taken away"
        setattr(node, field, copy.deepcopy(replacement))
    elif replacement is None:
        del getattr(node, field)[index]
    else:
        getattr(node, field)[index] = copy.deepcopy(replacement)
    return ast.fix_missing_locations(tree)


def _head(node: ast.AST) -> str:
    """The text of a statement without the statements in it."""
    bare = copy.copy(node)
    for field in ("body", "orelse", "finalbody", "handlers"):
        if isinstance(getattr(bare, field, None), list):
            setattr(bare, field, [])
    if isinstance(bare, ast.Match):
        return f"match {ast.unparse(bare.subject)}: {' '.join(f'case {_case(each)}:' for each in bare.cases)}"
    return ast.unparse(bare).removesuffix(":").strip()


def _case(case: ast.match_case) -> str:
    return ast.unparse(case.pattern) + (f" if {ast.unparse(case.guard)}" if case.guard is not None else "")


def _own_lines(node: ast.AST) -> range:
    if isinstance(node, ast.Match):
        return range(node.lineno, node.end_lineno + 1)
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return range(node.lineno, max(node.lineno + 1, body[0].lineno))
    return range(node.lineno, node.end_lineno + 1)


def all_mutants(root: Path, folder: str) -> Iterator[Mutant]:
    for file in sorted((root / folder).rglob("*.py")) if (root / folder).is_dir() else [root / folder]:
        yield from mutants_of(root, file.relative_to(root).as_posix())
