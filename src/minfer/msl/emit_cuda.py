"""The CUDA back end: CUDA C++ for NVRTC from the same description of a source. A simdgroup is a warp of 32.

An entry point takes one pointer a buffer, in order of `Entry.buffers`, then one 32-bit offset into the launch's dynamic
shared memory a [[threadgroup(n)]] argument, in order of `Entry.threadgroup`. What a kernel takes as `constant T &` is
passed itself, not by pointer (`Entry.values`): it is there when the kernel starts, without a read from memory. A grid
is counted in whole threadgroups. On architectures that can, a kernel lets the next one be placed at once and waits for
those before it (programmatic dependent launch), which changes nothing where the launch does not ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .emit import Emitter, Place, Value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from .unit import Instance, Kernel, Param, ThreadgroupVar, Unit


#: A kernel that calls this function of its source waits there for the launches before it, not where it begins.
WAIT = "wait_for_those_before"
#: A kernel that calls this one says there that the next may be placed, not where it begins.
CHAIN = "next_may_be_placed"


@dataclass(frozen=True)
class Entry:
    """How a kernel is called: the slots of its buffers and of its [[threadgroup(n)]] memory, in call order, and which
    of the buffers are passed by value."""

    buffers: tuple[int, ...]
    threadgroup: tuple[int, ...]
    values: frozenset[int] = frozenset()


def entry(kernel: Kernel) -> Entry:
    """The arguments of a kernel's entry point. A slot that two optional parameters share is passed once."""

    def slots(kind: str) -> tuple[int, ...]:
        return tuple(sorted({p.index for p in kernel.params if p.kind == kind}))

    values = frozenset(p.index for p in kernel.params if _by_value(p))
    return Entry(slots("buffer"), slots("threadgroup"), values)


def _by_value(p: Param) -> bool:
    return p.kind == "buffer" and p.form == "reference" and p.space == "constant" and not p.condition


class CudaEmitter(Emitter):
    """Kernels become device functions with an entry point beside them; threadgroup variables become shared memory.

    `conditionals` are places (file, line) whose `c ? a : b` get arms of one type: half and bfloat are classes here, and
    C++ cannot choose between them and float.
    """

    def __init__(
        self, unit: Unit, constants: Mapping[str, Value], conditionals: frozenset[Place] = frozenset()
    ) -> None:
        super().__init__(unit, constants)
        self.equal_arms(conditionals)

    def arm_text(self, other: str) -> str:
        """The arm takes the common type of both."""
        return f"msl_cuda::arm<decltype(({other}))>("

    def threadgroup_text(self, variables: list[ThreadgroupVar]) -> str:
        """One shared variable each, aligned so that it can be read as vectors, as in the software device's arena."""
        out = []
        for v in variables:
            kind = self.text_inline(*v.type).replace("volatile ", "").replace("const ", "")
            out.append(f"alignas(16) alignas({kind}) __shared__ {kind} {v.name} {self.text_inline(*v.dims)};")
        return " ".join(out)

    def text_inline(self, start: int, end: int) -> str:
        """Tokens on one line."""
        return " ".join(t.text for t in self.tokens[start:end])

    def unroll_text(self, pragma: str) -> str:
        """NVRTC knows the pragma of the source; a count in it was expanded by our preprocessor."""
        count = pragma.partition("unroll")[2].strip(" ()")
        return f"#pragma unroll {count}" if count.isdigit() else "#pragma unroll"

    def argument(self, p: Param) -> str:
        """What an entry point passes for a kernel parameter."""
        form = "msl_cuda::Pointer" if p.form == "pointer" else "msl_cuda::Reference"
        if p.kind == "buffer":
            return f"{form}{{(void *)&b{p.index}}}" if _by_value(p) else f"{form}{{b{p.index}}}"
        if p.kind == "threadgroup":
            return f"{form}{{msl_cuda::threadgroup(t{p.index})}}"
        return f"msl_cuda::{p.builtin}()"

    def wrapper(self, symbol: str, instance: Instance) -> str:
        """The entry point of one instance."""
        kernel = instance.kernel
        slots = entry(kernel)
        values = {p.index: self._value_type(p) for p in kernel.params if _by_value(p)}
        params = ", ".join(
            [f"const __grid_constant__ {values[i]} b{i}" if i in values else f"void *b{i}" for i in slots.buffers]
            + [f"uint t{i}" for i in slots.threadgroup]
        )
        bounds = f"__launch_bounds__({kernel.max_threads}) " if kernel.max_threads else ""
        args = self.text_inline(*instance.args) if instance.args else ""
        call = ", ".join(self.argument(p) for p in kernel.params)
        own = {self.tokens[i].text for i in range(*kernel.body)}
        begin = ("" if CHAIN in own else "msl_cuda::chain(); ") + ("" if WAIT in own else "msl_cuda::wait(); ")
        body = f"{begin}{kernel.scope}{kernel.name}{args}({call});"
        return f'extern "C" __global__ void {bounds}{symbol}({params}) {{ {body} }}'

    def _value_type(self, p: Param) -> str:
        """The type of a parameter that is passed by value."""
        words = self.text_inline(p.decl[0], p.type_end).split()
        return " ".join(w for w in words if w not in ("constant", "const", "volatile"))


def emit_cuda(
    unit: Unit,
    variants: Sequence[tuple[Mapping[str, Value], Sequence[tuple[str, Instance]]]],
    conditionals: frozenset[Place] = frozenset(),
) -> str:
    """A translation unit: for every set of constant values (by name), the source in a namespace of its own within
    `metal`, and the entry points of the instances asked for, as (symbol, instance)."""
    out = ['#include "msl_cuda.h"\n']
    for k, (constants, instances) in enumerate(variants):
        emitter = CudaEmitter(unit, constants, conditionals)
        out.append(f'namespace metal {{ namespace msl_v{k} {{\n{emitter.text()}\n#line 1 "entry points"\n')
        out += [emitter.wrapper(symbol, instance) + "\n" for symbol, instance in instances]
        out.append("} }\n")
    return "".join(out)
