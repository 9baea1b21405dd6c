"""The C++ back end: the text of a translation unit that runs on the software device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .emit import Emitter, Value
from .unit import SPACES, Instance, Param, ThreadgroupVar, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_VECTOR = re.compile(r"(bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234](x[234])?")


class CppEmitter(Emitter):
    """Threadgroup variables become references into the threadgroup's arena, looked up by number.

    With `lockstep`, every loop tells the runtime where it is: lanes are compared by their iteration.
    """

    def __init__(self, unit: Unit, constants: Mapping[str, Value], mode: str = "fast") -> None:
        self.lockstep = mode == "lockstep"
        super().__init__(unit, constants)
        if self.lockstep:
            self._mark_loops()
        if mode == "checked":
            self._mark_casts()

    def _mark_casts(self) -> None:
        """A cast to a vector pointer checks the address: compilers look at scalars only. `->*` binds like a cast."""
        tokens = self.tokens
        for i, t in enumerate(tokens):
            if t.text != "(" or tokens[close := self.unit.pair[i]].text != ")" or not 3 <= close - i <= 7:
                continue
            words = [w.text for w in tokens[i + 1 : close]]
            kinds = [w for w in words if w not in ("const", "volatile", "*", *SPACES)]
            following = tokens[close + 1]
            if (
                words[-1] == "*"
                and words.count("*") == 1
                and len(kinds) == 1
                and _VECTOR.fullmatch(kinds[0])
                and (following.kind == "id" or following.text in "(&")
            ):
                const = "const " if "const" in words or "constant" in words else ""
                self.replace(i, close + 1, f"msl_rt::Cast<{const}{kinds[0]} *>() ->*")

    def _mark_loops(self) -> None:
        tokens, pair = self.tokens, self.unit.pair
        closing: set[int] = set()  # the while of a do loop
        for i, t in enumerate(tokens):
            if t.kind != "id" or t.text not in ("for", "while", "do"):
                continue
            if t.text == "do":
                self.edits[i] = (i + 1, "MSL_LOOP do")
                j = i + 1
                while tokens[j].text not in (";", "{"):
                    j = pair.get(j, j) + 1
                closing.add(pair.get(j, j) + 1)
                continue
            first, last = i + 2, pair[i + 1]
            if i not in closing:
                self.edits[i] = (i + 1, f"MSL_LOOP {t.text}")
            if t.text == "for":
                semicolons = []
                j = first
                while j < last:
                    if tokens[j].text == ";":
                        semicolons.append(j)
                    j = pair.get(j, j) + 1
                if len(semicolons) != 2:  # over the elements of an array: no lane leaves early
                    self.edits[i] = (i + 1, "for")
                    continue
                first, last = semicolons[0] + 1, semicolons[1]
            if first == last:
                self.edits[first] = (first + 1, "msl_loop.next();")
            else:
                self.edits[first - 1] = (first, f"{tokens[first - 1].text} msl_loop.next() && (")
                self.edits[last] = (last + 1, f") {tokens[last].text}")

    def threadgroup_text(self, variables: list[ThreadgroupVar]) -> str:
        """One typedef and one reference a variable."""
        out = []
        for v in variables:
            kind = " ".join(t.text for t in self.tokens[v.type[0] : v.type[1]] if t.text not in ("const", "volatile"))
            dims = self.text_inline(*v.dims)
            out.append(
                f"typedef {kind} msl_t{v.number} {dims}; msl_t{v.number} & {v.name} = "
                f"*(msl_t{v.number} *)msl_rt::tg_variable({v.number}, sizeof(msl_t{v.number}));"
            )
        return " ".join(out)

    def text_inline(self, start: int, end: int) -> str:
        """Tokens on one line."""
        return " ".join(t.text for t in self.tokens[start:end])

    def unroll_text(self, pragma: str) -> str:
        """A macro of the C++ header would be too late for a pragma: the compiler sees both spellings by _Pragma."""
        return "" if self.lockstep else "MSL_UNROLL"

    def argument(self, p: Param) -> str:
        """The C++ expression that a wrapper passes for a kernel parameter."""
        if p.kind == "buffer":
            return f"msl_rt::{'buffer' if p.form == 'pointer' else 'buffer_ref'}(l, {p.index})"
        if p.kind == "threadgroup":
            return f"msl_rt::{'tg_buffer' if p.form == 'pointer' else 'tg_ref'}(l, {p.index})"
        return f"msl_rt::{p.builtin}(l)"

    def wrapper(self, symbol: str, instance: Instance) -> str:
        """The entry point of one instance."""
        kernel = instance.kernel
        args = self.text_inline(*instance.args) if instance.args else ""
        call = ", ".join(self.argument(p) for p in kernel.params)
        return (
            f'extern "C" __attribute__((visibility("default"))) MSL_ENTRY void {symbol}(msl_rt::Lane *l) '
            f"{{ (void)l; {kernel.scope}{kernel.name}{args}({call}); }}"
        )


def emit_cpp(
    unit: Unit, variants: Sequence[tuple[Mapping[str, Value], Sequence[tuple[str, Instance]]]], mode: str = "fast"
) -> str:
    """A translation unit: for every set of constant values, the source in a namespace of its own and the wrappers of
    the instances asked for, as (symbol, instance). The constants are keyed by name."""
    out = ['#include "msl_cpp.h"\n']
    for k, (constants, instances) in enumerate(variants):
        emitter = CppEmitter(unit, constants, mode)
        out.append(f'namespace msl_v{k} {{\n{emitter.text()}\n#line 1 "wrappers"\n')
        out += [emitter.wrapper(symbol, instance) + "\n" for symbol, instance in instances]
        out.append("}\n")
    return "".join(out)
