"""Record tests/data/tiny: tiny random models of transformers as GGUF files, and the logits transformers gives.

Run with transformers, torch and numpy at hand, and minfer on the path:  python tests/tools/record_tiny_models.py
Each model is `<name>.gguf` (f32 weights, our writer) and `<name>.npz`: token ids, positions, and logits of every token.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import transformers
from transformers import Gemma3TextConfig, LlamaConfig, Qwen2Config, Qwen3Config

from minfer.gguf.writer import Tensor, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator

OUT = Path(__file__).parent.parent / "data" / "tiny"
N_VOCAB, N_TOKENS = 96, 24
#: Far apart, since a rope that is wrong at 20,000 can be right at 24.
POSITIONS = (0, 1, 100, 101, 5000, 5001, 20000, 20003)

CONFIGS = {
    # head_dim is not hidden / heads, GQA, separate output, Llama 3's rope factors
    "llama-llama3rope": LlamaConfig(
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=32768, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
        },
    ),
    # tied, plain attention, linear scaling
    "llama-linear": LlamaConfig(
        hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    ),
    "qwen2": Qwen2Config(
        hidden_size=48, intermediate_size=88, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=1,
        max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3": Qwen3Config(
        hidden_size=40, intermediate_size=72, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=32768, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ),
    "qwen3-yarn": Qwen3Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        head_dim=64, max_position_embeddings=32768, tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
    # seven layers: six of the pattern and one more; the window is shorter than the text
    "gemma3": Gemma3TextConfig(
        hidden_size=40, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        head_dim=24, max_position_embeddings=32768, sliding_window=8, query_pre_attn_scalar=24,
        layer_types=["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(7)],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}  # fmt: skip

_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_name(name: str, arch: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{(_GEMMA_LAYER if arch == 'gemma3' else _LAYER)[rest]}"


def interleave(rows: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of q or k from split halves (transformers) to neighbouring pairs (GGUF's llama)."""
    d = rows.shape[0] // n_head
    return rows.reshape(n_head, 2, d // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@contextlib.contextmanager
def f32_is_f64() -> Iterator[None]:
    """Make transformers compute rotary angles in f64: it casts to f32, which is 1e-3 radians off at position 20,000."""
    saved = torch.float, torch.float32, torch.Tensor.float
    torch.float, torch.float32, torch.Tensor.float = torch.float64, torch.float64, torch.Tensor.double
    try:
        yield
    finally:
        torch.float, torch.float32, torch.Tensor.float = saved


def record(name: str, config: transformers.PretrainedConfig) -> None:
    torch.manual_seed(0)
    config.vocab_size = N_VOCAB
    config.pad_token_id = 0
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            # Norm gains near 1 (0 for Gemma, which adds 1), everything else spread out: no gain or bias is a no-op.
            centre = 1.0 if "norm" in key and "Gemma" not in type(config).__name__ else 0.0
            spread = 0.3 if "norm" in key or "bias" in key else 1.5 / value.shape[-1] ** 0.5
            value.copy_(centre + spread * torch.randn(value.shape))

    arch = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    main = rope["full_attention"] if arch == "gemma3" else rope
    tensors = []
    for key, value in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = value.numpy()
        if arch == "gemma3" and "norm" in key:
            array = array + np.float32(1)
        if arch == "llama" and "q_proj" in key:
            array = interleave(array, config.num_attention_heads)
        if arch == "llama" and "k_proj" in key:
            array = interleave(array, config.num_key_value_heads)
        tensors.append(Tensor.of(gguf_name(key, arch), np.ascontiguousarray(array)))
    metadata = {
        "general.architecture": arch,
        "general.name": f"tiny {name}",
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(main["rope_theta"]),
    }
    if arch == "gemma3":
        metadata[f"{arch}.attention.sliding_window"] = config.sliding_window
    if main["rope_type"] in ("linear", "yarn"):
        metadata[f"{arch}.rope.scaling.type"] = main["rope_type"]
        metadata[f"{arch}.rope.scaling.factor"] = float(main["factor"])
    if main["rope_type"] == "yarn":
        metadata[f"{arch}.rope.scaling.original_context_length"] = main["original_max_position_embeddings"]
    if main["rope_type"] == "llama3":
        plain = 1.0 / main["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        with f32_is_f64():
            scaled = type(model.model.rotary_emb)(config).inv_freq.numpy()
        tensors.append(Tensor.of("rope_freqs.weight", (plain / scaled).astype(np.float32)))
    write_model(OUT / f"{name}.gguf", metadata, tensors)

    rng = np.random.default_rng(1)
    ids, far_ids = rng.integers(0, N_VOCAB, N_TOKENS), rng.integers(0, N_VOCAB, len(POSITIONS))
    recorded = {"ids": ids.astype(np.int32), "far_ids": far_ids.astype(np.int32)}
    exact = model.double()
    with torch.no_grad(), f32_is_f64():
        exact.model.rotary_emb = type(exact.model.rotary_emb)(config)
        recorded["logits"] = exact(torch.tensor(ids)[None]).logits[0].numpy().astype(np.float32)
        if arch != "gemma3":  # its sliding mask counts places in the sequence, not positions
            positions = torch.tensor(POSITIONS)[None]
            far = exact(torch.tensor(far_ids)[None], position_ids=positions).logits[0]
            recorded["far_positions"] = np.array(POSITIONS, np.int32)
            recorded["far_logits"] = far.numpy().astype(np.float32)
    np.savez_compressed(OUT / f"{name}.npz", **recorded)
    print(f"{name}: {(OUT / f'{name}.gguf').stat().st_size:,} bytes, logits {recorded['logits'].std():.2f} rms")


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}", file=sys.stderr)
    for config_name, tiny in CONFIGS.items():
        record(config_name, tiny)
