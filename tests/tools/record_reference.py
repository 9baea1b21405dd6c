"""Pack another engine's reference outputs for the two real models into tests/data/reference.

Run with the folder that holds them:  python tests/tools/record_reference.py FOLDER
A model's folder there has `index.json` (llama.cpp's token ids and greedy continuations with margins) and, for each
prompt, `<name>.f32.npy`: last-token logits of an independent float64 pass over exactly dequantized weights. Here the
logits become int16 steps of 1/512, so each is within 1/1024 of what was recorded.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path

import numpy as np

OUT = Path(__file__).parent.parent / "data" / "reference"
STEP = 1 / 512


def pack(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    prompts = []
    logits = []
    for prompt in index["prompts"]:
        exact = np.load(folder / f"{prompt['name']}.f32.npy")
        coded = np.rint(exact.astype(np.float64) / STEP)
        assert np.abs(coded).max() < 32767, "the logits are beyond the code's range"
        logits.append(coded.astype(np.int16))
        keys = ("name", "text", "prompt_ids", "greedy_ids", "greedy_margin")
        prompts.append({key: prompt[key] for key in keys})
    kept = {
        "model": index["model"],
        "sha256": index["sha256"],
        "engine": f"llama-cpp-python {index['llama_cpp_python']}",
    }
    kept["prompts"] = prompts
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{folder.name}.json").write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n")
    # Bytes of the low and the high half apart compress better.
    halves = np.stack(logits).view(np.uint8).reshape(-1, 2).T
    (OUT / f"{folder.name}.logits.xz").write_bytes(lzma.compress(halves.tobytes(), preset=9))


if __name__ == "__main__":
    for found in sorted(Path(sys.argv[1]).iterdir()):
        pack(found)
