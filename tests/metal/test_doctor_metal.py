"""What the doctor asks of Metal, over the fake: each check passes on a sound Mac and fails where one thing is wrong."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fakemetal import Faults, Runtime, installed
from fakemetal.install import MODULE
from scenario import ADD, MULTIPLY, SCALE, N, mutated, step, values

from minfer import backends, cases, doctor
from minfer.doctor.kernels import Oracle, check_kernels
from minfer.errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from minfer.backends.base import Check

DEVICE, ENCODE = "__init__.py", "encode.py"

#: Every check, in order.
ALL = (
    "references",
    "new memory",
    "libraries",
    "direct encoding",
    "mapped memory",
    "message",
    "event wait",
    "bounded wait",
    "residency set",
    "launch times",
    "replay",
)


def examined(mac: Runtime, monkeypatch: pytest.MonkeyPatch, *, risky: bool = False, **options: Any) -> dict[str, Check]:
    """All checks of a device, by the fake's clock."""
    package = importlib.import_module(MODULE)
    on_the_clock(mac, monkeypatch)
    metal = package.MetalDevice(**options)
    found = {check.name: check for check in metal.checks(risky=risky)}
    metal.close()
    return found


def on_the_clock(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=lambda: mac.time, sleep=mac.sleep)
    for module in ("checks", "counters"):
        monkeypatch.setattr(importlib.import_module(f"{MODULE}.{module}"), "time", clock)


