"""ggml types that minfer can measure but not compute with, and numbers that ggml has retired.

A file may carry a tensor of such a type that nothing reads; the reader must still know where it ends.
Source: ggml's `ggml_type` enumeration and its `type_traits` table (ggml.h, ggml.c).
"""

from __future__ import annotations

from minfer.quants.format import Format

SIZE_ONLY = (
    Format("Q8_1", 9, 32, 36),  # activations, at run time only
    Format("Q8_K", 15, 256, 292),  # activations, at run time only
    Format("IQ2_XXS", 16, 256, 66),
    Format("IQ2_XS", 17, 256, 74),
    Format("IQ3_XXS", 18, 256, 98),
    Format("IQ1_S", 19, 256, 50),
    Format("IQ3_S", 21, 256, 110),
    Format("IQ2_S", 22, 256, 82),
    Format("I8", 24, 1, 1),
    Format("I16", 25, 1, 2),
    Format("I32", 26, 1, 4),
    Format("I64", 27, 1, 8),
    Format("F64", 28, 1, 8),
    Format("IQ1_M", 29, 256, 56),
    Format("TQ1_0", 34, 256, 54),
    Format("TQ2_0", 35, 256, 66),
    Format("NVFP4", 40, 64, 36),
    Format("Q1_0", 41, 128, 18),
)

# number -> (name, what to use instead)
REMOVED = {
    4: ("Q4_2", "Q4_0"),
    5: ("Q4_3", "Q4_1"),
    31: ("Q4_0_4_4", "Q4_0"),
    32: ("Q4_0_4_8", "Q4_0"),
    33: ("Q4_0_8_8", "Q4_0"),
    36: ("IQ4_NL_4_4", "IQ4_NL"),
    37: ("IQ4_NL_4_8", "IQ4_NL"),
    38: ("IQ4_NL_8_8", "IQ4_NL"),
}
