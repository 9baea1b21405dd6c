"""Record what `transformers` makes of every chat template in tests/data/templates, into recorded.json beside them.

Needs its own environment: `pip install transformers jinja2`, then `python tests/tools/record_templates.py`.
The clock stands still at `NOW`, because some templates print the date.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import transformers
from transformers.utils import chat_template_utils

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
NOW = datetime.datetime(2024, 7, 26, 12, 30)

SYSTEM = {"role": "system", "content": "You are terse. <b>& \"quotes\" 'too'</b>"}
USER = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Rayleigh scattering.\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nShort waves scatter more.\n</think>\n\nRayleigh scattering."}
AGAIN = {"role": "user", "content": "  Und auf Deutsch? 天空 🙂\n\nBitte.  "}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & here",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Größe"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"sky": "blau", "t": 21.5}'}

CASES: dict[str, dict[str, object]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "multi-turn": {"messages": [USER, ANSWER, AGAIN]},
    "system multi-turn": {"messages": [SYSTEM, USER, THOUGHT, AGAIN]},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "thinking": {"messages": [SYSTEM, USER], "enable_thinking": True},
    "no thinking": {"messages": [SYSTEM, USER], "enable_thinking": False},
    "tools offered": {"messages": [SYSTEM, USER], "tools": [TOOL]},
    "tools offered, no system": {"messages": [USER], "tools": [TOOL]},
    "tool call": {"messages": [USER, CALL, RESULT], "tools": [TOOL]},
    "tool call answered": {"messages": [SYSTEM, USER, CALL, RESULT, ANSWER, AGAIN], "tools": [TOOL]},
    "documents": {"messages": [USER], "documents": [{"title": "Optics", "text": "Light scatters."}]},
    "no messages": {"messages": []},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why is the sky blue?"}]}]},
}


class StoppedClock(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> StoppedClock:
        return cls(*NOW.timetuple()[:6])


def render(source: str, case: dict[str, object]) -> dict[str, str]:
    arguments = {"add_generation_prompt": True, "bos_token": "<BOS>", "eos_token": "<EOS>", **case}
    messages = arguments.pop("messages")
    try:
        rendered, _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **arguments)
    except Exception as error:
        return {"error": str(error)}
    return {"text": rendered[0]}


def main() -> None:
    chat_template_utils.datetime = StoppedClock
    recorded = {
        path.name: {name: render(path.read_text(encoding="utf-8"), case) for name, case in CASES.items()}
        for path in sorted(TEMPLATES.glob("*.jinja"))
    }
    result = {
        "transformers": transformers.__version__,
        "now": NOW.isoformat(),
        "cases": CASES,
        "recorded": recorded,
    }
    text = json.dumps(result, ensure_ascii=False, indent=1)
    (TEMPLATES / "recorded.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
