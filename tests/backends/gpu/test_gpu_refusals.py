"""What the GPU backend refuses: at assignment by name, before a launch by row, and when a device stops."""

from __future__ import annotations

import dataclasses
from typing import Any

import gpu_cases
import numpy as np
import pytest

from helpers import TINY, open_engine
from minfer import cases
from minfer.backends.gpu import args
from minfer.backends.gpu.backend import GpuBackend
from minfer.backends.gpu.devices import simulator
from minfer.backends.gpu.devices.base import Bound
from minfer.backends.gpu.devices.simulator import SimulatorDevice
from minfer.backends.gpu.launch import Ref
from minfer.backends.gpu.lower import Profile, choose, unsupported
from minfer.backends.gpu.lower.simple import move_rows
from minfer.cases import Case, Value
from minfer.errors import DeviceError, GraphError, RequestError, UnsupportedError
from minfer.graph import ir
from minfer.graph.allocate import Allocator
from minfer.graph.fuse import NORM_PROLOGUE_MAX_TOKENS
from minfer.graph.ir import RopeSpec, Weight
from minfer.graph.plan import make_plan
from minfer.msl import Library
from minfer.msl.errors import ToolError

PROFILE = Profile("tiny GPU", True, 1024, 32768, 1 << 32)
GAIN = (Weight("g", "F32", (256,)), 1e-6)


@pytest.mark.parametrize(
    ("op", "shape", "kv_format", "reason"),
    [
        (ir.MatMul(Weight("w", "IQ2_XXS", (256, 8))), (8, 1), "f32", "w is IQ2_XXS, which no kernel reads"),
        (ir.Embed(Weight("w", "TQ1_0", (256, 8))), (256, 1), "f32", "w is TQ1_0, which no kernel reads"),
        (ir.MatMul(Weight("w", "Q4_K", (128, 8))), (8, 1), "f32", "rows of 128 values, no whole blocks of 256"),
        (ir.RmsNorm(Weight("g", "F16", (8,)), 0.1), (8, 1), "f32", "g is F16; gains, biases and frequency factors"),
        (ir.MatMul(Weight("w", "F32", (8, 8)), Weight("b", "BF16", (8,))), (8, 1), "f32", "b is BF16"),
        (ir.Attn(0, 2, 1, 12, 1.0), (24, 1), "f32", "a head of 12 values; kernels take multiples of 8 up to 256"),
        (ir.Rope(RopeSpec("norm", 264, 264, 1e4)), (264, 1), "f32", "a head of 264 values"),
        (ir.HeadNorm(Weight("g", "F32", (4,)), 0.1), (8, 1), "f32", "a head of 4 values"),
        (ir.HeadRopeStore(0, 2, 1, RopeSpec("norm", 80, 80, 1e4)), (160, 1), "q8_0", "80 is not whole blocks of 32"),
        (ir.Permute((4, 3, 2, 1, 0)), (1, 1, 1, 1, 2), "f32", "up to 4 axes, found 5"),
        (ir.Project((Weight("w", "Q4_K", (256, 8)),), GAIN), (8, 9), "f32", "a norm joined to a product of 9 tokens"),
        (ir.TopK(1025), (2051, 1), "f32", "the best 1025 of a row; top_parts gives up to 1024"),
        (ir.Silu(), (1 << 20, 1 << 11), "f32", "kernels index up to 2^31"),
    ],
)
def test_what_no_kernel_runs_is_named(op: ir.Op, shape: tuple[int, ...], kv_format: str, reason: str) -> None:
    node = ir.Node(0, "n", op, (), shape, "f32")
    found = unsupported(node, PROFILE, kv_format)
    assert found is not None
    assert reason in found


def test_fusion_and_kernels_agree_on_how_many_tokens_a_norm_joins() -> None:
    assert NORM_PROLOGUE_MAX_TOKENS == choose.NORM_MAX_TOKENS
    op = ir.Project((Weight("w", "Q4_K", (256, 8)),), GAIN)
    assert unsupported(ir.Node(0, "n", op, (), (8, choose.NORM_MAX_TOKENS), "f32"), PROFILE, "f32") is None


def test_a_fused_node_with_too_many_tokens_is_refused_by_name() -> None:
    case = Case("bad", ir.Project((Weight("w", "Q4_K", (256, 8)),), GAIN), (Value((256, 9)),), "matmul")
    with pytest.raises(
        UnsupportedError, match=r"blk\.0\.out: Project cannot run on simulator: a norm joined to .* 9 tokens"
    ):
        cases.run(case, gpu_cases.backend(case))


