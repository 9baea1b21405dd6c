"""`python -m minfer.msl`: what it prints and how it exits. The kernel is the one of docs/msl.md."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from minfer.msl.__main__ import main

PAGE = Path(__file__).parents[2] / "docs" / "msl.md"
RUN = ["--groups", "3", "--threads", "128", "-b", "f32:3x256:arange", "-b", "f32:3:fresh", "-b", "u32=256"]


@pytest.fixture
def blocks(tmp_path: Path) -> dict[str, Path]:
    """The Metal sources that the page shows, the faulty one and its repair."""
    found = re.findall(r"```metal\n(.*?)```", PAGE.read_text(), re.DOTALL)
    files = {"row_sums": tmp_path / "row_sums.metal", "repaired": tmp_path / "repaired.metal"}
    files["row_sums"].write_text(found[0])
    files["repaired"].write_text(found[0].replace(found[1].split("\n")[0], found[1].rstrip()))
    return files


def test_check_lists_kernels(blocks: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(blocks["row_sums"])]) == 0
    out = capsys.readouterr().out
    assert "row_sums(x [[buffer(0)]] read, y [[buffer(1)]] written, n [[buffer(2)]] read)" in out


def test_run_computes(blocks: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "out.npz"
    assert main(["run", str(blocks["repaired"]), "row_sums", *RUN, "--save", str(saved)]) == 0
    rows = np.arange(768, dtype=np.float32).reshape(3, 256).sum(1)
    np.testing.assert_array_equal(np.load(saved)["y"], rows)
    assert "y = [ 32640.  98176. 163712.]" in capsys.readouterr().out


def test_the_race_of_the_page_is_found_and_its_repair_is_clean(
    blocks: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(blocks["row_sums"]), "row_sums", *RUN, "--check"]) == 1
    out = capsys.readouterr().out
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("row_sums.metal:")]
    assert len(shown) == 2
    for line in shown:
        assert line in out
    assert main(["run", str(blocks["repaired"]), "row_sums", *RUN, "--check"]) == 0
    assert "kernel row_sums: no faults found" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["run", "FILE", "row_sums"], "takes 3 buffers"),
        (["run", "FILE", "sums"], "no kernel 'sums'"),
        (["run", "FILE", "row_sums", "-b", "f33:1"], "'f33' is none of"),
        (["run", "FILE", "row_sums", "-b", "f32:x"], "invalid literal"),
        (["run", "FILE", "row_sums", "--constant", "a"], "is not NAME=VALUE"),
        (["check", "missing.metal"], "No such file"),
        (["check", "FILE", "--compiler", "no-such-compiler"], "install g++"),
    ],
)
def test_errors_are_sentences(
    blocks: dict[str, Path], args: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(blocks["row_sums"]) if a == "FILE" else a for a in args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert reason in err
    assert "Traceback" not in err
