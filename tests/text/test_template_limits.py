"""Hostile chat templates: nothing escapes, hangs or eats memory."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minfer.errors import TemplateError
from minfer.text import ChatTemplate, sandbox

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def render(source: str) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(MESSAGES)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ messages|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ raise_exception.__globals__ }}",
    "{{ range.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}",
    "{% extends 'x' %}",
    "{% for m in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__call__.__globals__ }}",
    "{{ messages[0].content.encode() }}",
    "{{ environment.take_value }}{{ take_value(1) }}",
]

GROW = "{% set ns = namespace(x=START) %}{% for i in range(64) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def grow(start: str, following: str) -> str:
    return GROW.replace("START", start).replace("NEXT", following)


BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 9**(9**9) }}",
    "{{ 1.5|round(10**9, 'floor') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{{ range(10**18)|list }}",
    grow("'ab'", "ns.x ~ ns.x"),
    grow("'ab'", "ns.x + ns.x"),
    grow("'ab'", "ns.x * 2"),
    grow("'ab'", "'%s%s' % (ns.x, ns.x)"),
    grow("'ab'", "'{}{}'.format(ns.x, ns.x)"),
    grow("'ab'", "'%s%s'|format(ns.x, ns.x)"),
    grow("'ab'", "[ns.x, ns.x]|join"),
    grow("'ab'", "[ns.x, ns.x]|join(ns.x)"),
    grow("'ab'", "ns.x.join([ns.x, ns.x])"),
    grow("'ab'", "ns.x.replace('a', ns.x)"),
    grow("'ab'", "ns.x|replace('a', ns.x)"),
    grow("[1]", "[ns.x, ns.x]"),
    grow("[1]", "(ns.x, ns.x)"),
    grow("[1]", "ns.x + ns.x"),
    grow("1", "{'a': ns.x, 'b': ns.x}"),
    grow("1", "dict(a=ns.x, b=ns.x)"),
    grow("1", "dict.fromkeys(['a', 'b'], ns.x)"),
    grow("7", "ns.x * ns.x"),
    grow("7", "ns.x ** 7"),
    "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% macro m(x, n) %}{% if n %}{{ m(x ~ x, n - 1) }}{% else %}{{ x }}{% endif %}{% endmacro %}{{ m('ab', 64) }}",
    "{% for i in range(10000) %}{% for j in range(10000) %}{% endfor %}{% endfor %}",
    "{% set xs = range(10000)|list %}{% for a in xs %}{% for b in xs %}{% for c in xs %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(64) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% block b %}{{ self.b() }}{{ self.b() }}{% endblock %}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '1'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ (1).to_bytes(10**9, 'big') }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'|indent(10**9, first=true) }}",
    "{{ 'a'|wordwrap(0) }}",
    "{{ lipsum(n=10**9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format('a') }}",
    "{{ '{:>{}}'.format('a', 999999999) }}",
    "{{ '{:>{w}}'.format('a', w=999999999) }}",
    "{{ messages|tojson(indent=10**9) }}",
    "{{ messages|batch(10**9, 1)|list }}",
    "{{ messages|slice(10**9)|list }}",
    "{{ ([[1]] * 10000)|sum(start=[]) }}",
    "{{ strftime_now('%999999999Y') }}",
    "{{ strftime_now('%Y' * 1000) }}",
    "{{ dict.fromkeys(range(100000), 'a' * 900000)|tojson }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ " + "1+" * 20000 + "1 }}",
    "{{ a" + ".b" * 30000 + " }}",
    "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "x" * 300_000,
]


@pytest.mark.parametrize("source", ESCAPES)
def test_escapes_are_refused(source):
    with pytest.raises(TemplateError):
        render(source)


@pytest.mark.parametrize("source", BOMBS, ids=lambda source: source[:50])
def test_bombs_are_refused_within_the_budget(source, monkeypatch):
    """What a refused template spent is bounded; time is only a net that this test pulls away."""
    monkeypatch.setattr(sandbox, "SECONDS", 600.0)
    monkeypatch.setattr(sandbox, "STEP", 4096)  # a sixteenth of the rounds, to keep the test short
    spent: list[sandbox.Budget] = []
    make = sandbox.Budget.__init__
    monkeypatch.setattr(sandbox.Budget, "__init__", lambda self, *args: (make(self, *args), spent.append(self))[0])
    before = peak_memory()
    with pytest.raises(TemplateError):
        render(source)
    assert all(one.used <= one.limit + one.value_limit for one in spent)
    assert peak_memory() - before < 200e6


def test_time_is_bounded_too(monkeypatch):
    monkeypatch.setattr(sandbox, "SECONDS", 0.0)
    with pytest.raises(TemplateError, match="line 2: the template runs longer than 0 s"):
        render("x\n{% for m in messages %}{{ m.content }}{% endfor %}")


def test_long_conversations_are_not_hostile():
    """3 MB of conversation, with a template that copies and accumulates as published ones do."""
    messages = [{"role": "user", "content": "word " * 2000}] * 300
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}"
        "{% set text = m.role + ': ' + m.content|trim %}{{ text ~ '\n' }}{% endfor %}{{ messages[::-1]|length }}"
    )
    text = ChatTemplate(source, bos_token=None, eos_token=None).render(messages)
    assert text == ("user: " + ("word " * 2000).strip() + "\n") * 300 + "300"


PARTS = """
{{ }} {% %} {%- -%} for in if set macro endfor endif endmacro messages loop ns namespace ( ) [ ] { } . , : | ~ + * ** %
== 'a' 1 10**9 x y range join tojson format replace map list attr __class__ content call filter {# #} = not
"""


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PARTS.split()), max_size=30))
def test_any_template_renders_or_is_refused(parts):
    with suppress(TemplateError):
        assert isinstance(render(" ".join(parts)), str)
