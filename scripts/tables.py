"""Write the generated tables of the README and docs from the code: `python scripts/tables.py [--check]`."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minfer.backends import DEVICES
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.lower import WEIGHT_TYPES, choose, unsupported
from minfer.cases import all_cases
from minfer.graph.allocate import Allocator
from minfer.graph.fuse import FUSIONS
from minfer.graph.ir import WINDOW_LAYOUTS, Node
from minfer.graph.plan import make_plan
from minfer.graph.rules import RULES
from minfer.models import ARCHITECTURES
from minfer.quants import FORMATS, KV_FORMATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).parents[1]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(map(str, head)), None, *(list(map(str, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" if cells else f"|{' --- |' * len(lines[0])}" for cells in lines)


def summary(thing: object) -> str:
    """A docstring's first paragraph, on one line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def architectures() -> str:
    rows = []
    for name, architecture in ARCHITECTURES.items():
        module = sys.modules[architecture.__module__]
        rows.append((f"`{name}`", summary(module)))
    return table(("architecture", "what it is"), rows)


def formats() -> str:
    rows = []
    for name, fmt in FORMATS.items():
        bits = 8 * fmt.block_bytes / fmt.block_size
        rows.append((name, fmt.block_size, fmt.block_bytes, f"{bits:g}", "yes" if fmt.quantizes else "-"))
    return table(("weight type", "values a block", "bytes a block", "bits a weight", "minfer can write it"), rows)


def kv_formats() -> str:
    f32 = KV_FORMATS["f32"].row_bytes(1024)
    rows = [(name, fmt.row_bytes(1024), f"{f32 / fmt.row_bytes(1024):.2f}x") for name, fmt in KV_FORMATS.items()]
    return table(("KV format", "bytes for 1,024 values", "smaller than f32"), rows)


#: Where each device's backend says what it is; read as text, so that a device need not be built to be listed.
DEVICE_FILES = {
    "metal": "gpu/devices/metal/__init__.py",
    "cuda": "gpu/devices/cuda.py",
    "cpu": "cpu/__init__.py",
    "reference": "reference.py",
    "simulator": "gpu/devices/simulator.py",
}


def devices() -> str:
    assert set(DEVICES) <= set(DEVICE_FILES), "a device without a place in this table"
    rows = []
    for name, file in DEVICE_FILES.items():
        text = ast.get_docstring(ast.parse((ROOT / "src/minfer/backends" / file).read_text())) or ""
        rows.append((f"`{name}`", " ".join(text.split("\n\n")[0].split())))
    return table(("device", "what it is"), rows)


def products() -> str:
    rows = []
    for c in choose.PRODUCTS:
        tokens = "any" if c.max_tokens == choose.MANY else f"up to {c.max_tokens}"
        rows.append((tokens, f"`{c.kernel}`", c.tier, f"{c.rows} x {c.tokens}", c.why))
    return table(("tokens", "kernel", "tier", "rows x tokens", "why"), rows)


def attention() -> str:
    groups = ", ".join(f"`attention_g{g}`" for g in choose.HEAD_GROUPS)
    rows = [
        (
            f"up to {choose.SPLIT_MAX_QUERIES}",
            "any",
            f"{groups} and `attention_combine`",
            "query heads that share a KV head, together; windows of more than 256 rows in parts of 256, at most 16, "
            "then combined. The number of parts is a program's: 256 rows, 512, 1,024 and so on have one each",
        ),
        (
            f"up to {choose.SPLIT_MAX_QUERIES} (CUDA)",
            "any",
            "`attention_wide_g1` ... `attention_wide_g8` and `attention_combine`",
            "up to 512 rows each query head for itself; beyond, query heads that share a KV head together, in parts of "
            f"128 rows, at most {choose.MAX_SPLITS}",
        ),
        (
            ", ".join(f"from {n} ({WINDOW_LAYOUTS[layout]})" for layout, n in choose.TILED_MIN_QUERIES.items()),
            "causal, span",
            "`attention_tiled`",
            "8 queries of a head share tiles of 64 rows, as far as one of them reads them",
        ),
        (
            "the same",
            "causal, span",
            "`attention_mma`",
            "CUDA: tensor cores; 64 rows, each a query with one of the heads that share a KV head, share tiles of 8 to "
            "64 rows; where no core has two threadgroups, two simdgroups a row (heads up to "
            f"{choose.SHARING_MAX_HEAD})",
        ),
        (
            f"from {choose.SPLIT_MAX_QUERIES + 1}",
            "span, map",
            groups,
            "each query reads its own rows, however far apart",
        ),
    ]
    return table(("queries", "window", "kernel", "how"), rows)


