"""The tensors of a transformer's layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minfer.graph.ir import Weight


@dataclass(frozen=True, slots=True)
class Block:
    """The tensors of one layer, named as in the file (`attn_q` is `blk.N.attn_q.weight`); None where it has none."""

    attn_norm: Weight
    attn_q: Weight
    attn_k: Weight
    attn_v: Weight
    attn_output: Weight
    ffn_norm: Weight
    ffn_gate: Weight
    ffn_up: Weight
    ffn_down: Weight
    attn_q_bias: Weight | None = None
    attn_k_bias: Weight | None = None
    attn_v_bias: Weight | None = None
    attn_q_norm: Weight | None = None
    attn_k_norm: Weight | None = None
    post_attention_norm: Weight | None = None
    post_ffw_norm: Weight | None = None
