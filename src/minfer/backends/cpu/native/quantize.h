// Rows of floats to 8-bit blocks and KV rows, and back.
#pragma once

#include MINFER_SIMD

namespace minfer::MINFER_ISA {

// 32 values to codes: d = max|x| / 127, code = x / d rounded half to even. Where 1 / d is not finite, codes are 0.
// A NaN or Inf makes d NaN, so that it shows in every product.
struct Block {
  F8 v[4];
  MINFER_INLINE explicit Block(const float* x) {
    for (int i = 0; i < 4; ++i) v[i] = load<F8>(x + 8 * i);
  }
  // max|x|, or NaN
  MINFER_INLINE float most() const {
    F8 top{}, poison{};
    for (int i = 0; i < 4; ++i) top = vmax(bits<F8>(bits<W8>(v[i]) & 0x7fffffffu), top), poison += v[i] * 0.0f;
    return max(top) + sum(poison);
  }
  MINFER_INLINE S8x32 codes(float inverse) const {
    I8 whole[4];
    for (int i = 0; i < 4; ++i) whole[i] = round8(v[i] * inverse);
    return narrow(whole);
  }
};

template <class V>
MINFER_INLINE V inverse_of(V d) {
  const V inverse = 1.0f / d;
  return inverse - inverse == 0.0f ? inverse : V{};
}

// Rows of whole blocks; what is missing of the last 256 values is zero. Blocks go in eights, so that most of what is done
// once a block is done for all eight.
inline void quantize_row(const float* x, int64_t n, uint8_t* out) {
  const Q8Row row = q8_row(out, n);
  for (int64_t b = 0; 32 * b < n; b += 8) {
    const int64_t count = n / 32 - b < 8 ? n / 32 - b : 8;
    float most[8] = {}, inverse[8];
    for (int64_t i = 0; i < count; ++i) most[i] = Block(x + 32 * (b + i)).most();
    const F8 d = load<F8>(most) / 127.0f;
    store(inverse, inverse_of(d));
    I8 ones[8] = {};
    for (int64_t i = 0; i < 8; ++i) {
      const S8x32 codes = i < count ? Block(x + 32 * (b + i)).codes(inverse[i]) : S8x32{};
      store(row.codes + 32 * (b + i), codes);
      // Lanes 0-3 of the products with one are the first 16 codes.
      ones[i] = dot32(U8x32{} + static_cast<uint8_t>(1), codes);
    }
    constexpr int64_t kMost = 4 * 127;
    const auto quads = [&](int i) {  // sums of the first halves of four blocks, then of the last ones
      return to_float(add_pairs<2 * kMost>(add_pairs<kMost>(ones[i], ones[i + 1]), add_pairs<kMost>(ones[i + 2], ones[i + 3])));
    };
    store(row.d + b, d);
    float halves[2][8];
    store(halves[0], quads(0)), store(halves[1], quads(4));
    for (int64_t i = 0; i < 8; ++i) {
      const float low = halves[i / 4][i % 4], high = halves[i / 4][4 + i % 4], scale = row.d[b + i];
      row.d_half[2 * (b + i)] = row.d_half[2 * (b + i) + 1] = scale;
      row.sums[b + i] = scale * (low + high);
      row.sums_half[2 * (b + i)] = scale * low, row.sums_half[2 * (b + i) + 1] = scale * high;
    }
  }
}

// One KV row; false where a value is beyond what the format holds. Padding is zeroed.
inline bool pack_kv(KvFormat format, const float* x, int64_t n, uint8_t* row, int64_t row_bytes) {
  if (format == KvFormat::F32) {
    std::memcpy(row, x, 4 * n);
    return true;
  }
  if (format == KvFormat::F16) {
    F8 probe{};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      const F8 v = load<F8>(x + i);
      store_half8(row + 2 * i, v);
      // 0 for a finite result and for what was NaN or Inf already; NaN for a value that became Inf.
      probe += (half8(row + 2 * i) - v) * 0.0f - (v - v);
    }
    bool ok = true;
    if (i < n) {
      F8 v{}, back;
      std::memcpy(&v, x + i, 4 * (n - i));
      uint16_t h[8];
      store_half8(h, v);
      back = half8(h);
      probe += (back - v) * 0.0f - (v - v);
      std::memcpy(row + 2 * i, h, 2 * (n - i));
    }
    std::memset(row + 2 * n, 0, row_bytes - 2 * n);
    const float total = sum(probe);
    if (total != total) {  // rare: look which it was
      for (int64_t j = 0; j < n; ++j) {
        uint16_t h;
        std::memcpy(&h, row + 2 * j, 2);
        ok &= !((h & 0x7fff) == 0x7c00 && std::isfinite(x[j]));
      }
    }
    return ok;
  }
  bool ok = true;
  for (int64_t i = 0; i < n / 32; ++i) {
    const Block block(x + 32 * i);
    F8 d{};
    d[0] = block.most() / 127.0f;
    uint16_t h[8];
    store_half8(h, d);
    std::memcpy(row + 34 * i, h, 2);
    store(row + 34 * i + 2, block.codes(inverse_of(d)[0]));
    ok &= (h[0] & 0x7c00) != 0x7c00;
  }
  std::memset(row + 34 * (n / 32), 0, row_bytes - 34 * (n / 32));
  return ok;
}

// kVectors vectors of floats of a KV row, from value `at` on.
template <KvFormat kFormat, int kVectors>
MINFER_INLINE void unpack_values(const uint8_t* row, int64_t at, float* out) {
#pragma GCC unroll 8
  for (int i = 0; i < 8 * kVectors; i += 8) {
    if (kFormat == KvFormat::F32) {
      std::memcpy(out + i, row + 4 * (at + i), 32);
    } else if (kFormat == KvFormat::F16) {
      store(out + i, half8(row + 2 * (at + i)));
    } else {
      const uint8_t* block = row + (at + i) / 32 * 34;
      store(out + i, int8x8(block + 2 + (at + i) % 32) * one_half(block));
    }
  }
}

// Values [at, at + n) of the KV rows of cells [begin, end), both multiples of 8, to rows of `width` floats, with zeros up
// to whole vectors.
template <KvFormat kFormat>
MINFER_INLINE void unpack_rows(const uint8_t* rows, int64_t row_bytes, int64_t at, int64_t n, int32_t begin, int32_t end,
                               float* out, int64_t width) {
  for (int32_t cell = begin; cell < end; ++cell, out += width) {
    const uint8_t* row = rows + cell * row_bytes;
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) unpack_values<kFormat, 8>(row, at + i, out + i);
    for (; i < n; i += 8) unpack_values<kFormat, 1>(row, at + i, out + i);
    for (; i < width; i += 8) store(out + i, F8{});
  }
}

inline void unpack_kv(KvFormat format, const uint8_t* rows, int64_t row_bytes, int64_t at, int64_t n, int32_t begin,
                      int32_t end, float* out, int64_t width) {
  if (format == KvFormat::F32) unpack_rows<KvFormat::F32>(rows, row_bytes, at, n, begin, end, out, width);
  else if (format == KvFormat::F16) unpack_rows<KvFormat::F16>(rows, row_bytes, at, n, begin, end, out, width);
  else unpack_rows<KvFormat::Q8_0>(rows, row_bytes, at, n, begin, end, out, width);
}

}  // namespace minfer::MINFER_ISA
