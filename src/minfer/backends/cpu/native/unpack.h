// From the bytes of a block format to what the products take: codes of one byte, and a scale and a minimum for every 32
// (or 16) of them, so that x = d * code + m. Layouts: minfer.quants. A chunk is 8 blocks of 32 values; where a row ends inside one, a copy
// fills it up.
#pragma once

#include MINFER_SIMD

namespace minfer::MINFER_ISA {

// Lane i belongs to block i of the chunk; with a scale for every 16 values, [0] and [1] are groups 0-7 and 8-15.
struct Scales {
  F8 d[2], m[2];
};

MINFER_INLINE uint32_t load_u32(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

template <Type>
struct Codec;

// kGroup: values a scale. kMaxCode: the largest code, -1 where codes are signed. A format of small blocks has scales(p, q,
// result) of the four blocks at p and at q, and codes(block); a super-block has scales(chunk, result), codes(chunk, block).
template <int kBytes, int kMax>
struct Small {
  static constexpr bool kSmall = true, kNibbles = false;
  static constexpr int kGroup = 32, kMaxCode = kMax;
  static constexpr int64_t kBlockBytes = kBytes, kChunkBytes = 8 * kBytes;
};
template <int kBytesPerChunk, int kGroupSize, int kMax>
struct Super {
  static constexpr bool kSmall = false, kNibbles = false;
  static constexpr int kGroup = kGroupSize, kMaxCode = kMax;
  static constexpr int64_t kChunkBytes = kBytesPerChunk;
};

struct Plain {
  static MINFER_INLINE U8x32 code(U8x32 nibbles) { return nibbles; }
};

// Blocks with 16 bytes of nibbles at kCodesAt and, where there is one, a word of fifth bits at kBitsAt. pair(p, q, ...) gives
// the first 16 codes of two blocks, and the last ones: an instruction less for each than one block's 32.
template <int kBytes, int kMax, int kCodesAt, int kBitsAt = 0, class Map = Plain>
struct Nibbles : Small<kBytes, kMax> {
  static constexpr bool kNibbles = true;
  static MINFER_INLINE U8x32 codes(const uint8_t* p) {
    const U8x32 v = nibbles(p + kCodesAt);
    return Map::code(kBitsAt ? v | (mask_of_bits(p + kBitsAt) & 16) : v);
  }
  static MINFER_INLINE void pair(const uint8_t* p, const uint8_t* q, U8x32& low, U8x32& high) {
    const U8x32 v = two16(p + kCodesAt, q + kCodesAt);
    low = low_nibbles(v), high = high_nibbles(v);
    if (kBitsAt) {
      U8x32 low_bits, high_bits;
      mask_of_bits(p + kBitsAt, q + kBitsAt, low_bits, high_bits);
      low |= low_bits & 16, high |= high_bits & 16;
    }
    low = Map::code(low), high = Map::code(high);
  }
};

template <>
struct Codec<Type::Q4_0> : Nibbles<18, 15, 2> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) {
    s.d[0] = half8_strided(p, q, 18), s.m[0] = s.d[0] * -8.0f;
  }
};

template <>
struct Codec<Type::Q4_1> : Nibbles<20, 15, 4> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) { half8_pairs(p, q, 20, s.d[0], s.m[0]); }
};

template <>
struct Codec<Type::Q5_0> : Nibbles<22, 31, 6, 2> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) {
    s.d[0] = half8_strided(p, q, 22), s.m[0] = s.d[0] * -16.0f;
  }
};

template <>
struct Codec<Type::Q5_1> : Nibbles<24, 31, 8, 4> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) { half8_pairs(p, q, 24, s.d[0], s.m[0]); }
};

template <>
struct Codec<Type::Q8_0> : Small<34, -1> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) {
    s.d[0] = half8_strided(p, q, 34), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p) { return load<U8x32>(p + 2) ^ kSignedOffset; }
};

// ggml's kvalues_iq4nl.
constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Levels {
  static MINFER_INLINE U8x32 code(U8x32 nibbles) {
    return lookup(nibbles, reinterpret_cast<const uint8_t*>(kLevels)) ^ kSignedOffset;
  }
};

template <>
struct Codec<Type::IQ4_NL> : Nibbles<18, -1, 2, 0, Levels> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) {
    s.d[0] = half8_strided(p, q, 18), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
};

// Doubled E2M1 levels, -12 to 12, shifted to 0 to 24.
struct ShiftedE2M1 {
  static MINFER_INLINE U8x32 code(U8x32 nibbles) {
    static constexpr uint8_t kCodes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return lookup(nibbles, kCodes);
  }
};

template <>
struct Codec<Type::MXFP4> : Nibbles<17, 31, 1, 0, ShiftedE2M1> {
  static MINFER_INLINE void scales(const uint8_t* p, const uint8_t* q, Scales& s) {
    uint32_t d[8];  // 2^(e - 128): the two smallest are subnormal
    const auto scale = [](uint32_t e) { return e < 2 ? 0x200000u << e : (e - 1) << 23; };
    for (int i = 0; i < 4; ++i) d[i] = scale(p[17 * i]), d[4 + i] = scale(q[17 * i]);
    s.d[0] = load<F8>(d), s.m[0] = s.d[0] * -12.0f;
  }
};

