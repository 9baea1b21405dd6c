"""What decoder-only transformers share: hyper-parameters, embedding, attention, gated FFN, output head.

An architecture is one file that says which tensors a layer has and how a layer runs. Attribute names are GGUF's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from minfer.errors import UnsupportedError
from minfer.graph.builder import Builder
from minfer.graph.ir import Attn

if TYPE_CHECKING:
    from collections.abc import Callable

    from minfer.graph.ir import Graph, GraphParams, Node, RopeSpec, RopeStyle, Weight
    from minfer.models.block import Block
    from minfer.models.reader import Reader


class Transformer(ABC):
    """A loaded architecture: sizes, weights by reference, and `build`.

    Raises `ModelFileError` for metadata or tensors that are missing or contradict each other, and `UnsupportedError`
    for a valid variant that is not computed here.
    """

    arch: ClassVar[str]
    rope_style: ClassVar[RopeStyle]

    def __init__(self, r: Reader) -> None:
        self.n_layer = r.integer("block_count")
        self.n_ctx_train = r.integer("context_length")
        self.n_embd = r.integer("embedding_length")
        self.n_ff = r.integer("feed_forward_length")
        self.n_head = r.integer("attention.head_count")
        self.n_kv_head = r.integer("attention.head_count_kv", self.n_head)
        self.eps = r.number("attention.layer_norm_rms_epsilon")
        if self.n_head % self.n_kv_head:
            raise r.fail(f"{self.n_head} query heads do not divide among {self.n_kv_head} KV heads")
        key_length = r.integer("attention.key_length", None)
        self.head_dim = self._default_head_dim(r) if key_length is None else key_length
        if (value := r.integer("attention.value_length", self.head_dim)) != self.head_dim:
            raise UnsupportedError(
                f"{r.file.path}: heads have {self.head_dim} key and {value} value dimensions; they must be equal"
            )
        r.refuse("expert_count", "mixture-of-experts models are not supported")
        self.attn_scale = r.number("attention.scale", self.default_attn_scale())
        self.attn_softcap = r.number("attn_logit_softcapping", None)
        self.final_softcap = r.number("final_logit_softcapping", None)
        self.rope: RopeSpec = r.rope(self.rope_style, self.head_dim)
        embd = r.file.tensors.get("token_embd.weight")
        self.n_vocab = embd.shape[-1] if embd and embd.shape else 0
        self.token_embd = r.weight("token_embd.weight", self.n_embd, self.n_vocab)
        self.output_norm = r.weight("output_norm.weight", self.n_embd)
        # A file without an output matrix ties it to the embedding.
        self.output = r.optional("output.weight", self.n_embd, self.n_vocab) or self.token_embd
        self.blk = tuple(self.load_block(r, f"blk.{i}") for i in range(self.n_layer))
        r.finish()
        self.weights = tuple(r.used.values())

    def _default_head_dim(self, r: Reader) -> int:
        if self.n_embd % self.n_head:
            raise r.fail(
                f"an embedding of {self.n_embd} does not divide among {self.n_head} heads, "
                f"and {r.arch}.attention.key_length does not say how long a head is"
            )
        return self.n_embd // self.n_head

    def default_attn_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)

    @abstractmethod
    def load_block(self, r: Reader, blk: str) -> Block:
        """The tensors of layer `blk`, each with the shape it must have."""

    @abstractmethod
    def layer(self, b: Builder, index: int, x: Node) -> Node:
        """One layer: the residual stream in, the residual stream out."""

    def embed(self, b: Builder) -> Node:
        return b.embed(self.token_embd)

    def build(self, params: GraphParams) -> Graph:
        """The forward pass: token ids to logits `(n_vocab, n_outputs)`, or to the best of them."""
        b = Builder(params)
        x = self.embed(b)
        for index in range(self.n_layer):
            with b.layer(index):
                x = self.layer(b, index, x)
        x = b.rms_norm(x, self.output_norm, self.eps, "output_norm")
        logits = b.matmul(x, self.output, "logits")
        if self.final_softcap is not None:
            logits = b.soft_cap(logits, self.final_softcap, "logits_capped")
        return b.finish(logits if params.top_k is None else b.top_k(logits, params.top_k))

    def core_tensors(self, r: Reader, blk: str) -> dict[str, Weight]:
        """The nine tensors that every layer has."""
        d, d_ff, d_q, d_kv = self.n_embd, self.n_ff, self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        return {
            "attn_norm": r.weight(f"{blk}.attn_norm.weight", d),
            "attn_q": r.weight(f"{blk}.attn_q.weight", d, d_q),
            "attn_k": r.weight(f"{blk}.attn_k.weight", d, d_kv),
            "attn_v": r.weight(f"{blk}.attn_v.weight", d, d_kv),
            "attn_output": r.weight(f"{blk}.attn_output.weight", d_q, d),
            "ffn_norm": r.weight(f"{blk}.ffn_norm.weight", d),
            "ffn_gate": r.weight(f"{blk}.ffn_gate.weight", d, d_ff),
            "ffn_up": r.weight(f"{blk}.ffn_up.weight", d, d_ff),
            "ffn_down": r.weight(f"{blk}.ffn_down.weight", d_ff, d),
        }

    def attention(self, b: Builder, blk: Block, x: Node, rope: RopeSpec, sliding: int | None = None) -> Node:
        """Projections, head norms where the layer has them, rope, KV store, attention, output projection."""
        q = b.matmul(x, blk.attn_q, "q", blk.attn_q_bias)
        k = b.matmul(x, blk.attn_k, "k", blk.attn_k_bias)
        v = b.matmul(x, blk.attn_v, "v", blk.attn_v_bias)
        if blk.attn_q_norm and blk.attn_k_norm:
            q = b.head_norm(q, blk.attn_q_norm, self.eps, "q_normed")
            k = b.head_norm(k, blk.attn_k_norm, self.eps, "k_normed")
        q = b.rope(q, rope, "q_roped")
        k = b.rope(k, rope, "k_roped")
        b.kv_store(k, v)
        op = Attn(
            b.layer_index, self.n_head, self.n_kv_head, self.head_dim, self.attn_scale, self.attn_softcap, sliding
        )
        rows = b.attn(q, op)
        return b.matmul(rows, blk.attn_output, "attn_out")

    def gated_ffn(self, b: Builder, blk: Block, x: Node, act: Callable[[Node, str], Node]) -> Node:
        """down(act(gate(x)) * up(x)): SwiGLU with `b.silu`, GeGLU with `b.gelu` (arXiv:2002.05202)."""
        gate = act(b.matmul(x, blk.ffn_gate, "gate"), "gate_act")
        return b.matmul(b.mul(gate, b.matmul(x, blk.ffn_up, "up"), "ffn_act"), blk.ffn_down, "ffn_out")

    def tail_rows(self, b: Builder, index: int, x: Node) -> Node:
        """In the last layer, only the rows whose logits are asked for go on to the FFN."""
        return b.tail_rows(x) if index == self.n_layer - 1 else x
