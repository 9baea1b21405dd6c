"""A file that contradicts itself, or that is of a variant minfer does not compute, is refused by name at load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from helpers import TINY, Edit, edited, f32, open_engine, put
from minfer.errors import MinferError, ModelFileError, UnsupportedError
from minfer.gguf import open_model
from minfer.gguf.writer import Tensor
from minfer.models import load_architecture

if TYPE_CHECKING:
    from pathlib import Path

CASES: dict[str, tuple[str, type[MinferError], Edit]] = {
    "architecture missing": ("qwen2", ModelFileError, lambda m, t: m.pop("general.architecture")),
    "architecture 'mamba' is not supported": (
        "qwen2", UnsupportedError, lambda m, t: m.update({"general.architecture": "mamba"}),
    ),
    "qwen2.block_count is missing": ("qwen2", ModelFileError, lambda m, t: m.pop("qwen2.block_count")),
    "qwen2.embedding_length is 'big'": (
        "qwen2", ModelFileError, lambda m, t: m.update({"qwen2.embedding_length": "big"}),
    ),
    "qwen2.attention.head_count is 0": (
        "qwen2", ModelFileError, lambda m, t: m.update({"qwen2.attention.head_count": 0}),
    ),
    "layer_norm_rms_epsilon is nan": (
        "qwen2",
        ModelFileError,
        lambda m, t: m.update({"qwen2.attention.layer_norm_rms_epsilon": float("nan")}),
    ),
    "6 query heads do not divide among 4 KV heads": (
        "qwen2", ModelFileError, lambda m, t: m.update({"qwen2.attention.head_count_kv": 4}),
    ),
    "48 does not divide among 7 heads": (
        "qwen2",
        ModelFileError,
        lambda m, t: (m.pop("qwen2.attention.key_length"), m.update({"qwen2.attention.head_count": 7})),
    ),
    "8 key and 16 value dimensions": (
        "qwen2", UnsupportedError, lambda m, t: m.update({"qwen2.attention.value_length": 16}),
    ),
    "head_count_kv differs between layers": (
        "qwen2", UnsupportedError, lambda m, t: m.update({"qwen2.attention.head_count_kv": [1, 1, 2]}),
    ),
    "mixture-of-experts": ("qwen2", UnsupportedError, lambda m, t: m.update({"qwen2.expert_count": 8})),
    "computed with full attention": (
        "qwen2", UnsupportedError, lambda m, t: m.update({"qwen2.attention.sliding_window": 128}),
    ),
    "rope.dimension_count is 12": (
        "qwen2", ModelFileError, lambda m, t: m.update({"qwen2.rope.dimension_count": 12}),
    ),
    "rope.scaling.type is 'longrope'": (
        "qwen2", UnsupportedError, lambda m, t: m.update({"qwen2.rope.scaling.type": "longrope"}),
    ),
    "yarn_ext_factor is 0.5": (
        "qwen2",
        UnsupportedError,
        lambda m, t: m.update({"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.yarn_ext_factor": 0.5}),
    ),
    "tensor token_embd.weight is missing": ("qwen2", ModelFileError, lambda m, t: t.pop("token_embd.weight")),
    "tensor blk.2.ffn_up.weight is missing": ("qwen2", ModelFileError, lambda m, t: t.pop("blk.2.ffn_up.weight")),
    "tensor blk.1.attn_q.bias is missing": ("qwen2", ModelFileError, lambda m, t: t.pop("blk.1.attn_q.bias")),
    "tensor blk.0.attn_k_norm.weight is missing": (
        "qwen3", ModelFileError, lambda m, t: t.pop("blk.0.attn_k_norm.weight"),
    ),
    "tensor blk.0.attn_v.weight has shape [48, 16], the hyper-parameters of qwen2 give [48, 8]": (
        "qwen2", ModelFileError, lambda m, t: put(t, f32("blk.0.attn_v.weight", 48, 16)),
    ),
    "tensor output_norm.weight has shape [47]": (
        "qwen2", ModelFileError, lambda m, t: put(t, f32("output_norm.weight", 47)),
    ),
    "tensor output.weight has shape [48, 95]": (
        "qwen2", ModelFileError, lambda m, t: put(t, f32("output.weight", 48, 95)),
    ),
    "tensor rope_freqs.weight has shape [9]": (
        "llama-linear", ModelFileError, lambda m, t: put(t, f32("rope_freqs.weight", 9)),
    ),
    "tensor blk.0.attn_sinks.weight has no place in qwen2": (
        "qwen2", UnsupportedError, lambda m, t: put(t, f32("blk.0.attn_sinks.weight", 6)),
    ),
    "tensor blk.3.attn_norm.weight has no place": (
        "qwen2", UnsupportedError, lambda m, t: put(t, f32("blk.3.attn_norm.weight", 48)),
    ),
    "gemma3.attention.sliding_window is missing": (
        "gemma3", ModelFileError, lambda m, t: m.pop("gemma3.attention.sliding_window"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CASES)
def test_refused(what: str, tmp_path: Path) -> None:
    name, kind, edit = CASES[what]
    path = edited(TINY / f"{name}.gguf", tmp_path / "bad.gguf", edit)
    expected = "general.architecture is None" if what == "architecture missing" else what
    with open_model(path) as model, pytest.raises(kind) as raised:
        load_architecture(model)
    assert expected in str(raised.value)
    assert str(path) in str(raised.value)


def test_a_key_length_must_fit_the_tensors(tmp_path: Path) -> None:
    def edit(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        m.update({"qwen2.attention.key_length": 16, "qwen2.attention.value_length": 16})

    path = edited(TINY / "qwen2.gguf", tmp_path / "bad.gguf", edit)
    with open_model(path) as model, pytest.raises(ModelFileError, match=r"attn_q.weight has shape \[48, 48\]"):
        load_architecture(model)


def _logits(path: Path) -> np.ndarray[Any, Any]:
    engine = open_engine(path)
    return engine.prefill([1, 2, 3, 4])


def test_what_does_not_change_the_model_is_accepted(tmp_path: Path) -> None:
    def edit(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        put(t, f32("v.blk.0.attn_q.weight", 5, 5))
        put(t, f32("blk.0.attn_rot_embd.weight", 4))
        m.update({"qwen2.expert_count": 0, "qwen2.attention.head_count_kv": [1, 1, 1], "unknown.key": "x"})

    path = edited(TINY / "qwen2.gguf", tmp_path / "extra.gguf", edit)
    assert np.array_equal(_logits(path), _logits(TINY / "qwen2.gguf"))


def test_a_tied_model_with_an_output_matrix(tmp_path: Path) -> None:
    """Some converters write the tied matrix twice: the same logits. One that differs is the one that counts."""

    def copy(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        embd = t["token_embd.weight"]
        put(t, Tensor("output.weight", embd.format, embd.shape, embd.data))

    def double(m: dict[str, Any], t: dict[str, Tensor]) -> None:
        embd = t["token_embd.weight"]
        twice = 2 * np.asarray(embd.data).view(np.float32).reshape(embd.shape[::-1])
        put(t, Tensor.of("output.weight", twice))

    plain = _logits(TINY / "qwen2.gguf")
    assert np.array_equal(_logits(edited(TINY / "qwen2.gguf", tmp_path / "copy.gguf", copy)), plain)
    assert np.array_equal(_logits(edited(TINY / "qwen2.gguf", tmp_path / "double.gguf", double)), 2 * plain)


def test_partial_rotary_is_read_from_the_file(tmp_path: Path) -> None:
    path = edited(
        TINY / "qwen3.gguf", tmp_path / "partial.gguf", lambda m, t: m.update({"qwen3.rope.dimension_count": 16})
    )
    with open_model(path) as model:
        rope = load_architecture(model).rope
    assert (rope.head_dim, rope.n_dims) == (32, 16)
    assert not np.array_equal(_logits(path), _logits(TINY / "qwen3.gguf"))
