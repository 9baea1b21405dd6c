// From the bytes of a block format to what the products take: codes of one byte, and a scale and a minimum for every 32
// (or 16) of them, so that x = d * code + m. Layouts: minfer.quants. A chunk is 8 blocks of 32 values, or the rest of a row.
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

// The f16 scale (and minimum) at the head of n blocks that lie `stride` bytes apart. Lanes beyond them repeat the last
// block: activations are zero there.
MINFER_INLINE F8 head_scales(const uint8_t* p, int64_t stride, int n) {
  return n == 8 ? half8_strided(p, stride, 7 * stride) : half8_strided(p, stride, (n - 1) * stride);
}
MINFER_INLINE void head_pairs(const uint8_t* p, int64_t stride, int n, F8& first, F8& second) {
  if (n == 8) half8_pairs(p, stride, 7 * stride, first, second);
  else half8_pairs(p, stride, (n - 1) * stride, first, second);
}

template <Type>
struct Codec;

// kGroup: values a scale. kMaxCode: the largest code, -1 where codes are signed. scales(chunk, blocks in it, result);
// codes(chunk, block).
template <int kBytesPerBlock, int kMax>
struct Small {
  static constexpr int kGroup = 32, kMaxCode = kMax;
  static constexpr int64_t kChunkBytes = 8 * kBytesPerBlock;
};
template <int kBytesPerChunk, int kGroupSize, int kMax>
struct Super {
  static constexpr int kGroup = kGroupSize, kMaxCode = kMax;
  static constexpr int64_t kChunkBytes = kBytesPerChunk;
};

template <>
struct Codec<Type::Q4_0> : Small<18, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) {
    s.d[0] = head_scales(p, 18, n), s.m[0] = s.d[0] * -8.0f;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return nibbles(p + 18 * j + 2); }
};

template <>
struct Codec<Type::Q4_1> : Small<20, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) { head_pairs(p, 20, n, s.d[0], s.m[0]); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return nibbles(p + 20 * j + 4); }
};

template <>
struct Codec<Type::Q5_0> : Small<22, 31> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) {
    s.d[0] = head_scales(p, 22, n), s.m[0] = s.d[0] * -16.0f;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    return nibbles(p + 22 * j + 6) | (mask_of_bits(load_u32(p + 22 * j + 2)) & 16);
  }
};

template <>
struct Codec<Type::Q5_1> : Small<24, 31> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) { head_pairs(p, 24, n, s.d[0], s.m[0]); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    return nibbles(p + 24 * j + 8) | (mask_of_bits(load_u32(p + 24 * j + 4)) & 16);
  }
};

template <>
struct Codec<Type::Q8_0> : Small<34, -1> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) {
    s.d[0] = head_scales(p, 34, n), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return load<U8x32>(p + 34 * j + 2) ^ kSignedOffset; }
};

// ggml's kvalues_iq4nl.
constexpr int8_t kLevels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

MINFER_INLINE U8x32 level_codes(U8x32 codes) {
  return lookup(codes, reinterpret_cast<const uint8_t*>(kLevels)) ^ kSignedOffset;
}

template <>
struct Codec<Type::IQ4_NL> : Small<18, -1> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) {
    s.d[0] = head_scales(p, 18, n), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return level_codes(nibbles(p + 18 * j + 2)); }
};

// Doubled E2M1 levels, -12 to 12, shifted to 0 to 24.
constexpr uint8_t kShiftedE2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

template <>
struct Codec<Type::MXFP4> : Small<17, 31> {
  static MINFER_INLINE void scales(const uint8_t* p, int n, Scales& s) {
    uint32_t d[8] = {};  // 2^(e - 128): the two smallest are subnormal
    for (int i = 0; i < n; ++i) {
      const uint32_t e = p[17 * i];
      d[i] = e < 2 ? 0x200000u << e : (e - 1) << 23;
    }
    s.d[0] = load<F8>(d), s.m[0] = s.d[0] * -12.0f;
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return lookup(nibbles(p + 17 * j + 1), kShiftedE2M1); }
};

template <>
struct Codec<Type::Q2_K> : Super<84, 16, 15> {
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) {
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
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) {
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
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) { k_scales(p, s); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const U8x32 pair = load<U8x32>(p + 16 + 32 * (j / 2));
    return j % 2 ? pair >> 4 : pair & 15;
  }
};

template <>
struct Codec<Type::Q5_K> : Super<176, 32, 31> {
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) { k_scales(p, s); }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) {
    const U8x32 pair = load<U8x32>(p + 48 + 32 * (j / 2));
    return (j % 2 ? pair >> 4 : pair & 15) | ((load<U8x32>(p + 16) >> static_cast<uint8_t>(j)) & 1) << 4;
  }
};

template <>
struct Codec<Type::Q6_K> : Super<210, 16, 63> {
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) {
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
  static MINFER_INLINE void scales(const uint8_t* p, int, Scales& s) {
    const uint32_t high = load_u16(p + 2);
    uint8_t sc[8];
    for (int i = 0; i < 8; ++i)
      sc[i] = static_cast<uint8_t>((p[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4);
    s.d[0] = (uint8x8(sc) - 32.0f) * one_half(p), s.m[0] = s.d[0] * static_cast<float>(-kSignedOffset);
  }
  static MINFER_INLINE U8x32 codes(const uint8_t* p, int j) { return level_codes(nibbles(p + 8 + 16 * j)); }
};

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
