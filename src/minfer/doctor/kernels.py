"""Every op case on a device against the oracle; the oracle against the definitions."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minfer import cases
from minfer.backends import open_backend
from minfer.backends.base import Check
from minfer.doctor.definitions import evaluate
from minfer.errors import DeviceError
from minfer.graph import ir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from minfer.backends.base import Backend, LaunchList, Values
    from minfer.cases import Array, Case

#: The backend that gives a case's expected result. It is itself compared with the definitions.
ORACLE = "reference"
#: Failures that are told one by one.
MOST_FAILURES = 12


class Oracle:
    """What cases should give, each computed once."""

    def __init__(self) -> None:
        self._found: dict[str, list[Array]] = {}

    def expected(self, case: Case, device: str) -> list[Array]:
        if device == ORACLE:
            return evaluate(case)
        if case.name not in self._found:
            self._found[case.name] = cases.run(case, open_backend(ORACLE, case.kv_format))
        return self._found[case.name]


@dataclass(slots=True)
class _Passed:
    """Cases that went well, by what ran them; the one that came closest to its bound."""

    n: int = 0
    share: float = -1.0
    error: float = 0.0
    bound: float = 0.0
    name: str = ""

    def add(self, case: Case, error: float, bound: float) -> None:
        self.n += 1
        share = error / bound if bound else 0.0
        if share > self.share:
            self.share, self.error, self.bound, self.name = share, error, bound, case.name


def check_kernels(device: str, oracle: Oracle, some: Sequence[Case] | None = None) -> Iterator[Check]:
    """A line for each kernel (or op, where a device has no kernels of ours), and for each case that fails."""
    some = cases.all_cases() if some is None else some
    start = time.perf_counter()
    skipped: Counter[tuple[str, str]] = Counter()
    runs: list[tuple[Case, str]] = []
    listed: list[LaunchList] = []
    first: Backend | None = None
    for case in some:
        backend = open_backend(device, case.kv_format)
        first = first or backend
        if reason := _lacks(case, backend):
            skipped[type(case.op).__name__, reason] += 1
        else:
            opened = cases.Opened(case, backend)
            here = [launches for launches in opened.launches() if launches is not None]
            listed += here
            runs.append((case, _kernels(here) or type(case.op).__name__))
            opened.close()
        if backend is not first:
            backend.close()
    for (op, reason), n in skipped.items():
        yield Check(op, "skip", f"{_cases(n)} not supported: {reason}", {"cases": n})
    if listed and first:
        try:
            made = first.prepare(listed)
        except Exception as error:  # whatever a compiler or a driver raises belongs into the report
            yield Check("compile", "fail", f"{_said(error)}; {_cases(len(runs))} not run")
            first.close()
            return
        if made:
            seconds = time.perf_counter() - start
            yield Check("compile", "pass", f"{made} variants of kernels in {seconds:.1f} s", {"variants": made})
    if first:
        first.close()

    passed: dict[str, _Passed] = {}
    failed = 0
    for i, (case, kernels) in enumerate(runs):
        dead = False
        try:
            wrong = _run(case, device, oracle, passed.setdefault(kernels, _Passed()))
        except Exception as error:
            wrong, dead = Check("", "fail", _said(error)), isinstance(error, DeviceError)
        if wrong:
            failed += 1
            if failed <= MOST_FAILURES:
                yield Check(kernels, "fail", f"{case.name}: {_inputs(case)}: {wrong.text}", wrong.values)
        if dead:
            left = len(runs) - i - 1
            if left:
                yield Check("cases", "skip", f"{_cases(left)} not run after the device stopped", {"cases": left})
            break
    if failed > MOST_FAILURES:
        more = failed - MOST_FAILURES
        yield Check("cases", "fail", f"{_cases(more)} more failed", {"cases": more})
    for kernels, group in passed.items():
        if group.n:
            text = f"{_cases(group.n)}, error up to {group.error:.1e} of {group.bound:.1e} ({group.name})"
            if not group.bound:
                text = f"{_cases(group.n)}, all bits the same"
            values: Values = {
                "cases": group.n,
                "error": group.error,
                "bound": group.bound,
                "case": group.name,
            }
            yield Check(kernels, "pass", text, values)


def _run(case: Case, device: str, oracle: Oracle, passed: _Passed) -> Check | None:
    """What is wrong with a case. It runs once, then with other inputs, then as at first: a device may encode the first
    run and record the second, and nothing that a run leaves behind may stand in for what the next one should do."""
    backend = open_backend(device, case.kv_format)
    try:
        opened = cases.Opened(case, backend)
        programs = opened.compile()
        results = []
        for seed in (0, 1, 0):
            opened.write(seed)
            for program in programs:
                program.run()
            results.append(opened.results())
        bound = backend.bound(opened.out, case.kind, cases.BOUNDS[case.kind])
    finally:
        backend.close()
    got, _, again = results
    want = oracle.expected(case, device)
    error = max(cases.error(g, w) for g, w in zip(got, want, strict=True))
    if not error <= bound:
        return _difference(case, got, want, error, bound)
    if any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(got, again, strict=True)):
        wrong = _difference(case, again, got, max(cases.error(a, b) for a, b in zip(again, got, strict=True)), 0.0)
        return Check("", "fail", f"run again, it differs: {wrong.text}", wrong.values)
    passed.add(case, error, bound)
    return None


def _difference(case: Case, got: Sequence[Array], want: Sequence[Array], error: float, bound: float) -> Check:
    """The value that is furthest off, of the result that is."""
    names: tuple[str, ...] = ("ids", "logits", "sum") if isinstance(case.op, ir.TopK) else ("value", "K rows", "V rows")
    if isinstance(case.op, ir.KvStore):
        names = names[1:]
    which = max(range(len(got)), key=lambda i: cases.error(got[i], want[i]))
    g, w = got[which], want[which]
    if g.shape != w.shape:
        return Check("", "fail", f"{names[which]} of shape {g.shape}, expected {w.shape}")
    with np.errstate(invalid="ignore"):  # Inf less Inf
        off = np.abs(g.astype(np.float64) - w)
    off[~np.isfinite(off) & ~((g == w) | (np.isnan(g) & np.isnan(w)))] = np.inf
    at = tuple(int(i) for i in np.unravel_index(int(np.nan_to_num(off, posinf=np.inf).argmax()), g.shape))
    found, expected = float(g[at]), float(w[at])
    text = (
        f"{names[which]} {list(at)} of {list(g.shape)} is {found:.7g}, expected {expected:.7g}; "
        f"error {error:.2e}, allowed {bound:.1e}"
    )
    values: Values = {
        "found": found,
        "expected": expected,
        "error": error,
        "bound": bound,
        "at": str(list(at)),
    }
    return Check("", "fail", text, values)


def _lacks(case: Case, backend: Backend) -> str | None:
    """What the device lacks for a case."""
    nodes = [node for node in case.graph(backend.name) if not isinstance(node.op, ir.Input)]
    return next((reason for node in nodes if (reason := backend.supports(node))), None)


def _kernels(listed: Sequence[LaunchList]) -> str:
    """The kernels that compute the op's value; those that fill the KV rows before are of other cases."""
    launches = [launch for some in listed for launch in some.to_json()["launches"]]
    return " + ".join(launch["kernel"] for launch in launches if launch["node"] == "blk.0.out")


def _inputs(case: Case) -> str:
    """The shapes of a case: inputs, weights, rows."""
    parts = [f"{type(case.op).__name__} of " + ", ".join(str(value.shape) for value in case.inputs)]
    parts += [f"{weight.name} {weight.type} {weight.shape}" for weight in ir.weights_of(case.op)]
    if case.kv:
        parts.append(f"{case.kv.n_cells} {case.kv.format} rows of {case.kv.n_values}")
    return ", ".join(parts)


def _said(error: Exception) -> str:
    return str(error) if type(error).__module__ == "minfer.errors" else f"{type(error).__name__}: {error}"


def _cases(n: int) -> str:
    return f"{n} case{'' if n == 1 else 's'}"
