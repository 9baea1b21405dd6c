"""The environment that chat templates run in: Hugging Face's Jinja, sandboxed, with bounded work and memory.

A chat template comes with a model file from anywhere, so it is hostile input. Jinja's immutable sandbox keeps it away
from Python's internals; this module keeps it from hanging or from eating memory. The rule:

- every value that a template makes has at most `Budget.value_limit` units, counted as a tree (a character is one unit,
  a container element eight): so printing, comparing or hashing any value is cheap, even one that nests itself cleverly;
- all values made, loop rounds and calls together cost at most `Budget.limit` units, and at most `SECONDS` of CPU time;
- what could be large before it can be counted (`*`, `**`, `%`, format, replace, join, indent) is estimated first;
- methods and filters that are not on the lists below do not exist.

Both limits grow with the input, so a long conversation is never refused for its length.
"""

from __future__ import annotations

import contextvars
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, ValuesView
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from jinja2.parser import Parser

T = TypeVar("T")

SECONDS = 10.0
STEP = 256  # units a loop round or a call costs
ELEMENT = 8  # units a container element costs besides its value
MAX_DEPTH = 100  # nesting of input and of values: deeper breaks Python's own recursion
MAX_BITS = 4096  # size of an integer
MAX_COUNT = 10_000  # a width, a batch size, a number of digits


class LimitError(SecurityError):
    """A template went over one of its limits."""


def weigh(value: object, limit: int) -> tuple[int, int, int]:
    """(units, elements, depth) of a value counted as a tree. Raises LimitError once over `limit`."""
    units = elements = depth = 0
    level = [value]
    while level:
        inner: list[object] = []
        for item in level:
            if isinstance(item, str):
                units += len(item)
            elif isinstance(item, Mapping):
                elements += len(item)
                units += 2 * ELEMENT * len(item)
                inner.extend(item.keys())
                inner.extend(item.values())
            elif isinstance(item, list | tuple | Set | ValuesView):
                elements += len(item)
                units += ELEMENT * len(item)
                inner.extend(item)
            elif isinstance(item, int):
                if item.bit_length() > MAX_BITS:
                    raise LimitError(f"the template handles an integer of {item.bit_length()} bits")
                units += 1
            else:
                units += 1
            if units > limit:
                raise LimitError(f"the template makes a value of more than {limit} units")
        level = inner
        depth += 1
        if depth > MAX_DEPTH:
            raise LimitError(f"the template nests values deeper than {MAX_DEPTH}")
    return units, elements, depth


class Budget:
    """What one compilation or rendering may spend."""

    def __init__(self, input_units: int = 0) -> None:
        self.value_limit = 1_000_000 + 8 * input_units
        self.limit = 64_000_000 + 256 * input_units
        self.used = 0
        self._deadline = time.thread_time() + SECONDS

    def spend(self, units: int) -> None:
        """Raises LimitError over the limit of work or time."""
        self.used += units
        if self.used > self.limit:
            raise LimitError(f"the template does more than {self.limit} units of work")
        if time.thread_time() > self._deadline:
            raise LimitError(f"the template runs longer than {SECONDS:.0f} s")

    def foresee(self, units: int) -> None:
        """Raises LimitError if a value about to be made is too large; nothing is spent yet."""
        if units > self.value_limit:
            raise LimitError(f"the template makes a value of about {units} units; {self.value_limit} are allowed")

    def take(self, value: T) -> T:
        """Count a new value. Raises LimitError."""
        self.spend(STEP + weigh(value, self.value_limit)[0])
        return value


_budget: contextvars.ContextVar[Budget] = contextvars.ContextVar("budget")


@contextmanager
def budget(input_units: int = 0) -> Iterator[Budget]:
    """Give the block a fresh budget."""
    fresh = Budget(input_units)
    token = _budget.set(fresh)
    try:
        yield fresh
    finally:
        _budget.reset(token)


