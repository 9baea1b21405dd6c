"""The preprocessor: macros, conditions, includes and the places of tokens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minfer.msl import SourceError, preprocess
from minfer.msl.lexer import tokenize
from minfer.msl.ppexpr import evaluate
from minfer.msl.preprocess import Preprocessor

if TYPE_CHECKING:
    from pathlib import Path


def expand(text: str, **options: object) -> str:
    return " ".join(t.text for t in Preprocessor(**options).run(text, "a.metal"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#define A 1\nA B", "1 B"),
        ("#define F(x, y) x*y+x\nF(1+2, 3)", "1 + 2 * 3 + 1 + 2"),
        ("#define F(x) #x\nF(a  +b \"c\")", r'"a +b \"c\""'),
        ("#define F(x, y) x##y\nF(ab, cd) F(1, e3)", "abcd 1e3"),
        ("#define F(...) f(__VA_ARGS__)\nF(1, 2) F()", "f ( 1 , 2 ) f ( )"),
        ("#define F(a, ...) g(a, __VA_ARGS__)\nF(1, 2, 3)", "g ( 1 , 2 , 3 )"),
        ("#define A B\n#define B A\nA B", "A B"),
        ("#define F(x) F(x + 1)\nF(F(1))", "F ( F ( 1 + 1 ) + 1 )"),
        ("#define G(x) x\n#define H G\nH(3) G", "3 G"),
        ("#define F(x) [x]\nF((1, 2))\nF(\n4\n)", "[ ( 1 , 2 ) ] [ 4 ]"),
        ("#define A 2\n#undef A\nA", "A"),
        ("#if defined(X) || !defined Y && __METAL_VERSION__ >= 310\nyes\n#else\nno\n#endif", "yes"),
        ("#if 0\n#error never\n#elif 1\na\n#elif 1\nb\n#else\nc\n#endif", "a"),
        ("#ifdef __METAL__\n#ifndef Q\nin\n#endif\n#endif", "in"),
        ("a /* b\n c */ d // e \\\n f\ng", "a d g"),
        ("#define A 1 \\\n + 2\nA", "1 + 2"),
        ("#if (1 << 4) == 16 && (-7 / 2) == -3 && 0x10 == 020\nok\n#endif", "ok"),
        ("_Pragma(\"unroll\") for", "unroll for"),
        ("#pragma unroll(4)\nfor", "unroll ( 4 ) for"),
        ("__LINE__\n__LINE__", "1 2"),
    ],
)  # fmt: skip
def test_expansion(text: str, expected: str) -> None:
    assert expand(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("#if 1\nx", 1, "#if without #endif"),
        ("x\n#endif", 2, "#endif without #if"),
        ("#error broken", 1, "broken"),
        ("#define F(x) x\nF(1, 2)", 2, "takes 1 arguments, 2 given"),
        ("#define F(x) x\nF(1", 2, "open argument list"),
        ("#define", 1, "without a name"),
        ("#frob", 1, "unknown directive"),
        ("a\n/* b", 2, "comment that is not closed"),
        ('a\nb "c', 2, "string that is not closed"),
        ("#if 1 +\n#endif", 1, "nothing"),
        ("#if 1 << 100\n#endif", 1, "shift by 100"),
    ],
)
def test_errors_have_a_place(text: str, line: int, reason: str) -> None:
    with pytest.raises(SourceError) as caught:
        expand(text)
    assert (caught.value.file, caught.value.line) == ("a.metal", line)
    assert reason in caught.value.reason


def test_tokens_of_a_macro_are_where_it_is_used() -> None:
    tokens = Preprocessor().run("#define A x +\\\n y\n\nA\n z", "a.metal")
    assert [(t.text, t.line) for t in tokens] == [("x", 4), ("+", 4), ("y", 4), ("z", 5)]


def test_includes_stay_inside_the_offered_directories(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    (inside / "sub").mkdir(parents=True)
    outside.mkdir()
    (inside / "a.h").write_text('#pragma once\n#include "sub/b.h"\nA')
    (inside / "sub" / "b.h").write_text("B")
    (outside / "secret.h").write_text("secret")
    (inside / "link.h").symlink_to(outside / "secret.h")
    assert expand('#include "a.h"\n#include <a.h>\n#include <metal_stdlib>\nC', include_dirs=[inside]) == "B A C"
    for name in ("../out/secret.h", str(outside / "secret.h"), "link.h", "secret.h"):
        with pytest.raises(SourceError):
            expand(f'#include "{name}"', include_dirs=[inside])


def test_hostile_macros_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "MAX_EXPANSIONS", 10_000)
    doubling = "\n".join(f"#define A{k + 1} A{k} A{k}" for k in range(40))
    with pytest.raises(SourceError, match="does not come to an end"):
        expand(f"#define A0 x\n{doubling}\nA40")
    with pytest.raises(SourceError, match="nested too deep"):
        expand("#if " + "(" * 1000 + "1" + ")" * 1000 + "\n#endif")


@given(st.text(alphabet="ab10 +-*/%()<>=!&|^?:~,.\"'#\n\\[]{};_", max_size=60))
def test_any_text_expands_or_is_refused(text: str) -> None:
    with contextlib.suppress(SourceError):
        expand(text)


OPERATORS = st.sampled_from(["+", "-", "*", "&", "|", "^", "<", "==", "<<"])
EXPRESSIONS = st.recursive(
    st.integers(0, 50).map(str), lambda e: st.tuples(e, OPERATORS, e).map(lambda t: f"({' '.join(t)})"), max_leaves=6
)


@given(EXPRESSIONS)
def test_integer_expressions_are_those_of_python(text: str) -> None:
    head = tokenize("x", "f")[0][0]
    try:
        got = evaluate(tokenize(text, "f")[0], head)
    except SourceError:
        return  # a shift that is too far
    if got < 2**63:
        assert got == int(eval(text)) or "<<" in text


def test_an_include_in_a_loop_ends(tmp_path: Path) -> None:
    (tmp_path / "a.h").write_text('#include "a.h"\n')
    with pytest.raises(SourceError, match="includes are nested too deep"):
        expand('#include "a.h"', include_dirs=[tmp_path])
