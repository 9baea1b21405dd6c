"""Checked access to a model file for one architecture: hyper-parameters by key, tensors by name and shape."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, overload

import numpy as np

from minfer.errors import ModelFileError, UnsupportedError
from minfer.graph.ir import RopeScaling, RopeSpec, RopeStyle, Weight

if TYPE_CHECKING:
    from minfer.gguf import ModelFile

# In-layer tensors of old converters that hold nothing the computation needs.
_HARMLESS = re.compile(r"blk\.\d+\.(attn_rot_embd|attn\.rot_embd\.inv_freq)(\.weight)?$")


class Reader:
    """What an architecture asks of a file. Every refusal names the file, the key or tensor, and both values."""

    def __init__(self, file: ModelFile, arch: str) -> None:
        self.file = file
        self.arch = arch
        self.used: dict[str, Weight] = {}

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.file.path}: {message}")

    @overload
    def integer(self, key: str, default: int = ...) -> int: ...
    @overload
    def integer(self, key: str, default: None) -> int | None: ...
    def integer(self, key: str, default: object = ...) -> object:
        """A positive integer. A per-layer array is read as its one value if all layers agree."""
        value = self._get(key, default)
        if isinstance(value, np.ndarray):
            different = sorted({int(v) for v in value})
            if len(different) != 1:
                raise UnsupportedError(
                    f"{self.file.path}: {self.arch}.{key} differs between layers ({different}); "
                    "minfer computes models whose layers agree"
                )
            value = different[0]
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(f"{self.arch}.{key} is {value!r}, expected a positive integer")
        return value

    @overload
    def number(self, key: str, default: float = ...) -> float: ...
    @overload
    def number(self, key: str, default: None) -> float | None: ...
    def number(self, key: str, default: object = ...) -> object:
        """A positive, finite number."""
        value = self._get(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
            raise self.fail(f"{self.arch}.{key} is {value!r}, expected a positive number")
        return float(value)

    def refuse(self, key: str, why: str) -> None:
        """The model uses something that changes its results and that minfer does not compute."""
        value = self.file.metadata.get(f"{self.arch}.{key}")
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise UnsupportedError(f"{self.file.path}: {self.arch}.{key} is {value!r}: {why}")

    def weight(self, name: str, *shape: int) -> Weight:
        """A tensor that must be there with this shape (feature-fastest)."""
        found = self.optional(name, *shape)
        if found is None:
            raise self.fail(f"tensor {name} is missing; {self.arch} needs it with shape {list(shape)}")
        return found

    def optional(self, name: str, *shape: int) -> Weight | None:
        """A tensor of this shape, or None where the file has none of the name."""
        info = self.file.tensors.get(name)
        if info is None:
            return None
        if info.shape != shape:
            raise self.fail(
                f"tensor {name} has shape {list(info.shape)}, the hyper-parameters of {self.arch} give {list(shape)}"
            )
        if not info.format.computes:
            raise UnsupportedError(
                f"{self.file.path}: tensor {name} is {info.format.name}, which minfer does not compute with; "
                "convert the model to a supported type"
            )
        weight = self.used[name] = Weight(name, info.format.name, info.shape)
        return weight

    def rope(self, style: RopeStyle, head_dim: int, *, base: float | None = None, scaled: bool = True) -> RopeSpec:
        """The rotary embedding as the metadata states it; `base` overrides it, `scaled=False` leaves scaling out."""
        n_dims = self.integer("rope.dimension_count", head_dim)
        if n_dims > head_dim or n_dims % 2:
            raise self.fail(f"{self.arch}.rope.dimension_count is {n_dims}: not an even part of a head of {head_dim}")
        freqs = self.optional("rope_freqs.weight", n_dims // 2) if scaled else None
        if base is None:
            base = self.number("rope.freq_base", 10000.0)
        return RopeSpec(style, head_dim, n_dims, base, self._scaling() if scaled else None, freqs)

    def _scaling(self) -> RopeScaling | None:
        kind = self._get("rope.scaling.type", "linear")
        stated = self.number("rope.scaling.factor", None)
        factor = self.number("rope.scale_linear", 1.0) if stated is None else stated
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind != "yarn":
            raise UnsupportedError(
                f"{self.file.path}: {self.arch}.rope.scaling.type is {kind!r}; minfer computes none, linear and yarn"
            )
        extrapolation = self._get("rope.scaling.yarn_ext_factor", 1.0)
        if extrapolation not in (1.0, -1.0):
            raise UnsupportedError(
                f"{self.file.path}: {self.arch}.rope.scaling.yarn_ext_factor is {extrapolation!r}, minfer computes 1"
            )
        original = self.integer("rope.scaling.original_context_length", None)
        attn_factor = self.number("rope.scaling.attn_factor", None)
        return RopeScaling(
            "yarn",
            factor,
            self.integer("context_length") if original is None else original,
            self.number("rope.scaling.yarn_attn_factor", 1.0) if attn_factor is None else attn_factor,
            self.number("rope.scaling.yarn_beta_fast", 32.0),
            self.number("rope.scaling.yarn_beta_slow", 1.0),
        )

    def finish(self) -> None:
        """Refuse tensors inside the layers that nothing read: leaving them out would give wrong answers in silence."""
        for name in self.file.tensors:
            if name.startswith("blk.") and name not in self.used and not _HARMLESS.match(name):
                raise UnsupportedError(
                    f"{self.file.path}: tensor {name} has no place in {self.arch} as minfer computes it; "
                    "the file is of a variant that is not supported"
                )

    def _get(self, key: str, default: object) -> object:
        value = self.file.metadata.get(f"{self.arch}.{key}", default)
        if value is ...:
            raise self.fail(
                f"{self.arch}.{key} is missing from the metadata; {self.arch} cannot be computed without it"
            )
        return value
