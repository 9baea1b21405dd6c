"""Gemma 3 (arXiv:2503.19786): scaled embedding, norms before and after each sub-layer, head norms, GeGLU.

Five of six layers attend to a sliding window and rotate with a base of their own, without the long-context scaling.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from minfer.models.block import Block
from minfer.models.transformer import Transformer

if TYPE_CHECKING:
    from minfer.graph.builder import Builder
    from minfer.graph.ir import Node, RopeStyle
    from minfer.models.reader import Reader

_LAYERS_OF_27B = 62


class Gemma3(Transformer):
    arch = "gemma3"
    rope_style: ClassVar[RopeStyle] = "neox"

    def __init__(self, r: Reader) -> None:
        super().__init__(r)
        self.sliding = r.integer("attention.sliding_window")
        self.pattern = r.integer("attention.sliding_window_pattern", 6)
        local = r.number("rope.freq_base_swa", 10000.0)
        self.rope_local = r.rope(self.rope_style, self.head_dim, base=local, scaled=False)

    def default_attn_scale(self) -> float:
        # The 27B model alone scales by the width of the embedding a head stands for; no key of the file says so.
        if self.n_layer == _LAYERS_OF_27B:
            return 1.0 / math.sqrt(self.n_embd / self.n_head)
        return super().default_attn_scale()

    def load_block(self, r: Reader, blk: str) -> Block:
        return Block(
            **self.core_tensors(r, blk),
            attn_q_norm=r.weight(f"{blk}.attn_q_norm.weight", self.head_dim),
            attn_k_norm=r.weight(f"{blk}.attn_k_norm.weight", self.head_dim),
            post_attention_norm=r.weight(f"{blk}.post_attention_norm.weight", self.n_embd),
            post_ffw_norm=r.weight(f"{blk}.post_ffw_norm.weight", self.n_embd),
        )

    def embed(self, b: Builder) -> Node:
        return b.scale(super().embed(b), math.sqrt(self.n_embd), "embed_scaled")

    def layer(self, b: Builder, index: int, x: Node) -> Node:
        blk = self.blk[index]
        full = index % self.pattern == self.pattern - 1
        rope, sliding = (self.rope, None) if full else (self.rope_local, self.sliding)
        assert blk.post_attention_norm
        assert blk.post_ffw_norm

        h = b.rms_norm(x, blk.attn_norm, self.eps, "attn_norm")
        h = self.attention(b, blk, h, rope, sliding)
        x = b.add(x, b.rms_norm(h, blk.post_attention_norm, self.eps, "post_attention_norm"), "attn_residual")
        x = self.tail_rows(b, index, x)
        h = b.rms_norm(x, blk.ffn_norm, self.eps, "ffn_norm")
        h = self.gated_ffn(b, blk, h, b.gelu)
        return b.add(x, b.rms_norm(h, blk.post_ffw_norm, self.eps, "post_ffw_norm"), "ffn_residual")
