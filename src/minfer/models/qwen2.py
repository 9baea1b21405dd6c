"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama's layer with biases on q, k and v, and rope over split halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from minfer.models.block import Block
from minfer.models.llama import Llama

if TYPE_CHECKING:
    from minfer.graph.ir import RopeStyle
    from minfer.models.reader import Reader


class Qwen2(Llama):
    arch = "qwen2"
    rope_style: ClassVar[RopeStyle] = "neox"

    def load_block(self, r: Reader, blk: str) -> Block:
        r.refuse("attention.sliding_window", "qwen2 layers are computed with full attention")
        d_q, d_kv = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        return Block(
            **self.core_tensors(r, blk),
            attn_q_bias=r.weight(f"{blk}.attn_q.bias", d_q),
            attn_k_bias=r.weight(f"{blk}.attn_k.bias", d_kv),
            attn_v_bias=r.weight(f"{blk}.attn_v.bias", d_kv),
        )