def test_threadgroup_memory_over_the_limit_is_refused() -> None:
    small = dataclasses.replace(PROFILE, max_threadgroup_bytes=8192)
    node = ir.Node(0, "n", ir.MatMul(Weight("w", "F32", (8, 8))), (), (8, 1), "f32")
    assert "gemm takes 12,288 bytes of threadgroup memory, tiny GPU has 8,192" in str(unsupported(node, small, "f32"))


def test_a_refusal_at_load_names_the_node() -> None:
    case = Case("bad", ir.Attn(0, 1, 1, 12, 1.0), gpu_cases.by_name("attn/one_row/f32").inputs, "attention")
    case = dataclasses.replace(case, inputs=(Value((12, 1)), *case.inputs[1:]), kv=cases.KvFill(12, 4, (0,)))
    with pytest.raises(UnsupportedError, match=r"blk\.0\.out: Attn cannot run on simulator: a head of 12 values"):
        cases.run(case, gpu_cases.backend(case))


def _edit(name: str, **inputs: tuple[int, ...]) -> Case:
    case = gpu_cases.by_name(name)
    values = list(case.inputs)
    for key, integers in inputs.items():
        values[int(key[1:])] = Value((len(integers),), integers=integers)
    return dataclasses.replace(case, inputs=tuple(values))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (_edit("embed/F32", x0=(0, 37)), r"token ids 0 to 37 do not fit the 37 rows of embd\.weight"),
        (_edit("embed/F32", x0=(-1, 3)), "token ids -1 to 3"),
        (_edit("get_rows", x1=(8, 9, 0)), "ids 0 to 9 do not fit the 9 rows"),
        (_edit("kv_store/f32/96x3", x2=(4, 2, 13)), "layer 0: cells 2 to 13 do not fit a KV region of 13"),
        (_edit("kv_store/f32/96x3", x2=(4, 2, 4)), "a cell is stored twice"),
        (_edit("rope/norm/plain", x1=(0, 1, -1, 3, 4)), "positions -1 to 4"),
        (_edit("attn/one_row/f32", x1=(4,)), "layer 0: a query reads cells 0 to 4 of 4"),
        (cases.windowed("bad", 2, (90, 101), 1, "f32", None), "a query reads cells 90 to 100 of 100"),
        (cases.windowed("bad", 8, (95, 6, 0, 0, 0, 0, 0, 0), 1, "f32", None), "reads cells 95 to 100 of 100"),
        (cases.windowed("bad", 8, (5, -2, 0, 0, 0, 0, 0, 0), 1, "f32", None), "a run of -2 rows"),
    ],
)
def test_a_row_out_of_range_is_refused_before_the_launch(case: Case, reason: str) -> None:
    gpu = gpu_cases.backend(case)
    with pytest.raises(RequestError, match=reason):
        cases.run(case, gpu)


def test_a_window_of_none_of_the_three_sizes_is_refused() -> None:
    with pytest.raises(GraphError, match="none of the three layouts"):
        gpu_cases.launches(cases.windowed("bad", 8, (1, 2, 3), 1, "f32", None))


def test_the_best_of_a_row_too_long_are_refused() -> None:
    case = Case("bad", ir.TopK(1), (Value(((1 << 20) + 1, 1), fill=0.0),), "elementwise")
    with pytest.raises(UnsupportedError, match=r"blk\.0\.out: rows of 1,048,577; top_merge takes up to 1,048,576"):
        gpu_cases.launches(case)


def test_a_layer_without_kv_rows_is_refused() -> None:
    case = gpu_cases.by_name("attn/one_row/f32")
    gpu = gpu_cases.backend(case)
    graph = case.graph(gpu.name)
    plan = make_plan(lambda _: graph, graph.params, {gpu.name: gpu}, Allocator({gpu.name: gpu}))
    with pytest.raises(GraphError, match="layer 0 has no KV rows on simulator"):
        gpu.lower(plan, plan.splits[0])


def test_moved_rows_stay_inside() -> None:
    gpu = GpuBackend(SimulatorDevice(), "f16")
    gpu.add_kv_region(0, 8, 32, gpu.kv_format)
    with pytest.raises(RequestError, match="moving 4 rows from cell 5 to 0 leaves the 8 cells"):
        gpu.copy_rows([(5, 0, 4)])


#: Far, overlapping by all but one row, by half, a distance that divides nothing, and onto itself.
MOVES = [(0, 20, 12), (0, 1, 30), (1, 0, 30), (4, 10, 12), (10, 4, 12), (3, 10, 20), (10, 3, 20), (5, 5, 9), (0, 9, 0)]