def test_a_sound_mac_passes(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    found = examined(mac, monkeypatch)
    assert tuple(found) == ALL
    assert {check.verdict for check in found.values()} == {"pass"}, found
    assert found["message"].values["seconds"] == pytest.approx(mac.faults.message_s)
    assert mac.faults.wait_s < float(found["event wait"].values["seconds"]) < 2 * mac.faults.wait_s


def test_what_a_device_is(mac: Runtime) -> None:
    facts = importlib.import_module(MODULE).MetalDevice().facts()
    assert facts["GPU"] == "Apple M3 (pretended)"
    assert facts["family"] == "Apple9 or later"
    with installed(Runtime(family=1005)):
        assert importlib.import_module(MODULE).MetalDevice().facts()["family"] == "none of Apple7 on"


#: What is wrong with the Mac: (faults, check, what it says).
WRONG: dict[str, tuple[Faults, str, str]] = {
    "memory that is not zero": (Faults(dirty_memory=True), "new memory", "4,194,304 of 4,194,304 bytes"),
    "a compiler that refuses": (Faults(broken_source="nonsense\n"), "libraries", "attention.metal does not compile"),
    "a mapping that is copied": (Faults(copies_mapping=True), "mapped memory", "Metal made a copy"),
    "no mapping": (Faults(no_mapping=True), "mapped memory", "Metal does not map"),
    "dear messages": (Faults(message_s=3e-5), "message", "30.00 us; .* slower than the GPU"),
    "slow waits": (Faults(wait_s=0.02), "event wait", "20,?0.. us for an empty command buffer"),
    "a bound that is too long": (Faults(timeout_factor=100.0), "bounded wait", "2000.0 ms of a bound of 20 ms"),
    "a bound that is no wait": (Faults(timeout_factor=0.0), "bounded wait", "0.0 ms of a bound of 20 ms"),
    "a replay that differs": (Faults(corrupt_replay=True), "replay", "the self-test found .* bytes different"),
    "launches that take no time": (Faults(ticks_per_second=1e3), "launch times", "the clock is not in seconds"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(what: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, name, said = WRONG[what]
    mac.faults = faults
    found = examined(mac, monkeypatch)
    assert tuple(found) == ALL, "one failure does not hide the others"
    assert found[name].verdict == "fail"
    assert re.search(said, found[name].text), found[name].text


#: What is wrong with our code: (file, text, text with the mistake, check, what it says).
MISTAKES: dict[str, tuple[str, str, str, str, str]] = {
    "no barrier": (
        ENCODE,
        "            if barrier:",
        "            if False:",
        "direct encoding",
        "values differ from numpy",
    ),
    "an offset into a mapping lost": (
        DEVICE,
        "label, keep), offset",
        "label, keep), 0",
        "mapped memory",
        "a kernel reads .* from a file that holds 1.5",
    ),
    "a wait for what has happened": (
        DEVICE,
        "(self._value + 1, mill",
        "(self._value, mill",
        "bounded wait",
        "answer True",
    ),
    "no barrier in a replay": (
        ENCODE,
        "            if step.barrier:",
        "            if False:",
        "replay",
        "the self-test found .* bytes different",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_found(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, old, new, name, said = MISTAKES[what]
    with installed(Runtime()) as mac:
        mutated(tmp_path / "metal", file, old, new)
        mac.shuffle(seed=1)
        found = examined(mac, monkeypatch)
        assert found[name].verdict == "fail"
        assert re.search(said, found[name].text), found[name].text


def test_references_that_are_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Runtime(), strict=False) as mac:
        monkeypatch.setattr("objc.registerMetaDataForSelector", lambda *given: None)
        found = examined(mac, monkeypatch)["references"]
    assert found.verdict == "fail"
    assert found.text == "a new buffer is held 2 times; of 8 x 16 MiB, 128 MiB were not given back"


def test_an_m1_replays_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Runtime(family=1007)) as mac:
        skipped = examined(mac, monkeypatch)["replay"]
        assert skipped.verdict == "skip"
        assert "--replay" in skipped.text
        assert not mac.messages["executeCommandsInBuffer:withRange:"]
        assert examined(mac, monkeypatch, risky=True)["replay"].verdict == "pass"
        assert mac.messages["executeCommandsInBuffer:withRange:"] == 3


def test_a_macos_without_residency_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(Runtime(macos=(14,))) as mac:
        found = examined(mac, monkeypatch)["residency set"]
        assert (found.verdict, found.text[:5]) == ("skip", "none:")


def test_a_replay_that_raises(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody thought of is a line of the report as well."""
    module = importlib.import_module(f"{MODULE}.self_test")
    monkeypatch.setattr(module, "tried", lambda device: 1 / 0)
    found = examined(mac, monkeypatch)["replay"]
    assert (found.verdict, found.text) == ("fail", "ZeroDivisionError: division by zero")


def test_the_whole_report_of_a_mac(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `minfer doctor` does where Metal is: its checks, cases encoded and replayed, speed by the GPU's clock."""
    on_the_clock(mac, monkeypatch)
    names = ("rms_norm/33x1", "project/norm_qkv/n1", "matmul/Q4_0/96x37/n9", "attn/decode1000", "kv_store/q8_0/96x3")
    few = tuple(case for case in cases.all_cases() if case.name in names)
    monkeypatch.setattr(cases, "all_cases", lambda: few)
    monkeypatch.setattr("minfer.doctor.speed.LARGE_S", 0.0)
    monkeypatch.setattr(backends, "AUTO", ("metal", "reference"))
    lines = list(doctor.examine())
    assert [f"{part}: {check.name}: {check.text}" for part, check in lines if check.verdict == "fail"] == []
    parts = dict.fromkeys(part.split(" (")[0] for part, _ in lines)
    assert list(parts) == [
        "devices",
        "kernels of reference against their definitions",
        "speed of reference",
        "what metal takes for granted",
        "kernels of metal against the reference",
        "speed of metal",
    ]
    assert mac.messages["executeCommandsInBuffer:withRange:"] >= len(few), "the second run of a case is a replay"
    for check in (check for part, check in lines if part == "speed of metal"):
        assert check.values["clock"] == "device clock"
        assert int(check.values["bytes"]) > 0


def test_a_replay_that_loses_a_launch_is_found_by_the_cases(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [case for case in cases.all_cases() if case.name == "attn/decode1000"]
    assert {check.verdict for check in check_kernels("metal", Oracle(), [case])} == {"pass"}
    mac.faults.corrupt_replay = True  # the self-test's verdict is kept on disk, from before
    (found,) = check_kernels("metal", Oracle(), [replace(case, name="attn/again")])
    assert found.verdict == "fail"
    assert "run again, it differs" in found.text


# --- the GPU's clock ---------------------------------------------------------------------------------------------


def chain(metal: Any) -> list[Any]:
    x, y, z = (metal.buffer(4 * N, name) for name in "xyz")
    metal.write(x, 0, values(1).tobytes())
    steps = [step(ADD, x, x, y, barrier=False), step(MULTIPLY, y, x, z, barrier=True)]
    return [*steps, step(SCALE, z, None, z, barrier=True, factor=0.5)]


@pytest.mark.parametrize("ticks", [24e6, 1e9])
def test_each_launch_is_timed(ticks: float, mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake's threadgroup takes a microsecond, whatever a tick is; and the steps give what they always give."""
    mac.faults.ticks_per_second = ticks
    metal = importlib.import_module(MODULE).MetalDevice()
    on_the_clock(mac, monkeypatch)
    steps = chain(metal)
    longer = replace(steps[1].launch, grid=(7, 1, 1))
    seconds = metal.times([steps[0], replace(steps[1], launch=longer), steps[2]])
    assert seconds == pytest.approx([2e-6, 7e-6, 2e-6], abs=2 / ticks)
    z = np.frombuffer(metal.read(steps[2].bound[1].buffer, 0, 4 * N), np.float32)
    assert np.array_equal(z, (values(1) + values(1)) * values(1) * np.float32(0.5))
    metal.close()


def test_many_launches_are_sampled_in_parts(mac: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    metal = importlib.import_module(MODULE).MetalDevice()
    on_the_clock(mac, monkeypatch)
    monkeypatch.setattr(importlib.import_module(f"{MODULE}.counters"), "MOST_LAUNCHES", 2)
    assert len(metal.times(chain(metal))) == 3
    assert mac.messages["newCounterSampleBufferWithDescriptor:error:"] == 2
    metal.close()


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (Faults(no_sampling=True), "Apple M3 .* samples no counters where an encoder begins and ends"),
        (Faults(no_counters=True), "has no counters of time"),
        (Faults(no_sample_buffer=True), "samples no 6 counters: no room for 6 samples"),
        (Faults(no_samples=True), "took not every sample of 3 launches"),
        (Faults(ticks_per_second=0.0), "the clock of Apple M3 .* stands still"),
    ],
)
def test_without_counters_the_reason_is_said(
    faults: Faults, reason: str, mac: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    mac.faults = faults
    metal = importlib.import_module(MODULE).MetalDevice()
    on_the_clock(mac, monkeypatch)
    steps = chain(metal)
    with pytest.raises(UnsupportedError, match=reason):
        metal.times(steps)
    metal.encode(steps)  # the device goes on
    metal.close()
    check = examined(mac, monkeypatch)["launch times"]
    assert check.verdict == "skip"
    assert re.search(f"the host's clock is used: .*{reason.split('6 samples')[0][:12]}", check.text)


def test_a_dead_device_is_not_timed(mac: Runtime) -> None:
    metal = importlib.import_module(MODULE).MetalDevice()
    steps = chain(metal)
    mac.faults.fail_at = mac.committed + 1
    metal.encode(steps)
    for _ in range(2):
        with pytest.raises(DeviceError):
            metal.times(steps)