def _count(value: object, what: str) -> None:
    if isinstance(value, int) and abs(value) > MAX_COUNT:
        raise LimitError(f"{what} of {value} in a template; at most {MAX_COUNT} is allowed")


def _bits(number: float) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def _foresee_format(pattern: str, values: object, mark: str) -> None:
    """Each field may print every value, and a width may pad it."""
    spent = _budget.get()
    fields = pattern.count(mark)
    widest = max((int(digits) for digits in re.findall(r"\d{1,20}", pattern)), default=0)
    if isinstance(values, tuple | dict):  # a width may also come from an argument
        given = values.values() if isinstance(values, dict) else values
        widest = max([widest, *(abs(v) for v in given if isinstance(v, int) and ("*" in pattern or "{" in pattern))])
    spent.foresee(len(pattern) + fields * (widest + 2 * weigh(values, spent.value_limit)[0]))


def _foresee_replace(text: str, old: str, new: str) -> None:
    _budget.get().foresee(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _join(separator: str, items: Iterable[Any]) -> list[Any]:
    found = list(items)
    _budget.get().foresee(weigh(found, _budget.get().value_limit)[0] + len(separator) * len(found))
    return found


# The methods that text offers. Those that pad (center, ljust, zfill, expandtabs) or build tables are left out.
_METHOD_NAMES = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex
    rpartition rsplit rstrip split splitlines startswith strip swapcase title upper
"""
_TEXT_METHODS = frozenset(_METHOD_NAMES.split())
_FILTERS = """
    abs attr batch capitalize count d default dictsort e escape first float forceescape format groupby indent int items
    join last length list lower map max min random reject rejectattr replace reverse round safe select selectattr slice
    sort string sum title trim truncate unique upper urlencode wordcount
"""


def _check_filter(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Foresee what a filter would make; `args` start with the filtered value."""
    if name in ("batch", "slice", "round", "truncate"):
        for value in (*args[1:2], *kwargs.values()):
            _count(value, f"the filter {name} with a size")
    elif name == "sum":
        for value in (*args[2:3], *(kwargs[key] for key in ("start",) if key in kwargs)):
            if not isinstance(value, int | float):
                raise LimitError("the filter sum starts from something that is not a number")
    elif name == "replace":
        old, new = ([*args[1:3], kwargs.get("old", ""), kwargs.get("new", "")])[:2]
        _foresee_replace(str(args[0]), str(old), str(new))
    elif name == "format":
        _foresee_format(str(args[0]), kwargs or args[1:], "%")
    elif name == "join":
        separator = args[1] if len(args) > 1 else kwargs.get("d", "")
        args = (_join(str(separator), args[0]), *args[1:])
    elif name == "indent":
        width = args[1] if len(args) > 1 else kwargs.get("width", 4)
        _count(width, "the filter indent with a width")
        text = str(args[0])
        size = len(width) if isinstance(width, str) else int(width)
        _budget.get().foresee(len(text) + (len(text.splitlines()) + 1) * size)
    return args


_PASSES = ("jinja_pass_arg",)  # how jinja marks filters that want the context or the environment first


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    leading = 1 if hasattr(function, _PASSES[0]) else 0

    def guarded(*args: Any, **kwargs: Any) -> Any:
        rest = _check_filter(name, args[leading:], kwargs)
        return _budget.get().take(function(*args[:leading], *rest, **kwargs))

    guarded.__dict__.update(getattr(function, "__dict__", {}))
    guarded.__name__ = name
    return guarded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face's `tojson`: no HTML escapes, keys in their order."""
    spent = _budget.get()
    units, elements, depth = weigh(value, spent.value_limit)
    width = len(indent) if isinstance(indent, str) else abs(int(indent or 0))
    apart = sum(map(len, separators)) if separators else 4
    spent.foresee(units + elements * (width * depth + apart))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return spent.take(text)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateRuntimeError(str(message))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"%[^A-Za-z%]*\d", pattern):
        raise LimitError("strftime_now with a width or a long pattern")
    return datetime.now().strftime(pattern)


