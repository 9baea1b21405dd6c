// Rows of any weight type to floats: ggml's formula for each, every step rounded to f32. Plain loops: this runs for
// embedding rows, a few a step. Layouts: minfer.quants.
#include <cstring>

#include "half.h"
#include "kernels.h"
#include "layout.h"

namespace minfer {

namespace {

uint32_t load_u32(const uint8_t* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

int nibble(const uint8_t* qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }

void scaled(float d, int code, float* out) { *out = d * static_cast<float>(code); }

// Scales and minimums of Q4_K and Q5_K.
void k_scale(const uint8_t* p, int s, int* sc, int* mn) {
  if (s < 4) {
    *sc = p[s] & 63, *mn = p[s + 4] & 63;
  } else {
    *sc = (p[s + 4] & 15) | (p[s - 4] >> 6) << 4, *mn = p[s + 4] >> 4 | (p[s] >> 6) << 4;
  }
}

void block_32(Type type, const uint8_t* p, float* out) {
  static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const float d = load_half(p);
  for (int i = 0; i < 32; ++i) {
    switch (type) {
      case Type::Q4_0: scaled(d, nibble(p + 2, i) - 8, out + i); break;
      case Type::Q4_1: out[i] = d * static_cast<float>(nibble(p + 4, i)) + load_half(p + 2); break;
      case Type::Q5_0: scaled(d, (nibble(p + 6, i) | static_cast<int>(load_u32(p + 2) >> i & 1) << 4) - 16, out + i); break;
      case Type::Q5_1: {
        const int code = nibble(p + 8, i) | static_cast<int>(load_u32(p + 4) >> i & 1) << 4;
        out[i] = d * static_cast<float>(code) + load_half(p + 2);
        break;
      }
      case Type::Q8_0: scaled(d, static_cast<int8_t>(p[2 + i]), out + i); break;
      case Type::IQ4_NL: scaled(d, levels[nibble(p + 2, i)], out + i); break;
      case Type::MXFP4: {
        const float e = float_of_bits(p[0] < 2 ? 0x200000u << p[0] : static_cast<uint32_t>(p[0] - 1) << 23);
        scaled(e, doubled[nibble(p + 1, i)], out + i);
        break;
      }
      default: break;
    }
  }
}

void block_256(Type type, const uint8_t* p, float* out) {
  static const int8_t levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, j = i / 32 % 4, l = i % 32;  // value 128 half + 32 j + l
    switch (type) {
      case Type::Q2_K: {
        const uint8_t s = p[i / 16];
        const float d = load_half(p + 80) * static_cast<float>(s & 15), m = load_half(p + 82) * static_cast<float>(s >> 4);
        out[i] = d * static_cast<float>(p[16 + 32 * half + l] >> 2 * j & 3) - m;
        break;
      }
      case Type::Q3_K: {
        const int s = i / 16;
        const uint8_t* packed = p + 96;
        const int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
        const int sc = (low | (packed[8 + s % 4] >> 2 * (s / 4) & 3) << 4) - 32;
        const int code = (p[32 + 32 * half + l] >> 2 * j & 3) - (p[l] >> (4 * half + j) & 1 ? 0 : 4);
        scaled(load_half(p + 108) * static_cast<float>(sc), code, out + i);
        break;
      }
      case Type::Q4_K:
      case Type::Q5_K: {
        int sc, mn;
        k_scale(p + 4, i / 32, &sc, &mn);
        const uint8_t byte = p[(type == Type::Q4_K ? 16 : 48) + 32 * (i / 64) + l];
        int code = i / 32 % 2 ? byte >> 4 : byte & 15;
        if (type == Type::Q5_K) code |= (p[16 + l] >> i / 32 & 1) << 4;
        const float d = load_half(p) * static_cast<float>(sc), m = load_half(p + 2) * static_cast<float>(mn);
        out[i] = d * static_cast<float>(code) - m;
        break;
      }
      case Type::Q6_K: {
        const uint8_t byte = p[64 * half + 32 * (j % 2) + l];
        const int code = ((j / 2 ? byte >> 4 : byte & 15) | (p[128 + 32 * half + l] >> 2 * j & 3) << 4) - 32;
        scaled(load_half(p + 208) * static_cast<float>(static_cast<int8_t>(p[192 + i / 16])), code, out + i);
        break;
      }
      case Type::IQ4_XS: {
        const int s = i / 32;
        const int sc = ((p[4 + s / 2] >> 4 * (s % 2) & 15) | (load_u16(p + 2) >> 2 * s & 3) << 4) - 32;
        scaled(load_half(p) * static_cast<float>(sc), levels[nibble(p + 8 + 16 * s, l)], out + i);
        break;
      }
      default: break;
    }
  }
}

}  // namespace

void dequantize_row(Type type, const uint8_t* row, int64_t n, float* out) {
  const TypeLayout& layout = kLayouts[static_cast<int>(type)];
  if (type == Type::F32) {
    std::memcpy(out, row, 4 * n);
  } else if (type == Type::F16) {
    for (int64_t i = 0; i < n; ++i) out[i] = load_half(row + 2 * i);
  } else if (type == Type::BF16) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_of_bits(static_cast<uint32_t>(load_u16(row + 2 * i)) << 16);
  } else {
    for (int64_t i = 0; i < n / layout.block_size; ++i) {
      const uint8_t* p = row + i * layout.block_bytes;
      if (layout.block_size == 32) block_32(type, p, out + 32 * i);
      else block_256(type, p, out + 256 * i);
    }
  }
}

}  // namespace minfer
