"""The front end: a token walk over declarations that yields a `Unit`. It is no C++ parser.

It finds what Metal adds to C++ (kernels, attributes, address spaces, threadgroup variables, function constants, host
names) and leaves every expression to the back end's compiler. What it cannot place is an error, never passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cursor import Cursor
from .ppexpr import evaluate
from .refuse import refuse
from .unit import (
    BUILTINS_1D,
    BUILTINS_3D,
    SCALARS,
    SPACES,
    Function,
    FunctionConstant,
    Instance,
    Kernel,
    Param,
    ThreadgroupVar,
    Unit,
)

if TYPE_CHECKING:
    from .lexer import Token

_TYPE_WORDS = frozenset(["struct", "class", "union", "enum"])
_NOT_FUNCTIONS = frozenset(["decltype", "alignas", "__attribute__", "noexcept", "sizeof", "typeof", "__declspec"])
_IGNORED_ATTRIBUTES = frozenset(
    ["maybe_unused", "unused", "nodiscard", "gnu::unused", "clang::always_inline", "gnu::always_inline"]
)
MAX_BUFFERS = 31


def parse(tokens: list[Token], file: str) -> Unit:
    """Describe a preprocessed source. Raises SourceError with file and line."""
    unit = Unit(tokens, file)
    _Walker(unit).scope(0, len(tokens), "")
    refuse(unit)
    for instance in unit.instances.values():
        instance.constants = _constants_used(unit, instance.kernel)
    return unit


def _constants_used(unit: Unit, kernel: Kernel) -> tuple[str, ...]:
    """Function constants that the kernel may read, through any function it names (an over-estimate by name)."""
    by_name: dict[str, set[str]] = {}
    for f in unit.functions:
        by_name.setdefault(f.name, set()).update(f.uses)
    for name, _, _, init in unit.derived:
        by_name.setdefault(name, set()).update(t.text for t in unit.tokens[init[0] : init[1]] if t.kind == "id")
    seen: set[str] = set()
    todo = set(kernel.uses)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo |= by_name.get(name, set()) - seen
    return tuple(n for n in unit.constants if n in seen)


class _Walker(Cursor):
    # ---- declarations

    def scope(self, i: int, end: int, scope: str) -> None:
        while i < end:
            t = self.text(i)
            if t == ";" or self.tokens[i].kind == "pragma" or (t == "inline" and self.text(i + 1) == "namespace"):
                i += 1
            elif t == "namespace":
                j = i + 1
                while self.text(j) not in ("{", ";", "="):
                    j += 1
                if self.text(j) == "{":
                    name = "".join(self.text(k) for k in range(i + 1, j))
                    self.scope(j + 1, self.pair[j], f"{scope}{name}::" if name else scope)
                    i = self.pair[j] + 1
                else:
                    i = self.semicolon(j)
            elif t in ("using", "typedef", "static_assert"):
                i = self.semicolon(i)
            else:
                i = self.declaration(i, scope)

    def declaration(self, start: int, scope: str) -> int:
        i, template = start, None
        while self.text(i) == "template":
            if self.text(i + 1) != "<":
                end = self.semicolon(i)
                self.instantiation(i, end)
                return end
            close = self.angle_end(i + 1)
            template = (template[0] if template else i, close)
            i = close
        if template and self.text(i) in ("using",):
            return self.semicolon(i)
        first, params, name, equals = i, -1, -1, False
        is_type = False
        while i < len(self.tokens):
            t = self.text(i)
            if t == ";":
                self.variable(first, i + 1, params if not equals else -1, is_type, scope)
                return i + 1
            if self.is_attribute(i):
                i = self.pair[i]
            elif t in _TYPE_WORDS and params < 0:
                is_type = True
            elif t == "(":
                if (
                    params < 0
                    and self.tokens[i - 1].kind == "id"
                    and self.text(i - 1) not in _NOT_FUNCTIONS
                    and not equals
                ):
                    if self.text(i - 1) == "operator":
                        i = self.pair[i] + 1
                        continue
                    params, name = i, i - 1
                elif params < 0 and self.text(i - 1) == ">" and not equals:  # a specialization: name<args>(...)
                    params, name = (
                        i,
                        next(
                            (k - 1 for k in range(i - 2, first, -1) if self.text(k) == "<" and self.angle_end(k) == i),
                            i - 1,
                        ),
                    )
                elif params < 0 and "operator" in (self.text(i - 2), self.text(i - 3)):
                    params, name = i, i - 1
                i = self.pair[i]
            elif t == "=" and self.text(i - 1) != "operator":
                equals = True
            elif t == "{":
                if is_type and params < 0:
                    self.type_body(first, i, scope)
                elif params >= 0 and not equals:
                    self.function(first, template, params, name, i, scope)
                    return self.pair[i] + 1
                i = self.pair[i]
            i += 1
        raise self.tokens[start].error("declaration without an end")

    def type_body(self, first: int, brace: int, scope: str) -> None:
        """Record members (a swizzle must not be taken for one) and member functions."""
        name = next((self.text(k) for k in range(brace - 1, first, -1) if self.tokens[k].kind == "id"), "")
        end = self.pair[brace]
        self.unit.types.append((name, brace, end))
        if self.text(first) == "enum":
            return
        i = brace + 1
        while i < end:
            t = self.text(i)
            if self.is_attribute(i):
                i = self.pair[i]
            elif t == "(":
                close = self.pair[i]
                j = close + 1
                while self.text(j) in ("const", "noexcept", "thread", "device", "constant", "threadgroup"):
                    j += 1
                if self.text(j) == ":":  # constructor initializers
                    while self.text(j) not in ("{", ";"):
                        j = self.pair.get(j, j) + 1
                    if self.text(self.pair[j] + 1 if j in self.pair else j) == "{":
                        j = self.pair[j] + 1
                if self.text(j) == "{" and self.tokens[i - 1].kind in ("id", "op"):
                    span = (j, self.pair[j] + 1)
                    self.no_threadgroup(*span)
                    self.unit.functions.append(
                        Function(
                            self.text(i - 1), (i, close + 1), span, self.names(*span), self.tokens[i].line, member=True
                        )
                    )
                    i = self.pair[j]
                else:
                    i = close
            elif t == "{":
                i = i if self._nested_type(i, brace) else self.pair[i]
            elif (
                self.tokens[i].kind == "id"
                and self.text(i + 1) in (";", ",", "[", "=", ":")
                and self.text(i - 1) not in ("(", "using")
            ):
                self.unit.members.add(t)
            i += 1

    def _nested_type(self, brace: int, outer: int) -> bool:
        k = brace - 1
        while k > outer and self.text(k) not in (";", "{", "}"):
            if self.text(k) in _TYPE_WORDS:
                return True
            k -= 1
        return False

    def function(
        self, first: int, template: tuple[int, int] | None, params: int, name: int, brace: int, scope: str
    ) -> None:
        body = (brace, self.pair[brace] + 1)
        head = [self.text(k) for k in range(first, params)]
        attrs = self.attributes(first, params)
        if "kernel" in head or any(a[0] == "kernel" for a in attrs):
            self.kernel(first, template, params, body, attrs, scope)
            return
        for attr, _, at in attrs:
            if attr not in _IGNORED_ATTRIBUTES and not attr.startswith(("gnu::", "clang::")):
                raise at.error(f"attribute {attr!r} on a function that is no kernel")
        self.no_threadgroup(*body)
        self.unit.functions.append(
            Function(
                self.text(name),
                (params, self.pair[params] + 1),
                body,
                self.names(*body),
                self.tokens[name].line,
                template=template is not None,
            )
        )

    def variable(self, first: int, end: int, params: int, is_type: bool, scope: str) -> None:
        """A declaration that ends in `;` at program scope: function constants, constants, prototypes."""
        attrs = self.attributes(first, end)
        words = [self.text(k) for k in range(first, end)]
        for attr, args, at in attrs:
            if attr == "function_constant":
                self.function_constant(first, end, args, at)
                return
            if attr not in _IGNORED_ATTRIBUTES:
                raise at.error(f"unknown attribute {attr!r} on a declaration at program scope")
        if params >= 0 or is_type:
            return
        if "threadgroup" in words:
            raise self.tokens[first].error("a threadgroup variable at program scope; declare it in a kernel")
        self.unit.variables.append((first, end))
        if "=" in words and any(w in self.unit.constants or any(w == d[0] for d in self.unit.derived) for w in words):
            equals = next(k for k in range(first, end) if self.text(k) == "=")
            name = equals - 1
            if self.tokens[name].kind == "id":
                self.unit.derived.append((self.text(name), (first, end), (first, name), (equals + 1, end - 1)))

    def function_constant(self, first: int, end: int, args: list[Token], at: Token) -> None:
        words = [t for t in self.tokens[first:end] if t.kind == "id"]
        names = [t.text for t in words[: next(k for k, t in enumerate(words) if t.text == "function_constant")]]
        plain = [n for n in names if n not in ("constant", "const", "static")]
        if "constant" not in names or len(plain) != 2:
            raise at.error("a function constant is declared as: constant T name [[function_constant(index)]];")
        kind, name = plain
        if kind.rstrip("234") not in SCALARS:
            raise at.error(f"a function constant of type {kind!r}; scalars and vectors of scalars are allowed")
        if any(self.text(k) == "=" for k in range(first, end)):
            raise at.error(f"function constant {name!r} has an initializer; its value comes with the pipeline")
        index = evaluate(args, at, {})
        if not 0 <= index < 65536:
            raise at.error(f"function constant index {index} is not between 0 and 65535")
        for other in self.unit.constants.values():
            if other.index == index and other.name != name:
                raise at.error(f"function constants {other.name!r} and {name!r} share index {index}")
        self.unit.constants[name] = FunctionConstant(name, kind, index, at.line)
        self.unit.constant_decls.append((first, end))

    # ---- kernels

    def kernel(
        self,
        first: int,
        template: tuple[int, int] | None,
        params: int,
        body: tuple[int, int],
        attrs: list[tuple[str, list[Token], Token]],
        scope: str,
    ) -> None:
        name = self.text(params - 1)
        at = self.tokens[params - 1]
        host, max_threads = "", 0
        for attr, args, where in attrs:
            if attr == "host_name":
                host = args[0].text[1:-1] if len(args) == 1 and args[0].kind == "str" else ""
                if not host:
                    raise where.error("host_name takes one string")
            elif attr == "max_total_threads_per_threadgroup":
                max_threads = evaluate(args, where, {})
                if not 1 <= max_threads <= 1024:
                    raise where.error(f"max_total_threads_per_threadgroup({max_threads}) is not between 1 and 1024")
            elif attr not in ("kernel", *_IGNORED_ATTRIBUTES):
                raise where.error(f"unknown attribute {attr!r} on kernel {name!r}")
        result = [self.text(k) for k in range(first, params - 1) if self.text(k) == "void"]
        if not result:
            raise at.error(f"kernel {name!r} must return void")
        if name == "main":
            raise at.error("a kernel cannot be named main")
        if name in self.unit.kernels:
            raise at.error(f"kernel {name!r} is defined twice")
        kernel = Kernel(
            name,
            scope,
            self.parameters(name, params),
            template,
            first,
            (params, self.pair[params] + 1),
            body,
            at.file,
            at.line,
            max_threads,
            self.threadgroup_variables(*body),
            self.names(params, body[1]),
        )
        self.unit.kernels[name] = kernel
        if template is None:
            self.add_instance(Instance(host or name, kernel, None), at)

    def add_instance(self, instance: Instance, at: Token) -> None:
        if instance.name in self.unit.instances:
            raise at.error(f"two kernels are named {instance.name!r}")
        self.unit.instances[instance.name] = instance

    def parameters(self, kernel: str, params: int) -> list[Param]:
        out: list[Param] = []
        for a, b in self.split(params + 1, self.pair[params]):
            if b - a == 1 and self.text(a) == "void":
                continue
            out.append(self.parameter(kernel, a, b))
        taken = {p.index for p in out if p.kind == "buffer" and p.index >= 0}
        free = (k for k in range(len(taken) + len(out) + 1) if k not in taken)
        for p in out:
            if p.kind == "buffer" and p.index < 0:
                p.index = next(free)
        seen: dict[tuple[str, int], Param] = {}
        for p in out:
            if p.kind == "builtin":
                continue
            where = self.tokens[p.decl[0]]
            limit = MAX_BUFFERS
            if not 0 <= p.index < limit:
                raise where.error(
                    f"{p.kind}({p.index}) of parameter {p.name!r}: a kernel has {limit} of them, 0 to {limit - 1}"
                )
            other = seen.setdefault((p.kind, p.index), p)
            if other is not p and not (p.condition and other.condition):
                raise where.error(f"parameters {other.name!r} and {p.name!r} share {p.kind}({p.index})")
        return out

    def parameter(self, kernel: str, a: int, b: int) -> Param:
        at = self.tokens[a]
        attrs = self.attributes(a, b)
        end = next((k for k in range(a, b) if self.is_attribute(k)), b)
        words = [self.text(k) for k in range(a, end)]
        space = next((w for w in words if w in SPACES), "")
        star = next(
            (
                k
                for k in range(a, end)
                if self.text(k) in ("*", "&") and self.tokens[k].kind == "op" and not self._inside_angle(a, k)
            ),
            -1,
        )
        form = "value" if star < 0 else "pointer" if self.text(star) == "*" else "reference"
        if form == "pointer" and self.text(star + 1) in ("*", "const") and "*" in words[star + 1 - a :]:
            raise at.error(f"kernel {kernel!r} takes a pointer to a pointer, which is no kernel argument")
        name_at = next((k for k in range(end - 1, a, -1) if self.tokens[k].kind == "id"), -1)
        if self.text(end - 1) in ("]",) and star < 0:
            raise at.error(f"array parameter of kernel {kernel!r}; pass a pointer")
        if name_at < 0 or self.text(name_at) in SPACES:
            raise at.error(f"cannot read this parameter of kernel {kernel!r}")
        type_end = star if star >= 0 else name_at
        p = Param(self.text(name_at), "", space, form, False, (a, end), type_end, line=at.line)
        p.const = space == "constant" or "const" in [self.text(k) for k in range(a, type_end)]
        for attr, args, where in attrs:
            if attr in ("buffer", "threadgroup"):
                if p.kind:
                    raise where.error(f"parameter {p.name!r} has two binding attributes")
                p.kind, p.index = attr, evaluate(args, where, {})
            elif attr in BUILTINS_3D or attr in BUILTINS_1D:
                if p.kind:
                    raise where.error(f"parameter {p.name!r} has two binding attributes")
                p.kind, p.builtin = "builtin", attr
            elif attr == "function_constant":
                p.condition = args[0].text if len(args) == 1 else ""
                if p.condition not in self.unit.constants and not any(d[0] == p.condition for d in self.unit.derived):
                    raise where.error("function_constant on a parameter takes the name of a function constant")
            elif attr not in _IGNORED_ATTRIBUTES:
                raise where.error(f"unknown attribute {attr!r} on parameter {p.name!r} of kernel {kernel!r}")
        self._check_parameter(kernel, p, at)
        return p

    def _inside_angle(self, a: int, k: int) -> bool:
        depth = 0
        for j in range(a, k):
            depth += {"<": 1, ">": -1}.get(self.text(j), 0)
        return depth > 0

    def _check_parameter(self, kernel: str, p: Param, at: Token) -> None:
        what = f"parameter {p.name!r} of kernel {kernel!r}"
        if p.form != "value" and not p.space:
            raise at.error(f"{what} is a {p.form} without an address space (device, constant or threadgroup)")
        if p.space == "thread":
            raise at.error(f"{what} points to thread memory, which is no kernel argument")
        if not p.kind and p.form != "value" and p.space in ("device", "constant"):
            p.kind = "buffer"
        if p.kind == "buffer" and (p.form == "value" or p.space not in ("device", "constant")):
            raise at.error(f"{what} has [[buffer]] but is no device or constant pointer or reference")
        if p.kind == "threadgroup" and (p.form == "value" or p.space != "threadgroup"):
            raise at.error(f"{what} has [[threadgroup]] but is no threadgroup pointer")
        if p.kind == "builtin":
            kind = self.text(p.type_end - 1)
            wide = kind[-1:] in ("2", "3")
            if p.form != "value" or kind.rstrip("23") not in ("uint", "ushort", "uint32_t", "uint16_t"):
                raise at.error(f"{what} has [[{p.builtin}]] and must be uint or ushort, or a vector of them")
            if wide and p.builtin in BUILTINS_1D:
                raise at.error(f"{what} has [[{p.builtin}]], which is a scalar")
        if not p.kind:
            raise at.error(f"{what} has no attribute that says where it comes from")

    def instantiation(self, first: int, end: int) -> None:
        """`template [[host_name("x")]] kernel type name<args>...;`; without a host name, the template's name."""
        attrs = self.attributes(first, end)
        words = [self.text(k) for k in range(first, end)]
        if "kernel" not in words:
            return  # an explicit instantiation of an ordinary template: C++ takes it
        self.unit.removed.append((first, end))
        host = next(
            (a[1][0].text[1:-1] for a in attrs if a[0] == "host_name" and len(a[1]) == 1 and a[1][0].kind == "str"), ""
        )
        for k in range(first, end):
            if self.text(k) in self.unit.kernels and self.text(k + 1) == "<" and self.text(k - 1) != "(":
                kernel = self.unit.kernels[self.text(k)]
                if kernel.template is None:
                    raise self.tokens[k].error(f"kernel {kernel.name!r} is no template")
                self.add_instance(Instance(host or kernel.name, kernel, (k + 1, self.angle_end(k + 1))), self.tokens[k])
                return
        raise self.tokens[first].error(f"no kernel template is known for the instantiation of {host or 'a kernel'!r}")

    # ---- threadgroup variables

    def no_threadgroup(self, start: int, end: int) -> None:
        found = self.threadgroup_variables(start, end)
        if found:
            raise self.tokens[found[0].start].error(
                f"threadgroup variable {found[0].name!r} in a function that is no kernel"
            )

    def threadgroup_variables(self, start: int, end: int) -> list[ThreadgroupVar]:
        out: list[ThreadgroupVar] = []
        for i in range(start, end):
            if self.text(i) != "threadgroup" or self.tokens[i].kind != "id" or self.text(i - 1) in ("[", "::"):
                continue
            j = i + 1
            while self.text(j) in ("const", "volatile", "typename", "struct"):
                j += 1
            type_start = j if self.text(j - 1) not in ("const", "volatile") else i + 1
            j += 1
            while self.text(j) in ("::", "<"):
                j = self.angle_end(j) if self.text(j) == "<" else j + 2
            while self.text(j) in ("const", "volatile"):
                j += 1
            if self.text(j) in ("*", "&", "("):
                continue  # a pointer or reference to threadgroup memory
            if self.tokens[j].kind != "id":
                raise self.tokens[i].error("cannot tell what this threadgroup declares")
            before = self.text(i - 1)
            if before not in (";", "{", "}") and self.tokens[i - 1].kind != "pragma" and before != "static":
                raise self.tokens[i].error("a threadgroup variable must be a statement of its own")
            close = self.semicolon(j)
            first = i - 1 if before == "static" else i
            for a, b in self.split(j, close - 1):
                if self.tokens[a].kind != "id":
                    raise self.tokens[a].error("threadgroup variables and pointers in one declaration; split it")
                k = a + 1
                while k < b:
                    if self.text(k) != "[":
                        reason = (
                            "has an initializer"
                            if self.text(k) in ("=", "{", "(")
                            else f"is followed by {self.text(k)!r}"
                        )
                        raise self.tokens[a].error(f"threadgroup variable {self.text(a)!r} {reason}")
                    k = self.pair[k] + 1
                out.append(ThreadgroupVar(self.text(a), len(out), (type_start, j), (a + 1, b), first, close))
        return out
