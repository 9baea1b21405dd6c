"""The doctor: a report whose every line is a verdict, and which finds what is planted."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from minfer import backends, cases, doctor
from minfer.backends.base import Check
from minfer.backends.gpu import kernels
from minfer.backends.gpu.devices import simulator
from minfer.backends.reference import ReferenceBackend
from minfer.cli import main
from minfer.doctor.definitions import evaluate
from minfer.doctor.kernels import MOST_FAILURES, Oracle, check_kernels
from minfer.doctor.speed import measure, shapes
from minfer.errors import DeviceError, UnsupportedError
from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minfer.cases import Case

CASES = cases.all_cases()
#: A case or more of each op, small enough for every test run; the whole list is what CI's own doctor runs.
SOME = (
    "embed/Q4_1",
    "get_rows",
    "swiglu/33x1",
    "rms_norm/33x1",
    "rope/neox/partial",
    "kv_store/q8_0/96x3",
    "head_rope_store/norm/q8_0/head64/biased/normed",
    "attn/decode1000",
    "attn/span/f16/full",
    "project/norm_qkv/n1",
    "project/swiglu/Q4_1/n9",
)


#: A line of norms.metal, and what gives twice the value for one token of five.
RIGHT = "= row[i] * scale * gain[i];"
WRONG = "= row[i] * scale * gain[i] * (token == 3 ? 2.0f : 1.0f);"


def some(*names: str) -> list[Case]:
    return [case for case in CASES if case.name in (names or SOME)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few cases, and small shapes only."""
    monkeypatch.setattr(cases, "all_cases", lambda: tuple(some()))
    monkeypatch.setattr("minfer.doctor.speed.LARGE_S", 0.0)


def is_here(name: str) -> bool:
    try:
        backends.open_backend(name, "f32").close()
    except UnsupportedError:
        return False
    return True


HERE = [name for name in backends.DEVICES if is_here(name)]


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *words])
    return int(end.value.code or 0), capsys.readouterr().out


# --- the report --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("device", HERE)
def test_every_device_here_passes(device: str) -> None:
    lines = list(doctor.examine([device]))
    assert {check.verdict for _, check in lines} <= {"pass", "skip"}
    parts = Counter(part.split(" (")[0] for part, _ in lines)
    assert parts["devices"] == len(backends.DEVICES) + len(backends.MISSING)
    against = "their definitions" if device == "reference" else "the reference"
    ran = [check for part, check in lines if part == f"kernels of {device} against {against}"]
    assert sum(int(check.values.get("cases", 0)) for check in ran) == len(SOME)
    assert parts[f"speed of {device}"] == len(shapes(large=False))
    for part, check in lines:
        assert check.text, f"{part}: {check.name} says nothing"


@pytest.mark.usefixtures("quick")
def test_the_text_and_the_json_are_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run("--device", "reference", capsys=capsys)
    assert code == 0
    assert text.startswith("minfer  ")
    marks = re.findall(r"^  (\S+)  ([^:]+):", text, re.MULTILINE)
    code, printed = run("--device", "reference", "--json", capsys=capsys)
    report = json.loads(printed)
    assert code == 0
    assert marks == [(line["verdict"], line["name"]) for line in report["lines"]]
    assert {mark for mark, _ in marks} == {"pass", "skip"}
    totals = Counter(mark for mark, _ in marks)
    assert report["totals"] == {"pass": totals["pass"], "fail": 0, "skip": totals["skip"]}
    assert re.search(rf"{totals['pass']} pass, 0 fail, {totals['skip']} skip, \d+ s\n$", text)
    assert report["about"]["minfer"]


@pytest.mark.usefixtures("quick")
def test_nothing_of_the_user_is_in_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    home = Path("/home/someone")
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setenv("MINFER_CACHE", str(home / "models"))
    monkeypatch.setenv("MINFER_KERNELS", "gemm:off")

    def broken(*given: object) -> Any:
        raise OSError(f"no such file: {home / 'lib.so'}")

    monkeypatch.setitem(backends.DEVICES, "reference", broken)
    code, text = run("--device", "reference", capsys=capsys)
    assert code == 1
    assert "FAIL  reference: OSError: no such file: ~/lib.so" in text
    assert "someone" not in text
    assert "MINFER_KERNELS=gemm:off" in text


def test_devices_that_are_not_here_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "AUTO", ("metal", "reference"))
    monkeypatch.setattr(cases, "all_cases", lambda: ())
    monkeypatch.setattr("minfer.doctor.speed.shapes", lambda *, large: ())
    monkeypatch.setitem(backends.MISSING, "abacus", "no beads")
    found = {check.name: check for part, check in doctor.examine() if part == "devices"}
    assert found["metal"].verdict == found["abacus"].verdict == found["simulator"].verdict == "skip"
    assert "No module named" in found["metal"].text
    assert found["abacus"].text == "not here: no beads"
    assert "not asked for: minfer doctor --device simulator" in found["simulator"].text
    assert found["reference"].verdict == "pass"
    named = {check.name: check for part, check in doctor.examine(["metal", "abacus"]) if part == "devices"}
    assert named["metal"].verdict == named["abacus"].verdict == "fail", "what was asked for is missed"
    with pytest.raises(UnsupportedError, match="no device named 'gpu'; expected one of metal"):
        doctor.examine(["gpu"])


