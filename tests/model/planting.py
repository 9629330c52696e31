"""Plant a bug in the product: the syntax tree of one function is changed, compiled, and put in place of its code.

A plant names a function as `module:function` or `module:Class.method`, and one change. The change finds its place by
the names that the place mentions; where no place does, or more than one, the plant is out of date, and says so. A
constant of a module is patched instead.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import NamedTuple, TypeVar
from unittest import mock

Function = ast.FunctionDef | ast.AsyncFunctionDef
Change = Callable[[Function], None]
Found = TypeVar('Found')


class Constant(NamedTuple):
    """The value that a constant of a module has instead of its own."""

    value: object


class Plant(NamedTuple):
    """One change of one function, or of one constant."""

    where: str
    change: Change | Constant


class Bug(NamedTuple):
    """What is planted, and the scenarios that find it, the cheapest first."""

    plants: tuple[Plant, ...]
    scenarios: tuple[str, ...]


def bug(where: str, change: Change | Constant, *scenarios: str) -> Bug:
    """Make a bug of one plant."""
    return Bug((Plant(where, change),), scenarios)


def pair(some: Bug, other: Bug, *scenarios: str) -> Bug:
    """Make a bug of two, which cover each other: neither is found alone."""
    return Bug((*some.plants, *other.plants), scenarios)


class Misplaced(AssertionError):
    """The function or the place in it is not there any more, or not the only one."""


@contextmanager
def planted(plants: Sequence[Plant]) -> Iterator[None]:
    """Have these bugs in the product inside, and none of them afterwards. Misplaced."""
    assert len({each.where for each in plants}) == len(plants), 'one plant a function: both() joins changes'
    with ExitStack() as stack:
        for each in plants:
            stack.enter_context(_planted(each))
        yield


@contextmanager
def _planted(plant: Plant) -> Iterator[None]:
    module_name, _, name = plant.where.partition(':')
    module = importlib.import_module(module_name)
    if isinstance(plant.change, Constant):
        if name not in vars(module):
            raise Misplaced(f'{plant.where}: there is no such constant')
        with mock.patch.object(module, name, plant.change.value):
            yield
        return
    function = _function(module, name)
    before = function.__code__
    # The code is exchanged, not the name: whoever imported the function by name has the bug, too.
    function.__code__ = _changed(module, name, plant)
    try:
        yield
    finally:
        function.__code__ = before


def _function(module: ModuleType, name: str) -> FunctionType:
    found: object = module
    for part in name.split('.'):
        found = inspect.getattr_static(found, part, None)
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, staticmethod | classmethod):
        found = found.__func__
    if not isinstance(found, FunctionType):
        raise Misplaced(f'{module.__name__}:{name}: there is no such function')
    return inspect.unwrap(found)


def _changed(module: ModuleType, name: str, plant: Plant) -> CodeType:
    tree = ast.parse(inspect.getsource(module))
    node: ast.AST = tree
    for part in name.split('.'):
        (node,) = (each for each in ast.iter_child_nodes(node) if getattr(each, 'name', None) == part)
    assert isinstance(node, Function)
    assert not isinstance(plant.change, Constant)
    try:
        plant.change(node)
    except Misplaced as error:
        raise Misplaced(f'{plant.where}: {error}') from None
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), 'exec')
    return next(each for each in _nested(code) if each.co_qualname == name)


def _nested(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _nested(each)


def changing(edit: Callable[..., None]) -> Callable[..., Change]:
    """Make changes of what edits a function: what is given to the edit behind the function is given here."""
    return lambda *given, **named: lambda function: edit(function, *given, **named)


@changing
def both(function: Function, *changes: Change) -> None:
    """Several changes of one function."""
    for each in changes:
        each(function)


@changing
def returns(function: Function, value: object) -> None:
    """Return a constant at once."""
    function.body = [ast.Return(_expression(repr(value)))]


@changing
def asks(function: Function, expression: str, *names: str) -> None:
    """The one condition that mentions these names is another one."""
    tests = [(each, 'test', each.test) for each in ast.walk(function) if isinstance(each, ast.If | ast.IfExp)]
    owner, field, _ = _only(names, [each for each in tests if _mentions(each[2], names)])
    setattr(owner, field, _expression(expression))


def never(*names: str) -> Change:
    """The one condition that mentions these names is never true."""
    return asks('False', *names)


def always(*names: str) -> Change:
    """The one condition that mentions these names is always true."""
    return asks('True', *names)


@changing
def drops(function: Function, *names: str) -> None:
    """The one simple statement that mentions these names is left out."""
    block, statement = _statement(function, names)
    block[block.index(statement)] = ast.Pass()


@changing
def moves_last(function: Function, *names: str) -> None:
    """The one simple statement that mentions these names comes last in its block."""
    block, statement = _statement(function, names)
    block.remove(statement)
    block.append(statement)


@changing
def moves_first(function: Function, *names: str) -> None:
    """The one simple statement that mentions these names comes first in its block."""
    block, statement = _statement(function, names)
    block.remove(statement)
    block.insert(0, statement)


@changing
def without(function: Function, *names: str, place: int | None = None) -> None:
    """The one operand or element that mentions these names is left out: of and, or, -, |, a list, a tuple or a set.

    Args:
        place: which one, in the order of the source, where there are several.
    """
    found = [(parent, each) for parent in ast.walk(function) for each in _operands(parent) if _mentions(each, names)]
    # The innermost: what holds it mentions the names, too.
    inner = [(parent, each) for parent, each in found if not any(_holds(each, other) for other, _ in found)]
    inner.sort(key=lambda each: (each[1].lineno, each[1].col_offset))
    parent, operand = inner[place] if place is not None else _only(names, inner)
    if isinstance(parent, ast.BinOp):
        _exchange(function, parent, parent.right if operand is parent.left else parent.left)
        return
    assert isinstance(parent, ast.BoolOp | ast.List | ast.Tuple | ast.Set)
    left: list[ast.expr] = parent.values if isinstance(parent, ast.BoolOp) else parent.elts
    left.remove(operand)
    if isinstance(parent, ast.BoolOp) and len(left) == 1:
        _exchange(function, parent, left[0])


@changing
def without_argument(function: Function, call: str, *names: str) -> None:
    """The one argument, of calls of this function, that mentions these names is left out."""
    found = [
        (arguments, argument)
        for each in _calls(function, call)
        for arguments in (each.args, each.keywords)
        for argument in arguments
        if _mentions(argument, names)
    ]
    arguments, argument = _only((call, *names), found)
    arguments.remove(argument)  # type: ignore[arg-type]


@changing
def passes(function: Function, call: str, position: int, expression: str) -> None:
    """The one call of this function gets another argument at this position."""
    _only((call,), _calls(function, call)).args[position] = _expression(expression)


@changing
def becomes(function: Function, call: str, expression: str) -> None:
    """The one call of this function becomes another expression."""
    _exchange(function, _only((call,), _calls(function, call)), _expression(expression))


@changing
def assigns(function: Function, name: str, expression: str) -> None:
    """The first assignment to this name assigns another expression."""
    found = [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in each.targets)
    ]
    if not found:
        raise Misplaced(f'nothing is assigned to {name}')
    min(found, key=lambda each: each.lineno).value = _expression(expression)


@changing
def results(function: Function, expression: str) -> None:
    """The last return of the function returns another expression."""
    found = [each for each in function.body if isinstance(each, ast.Return)]
    if not found:
        raise Misplaced('it does not end with a return')
    found[-1].value = _expression(expression)


@changing
def catches(function: Function, before: str, after: str) -> None:
    """The one handler of an exception handles another one."""
    handlers = [each for each in ast.walk(function) if isinstance(each, ast.ExceptHandler) and each.type]
    found = [each for each in handlers if ast.unparse(each.type or each) == before]
    _only((before,), found).type = _expression(after)


def _only(names: Sequence[str], found: Sequence[Found]) -> Found:
    if len(found) != 1:
        raise Misplaced(f'{len(found)} places mention {", ".join(names)}')
    return found[0]


def _mentions(node: ast.AST, names: Sequence[str]) -> bool:
    there = set()
    for each in ast.walk(node):
        there |= {getattr(each, field, None) for field in ('id', 'attr', 'arg', 'name')}
    return there.issuperset(names)


def _statement(function: Function, names: Sequence[str]) -> tuple[list[ast.stmt], ast.stmt]:
    simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.Return | ast.Raise
    blocks = [
        block
        for node in ast.walk(function)
        for field in ('body', 'orelse', 'finalbody')
        if isinstance(block := getattr(node, field, None), list)
    ]
    return _only(
        names,
        [(block, each) for block in blocks for each in block if isinstance(each, simple) and _mentions(each, names)],
    )


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    is_read = isinstance(getattr(node, 'ctx', None), ast.Load) or isinstance(node, ast.Set)
    return node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) and is_read else []


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return any(each is inner for each in ast.walk(outer))


def _calls(function: Function, name: str) -> list[ast.Call]:
    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
    return [each for each in calls if getattr(each.func, 'id', getattr(each.func, 'attr', None)) == name]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode='eval').body


def _exchange(function: Function, before: ast.AST, after: ast.expr) -> None:
    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return after if node is before else self.generic_visit(node)

    Exchange().visit(function)