template <>
struct Codec<Type::Q2_K> : Super<84, 16, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) {
    const float d = one_half(p + 80), low = -one_half(p + 82);
    const U8x16 packed = load<U8x16>(p);
    const U8x16 sc = packed & 15, mn = packed >> 4;
    uint8_t bytes[32];
    store(bytes, sc), store(bytes + 16, mn);
    for (int i = 0; i < 2; ++i) s.d[i] = uint8x8(bytes + 8 * i) * d, s.m[i] = uint8x8(bytes + 16 + 8 * i) * low;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    return (load<U8x32>(p + 16 + 32 * (j / 4)) >> static_cast<uint8_t>(2 * (j % 4))) & 3;
  }
};

template <>
struct Codec<Type::Q3_K> : Super<110, 16, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) {
    const float d = one_half(p + 108);
    const uint32_t a = load_u32(p + 96), b = load_u32(p + 100), c = load_u32(p + 104);
    const auto join = [](uint32_t low, uint32_t high) { return (low & 0x0f0f0f0f) | (high & 0x03030303) << 4; };
    const uint32_t sc[4] = {join(a, c), join(b, c >> 2), join(a >> 4, c >> 4), join(b >> 4, c >> 6)};
    for (int i = 0; i < 2; ++i) s.d[i] = (uint8x8(sc + 2 * i) - 32.0f) * d, s.m[i] = s.d[i] * -4.0f;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const U8x32 low = (load<U8x32>(p + 32 + 32 * (j / 4)) >> static_cast<uint8_t>(2 * (j % 4))) & 3;
    return low | ((load<U8x32>(p) >> static_cast<uint8_t>(j)) & 1) << 2;
  }
};

// The 12 bytes of Q4_K and Q5_K: eight 6-bit scales, eight 6-bit minimums.
MINFER_INLINE void k_scales(const uint8_t* p, Scales& s) {
  const float d = one_half(p), low = -one_half(p + 2);
  const uint32_t a = load_u32(p + 4), b = load_u32(p + 8), c = load_u32(p + 12);
  const uint32_t sc[2] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 6 & 0x03030303) << 4};
  const uint32_t mn[2] = {b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 6 & 0x03030303) << 4};
  s.d[0] = uint8x8(sc) * d, s.m[0] = uint8x8(mn) * low;
}

template <>
struct Codec<Type::Q4_K> : Super<144, 32, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) { k_scales(p, s); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const U8x32 pair = load<U8x32>(p + 16 + 32 * (j / 2));
    return j % 2 ? pair >> 4 : pair & 15;
  }
};

template <>
struct Codec<Type::Q5_K> : Super<176, 32, 31> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) { k_scales(p, s); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const U8x32 pair = load<U8x32>(p + 48 + 32 * (j / 2));
    return (j % 2 ? pair >> 4 : pair & 15) | ((load<U8x32>(p + 16) >> static_cast<uint8_t>(j)) & 1) << 4;
  }
};

template <>
struct Codec<Type::Q6_K> : Super<210, 16, 63> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) {
    const float d = one_half(p + 208);
    for (int i = 0; i < 2; ++i) s.d[i] = int8x8(p + 192 + 8 * i) * d, s.m[i] = s.d[i] * -32.0f;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const int h = j / 4, q = j % 4;
    const U8x32 low = load<U8x32>(p + 64 * h + 32 * (q % 2));
    const U8x32 high = (load<U8x32>(p + 128 + 32 * h) >> static_cast<uint8_t>(2 * q)) & 3;
    return (q / 2 ? low >> 4 : low & 15) | high << 4;
  }
};

template <>
struct Codec<Type::IQ4_XS> : Super<136, 32, -1> {
  static MINFER_INLINE void scales(const uint8_t* p, Scales& s) {
    const uint32_t high = load_u16(p + 2);
    uint8_t sc[8];
    for (int i = 0; i < 8; ++i)
      sc[i] = static_cast<uint8_t>((p[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4);
    s.d[0] = (uint8x8(sc) - 32.0f) * one_half(p), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return Levels::code(nibbles(p + 8 + 16 * j)); }
};

// The scales of a chunk, and the codes of its block j.
template <class C>
MINFER_INLINE void chunk_scales(const uint8_t* p, Scales& s) {
  if constexpr (C::kSmall) C::scales(p, p + 4 * C::kBlockBytes, s);
  else C::scales(p, s);
}
template <class C>
MINFER_INLINE U8x32 chunk_codes(const uint8_t* p, int j) {
  if constexpr (C::kSmall) return C::codes(p + j * C::kBlockBytes);
  else return C::codes(p, j);
}

// Calls `f` with the codec of a block format.
template <class F>
MINFER_INLINE void with_codec(Type type, F f) {
  switch (type) {
    case Type::Q4_0: return f(Codec<Type::Q4_0>{});
    case Type::Q4_1: return f(Codec<Type::Q4_1>{});
    case Type::Q5_0: return f(Codec<Type::Q5_0>{});
    case Type::Q5_1: return f(Codec<Type::Q5_1>{});
    case Type::Q8_0: return f(Codec<Type::Q8_0>{});
    case Type::Q2_K: return f(Codec<Type::Q2_K>{});
    case Type::Q3_K: return f(Codec<Type::Q3_K>{});
    case Type::Q4_K: return f(Codec<Type::Q4_K>{});
    case Type::Q5_K: return f(Codec<Type::Q5_K>{});
    case Type::Q6_K: return f(Codec<Type::Q6_K>{});
    case Type::IQ4_NL: return f(Codec<Type::IQ4_NL>{});
    case Type::IQ4_XS: return f(Codec<Type::IQ4_XS>{});
    case Type::MXFP4: return f(Codec<Type::MXFP4>{});
    default: return;
  }
}

}  // namespace minfer::MINFER_ISA
