"""Cut the small GGUF files beside this script out of real ones: python make_headers.py LLAMA_SPM_VOCAB SMOLLM2."""

from __future__ import annotations

import sys
from pathlib import Path

from minfer.gguf import ModelFile, StringArray, Tensor, open_model, typed, write_model

HERE = Path(__file__).parent
TOKENS = 300


def short_metadata(model: ModelFile) -> dict:
    """All metadata, each array cut to TOKENS items."""
    values = {key: typed(value, model.value_types[key]) for key, value in model.metadata.items()}
    return {k: StringArray.of(list(v[:TOKENS])) if isinstance(v, StringArray) else v for k, v in values.items()} | {
        k: v[:TOKENS] for k, v in values.items() if hasattr(v, "shape") and v.shape
    }


def main(spm: str, smollm2: str) -> None:
    with open_model(spm) as model:
        write_model(HERE / "header-llama-spm.gguf", short_metadata(model), [])
    with open_model(smollm2) as model:
        names = ["output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight"]
        tensors = [Tensor(n, model.tensors[n].format, model.tensors[n].shape, model.data(n)) for n in names]
        for name in ("token_embd.weight", "blk.0.attn_k.weight", "blk.0.ffn_down.weight"):
            t = model.tensors[name]  # the first two rows
            tensors.append(Tensor(name, t.format, (t.shape[0], 2), model.data(name)[:2]))
        write_model(HERE / "header-smollm2.gguf", short_metadata(model), tensors)


if __name__ == "__main__":
    main(*sys.argv[1:])
