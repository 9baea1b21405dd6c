"""What the Metal device says and does when something goes wrong."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from fakemetal import Faults, Runtime, installed
from fakemetal.install import MODULE
from scenario import ADD, MULTIPLY, N, exercise, step, values

from helpers import TINY, open_engine
from minfer import backends
from minfer.errors import DeviceError, DeviceMemoryError, RequestError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

PATH = TINY / "qwen3.gguf"


def device(**options: Any) -> Any:
    return importlib.import_module(MODULE).MetalDevice(**options)


def two_steps(metal: Any) -> list[Any]:
    x, y, z = (metal.buffer(4 * N, name) for name in "xyz")
    metal.write(x, 0, values(1).tobytes())
    return [step(ADD, x, x, y, barrier=False), step(MULTIPLY, y, x, z, barrier=True)]


# --- is it there? ------------------------------------------------------------------------------------------------


def test_without_pyobjc_asking_for_metal_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"device metal: No module named .*Mac with Apple silicon"):
        backends.open_backend("metal", "f32")


def test_auto_goes_on_without_metal_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minfer.engine.place.AUTO", ("metal",))
    with pytest.raises(UnsupportedError, match="no device here runs this model:\n  metal: device metal: No module"):
        open_engine(PATH, device="auto")
    monkeypatch.setattr("minfer.engine.place.AUTO", ("metal", "reference"))
    assert open_engine(PATH, device="auto").placement.devices == ("reference",)


def test_auto_takes_metal_on_a_mac(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    automatic = importlib.util.module_from_spec(backends.__spec__)
    backends.__spec__.loader.exec_module(automatic)
    assert automatic.AUTO[0] == "metal"
    monkeypatch.undo()
    monkeypatch.setattr("minfer.engine.place.AUTO", automatic.AUTO)
    engine = open_engine(PATH, device="auto")
    assert engine.placement.devices == ("metal",)
    engine.close()


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"macos": (13, 6)}, "needs macOS 14"),
        ({"faults": Faults(no_device=True)}, "gives no GPU"),
        ({"unified": False}, "has memory of its own"),
        ({"family": 1005, "metal3": False}, "has no simdgroup reductions"),
    ],
)
def test_unsupported_machines_are_refused(machine: dict[str, Any], reason: str) -> None:
    with installed(Runtime(**machine)), pytest.raises(UnsupportedError, match=reason):
        device()


def test_on_a_mac_without_pyobjc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="pip install pyobjc-framework-Metal"):
        backends.open_backend("metal", "f32")


@pytest.mark.parametrize("macos", [(14,), (15,), (26,)])
@pytest.mark.parametrize("family", [1007, 1009])
def test_every_macos_and_family_gives_numpys_results(macos: tuple[int, ...], family: int) -> None:
    with installed(Runtime(macos=macos, family=family)):
        exercise(device())


def test_a_virtual_gpu_has_no_matrix_tier() -> None:
    """It answers to Apple5 and to Metal 3: reductions yes, simdgroup matrices no."""
    with installed(Runtime(family=1005)):
        metal = device()
        assert not metal.profile.simd_matrix
        assert "Apple9" in metal.replayable()
        metal.close()
        del metal


def test_a_fixed_pyobjc_is_fine_too(capsys: pytest.CaptureFixture[str]) -> None:
    with installed(Runtime(over_retains=False)):
        exercise(device())
    assert capsys.readouterr().err == ""


def test_a_reference_too_many_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with installed(Runtime(), strict=False):
        monkeypatch.setattr("objc.registerMetaDataForSelector", lambda *given: None)
        metal = device()
        assert metal.references == 2
    assert "holds Metal objects 1 times too often" in capsys.readouterr().err


# --- command buffers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signals", [True, False])
def test_a_failed_command_buffer(signals: bool, mac: Runtime) -> None:
    metal = device()
    steps = two_steps(metal)
    mac.faults = Faults(fail_at=1, fail_signals=signals)
    metal.encode(steps)
    want = (
        r"2 launches, operation 4 \(elementwise\) to operation 5 \(elementwise\): Caused GPU Address Fault.*Domain 3\)"
    )
    with pytest.raises(DeviceError, match=want):
        metal.synchronize()
    for use in (lambda: metal.encode(steps), lambda: metal.buffer(16, "late"), metal.synchronize):
        with pytest.raises(
            DeviceError, match=r"stopped at an earlier fault: .*GPU Address Fault.* Load the model again"
        ):
            use()
    metal.close()
    again = device()  # made anew, it works
    exercise(again)


def test_a_failure_without_a_reason(mac: Runtime) -> None:
    metal = device()
    mac.faults = Faults(fail_at=1, no_reason=True)
    metal.encode(two_steps(metal))
    with pytest.raises(DeviceError, match=r"2 launches, .*: Metal gives no reason"):
        metal.synchronize()


def test_a_list_without_launches_sends_nothing(mac: Runtime) -> None:
    metal = device()
    metal.encode([])
    metal.record([]).run()
    metal.synchronize()
    assert mac.committed == 0
    metal.close()


def test_command_buffers_on_their_way_are_bounded(mac: Runtime) -> None:
    """A queue gives 64, and blocks where nobody waits for any."""
    metal = device()
    steps = two_steps(metal)
    for _ in range(40):
        metal.encode(steps)
        assert len(mac.in_flight) <= 32
    metal.synchronize()
    assert mac.committed == 40


def test_an_error_that_comes_after_its_signal(mac: Runtime) -> None:
    """The next step is not sent, and nothing else is done."""
    metal = device()
    steps = two_steps(metal)
    mac.faults = Faults(fail_at=1, fail_signals=True, late_status=1)
    metal.encode(steps)
    metal.synchronize()
    with pytest.raises(DeviceError, match=r"2 launches, .*GPU Address Fault"):
        metal.encode(steps)
    assert mac.committed == 1


def test_a_status_that_comes_late_is_no_error(mac: Runtime) -> None:
    mac.faults = Faults(late_status=3)
    exercise(device())


def test_a_command_buffer_that_never_completes(mac: Runtime) -> None:
    """The wait is bounded, and what the GPU may still write is kept for good."""
    metal = device(wait_s=1.0)
    mac.faults = Faults(hang_at=1)
    metal.encode(two_steps(metal))
    mac.messages.clear()
    with pytest.raises(DeviceError, match=r"no end of 2 launches, .* within 1 s. A launch cannot be cancelled"):
        metal.synchronize()
    assert mac.messages["waitUntilSignaledValue:timeoutMS:"] == 4, "four slices of 250 ms"
    abandoned = importlib.import_module(MODULE)._abandoned
    assert len(abandoned) == 1
    metal.close()
    mac.faults = Faults()  # the end of the test: let it go
    abandoned.clear()
    mac.drain()


def test_a_device_that_vanishes(mac: Runtime) -> None:
    engine = open_engine(PATH, device="metal")
    engine.prefill([1, 2])
    mac.faults = Faults(vanish_at=mac.committed + 2)
    engine.prefill([3])
    with pytest.raises(DeviceError, match=r"gave no command buffer: Apple M3 .* is gone or out of resources"):
        engine.prefill([4])
    with pytest.raises(DeviceError, match="stopped at an earlier fault"):
        engine.prefill([5])
    engine.close()


def test_the_gpu_runs_out_of_memory(mac: Runtime) -> None:
    metal = device()
    metal.encode(two_steps(metal))
    mac.faults = Faults(fail_at=1, fail_code=8, fail_text="Insufficient Memory", memory=1 << 30)
    with pytest.raises(
        DeviceError, match=r"out of memory, 1,073,\d{3},\d{3} of 1,073,741,824 bytes free.*Insufficient Memory"
    ):
        metal.synchronize()


# --- memory ------------------------------------------------------------------------------------------------------


def test_out_of_memory_has_both_numbers_and_leaks_nothing(mac: Runtime) -> None:
    metal = device()
    held = metal.buffer(1 << 20, "held")
    mac.faults.memory = (1 << 20) + 5000
    with pytest.raises(DeviceMemoryError, match=r"KV cache: 8,000 bytes asked for, 5,000 bytes free"):
        metal.buffer(8000, "KV cache")
    assert mac.allocated == 1 << 20
    del held
    assert mac.allocated == 0
    assert metal.buffer(8000, "KV cache").nbytes == 8000, "the device goes on"


def test_a_buffer_over_the_limit_is_not_even_asked_for(mac: Runtime) -> None:
    metal = device()
    mac.messages.clear()
    with pytest.raises(DeviceMemoryError, match="a buffer holds up to 4,294,967,296"):
        metal.buffer((1 << 32) + 1, "everything")
    assert not mac.messages["newBufferWithLength:options:"]


def test_a_mapping_that_metal_refuses(mac: Runtime) -> None:
    mac.faults.no_mapping = True
    with pytest.raises(DeviceMemoryError, match=r"weights from .*: Metal does not map [\d,]+ bytes, [\d,]+ bytes free"):
        open_engine(PATH, device="metal")


def test_bytes_outside_a_buffer_are_refused(mac: Runtime) -> None:
    metal = device()
    buffer = metal.buffer(64, "small")
    for use in (lambda: metal.read(buffer, 60, 8), lambda: metal.write(buffer, 60, bytes(8))):
        with pytest.raises(RequestError, match="small: bytes 60 to 68 of a buffer of 64"):
            use()


def test_a_model_that_does_not_fit_is_refused_before_anything_runs(mac: Runtime) -> None:
    mac.faults.memory = 100_000
    with pytest.raises(DeviceMemoryError, match="metal has 100,000 bytes free of 100,000"):
        open_engine(PATH, device="metal", n_ctx=512)
    assert not mac.committed


def test_without_residency_sets(mac: Runtime) -> None:
    mac.faults.no_residency = True
    exercise(device())


def test_weights_are_in_the_residency_set(mac: Runtime) -> None:
    engine = open_engine(PATH, device="metal")
    sets = [i for i in mac.alive if i.owner == "MTLResidencySet"]
    assert [len(s.committed) for s in sets] == [1]
    engine.close()


# --- kernels -----------------------------------------------------------------------------------------------------


def test_a_library_that_does_not_compile(mac: Runtime) -> None:
    """The compiler's lines name our files: two lines were put before the first of elementwise.metal."""
    metal = device()
    steps = two_steps(metal)
    mac.faults.broken_source = "kernel void broken(texture2d t [[texture(0)]]) {}"
    with pytest.raises(
        UnsupportedError, match=r"elementwise.metal does not compile on Apple M3.*:\nelementwise.metal:1:1: error:"
    ):
        metal.encode(steps)