def _range(*args: int) -> range:
    made = range(*args)
    _budget.get().foresee(ELEMENT * len(made) if len(made) < 1 << 40 else 1 << 60)
    _budget.get().spend(len(made))
    return made


class _TemplateNamespace(Namespace):
    """Jinja's namespace, without underscored names, and printed without its contents (they may nest without end)."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        Namespace.__init__(self)
        for name, value in dict(*rest, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a template may not set {name!r} on a namespace")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Instrument(NodeTransformer):
    """Routes what the sandbox cannot see (literals, `~`, slices, loop rounds) through the environment's hooks."""

    @staticmethod
    def _call(hook: str, *args: nodes.Expr, at: nodes.Node) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute(hook), list(args), [], None, None, lineno=at.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("take_value", node, at=node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("take_value", node, at=node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("take_value", node, at=node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("take_value", node, at=node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return self._call("join_values", *node.nodes, at=node)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = self._call("take_value", nodes.Const(None), at=node)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        return node


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up (trim and lstrip blocks, loop controls, its globals), within a `budget`."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _Generation],
            optimized=False,  # no constant folding: it would run outside the hooks
            finalize=self.take_output,
        )
        self.filters = {name: _guard_filter(name, self.filters[name]) for name in _FILTERS.split()}
        self.filters["tojson"] = _tojson
        self.globals = {
            "range": _range,
            "dict": dict,
            "cycler": jinja2.utils.Cycler,
            "joiner": jinja2.utils.Joiner,
            "namespace": _TemplateNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        return tree

    def take_value(self, value: Any) -> Any:
        """Count a value that a template made. Raises LimitError."""
        return _budget.get().take(value)

    def take_output(self, value: Any) -> Any:
        """Count a value before it is printed. Raises LimitError."""
        return _budget.get().take(value)

    def join_values(self, *values: Any) -> str:
        """The operator `~`. Raises LimitError."""
        return self.take_value("".join(map(str, _join("", values))))  # type: ignore[no-any-return]

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block, a macro or the whole template printed. Raises LimitError."""
        spent, made, size = _budget.get(), [], 0
        for part in parts:
            made.append(part)
            size += len(part)
            spent.foresee(size)
        spent.spend(size)
        return "".join(made)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _TEXT_METHODS
        if isinstance(obj, int | float | complex | bytes):
            return False
        if obj is dict:
            return attr == "fromkeys"
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        if attribute.startswith("_"):  # no innocent template asks for these
            raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")
        return super().unsafe_undefined(obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def guarded(*args: Any, **kwargs: Any) -> str:
            _foresee_format(value.__self__, (*args, *kwargs.values()), "{")
            return safe(*args, **kwargs)

        return guarded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str):
            if name == "replace":
                _foresee_replace(text, *(str(part) for part in args[:2]))
            elif name == "join" and args:
                args = (_join(text, args[0]),)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(text, TemplateEnvironment):  # one of our own hooks: counted already
            return result
        return _budget.get().take(result)

    def call_binop(self, context: Any, operator_: str, left: Any, right: Any) -> Any:
        spent = _budget.get()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator_ == "*" and not numbers:
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(many, "__len__"):
                    spent.foresee(max(times, 0) * max(weigh(many, spent.value_limit)[0], ELEMENT))
        elif operator_ == "+" and not numbers:
            spent.foresee(weigh(left, spent.value_limit)[0] + weigh(right, spent.value_limit)[0])
        elif operator_ == "%" and isinstance(left, str):
            _foresee_format(left, right if isinstance(right, tuple | dict) else (right,), "%")
        elif operator_ == "**" and numbers and abs(right) * _bits(left) > MAX_BITS:
            raise LimitError(f"the template computes a power of more than {MAX_BITS} bits")
        return spent.take(self.binop_table[operator_](left, right))
