"""Llama 2 and 3 (arXiv:2302.13971, arXiv:2407.21783), and what is published as them: Mistral, SmolLM2, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from minfer.models.block import Block
from minfer.models.transformer import Transformer

if TYPE_CHECKING:
    from minfer.graph.builder import Builder
    from minfer.graph.ir import Node, RopeStyle
    from minfer.models.reader import Reader


class Llama(Transformer):
    arch = "llama"
    rope_style: ClassVar[RopeStyle] = "norm"

    def load_block(self, r: Reader, blk: str) -> Block:
        r.refuse("attention.sliding_window", "llama layers are computed with full attention")
        d_q, d_kv = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        return Block(
            **self.core_tensors(r, blk),
            attn_q_bias=r.optional(f"{blk}.attn_q.bias", d_q),
            attn_k_bias=r.optional(f"{blk}.attn_k.bias", d_kv),
            attn_v_bias=r.optional(f"{blk}.attn_v.bias", d_kv),
        )

    def layer(self, b: Builder, index: int, x: Node) -> Node:
        blk = self.blk[index]
        h = b.rms_norm(x, blk.attn_norm, self.eps, "attn_norm")
        x = b.add(x, self.attention(b, blk, h, self.rope), "attn_residual")
        x = self.tail_rows(b, index, x)
        h = b.rms_norm(x, blk.ffn_norm, self.eps, "ffn_norm")
        return b.add(x, self.gated_ffn(b, blk, h, b.silu), "ffn_residual")
