"""`minfer plan`: the plan of a step with its kernel launches, or a traced run of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minfer.cli.terminal import as_json
from minfer.engine.trace import summarize
from minfer.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

    from minfer import Model


def shown(model: Model, n_tokens: int, *, json: bool) -> str:
    """The plan as text or JSON; a split's launches follow where its device runs kernels."""
    plan = model.plan(n_tokens)
    launched = [(split.device, listed) for split, listed in model.launches(plan)]
    if json:
        data = plan.to_json()
        for i, (_, listed) in enumerate(launched):
            if listed:
                data["splits"][i]["launches"] = listed.to_json()
        return as_json(data)
    parts = [str(plan)]
    for i, (device, listed) in enumerate(launched):
        if listed:
            parts.append(f"split {i}, launches on {device} (| is a barrier):\n{listed.table()}")
    return "\n\n".join(parts)


def write_trace(model: Model, text: str, path: Path) -> str:
    """Run a text with every value kept, and write the numbers of each as JSON; a line that says what was written.

    Raises `RequestError` where the text has no tokens or the file cannot be written.
    """
    tokens = model.tokenizer.encode(text)
    if not tokens:
        raise RequestError("nothing to trace: the text has no tokens")
    data = summarize(model.engine, tokens)
    try:
        path.write_text(as_json(data) + "\n", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the trace cannot be written to {path}: {error.strerror}") from error
    return f"{path}: {len(data['values']):,} values of a step of {len(tokens)} tokens"
