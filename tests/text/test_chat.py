"""Chat templates against what transformers renders, and the errors that a user sees."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from minfer.errors import ModelFileError, RequestError, TemplateError
from minfer.text import ChatTemplate, sandbox
from minfer.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
RECORD = json.loads((TEMPLATES / "recorded.json").read_text(encoding="utf-8"))


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=tokens.get("bos"), eos_token=tokens.get("eos"))


class StoppedClock(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.fromisoformat(RECORD["now"])


@pytest.mark.parametrize("case", RECORD["cases"])
@pytest.mark.parametrize("name", RECORD["recorded"])
def test_renders_as_transformers(name, case, monkeypatch):
    monkeypatch.setattr(sandbox, "datetime", StoppedClock)
    chat = template((TEMPLATES / name).read_text(encoding="utf-8"), bos="<BOS>", eos="<EOS>")
    expected = RECORD["recorded"][name][case]
    arguments = dict(RECORD["cases"][case])
    if "text" in expected:
        assert chat.render(arguments.pop("messages"), **arguments) == expected["text"]
    else:
        with pytest.raises(TemplateError) as caught:
            chat.render(arguments.pop("messages"), **arguments)
        assert expected["error"] in str(caught.value)