def test_kernels_and_constants_that_are_not_there(mac: Runtime) -> None:
    metal = device()
    launch = two_steps(metal)[0].launch
    with pytest.raises(UnsupportedError, match=r"elementwise.metal has no function constant 'nope'"):
        metal.pipeline(replace(launch, constants=(("nope", 1),)))
    with pytest.raises(UnsupportedError, match="kernel nope: Function nope was not found"):
        metal.pipeline(replace(launch, kernel="nope"))


def test_a_pipeline_that_metal_refuses(mac: Runtime) -> None:
    metal = device()
    mac.faults.pipeline = "Compiler encountered an internal error"
    with pytest.raises(
        UnsupportedError, match=r"kernel elementwise on Apple M3 .*: Compiler encountered an internal error"
    ):
        metal.encode(two_steps(metal))


def test_simdgroups_of_another_width(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    metal = device()
    monkeypatch.setattr("fakemetal.objects.Pipeline.threadExecutionWidth", lambda self: 16)
    with pytest.raises(UnsupportedError, match="simdgroups of 16 threads; kernels need 32"):
        metal.encode(two_steps(metal))


def test_more_threads_than_a_kernel_takes(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    metal = device()
    monkeypatch.setattr("fakemetal.objects.Pipeline.maxTotalThreadsPerThreadgroup", lambda self: 128)
    with pytest.raises(UnsupportedError, match=r"elementwise is launched with 256 threads .* runs it with up to 128"):
        metal.encode(two_steps(metal))


def test_libraries_and_pipelines_are_made_once_a_process(mac: Runtime) -> None:
    for _ in range(2):
        metal = device()
        metal.encode(two_steps(metal))
        metal.close()
    assert mac.messages["newLibraryWithSource:options:error:"] == 1
    assert mac.messages["newComputePipelineStateWithDescriptor:options:reflection:error:"] == 2


# --- replay ------------------------------------------------------------------------------------------------------


def verdicts(tmp_path: Path) -> list[str]:
    return list(json.loads((tmp_path / "cache" / "metal-replay.json").read_text()).values())


def recorded(metal: Any) -> str:
    return type(metal.record(two_steps(metal))).__name__


def test_the_self_test_decides_and_is_kept(mac: Runtime, tmp_path: Path) -> None:
    assert recorded(device()) == "Replay"
    assert verdicts(tmp_path) == ["same"]
    before = mac.committed
    assert recorded(device()) == "Replay"
    assert mac.committed == before, "the verdict was read, not made again"


def test_a_self_test_that_differs(
    mac: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replay stays off, which is said once; asked for by name it is an error."""
    mac.faults.corrupt_replay = True
    assert recorded(device()) == "Direct"
    assert "replay stays off on Apple M3" in capsys.readouterr().err
    assert recorded(device()) == "Direct"
    assert capsys.readouterr().err == ""
    assert verdicts(tmp_path)[0].startswith("found ")
    monkeypatch.setenv("MINFER_METAL_REPLAY", "1")
    with pytest.raises(UnsupportedError, match=r"MINFER_METAL_REPLAY=1: on Apple M3 .* bytes different; unset it"):
        recorded(device())


def test_a_self_test_that_fails_leaves_the_device_alive(mac: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    metal = device()
    mac.faults.fail_at = 4  # the first replay: three direct runs go before it
    assert recorded(metal) == "Direct"
    assert "the self-test failed: device metal stopped: replay of 32 launches" in capsys.readouterr().err
    metal.encode(two_steps(metal))
    metal.synchronize()


def test_a_self_test_that_took_the_process_down_is_not_tried_again(mac: Runtime, tmp_path: Path) -> None:
    assert recorded(device()) == "Replay"
    path = tmp_path / "cache" / "metal-replay.json"
    path.write_text(path.read_text().replace("same", "did not end"))
    assert recorded(device()) == "Direct"


def test_an_m1_replays_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Runtime(family=1008)):
        assert recorded(device()) == "Direct"
        monkeypatch.setenv("MINFER_METAL_REPLAY", "1")
        assert recorded(device()) == "Replay"


def test_the_switch_is_read_strictly(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_METAL_REPLAY", "yes")
    with pytest.raises(RequestError, match="MINFER_METAL_REPLAY is 0 or 1, not 'yes'"):
        recorded(device())


def test_a_gpu_capture(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINFER_METAL_CAPTURE", "/tmp/step.gputrace")
    engine = open_engine(PATH, device="metal")
    for token in range(1, 7):
        engine.prefill([token])
    assert mac.captures == ["/tmp/step.gputrace"]
    assert mac.messages["stopCapture"] == 1
    engine.close()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("destination", "start Python with METAL_CAPTURE_ENABLED=1"), ("disk full", "step.gputrace: disk full")],
)
def test_a_gpu_capture_that_cannot_start(
    fault: str, reason: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINFER_METAL_CAPTURE", "/tmp/step.gputrace")
    mac.faults.capture = fault
    with pytest.raises(UnsupportedError, match=reason):
        exercise(device())


def test_a_verdict_that_cannot_be_kept(
    mac: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINFER_CACHE", str(tmp_path / "file"))
    assert recorded(device()) == "Replay"
    assert "the verdict on replay is not kept" in capsys.readouterr().err