def kernels() -> str:
    found: dict[str, set[str]] = {}
    for case in all_cases():
        device = GpuBackend(SimulatorDevice(), case.kv_format)
        if case.kv:
            device.add_kv_region(0, case.kv.n_cells, case.kv.n_values, KV_FORMATS[case.kv.format])
        device._tensors = case.weights()
        graph = case.graph(device.name)
        plan = make_plan(lambda _, g=graph: g, graph.params, {device.name: device}, Allocator({device.name: device}))
        for split in plan.splits:
            for launch in device.launches(plan, split).launches:
                if launch.node == "blk.0.out" and not launch.family.startswith(("project", "gemm", "attention")):
                    found.setdefault(f"`{launch.kernel}` ({launch.family}.metal)", set()).add(type(case.op).__name__)
    return table(("kernel", "ops"), [(k, ", ".join(f"`{op}`" for op in sorted(ops))) for k, ops in found.items()])


def support() -> str:
    profile = SimulatorDevice().profile
    counts: dict[str, list[int]] = {}
    for case in all_cases():
        shape = case.graph("simulator").nodes[-1].shape
        node = Node(0, "out", case.op, (), shape, "f32")
        entry = counts.setdefault(type(case.op).__name__, [0, 0])
        entry[0] += unsupported(node, profile, case.kv_format) is None
        entry[1] += 1
    rows = [(f"`{op}`", "yes" if ok == n else f"{ok} of {n} cases") for op, (ok, n) in counts.items()]
    rows.append(("weight types", ", ".join(WEIGHT_TYPES)))
    rows.append(("KV formats", ", ".join(KV_FORMATS)))
    rows.append(("window layouts", ", ".join(WINDOW_LAYOUTS.values())))
    return table(("op", "GPU kernels"), rows)


def ops() -> str:
    rows = []
    for op, rule in RULES.items():
        inputs = ", ".join(rule.inputs) + (f" (the last {rule.optional} optional)" if rule.optional else "")
        rows.append((f"`{op.__name__}`", inputs or "-", rule.text.replace("|", "\\|"), summary(op)))
    return table(("op", "inputs", "shapes", "value"), rows)


def fusions() -> str:
    return table(
        ("rule", "what it does", "tokens"),
        [(f"`{rule.name}`", summary(rule.match), rule.tokens) for rule in FUSIONS],
    )


TABLES = {
    "README.md": {"architectures": architectures, "formats": formats, "kv-formats": kv_formats, "devices": devices},
    "docs/graph.md": {"ops": ops, "fusions": fusions},
    "docs/kernels.md": {"products": products, "attention": attention, "kernels": kernels, "support": support},
}


def filled(text: str, makers: dict[str, Callable[[], str]]) -> str:
    for name, make in makers.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"no place for table {name}")
        body = make()
        text = pattern.sub(lambda found, body=body: f"{found[1]}{body}\n{found[2]}", text)
    return text


def main() -> int:
    stale = []
    for name, makers in TABLES.items():
        path = ROOT / name
        before = path.read_text()
        after = filled(before, makers)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after)
    if stale and "--check" in sys.argv:
        print(
            f"{', '.join(stale)}: the tables are not what the code says; run python scripts/tables.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
