"""Launches of llama.cpp's Metal kernels with what numpy says of their results.

Only facts are stated here: how a kernel is launched (names of arguments, grid, threads, threadgroup memory, function
constants), read from the host code of the version that llama_metal.py fetches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llama_launch import Case, Launch, Maker, keep, shape, up

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Array = np.ndarray[Any, Any]

EXACT, F32, F16, HALF_OPERANDS = 0.0, 2e-6, 1e-3, 3e-3


class Cases(Maker):
    """Every case, made with one random generator."""

    def all(self) -> Iterator[Case]:
        """All cases, in a stable order."""
        for make in (
            self.norms,
            self.mat_vec,
            self.mat_vec_few,
            self.mat_mat,
            self.attention,
            self.attention_vec,
            self.rope,
        ):
            yield from make()
        for make in (self.soft_max, self.get_rows, self.copies, self.sorts, self.unary, self.glu, self.binary):
            yield from make()

    # ---- row operations

    def norms(self) -> Iterator[Case]:
        for base, d, fuse in (
            ("rms_norm", 576, 1), ("rms_norm", 63, 1), ("rms_norm_mul", 576, 2), ("rms_norm_mul_add", 576, 3),
            ("norm", 576, 1), ("norm_mul_add", 130, 3),
        ):  # fmt: skip
            x, g, b = self.floats(2, 5, d), self.floats(d), self.floats(d)
            y = np.zeros_like(x)
            wide, t = d % 4 == 0, d // 4 if d % 4 == 0 else d
            args = self.h.args(
                "norm", ne00=d, ne00_t=t, nb1=4 * d, nb2=20 * d, nb3=40 * d, eps=1e-5, nef1=[5, 1, 1], nef2=[2, 1, 1],
                nef3=1, nbf1=[4 * d, 0, 0], nbf2=[20 * d, 0, 0], nbf3=0, scale=1.0,
            )  # fmt: skip
            z = x.astype(np.float64)
            if base.startswith("norm"):
                z = z - z.mean(-1, keepdims=True)
            want = z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-5)
            want = want * (g if fuse > 1 else 1) + (b if fuse > 2 else 0)
            n = 32
            while n < t and n < 1024:
                n *= 2
            n = min(n, up(t, 32) * 32)
            kernel = f"kernel_{base}_f32{'_4' if wide else ''}"
            yield Case(
                [Launch("norm", kernel, (5, 2), (n,), [args, x, g, b, y], {1700: False}, 128)], y, want, F32, f"{d}"
            )
        x = self.floats(3, 4, 96)
        y = np.zeros_like(x)
        args = keep(self.h, "l2_norm", shape("0", x) | shape("", y), eps=1e-6)
        args["ne00"], args["ne0"] = 24, 24
        want = x / np.maximum(np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True)), 1e-6)
        yield Case([Launch("norm", "kernel_l2_norm_f32_f32_4", (4, 3), (32,), [args, x, y], {}, 128)], y, want, F32)

    def soft_max(self) -> Iterator[Case]:
        for d, kind in ((96, None), (99, "f32"), (128, "f16")):
            x = self.floats(3, 5, d)
            y = np.zeros_like(x)
            mask = x if kind is None else self.floats(5, d, kind="<f4" if kind == "f32" else "<f2")
            if kind:
                mask[self.rng.random((5, d)) < 0.3] = -np.inf
                mask[:, 0] = 0
            values = shape("0", x) | shape("1", mask) | shape("", y)
            args = keep(self.h, "soft_max", values, scale=0.5, max_bias=0.0, m0=1.0, m1=1.0, n_head_log2=2)
            z = x.astype(np.float64) * 0.5 + (mask.astype(np.float64) if kind else 0)
            p = np.exp(z - z.max(-1, keepdims=True))
            kernel = f"kernel_soft_max_{kind or 'f32'}{'_4' if d % 4 == 0 else ''}"
            note = f"{d}, {'mask' if kind else 'no mask'}"
            launch = Launch("softmax", kernel, (5, 3), (32,), [args, x, mask, x, y], {}, 128)
            yield Case([launch], y, p / p.sum(-1, keepdims=True), F32, note)

    def rope(self) -> Iterator[Case]:
        for style, kind in (("norm", "f32"), ("neox", "f32"), ("neox", "f16")):
            d, turned = 96, 64
            x = self.floats(5, 4, d, kind="<f4" if kind == "f32" else "<f2")
            y, position = np.zeros_like(x), np.array([0, 1, 5, 17, 300], np.int32)
            args = keep(
                self.h, "rope", shape("0", x) | shape("", y), n_dims=turned, n_ctx_orig=4096, freq_base=1e4,
                freq_scale=1.0,
                attn_factor=1.0, beta_fast=32.0, beta_slow=1.0,
            )  # fmt: skip
            angle = position[:, None, None] * 1e4 ** (-2.0 * np.arange(turned // 2) / turned)
            z = x.astype(np.float64)
            pick = (
                (slice(0, turned, 2), slice(1, turned, 2))
                if style == "norm"
                else (slice(0, turned // 2), slice(turned // 2, turned))
            )
            a, b = z[..., pick[0]], z[..., pick[1]]
            want = z.copy()
            want[..., pick[0]], want[..., pick[1]] = (
                a * np.cos(angle) - b * np.sin(angle),
                a * np.sin(angle) + b * np.cos(angle),
            )
            launch = Launch(
                "rope", f"kernel_rope_{style}_{kind}", (4, 5), (d,), [args, x, position, x, y], {801: False}
            )
            yield Case([launch], y, want, 2e-5 if kind == "f32" else F16)

    def get_rows(self) -> Iterator[Case]:
        for kind in ("f32", "f16", "q4_0", "q4_1", "q5_1", "q8_0", "q2_K", "q4_K", "q6_K", "iq4_xs"):
            k, plain = 768, kind in ("f32", "f16")
            w, values = self.blocks(kind, 20, k)
            ids = np.array([3, 19, 0, 3], np.int32)
            y = np.zeros((4, k), np.float32)
            fields = shape("0", w) | shape("1", ids) | shape("", y)
            t = k if plain else k // 16
            args = keep(self.h, "get_rows", fields | {"ne00": k}, ne00t=t)
            launch = Launch(
                "quantize", f"kernel_get_rows_{kind}", (4 * up(t, min(t, 1024)),), (min(t, 1024),), [args, w, ids, y]
            )
            yield Case([launch], y, values[ids], F32)

    def copies(self) -> Iterator[Case]:
        for source, target in (
            ("f32", "f16"),
            ("f16", "f32"),
            ("f32", "q8_0"),
            ("f32", "q4_0"),
            ("q8_0", "f32"),
            ("q4_1", "f16"),
        ):
            k, rows = 128, 6
            x, values = self.blocks(source, rows, k)
            plain = {"f32": "<f4", "f16": "<f2"}
            y: Array
            if target in plain:
                y, n = np.zeros((rows, k), plain[target]), k if source in plain else k // 16
            else:
                which = GGMLQuantizationType[target.upper()]
                y, n = np.zeros((rows, k // 32 * GGML_QUANT_SIZES[which][1]), np.uint8), k // 32
            fields = shape("0", x) | shape("", y)
            fields |= {
                "ne00": k,
                "ne0": k,
                "nb00": x.strides[1] if source in plain else GGML_QUANT_SIZES[GGMLQuantizationType[source.upper()]][1],
            }
            fields["nb0"] = (
                y.strides[1] if target in plain else GGML_QUANT_SIZES[GGMLQuantizationType[target.upper()]][1]
            )
            args = keep(self.h, "cpy", fields, nk0=n)
            want = values
            if target not in plain:
                want = quants.quantize(values.astype(np.float32), GGMLQuantizationType[target.upper()])
            launch = Launch("quantize", f"kernel_cpy_{source}_{target}", (rows,), (n,), [args, x, y])
            yield Case(
                [launch], y, want.reshape(y.shape), F16 if target == "f16" else EXACT if y.dtype == np.uint8 else F32
            )

    def sorts(self) -> Iterator[Case]:
        for order in ("asc", "desc"):
            d = 200
            x = self.rng.permutation(3 * d).reshape(3, d).astype(np.float32)
            at = np.zeros((3, d), np.int32)
            args = keep(self.h, "argsort", shape("0", x) | shape("", at), top_k=256)
            want = np.argsort(x if order == "asc" else -x, axis=1)
            yield Case(
                [Launch("argsort", f"kernel_argsort_f32_i32_{order}", (3,), (256,), [args, x, at], {}, 1024)],
                at,
                want,
                EXACT,
            )
        x = self.rng.permutation(4 * 333).reshape(4, 333).astype(np.float32)
        best = np.zeros(4, np.int32)
        args = self.h.args("argmax", ne00=333, nb01=4 * 333)
        yield Case(
            [Launch("misc", "kernel_argmax_f32", (4,), (64,), [args, x, best], {}, 256)], best, x.argmax(1), EXACT
        )

    # ---- element by element

    def unary(self) -> Iterator[Case]:
        functions: dict[str, Callable[[Array], Array]] = {
            "SILU": lambda x: x / (1 + np.exp(-x)),
            "GELU": lambda x: 0.5 * x * (1 + np.tanh(0.79788456080286535588 * x * (1 + 0.044715 * x * x))),
            "TANH": np.tanh, "RELU": lambda x: np.maximum(x, 0), "EXP": np.exp, "SQR": np.square, "NEG": np.negative,
            "SIGMOID": lambda x: 1 / (1 + np.exp(-x)), "SOFTPLUS": lambda x: np.log1p(np.exp(x)), "FLOOR": np.floor,
        }  # fmt: skip
        for name, f in functions.items():
            kind = "<f2" if name in ("RELU", "TANH") else "<f4"
            x = self.floats(5, 52, kind=kind)
            y = np.zeros_like(x)
            args = keep(self.h, "unary", shape("0", x) | shape("", y))
            args["ne00"], args["ne0"] = 13, 13
            one_by_one = name in ("SILU", "NEG")
            constants = {1200: self.h.macros[f"OP_UNARY_NUM_{name}"], 1201: one_by_one}
            t = "f16_f16" if kind == "<f2" else "f32_f32"
            launch = Launch(
                "unary",
                f"kernel_unary_{t}_4",
                (65 if one_by_one else 5,),
                (1 if one_by_one else 13,),
                [args, x, y],
                constants,
            )
            yield Case([launch], y, f(x.astype(np.float64)), F16 if kind == "<f2" else F32, name.lower())

    def glu(self) -> Iterator[Case]:
        for base, f in (("swiglu", lambda a: a / (1 + np.exp(-a))), ("reglu", lambda a: np.maximum(a, 0))):
            x, z = self.floats(5, 100), self.floats(5, 100)
            y = np.zeros_like(x)
            args = self.h.args("glu", ne00=100, nb01=400, ne10=100, nb11=400, ne0=100, nb1=400)
            launch = Launch("unary", f"kernel_{base}_f32", (5,), (50,), [args, x, z, y])
            yield Case([launch], y, f(x.astype(np.float64)) * z, F32)

    def binary(self) -> Iterator[Case]:
        for op, f, row in ((0, np.add, True), (2, np.multiply, False)):
            a, b = self.floats(2, 3, 40), self.floats(40) if row else self.floats(2, 3, 40)
            y = np.zeros_like(a)
            args = keep(self.h, "bin", shape("0", a) | shape("1", b) | shape("", y))
            args["ne00"], args["ne10"], args["ne0"] = 10, 10, 10
            groups, threads = ((10, 6), (1,)) if row else ((3, 2), (8,))
            constants = {1300: op, 1301: 1, 1302: row, 1303: False}
            launch = Launch("binbcast", "kernel_bin_fuse_f32_f32_f32_4", groups, threads, [args, a, b, y], constants)
            yield Case([launch], y, f(a, b), F32, f.__name__)

    # ---- matrices

    def product(self, kind: str, m: int, n: int, k: int) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Weights, activations, room for the result, the result and the fields that every product has."""
        w, values = self.blocks(kind, m, k)
        x, y = self.floats(n, k), np.zeros((n, m), np.float32)
        fields = shape("0", w) | shape("1", x) | shape("", y) | {"ne00": k, "r2": 1, "r3": 1}
        fields["nb00"] = (
            w.itemsize if kind in ("f32", "f16") else GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1]
        )
        return w, x, y, x.astype(np.float64) @ values.T, fields

    def mat_vec(self) -> Iterator[Case]:
        kinds = ["f32", "f16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K"]
        for kind in [*kinds, "iq4_nl", "iq4_xs", "iq2_xxs", "iq3_s", "mxfp4"]:
            m, n, k = 37, 2, 768
            w, x, y, want, fields = self.product(kind, m, n, k)
            plain = kind in ("f32", "f16")
            sg = 4 if plain else self.h.macros[f"N_SG_{kind.upper()}"]
            rows = 2 if plain else self.h.macros[f"N_R0_{kind.upper()}"]
            table = {
                "iq4_nl": 128,
                "iq4_xs": 128,
                "iq2_xxs": 256 * 8 + 128,
                "iq3_s": 2048,
                "mxfp4": 128,
                "q8_0": 128 * rows,
            }
            each = rows if plain or kind == "q8_0" else rows * sg
            kernel = f"kernel_mul_mv_{kind}_f32{'_4' if plain else ''}"
            constants = {600: sg, 602: 1, 603: 1, 604: 1, 605: False}
            args = keep(self.h, "mul_mv", fields, nr0=rows)
            unused = 16 if kind in ("q4_0", "q4_1", "q5_0", "q5_1") else 0  # declared, and the host gives it no memory
            memory = 256 if plain else table.get(kind, unused)
            launch = Launch("mul_mv", kernel, (up(m, each), n), (32, sg), [args, w, x, y], constants, memory)
            yield Case([launch], y, want, 1e-5)

    def mat_vec_few(self) -> Iterator[Case]:
        for kind in ("f16", "q4_1", "q8_0", "q4_K"):
            m, n, k = 37, 4, 768
            w, x, y, want, fields = self.product(kind, m, n, k)
            launch = Launch(
                "mul_mv", f"kernel_mul_mv_ext_{kind}_f32_r1_4", (up(m, 8), 1), (32, 2),
                [keep(self.h, "mul_mv_ext", fields), w, x, y], {600: 2, 601: 8, 602: 1, 603: 1, 604: 1, 605: False},
            )  # fmt: skip
            yield Case([launch], y, want, 1e-5)

    def mat_mat(self) -> Iterator[Case]:
        for kind, m, n in (
            ("f32", 64, 32), ("f16", 72, 33), ("q4_0", 72, 33), ("q4_1", 64, 64), ("q8_0", 72, 33), ("q4_K", 72, 33),
            ("q6_K", 64, 32),
        ):  # fmt: skip
            w, x, y, want, fields = self.product(kind, m, n, 256)
            ragged = m % 64 != 0 or n % 32 != 0
            constants = {700: False, 701: ragged, 702: 1, 703: 1, 704: 1, 705: 1}
            launch = Launch(
                "mul_mm", f"kernel_mul_mm_{kind}_f32", (up(n, 32), up(m, 64)), (32, 4),
                [keep(self.h, "mul_mm", fields), w, x, y], constants, 8192 if ragged else 6144,
            )  # fmt: skip
            yield Case([launch], y, want, HALF_OPERANDS, "ragged" if ragged else "whole tiles")

    # ---- attention

    def heads(self, kind: str, heads: int, n: int, d: int) -> tuple[Array, Array, int, int]:
        """Keys or values of (heads, n): bytes, values, bytes of a block and blocks (or elements) a row."""
        raw, values = self.blocks(kind, heads * n, d)
        raw = raw.reshape(heads, n, -1)
        unit = raw.itemsize if kind in ("f32", "f16") else GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1]
        return raw, values.reshape(heads, n, d), unit, raw.strides[1] // unit

    def _attention(
        self, kind: str, d: int, queries: int, n: int
    ) -> tuple[dict[str, Any], list[Array], Array, Array, int, int, int]:
        q = self.floats(4, queries, d)
        k, kv, unit, row = self.heads(kind, 2, n, d)
        v, vv, _, _ = self.heads(kind, 2, n, d)
        mask = np.zeros((queries, n), np.float16)
        mask[np.arange(n)[None] > n - queries + np.arange(queries)[:, None]] = -np.inf
        s = np.einsum("hqd,hnd->hqn", q.astype(np.float64), kv.repeat(2, axis=0)) / np.sqrt(d) + mask.astype(np.float64)
        p = np.exp(s - s.max(-1, keepdims=True))
        want = np.einsum("hqn,hnd->qhd", p / p.sum(-1, keepdims=True), vv.repeat(2, axis=0))
        fields = shape("0", q) | {
            "ne11": n,
            "ne_12_2": 2,
            "ne_12_3": 1,
            "ns10": row,
            "ns20": row,
            "scale": 1 / np.sqrt(d),
            "m0": 1,
            "m1": 1,
        }
        fields |= {f"nb{i}{j}": k.strides[2 - j] if j < 3 else k.nbytes for i in (1, 2) for j in (1, 2, 3)}
        fields |= {
            "ne31": queries,
            "ne32": 1,
            "ne33": 1,
            "ne30": n,
            "nb31": 2 * n,
            "nb32": mask.nbytes,
            "nb33": mask.nbytes,
        }
        fields |= {"ne1": 4, "ne2": queries, "ne3": 1, "n_head_log2": 4}
        for i in (1, 2):
            fields[f"nb{i}1"], fields[f"nb{i}2"] = k.strides[1], k.strides[0]
        return fields, [q, k, v, mask], np.zeros((queries, 4, d), np.float32), want, unit, row, k.strides[1]

    def _pad(
        self, fields: dict[str, Any], data: list[Array], c: int, n: int, queries: int, row: int
    ) -> tuple[list[Launch], Array]:
        pad = np.zeros(c * (2 * row * 2 + 2 * queries) + 64, np.uint8)
        if n % c == 0:
            return [], pad
        args = keep(self.h, "flash_attn_ext_pad", fields)
        return [
            Launch("fa_aux", "kernel_flash_attn_ext_pad", (c, 2), (32,), [args, *data[1:], pad], {100: True, 125: c})
        ], pad

    def attention(self) -> Iterator[Case]:
        for kind, queries, n in (("f16", 13, 100), ("f32", 8, 64), ("q8_0", 9, 130), ("q4_0", 16, 64)):
            d, sg, c = 64, 4, 64
            fields, data, out, want, _, row, stride = self._attention(kind, d, queries, n)
            launches, pad = self._pad(fields, data, c, n, queries, stride)
            blk = np.zeros((up(queries, 8), up(n, c)), np.int8)
            args = keep(self.h, "flash_attn_ext_blk", fields)
            launches.append(
                Launch(
                    "fa_aux",
                    "kernel_flash_attn_ext_blk",
                    blk.shape[::-1],
                    (32,),
                    [args, data[3], blk],
                    {224: 8, 225: c},
                )
            )
            constants = {
                300: True,
                301: False,
                302: False,
                303: False,
                304: n % c != 0,
                310: queries % 8 != 0,
                320: row,
                321: row,
                322: sg,
            }
            scratch = 16 * 32 * sg if kind.startswith("q") else 0
            memory = up((8 * (d + 2 * d + 4 * c) + scratch) * 2, 16) * 16
            buffers = [keep(self.h, "flash_attn_ext", fields), *data, data[0], pad, blk, out]
            kernel = f"kernel_flash_attn_ext_{kind}_dk{d}_dv{d}"
            launches.append(Launch(f"fa_{kind}", kernel, (up(queries, 8), 4), (32, sg), buffers, constants, memory))
            yield Case(launches, out, want, F16, f"{queries} queries, {n} keys")

    def attention_vec(self) -> Iterator[Case]:
        for kind, d, n, sg, wg, lockstep in (
            ("f16", 64, 150, 1, 1, False), ("q8_0", 64, 64, 1, 1, False), ("f16", 64, 150, 1, 32, False),
            ("q4_1", 128, 70, 1, 1, True),
            ("f16", 64, 150, 4, 1, True), ("q4_1", 128, 160, 2, 1, True),
        ):  # fmt: skip
            queries, c = 2, 32
            fields, data, out, want, _, row, stride = self._attention(kind, d, queries, n)
            launches, pad = self._pad(fields, data, c, n, queries, stride)
            constants = {
                400: True,
                401: False,
                402: False,
                403: False,
                404: n % c != 0,
                405: False,
                420: row,
                421: row,
                422: sg,
                423: wg,
            }
            memory = up((128 + 4 * c + 2 * 128) * sg * 2, 16) * 16
            rows = 4 * queries
            parts = out if wg == 1 else np.zeros(rows * wg * (d + 2), np.float32)
            buffers = [keep(self.h, "flash_attn_ext_vec", fields), *data, data[0], pad, parts, data[0]]
            kernel = f"kernel_flash_attn_ext_vec_{kind}_dk{d}_dv{d}"
            launches.append(Launch(f"fa_vec_{kind}", kernel, (queries, 4, wg), (32, sg), buffers, constants, memory))
            if wg > 1:
                args = self.h.args("flash_attn_ext_vec_reduce", nrows=rows)
                launches.append(
                    Launch(
                        "fa_aux",
                        "kernel_flash_attn_ext_vec_reduce",
                        (rows,),
                        (32 * wg,),
                        [args, parts, out],
                        {500: d, 501: wg},
                    )
                )
            yield Case(launches, out, want, F16, f"{n} keys, {sg} simdgroups, {wg} parts", lockstep)
