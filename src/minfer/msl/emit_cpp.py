"""The C++ back end: the text of a translation unit that runs on the software device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .emit import Emitter, Value
from .unit import Instance, Param, ThreadgroupVar, Unit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class CppEmitter(Emitter):
    """Threadgroup variables become references into the threadgroup's arena, looked up by number."""

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
        return "MSL_UNROLL"

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


def emit_cpp(unit: Unit, variants: Sequence[tuple[Mapping[str, Value], Sequence[tuple[str, Instance]]]]) -> str:
    """A translation unit: for every set of constant values, the source in a namespace of its own and the wrappers of
    the instances asked for, as (symbol, instance). The constants are keyed by name."""
    out = ['#include "msl_cpp.h"\n']
    for k, (constants, instances) in enumerate(variants):
        emitter = CppEmitter(unit, constants)
        out.append(f"namespace msl_v{k} {{\n{emitter.text()}\n#line 1 \"wrappers\"\n")
        out += [emitter.wrapper(symbol, instance) + "\n" for symbol, instance in instances]
        out.append("}\n")
    return "".join(out)
