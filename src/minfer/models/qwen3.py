"""Qwen3 (arXiv:2505.09388): Llama's layer with an RMSNorm on every q and k head, and rope over split halves."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from minfer.models.block import Block
from minfer.models.llama import Llama

if TYPE_CHECKING:
    from minfer.graph.ir import RopeStyle
    from minfer.models.reader import Reader


class Qwen3(Llama):
    arch = "qwen3"
    rope_style: ClassVar[RopeStyle] = "neox"

    def load_block(self, r: Reader, blk: str) -> Block:
        r.refuse("attention.sliding_window", "qwen3 layers are computed with full attention")
        return Block(
            **self.core_tensors(r, blk),
            attn_q_norm=r.weight(f"{blk}.attn_q_norm.weight", self.head_dim),
            attn_k_norm=r.weight(f"{blk}.attn_k_norm.weight", self.head_dim),
        )
