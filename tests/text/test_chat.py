"""Chat templates against what transformers renders, and the errors that a user sees."""

from __future__ import annotations

import functools
import json
from datetime import datetime
from pathlib import Path

import pytest
from vocab_data import tiny_bpe

from minfer.errors import ModelFileError, RequestError, TemplateError
from minfer.text import ChatTemplate, Tokenizer, sandbox

TEMPLATES = Path(__file__).parent.parent / "data" / "templates"
RECORD = json.loads((TEMPLATES / "recorded.json").read_text(encoding="utf-8"))


def template(source: str, **tokens: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token=tokens.get("bos"), eos_token=tokens.get("eos"))


@functools.cache
def published(name: str) -> ChatTemplate:
    return template((TEMPLATES / name).read_text(encoding="utf-8"), bos="<BOS>", eos="<EOS>")


class StoppedClock(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.fromisoformat(RECORD["now"])


@pytest.mark.parametrize("case", RECORD["cases"])
@pytest.mark.parametrize("name", RECORD["recorded"])
def test_renders_as_transformers(name, case, monkeypatch):
    monkeypatch.setattr(sandbox, "datetime", StoppedClock)
    chat = published(name)
    expected = RECORD["recorded"][name][case]
    arguments = dict(RECORD["cases"][case])
    if "text" in expected:
        assert chat.render(arguments.pop("messages"), **arguments) == expected["text"]
    else:
        with pytest.raises(TemplateError) as caught:
            chat.render(arguments.pop("messages"), **arguments)
        assert expected["error"] in str(caught.value)


USER = [{"role": "user", "content": "hi"}]


EXTRAS = [
    ("{{ x|tojson }}", {"x": {"b": "<é&'>", "a": [1, None]}}, """{"b": "<é&'>", "a": [1, null]}"""),
    ("{{ x|tojson(indent=2) }}", {"x": {"b": 1}}, '{\n  "b": 1\n}'),
    ("{% for i in [1,2,3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}", {}, "13"),
    ("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", {}, "1"),
    ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", {}, "ahib"),
    ("  {% if true %}\nx\n  {% endif %}\ny", {}, "x\ny"),
    ("{{ bos_token }}|{{ eos_token }}|{{ nothing }}", {}, "<s>||"),
    ("{{ enable_thinking }}{{ tools }}{{ documents }}", {"enable_thinking": False}, "FalseNoneNone"),
    ("{{ add_generation_prompt }}", {"add_generation_prompt": False}, "False"),
]


@pytest.mark.parametrize(("source", "variables", "expected"), EXTRAS)
def test_jinja_extras_of_transformers(source, variables, expected):
    assert template(source, bos="<s>").render(USER, **variables) == expected


def test_date_and_missing_content():
    assert template("{{ strftime_now('%Y') }}").render(USER) == datetime.now().strftime("%Y")
    assert template("{{ messages[0] }}").render([{"role": "user", "content": None}]) == "{'role': 'user'}"


def test_errors_name_the_line_and_the_variables():
    source = "{{ bos_token }}\n{% for m in messages %}\n{{ m.content }}\n{{ m.name.first.x }}\n{% endfor %}"
    with pytest.raises(TemplateError) as caught:
        template(source, bos="<s>").render(USER, enable_thinking=True)
    assert str(caught.value) == (
        "chat template, line 4: 'dict object' has no attribute 'name'; variables on offer: "
        "add_generation_prompt, bos_token, documents, enable_thinking, messages, tools"
    )
    with pytest.raises(TemplateError, match="line 2: only users here; variables on offer"):
        template("\n{{ raise_exception('only users here') }}").render(USER)
    with pytest.raises(TemplateError, match="chat template, line 3: Unexpected end of template"):
        template("\n\n{% for x in messages %}")
    with pytest.raises(TemplateError, match="must be text, found bytes"):
        template(b"x")


def test_arguments_are_plain_data():
    chat = template("{{ messages[0].content }}")
    for wrong in ("hi", ["hi"], [1]):
        with pytest.raises(RequestError, match="messages must be a list of mappings"):
            chat.render(wrong)
    with pytest.raises(RequestError, match=r"messages\[0\].content is a PosixPath; a chat template takes text"):
        chat.render([{"content": Path()}])
    nested: list = []
    nested.append(nested)
    with pytest.raises(RequestError, match="nested deeper than"):
        chat.render([{"content": nested}])

    class Loud(str):
        def upper(self):
            raise AssertionError("a caller's method ran")

    assert template("{{ messages[0].content.upper() }}").render([{"content": Loud("hi")}]) == "HI"


def test_caller_data_is_not_changed():
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    template("{% set m = messages[0] %}{{ m.content }}").render(messages)
    assert messages == [{"role": "user", "content": "hi", "tool_calls": None}]


KEY = "tokenizer.chat_template"


def test_from_metadata():
    chatml = Tokenizer.from_metadata(
        tiny_bpe([], control=["<|im_start|>", "<|im_end|>"], bos_token_id=256, eos_token_id=257)
    )
    plain = Tokenizer.from_metadata(tiny_bpe([]))

    def render(metadata, tokenizer, **arguments):
        return ChatTemplate.from_metadata(metadata, tokenizer).render(USER, **arguments)

    assert render({KEY: "{{ bos_token }}A{{ eos_token }}"}, chatml) == "<|im_start|>A<|im_end|>"
    both = {KEY: "A", KEY + ".tool_use": "B", KEY + ".rag": "C"}
    assert render(both, plain) == "A"
    assert render(both, plain, tools=[]) == "B"
    assert render({KEY: "A"}, plain, tools=[]) == "A"
    assert render({KEY + ".default": "D"}, plain) == "D"
    assert render({}, chatml) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render({}, chatml, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    with pytest.raises(TemplateError, match=r"no chat template .* use --raw"):
        ChatTemplate.from_metadata({}, plain)
    with pytest.raises(TemplateError, match=r"it has tokenizer.chat_template.rag, which no call selects"):
        ChatTemplate.from_metadata({KEY + ".rag": "C"}, plain)
    # ChatML's tokens as ordinary text do not make a ChatML model
    typed = tiny_bpe([], control=["<|im_start|>"], user=["<|im_end"])
    with pytest.raises(TemplateError, match="no ChatML tokens"):
        ChatTemplate.from_metadata({}, Tokenizer.from_metadata(typed))
    with pytest.raises(ModelFileError, match=r"tokenizer.chat_template: found int"):
        ChatTemplate.from_metadata({KEY: 3}, plain)
