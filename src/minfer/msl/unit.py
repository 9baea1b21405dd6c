"""What the front end knows about a Metal source: plain data that every back end reads.

Positions (`start`, `end`, ...) are indices into `Unit.tokens`, half open. A back end never parses; it prints the tokens
and replaces the ranges that are described here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .lexer import Token

SPACES = frozenset(["device", "constant", "threadgroup", "thread"])
BUILTINS_3D = frozenset(
    [
        "thread_position_in_grid",
        "threadgroup_position_in_grid",
        "thread_position_in_threadgroup",
        "threads_per_threadgroup",
        "dispatch_threads_per_threadgroup",
        "threads_per_grid",
        "threadgroups_per_grid",
    ]
)
BUILTINS_1D = frozenset(
    [
        "thread_index_in_threadgroup",
        "thread_index_in_simdgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "threads_per_simdgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "dispatch_quadgroups_per_threadgroup",
    ]
)
SCALARS = frozenset(
    [
        "bool",
        "char",
        "uchar",
        "short",
        "ushort",
        "int",
        "uint",
        "long",
        "ulong",
        "half",
        "bfloat",
        "float",
        "int8_t",
        "uint8_t",
        "int16_t",
        "uint16_t",
        "int32_t",
        "uint32_t",
        "int64_t",
        "uint64_t",
        "size_t",
    ]
)


@dataclass(slots=True)
class Param:
    """One kernel parameter. `kind` is buffer, threadgroup or builtin; `form` pointer, reference or value.

    `index` is the buffer or threadgroup slot; `builtin` the attribute's name; `condition` the function constant that
    must be true for the argument to exist. `decl` is the range of tokens without the attributes, `type_end` ends its
    type part (before * or & or the name).
    """

    name: str
    kind: str
    space: str
    form: str
    const: bool
    decl: tuple[int, int]
    type_end: int
    index: int = -1
    builtin: str = ""
    condition: str = ""
    line: int = 0


@dataclass(slots=True)
class ThreadgroupVar:
    """`threadgroup T name[2][3]` in a kernel's body: one per declarator; `number` counts them within the kernel.

    `start`..`end` is the whole declaration up to and with its semicolon (shared by the declarators of one statement).
    """

    name: str
    number: int
    type: tuple[int, int]
    dims: tuple[int, int]
    start: int
    end: int


@dataclass(slots=True)
class Kernel:
    """A kernel function or template. `start` is its first token after a template header, `sig` the `(`...`)` range."""

    name: str
    scope: str
    params: list[Param]
    template: tuple[int, int] | None
    start: int
    sig: tuple[int, int]
    body: tuple[int, int]
    file: str
    line: int
    max_threads: int = 0
    threadgroup: list[ThreadgroupVar] = field(default_factory=list)
    uses: frozenset[str] = frozenset()


@dataclass(slots=True)
class Instance:
    """A callable entry point: a kernel, or an explicit instantiation `kernel<args>` under its host name."""

    name: str
    kernel: Kernel
    args: tuple[int, int] | None
    constants: tuple[str, ...] = ()


@dataclass(slots=True)
class FunctionConstant:
    """`constant T name [[function_constant(index)]];`"""

    name: str
    type: str
    index: int
    line: int


@dataclass(slots=True)
class Function:
    """A function that is no kernel, for checks: its name, parameter list, body and the names that its body mentions."""

    name: str
    sig: tuple[int, int]
    body: tuple[int, int]
    uses: frozenset[str]
    line: int
    member: bool = False
    template: bool = False


@dataclass(slots=True)
class Unit:
    """A parsed source. `derived` are program-scope constants whose initializer mentions a function constant:
    (name, declaration range, type range, initializer range). `removed` are ranges a back end must not print."""

    tokens: list[Token]
    file: str
    pair: dict[int, int] = field(default_factory=dict)  # where the bracket that opens at a token closes
    kernels: dict[str, Kernel] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    constants: dict[str, FunctionConstant] = field(default_factory=dict)
    derived: list[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]]] = field(default_factory=list)
    constant_decls: list[tuple[int, int]] = field(default_factory=list)
    removed: list[tuple[int, int]] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    types: list[tuple[str, int, int]] = field(default_factory=list)
    variables: list[tuple[int, int]] = field(default_factory=list)
    members: set[str] = field(default_factory=set)

    def text(self, span: tuple[int, int]) -> str:
        """The source text of a token range, spaces normalized."""
        return " ".join(t.text for t in self.tokens[span[0] : span[1]])