def test_a_part_that_raises_ends_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the other parts go on."""

    def raising(self: Any, *, risky: bool) -> Iterator[Check]:
        yield Check("first", "pass", "good")
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(ReferenceBackend, "checks", raising)
    monkeypatch.setattr(cases, "all_cases", lambda: tuple(some("get_rows")))
    monkeypatch.setattr("minfer.doctor.speed.shapes", lambda *, large: shapes(large=False)[:1])
    lines = [(part, check) for part, check in doctor.examine(["reference"]) if part != "devices"]
    assert [(check.verdict, check.name) for part, check in lines] == [
        ("pass", "first"),
        ("fail", "the rest"),
        ("pass", "GetRows"),
        ("pass", "memory"),
    ]
    assert lines[1][1].text == "not run: ZeroDivisionError: division by zero"
    monkeypatch.setattr(cases, "Opened", lambda *given: 1 / 0)
    (kernels, _) = [check for part, check in doctor.examine(["reference"]) if part.startswith(("kernels", "speed"))]
    assert (kernels.verdict, kernels.name) == ("fail", "the rest")


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.mac_ver", lambda: ("15.1", ("", "", ""), "arm64"))
    assert doctor.about()["system"].startswith("macOS 15.1 (")
    monkeypatch.undo()

    def missing(*given: object, **options: object) -> Any:
        raise OSError

    monkeypatch.setattr("platform.freedesktop_os_release", missing)
    monkeypatch.setattr(Path, "read_text", missing)
    about = doctor.about()
    assert "numpy" in about["python"]
    assert about["processor"].endswith("threads")


# --- what is planted ---------------------------------------------------------------------------------------------


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Kernels with one place of a file's text changed."""

    def forget() -> None:
        for cached in (kernels._lines, kernels.source, simulator.library, simulator._kernel):
            cached.cache_clear()

    def plant(file: str, old: str, new: str) -> None:
        folder = tmp_path / "kernels"
        shutil.copytree(kernels.FOLDER, folder)
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new))
        monkeypatch.setattr(kernels, "FOLDER", folder)
        forget()

    yield plant
    monkeypatch.undo()
    forget()