@pytest.mark.parametrize("fmt", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_rows_move_verbatim_even_where_they_overlap(fmt: str, order: str) -> None:
    """On the device alone, with every access checked, in any order of threads."""
    gpu = GpuBackend(SimulatorDevice(check=True, order=order, seed=3), fmt)
    regions = [gpu.add_kv_region(layer, 32, n, gpu.kv_format) for layer, n in ((0, 32), (1, 288))]
    rng = np.random.default_rng(0)
    want = {}
    for region in regions:
        for side in (region.k, region.v):
            raw = rng.integers(0, 256, (32, region.row_bytes), np.uint8)
            gpu.write(side, raw)
            want[side.label] = [bytes(row) for row in raw]
    gpu.copy_rows(MOVES)
    for rows in want.values():
        for source, target, count in MOVES:
            moved = rows[source : source + count]
            rows[target : target + count] = moved
    for region in regions:
        for side in (region.k, region.v):
            got = gpu.read(side, 32 * region.row_bytes).reshape(32, -1)
            assert [bytes(row) for row in got] == want[side.label]
    launched = [step.launch for step, _ in gpu.device.reports]
    assert [launch.kernel for launch in launched] == ["move_rows"] * (4 * 7)


def test_a_move_over_more_strands_than_a_grid_has_keeps_them_apart() -> None:
    ref = Ref("k", 0)
    for source, target, count in (
        (0, 1 << 20, 1 << 16),
        (0, 100_000, 1 << 20),
        (98_304, 0, 1 << 20),
        (0, 65_537, 1 << 20),
    ):
        packed = args.MOVE.unpack(move_rows(ref, 64, source, target, count).args)
        distance, strands = abs(target - source), packed["strands"]
        assert isinstance(strands, int)
        assert 1 <= strands <= 1 << 15
        assert distance >= count or distance % strands == 0


def test_a_launch_that_touches_what_it_does_not_declare_stops_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checked device against a wrong declaration: the gate that holds the hazards to the truth."""
    case = gpu_cases.by_name("add/33")
    gpu = gpu_cases.backend(case, check=True)

    def short(*fields: Any) -> Bound:
        slot, buffer, offset, start, end, reads, writes = fields
        return Bound(slot, buffer, offset, start, end - 4 * (slot == 3), reads, writes)

    monkeypatch.setattr("minfer.backends.gpu.backend.Bound", short)
    with pytest.raises(DeviceError, match=r"undeclared write.*which the launch does not declare as written"):
        cases.run(case, gpu)
    with pytest.raises(DeviceError, match="stopped at an earlier fault"):
        gpu.synchronize()


def test_a_launch_without_end_kills_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    source = """kernel void elementwise(constant float & a [[buffer(0)]], device const float * x [[buffer(1)]],
        device const float * y [[buffer(2)]], device volatile float * z [[buffer(3)]]) {
        for (;;) z[1] += 1;
    }"""
    monkeypatch.setattr(simulator, "_kernel", lambda *_: Library(source).kernel("elementwise"))
    gpu = GpuBackend(SimulatorDevice(timeout=0.3))
    with pytest.raises(DeviceError, match="stopped: kernel elementwise: no threadgroup has ended for 300 ms"):
        cases.run(gpu_cases.by_name("add/33"), gpu)
    with pytest.raises(DeviceError, match="stopped at an earlier fault: kernel elementwise"):
        gpu.synchronize()
    monkeypatch.undo()
    case = gpu_cases.by_name("add/33")  # a new device in the same process is well
    (got,) = cases.run(case, GpuBackend(SimulatorDevice()))
    np.testing.assert_array_equal(got, case.data()["x0"] + case.data()["x1"])


def test_an_engine_on_the_simulator_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatorDevice, "memory", lambda self: (1000, 2000))
    with pytest.raises(
        Exception, match=r"simulator has 1,000 bytes free of 2,000; the model needs .*weights 0, KV cache"
    ):
        open_engine(TINY / "qwen3.gguf", device="simulator")


def test_without_a_compiler_the_simulator_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> Any:
        raise ToolError("no C++ compiler found: install g++")

    case = Case("new", ir.Rope(RopeSpec("norm", 24, 22, 1e4)), (Value((24, 1)), Value((1,), integers=(3,))), "rope")
    monkeypatch.setattr("minfer.msl.library.build", none)
    with pytest.raises(UnsupportedError, match=r"the simulator compiles its kernels: no C\+\+ compiler found"):
        cases.run(case, gpu_cases.backend(case))
