"""Plant a bug in the product: change a function's syntax tree and exchange its code.

A plant names a function as `module:function` or `module:Class.method`. The change finds its place by the names that the
place mentions. If there is no such place, or more than one, the plant is outdated and Misplaced is raised.
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
Match = TypeVar('Match')


class Constant(NamedTuple):
    value: object


class Plant(NamedTuple):
    target: str
    change: Change | Constant


class Bug(NamedTuple):
    """The plants of a bug, and the scenarios that find it, the cheapest first."""

    plants: tuple[Plant, ...]
    scenarios: tuple[str, ...]


def make_bug(target: str, change: Change | Constant, *scenarios: str) -> Bug:
    return Bug((Plant(target, change),), scenarios)


def make_pair(first: Bug, second: Bug, *scenarios: str) -> Bug:
    """Make one bug of two that cover each other: neither is found alone."""
    return Bug((*first.plants, *second.plants), scenarios)


class Misplaced(AssertionError):
    """The function, or the place in it, does not exist or is not the only one."""


@contextmanager
def plant_bugs(plants: Sequence[Plant]) -> Iterator[None]:
    assert len({plant.target for plant in plants}) == len(plants), 'one plant a function: both() joins changes'
    with ExitStack() as stack:
        for plant in plants:
            stack.enter_context(_plant_bug(plant))
        yield


@contextmanager
def _plant_bug(plant: Plant) -> Iterator[None]:
    module_name, _, name = plant.target.partition(':')
    module = importlib.import_module(module_name)
    if isinstance(plant.change, Constant):
        if name not in vars(module):
            raise Misplaced(f'{plant.target}: there is no such constant')
        with mock.patch.object(module, name, plant.change.value):
            yield
        return
    function = _find_function(module, name)
    before = function.__code__
    # Exchange the code, not the name: a module that imported the function by name gets the bug, too.
    function.__code__ = _compile_changed(module, name, plant)
    try:
        yield
    finally:
        function.__code__ = before


def _find_function(module: ModuleType, name: str) -> FunctionType:
    value: object = module
    for part in name.split('.'):
        value = inspect.getattr_static(value, part, None)
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if not isinstance(value, FunctionType):
        raise Misplaced(f'{module.__name__}:{name}: there is no such function')
    return inspect.unwrap(value)


def _compile_changed(module: ModuleType, name: str, plant: Plant) -> CodeType:
    tree = ast.parse(inspect.getsource(module))
    node: ast.AST = tree
    for part in name.split('.'):
        (node,) = (child for child in ast.iter_child_nodes(node) if getattr(child, 'name', None) == part)
    assert isinstance(node, Function)
    assert not isinstance(plant.change, Constant)
    try:
        plant.change(node)
    except Misplaced as error:
        raise Misplaced(f'{plant.target}: {error}') from None
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), 'exec')
    return next(nested for nested in _list_nested_code(code) if nested.co_qualname == name)


def _list_nested_code(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _list_nested_code(constant)


def make_change_factory(edit: Callable[..., None]) -> Callable[..., Change]:
    return lambda *given, **named: lambda function: edit(function, *given, **named)


@make_change_factory
def combine(function: Function, *changes: Change) -> None:
    for change in changes:
        change(function)


@make_change_factory
def return_constant(function: Function, value: object) -> None:
    function.body = [ast.Return(_parse_expression(repr(value)))]


@make_change_factory
def replace_condition(function: Function, expression: str, *names: str) -> None:
    tests = [(node, 'test', node.test) for node in ast.walk(function) if isinstance(node, ast.If | ast.IfExp)]
    owner, field, _ = _get_only(names, [test for test in tests if _mentions(test[2], names)])
    setattr(owner, field, _parse_expression(expression))


def never(*names: str) -> Change:
    return replace_condition('False', *names)


def always(*names: str) -> Change:
    return replace_condition('True', *names)


@make_change_factory
def drop_statement(function: Function, *names: str) -> None:
    block, statement = _find_statement(function, names)
    block[block.index(statement)] = ast.Pass()


@make_change_factory
def move_last(function: Function, *names: str) -> None:
    block, statement = _find_statement(function, names)
    block.remove(statement)
    block.append(statement)


@make_change_factory
def move_first(function: Function, *names: str) -> None:
    block, statement = _find_statement(function, names)
    block.remove(statement)
    block.insert(0, statement)


@make_change_factory
def drop_operand(function: Function, *names: str, place: int | None = None) -> None:
    """Delete the one operand or element that mentions these names.

    It is an operand of and, or, -, |, or an element of a list, a tuple or a set.
    `place` is its index among several matches, in the order of the source.
    """
    matches = [
        (parent, node) for parent in ast.walk(function) for node in _list_operands(parent) if _mentions(node, names)
    ]
    # Keep only the innermost matches: the nodes around a match mention its names, too.
    inner = [(parent, node) for parent, node in matches if not any(_contains(node, other) for other, _ in matches)]
    inner.sort(key=lambda each: (each[1].lineno, each[1].col_offset))
    parent, operand = inner[place] if place is not None else _get_only(names, inner)
    if isinstance(parent, ast.BinOp):
        _replace_node(function, parent, parent.right if operand is parent.left else parent.left)
        return
    assert isinstance(parent, ast.BoolOp | ast.List | ast.Tuple | ast.Set)
    operands: list[ast.expr] = parent.values if isinstance(parent, ast.BoolOp) else parent.elts
    operands.remove(operand)
    if isinstance(parent, ast.BoolOp) and len(operands) == 1:
        _replace_node(function, parent, operands[0])


@make_change_factory
def drop_argument(function: Function, call: str, *names: str) -> None:
    matches = [
        (arguments, argument)
        for node in _find_calls(function, call)
        for arguments in (node.args, node.keywords)
        for argument in arguments
        if _mentions(argument, names)
    ]
    arguments, argument = _get_only((call, *names), matches)
    arguments.remove(argument)  # type: ignore[arg-type]


@make_change_factory
def replace_argument(function: Function, call: str, position: int, expression: str) -> None:
    _get_only((call,), _find_calls(function, call)).args[position] = _parse_expression(expression)


@make_change_factory
def replace_call(function: Function, call: str, expression: str) -> None:
    _replace_node(function, _get_only((call,), _find_calls(function, call)), _parse_expression(expression))


@make_change_factory
def replace_assignment(function: Function, name: str, expression: str) -> None:
    assignments = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    if not assignments:
        raise Misplaced(f'nothing is assigned to {name}')
    min(assignments, key=lambda each: each.lineno).value = _parse_expression(expression)


@make_change_factory
def replace_return(function: Function, expression: str) -> None:
    statements = [statement for statement in function.body if isinstance(statement, ast.Return)]
    if not statements:
        raise Misplaced('it does not end with a return')
    statements[-1].value = _parse_expression(expression)


@make_change_factory
def replace_handler(function: Function, before: str, after: str) -> None:
    handlers = [node for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.type]
    matches = [node for node in handlers if ast.unparse(node.type or node) == before]
    _get_only((before,), matches).type = _parse_expression(after)


def _get_only(names: Sequence[str], matches: Sequence[Match]) -> Match:
    if len(matches) != 1:
        raise Misplaced(f'{len(matches)} places mention {", ".join(names)}')
    return matches[0]


def _mentions(node: ast.AST, names: Sequence[str]) -> bool:
    mentioned = set()
    for child in ast.walk(node):
        mentioned |= {getattr(child, field, None) for field in ('id', 'attr', 'arg', 'name')}
    return mentioned.issuperset(names)


def _find_statement(function: Function, names: Sequence[str]) -> tuple[list[ast.stmt], ast.stmt]:
    simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Delete | ast.Return | ast.Raise
    blocks = [
        block
        for node in ast.walk(function)
        for field in ('body', 'orelse', 'finalbody')
        if isinstance(block := getattr(node, field, None), list)
    ]
    return _get_only(
        names,
        [
            (block, statement)
            for block in blocks
            for statement in block
            if isinstance(statement, simple) and _mentions(statement, names)
        ],
    )


def _list_operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    is_read = isinstance(getattr(node, 'ctx', None), ast.Load) or isinstance(node, ast.Set)
    return node.elts if isinstance(node, ast.List | ast.Tuple | ast.Set) and is_read else []


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return any(node is inner for node in ast.walk(outer))


def _find_calls(function: Function, name: str) -> list[ast.Call]:
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, 'id', getattr(call.func, 'attr', None)) == name]


def _parse_expression(text: str) -> ast.expr:
    return ast.parse(text, mode='eval').body


def _replace_node(function: Function, before: ast.AST, after: ast.expr) -> None:
    class Exchange(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return after if node is before else self.generic_visit(node)

    Exchange().visit(function)