def test_a_wrong_kernel_is_named(planted: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With its shape, where, and both numbers; and the exit code tells."""
    planted("norms.metal", RIGHT, WRONG)
    monkeypatch.setattr(cases, "all_cases", lambda: tuple(some("rms_norm/576x5", "get_rows")))
    monkeypatch.setattr("minfer.doctor.speed.shapes", lambda *, large: ())
    code, printed = run("--device", "simulator", "--json", capsys=capsys)
    assert code == 1
    (line,) = [line for line in json.loads(printed)["lines"] if line["verdict"] == "fail"]
    assert line["name"] == "rms_norm"
    assert line["text"].startswith("rms_norm/576x5: RmsNorm of (576, 5), norm.weight F32 (576,): value [")
    (case,) = some("rms_norm/576x5")
    at = tuple(json.loads(line["values"]["at"]))
    assert at[0] == 3
    (want,) = evaluate(case)
    assert line["values"]["expected"] == pytest.approx(want[at], rel=1e-5)
    assert line["values"]["found"] == pytest.approx(want[at] * 2, rel=1e-5)
    assert f"is {line['values']['found']:.7g}, expected {line['values']['expected']:.7g}" in line["text"]


def test_a_kernel_that_does_not_compile_is_one_line(planted: Any) -> None:
    planted("norms.metal", RIGHT, "nonsense;")
    found = list(check_kernels("simulator", Oracle(), some("rms_norm/33x1", "get_rows")))
    assert [(check.name, check.verdict) for check in found] == [("compile", "fail")]
    assert "norms.metal:" in found[0].text
    assert "2 cases not run" in found[0].text


def wrong(monkeypatch: pytest.MonkeyPatch, change: Any) -> list[Check]:
    """The lines of a reference backend whose results are changed, against the definitions."""
    true = cases.Opened.results
    monkeypatch.setattr(cases.Opened, "results", lambda self: change(true(self)))
    return list(check_kernels("reference", Oracle(), some("get_rows", "kv_store/q8_0/96x3", "swiglu/33x1")))


def test_every_failure_is_told_up_to_some(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wrong(monkeypatch, lambda results: [r * np.float32(1.5) for r in results])
    assert [check.name for check in found] == ["GetRows", "SwiGLU", "KvStore"]
    assert {check.verdict for check in found} == {"fail"}
    assert "K rows [" in found[2].text or "V rows [" in found[2].text
    assert "13 q8_0 rows of 96" in found[2].text
    many = [case for case in CASES if case.name.startswith("silu/")] * 3
    told = list(check_kernels("reference", Oracle(), many))
    assert len(many) > MOST_FAILURES
    assert [check.name for check in told] == ["Silu"] * MOST_FAILURES + ["cases"]
    assert told[-1].text == f"{len(many) - MOST_FAILURES} cases more failed"


def test_nan_inf_and_shapes_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(results: list[Any]) -> list[Any]:
        results[0] = results[0].copy()
        results[0].reshape(-1)[5] = np.nan
        return results

    found = wrong(monkeypatch, spoil)
    assert all(check.verdict == "fail" and "is nan, expected " in check.text for check in found)
    monkeypatch.undo()
    found = wrong(monkeypatch, lambda results: [r[:1] for r in results])
    assert all(check.verdict == "fail" and "of shape (1, " in check.text for check in found)


def test_a_second_run_that_differs_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(100))

    def drift(results: list[Any]) -> list[Any]:
        return [r * np.float32(1 + 1e-6 * (next(calls) % 3)) for r in results] if len(results) == 1 else results

    found = {check.name: check for check in wrong(monkeypatch, drift)}
    assert found["KvStore"].verdict == "pass"
    assert found["SwiGLU"].verdict == "fail"
    assert "run again, it differs: value [" in found["SwiGLU"].text


def test_after_a_fault_the_rest_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(self: Any) -> Any:
        raise DeviceError("the device stopped: a page fault")

    monkeypatch.setattr(cases.Opened, "compile", fault)
    found = list(check_kernels("reference", Oracle(), some()))
    assert [(check.verdict, check.name) for check in found] == [("fail", "Embed"), ("skip", "cases")]
    assert "a page fault" in found[0].text
    assert found[1].text == f"{len(SOME) - 1} cases not run after the device stopped"


def test_any_error_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases.Opened, "compile", lambda self: 1 / 0)
    found = list(check_kernels("reference", Oracle(), some("get_rows", "view")))
    assert [check.verdict for check in found] == ["fail", "fail"]
    assert "get_rows: GetRows of (33, 9), (3,): ZeroDivisionError: division by zero" in found[0].text
    (line, *_) = measure("reference")
    assert (line.verdict, line.text) == ("fail", "ZeroDivisionError: division by zero")


def test_what_a_device_lacks_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        ReferenceBackend, "supports", lambda self, node: "no rope" if isinstance(node.op, ir.Rope) else None
    )
    found = list(check_kernels("reference", Oracle(), some("rope/neox/partial", "rope/norm/partial", "view")))
    assert [(check.verdict, check.name) for check in found] == [("skip", "Rope"), ("pass", "View")]
    assert found[0].text == "2 cases not supported: no rope"
    monkeypatch.setattr(ReferenceBackend, "supports", lambda self, node: "nothing here")
    assert {(check.verdict, check.text) for check in measure("reference")} == {("skip", "not supported: nothing here")}


# --- speed -------------------------------------------------------------------------------------------------------


def test_shapes_state_the_bytes_that_they_move() -> None:
    """As the GPU's launches declare them, to within what they read twice; and the flops of products and attention."""
    gpu = backends.open_backend("simulator", "f16")
    for shape in shapes(large=False):
        opened = cases.Opened(shape, gpu)
        own = [v for some in opened.launches() for v in some.to_json()["launches"] if v["node"] == "blk.0.out"]
        opened.close()
        nbytes = sum(v["bytes"] for v in own)
        assert 0.8 * nbytes <= shape.nbytes <= nbytes, shape.name
        if shape.flops:
            assert shape.flops == pytest.approx(own[0]["flops"], rel=0.05), shape.name
    gpu.close()


def test_small_and_large_are_the_same_list() -> None:
    for small, large in zip(shapes(large=False), shapes(large=True), strict=True):
        assert type(small.op) is type(large.op)
        assert small.nbytes < large.nbytes


def test_a_large_shape_is_run_where_it_is_soon_done(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def line(device: str, shape: Any) -> tuple[Check, float]:
        ran.append(shape.name)
        return Check(shape.name, "pass", "measured"), 1e-6 if "Q4_0" in shape.name else 1.0

    monkeypatch.setattr("minfer.doctor.speed._line", line)
    names = [check.name for check in measure("any")]
    assert "Q4_0 4096 x 16384, 1 token" in names
    assert "Q8_0 256 x 1024, 1 token" in names
    assert len(ran) == len(names) + 1
    ran.clear()
    list(measure("any", large_too=False))
    assert ran == [shape.name for shape in shapes(large=False)]
