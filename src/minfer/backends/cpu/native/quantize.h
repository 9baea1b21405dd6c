// Rows of floats to 8-bit blocks and KV rows, and back.
#pragma once

#include MINFER_SIMD

namespace minfer::MINFER_ISA {

// 32 values to codes: d = max|x| / 127, code = x / d rounded half to even. Where 1 / d is not finite, codes are 0.
// A NaN or Inf makes d NaN, so that it shows in every product.
MINFER_INLINE float quantize_block(const float* x, S8x32& codes) {
  F8 v[4], most{}, poison{};
  for (int i = 0; i < 4; ++i) {
    v[i] = load<F8>(x + 8 * i);
    most = vmax(bits<F8>(bits<W8>(v[i]) & 0x7fffffffu), most);
    poison += v[i] * 0.0f;
  }
  const float d = max(most) / 127.0f;
  float inverse = 1.0f / d;
  if (!std::isfinite(inverse)) inverse = 0.0f;
  I8 whole[4];
  for (int i = 0; i < 4; ++i) whole[i] = round8(v[i] * inverse);
  codes = narrow(whole);
  return d + sum(poison);
}

inline void quantize_row(const float* x, int64_t n, uint8_t* out) {
  const Q8Row row = q8_row(out, n);
  const int64_t padded = round_up(n, 256);
  for (int64_t i = 0; i < padded; i += 32) {
    S8x32 codes{};
    float d = 0.0f;
    if (i + 32 <= n) {
      d = quantize_block(x + i, codes);
    } else if (i < n) {
      float tail[32] = {};
      std::memcpy(tail, x + i, 4 * (n - i));
      d = quantize_block(tail, codes);
    }
    store(row.codes + i, codes);
    // Lanes 0-3 of the products with one are the first 16 codes.
    const I8 ones = dot32(U8x32{} + static_cast<uint8_t>(1), codes);
    const float low = static_cast<float>(ones[0] + ones[1] + ones[2] + ones[3]);
    const float high = static_cast<float>(ones[4] + ones[5] + ones[6] + ones[7]);
    row.d[i / 32] = row.d_half[i / 16] = row.d_half[i / 16 + 1] = d;
    row.sums[i / 32] = d * (low + high);
    row.sums_half[i / 16] = d * low, row.sums_half[i / 16 + 1] = d * high;
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
    S8x32 codes;
    F8 d{};
    d[0] = quantize_block(x + 32 * i, codes);
    uint16_t h[8];
    store_half8(h, d);
    std::memcpy(row + 34 * i, h, 2);
    store(row + 34 * i + 2, codes);
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
