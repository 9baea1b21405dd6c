// Runs the cases that record.py wrote, on the kernels of MINFER_CPU, and compares with the results written beside them.
//   replay FILE [threads]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "half.h"
#include "layout.h"
#include "ops.h"
#include "project.h"

using namespace minfer;

namespace {

struct Value {
  char tag = 'n';
  int64_t i = 0;
  double d = 0;
  std::string s;
  std::vector<float> v;
  std::vector<Value> l;
};

using Buffers = std::vector<std::vector<uint8_t>>;

class Reader {
 public:
  explicit Reader(const char* path) : in_(path, std::ios::binary) {
    if (!in_) std::fprintf(stderr, "cannot open %s\n", path), std::exit(2);
  }
  void raw(void* to, int64_t n) {
    in_.read(static_cast<char*>(to), n);
    if (!in_) std::fprintf(stderr, "the file ends early\n"), std::exit(2);
  }
  int64_t i64() {
    int64_t x;
    raw(&x, 8);
    return x;
  }
  double f64() {
    double x;
    raw(&x, 8);
    return x;
  }
  std::string text() {
    std::string s(i64(), '\0');
    raw(s.data(), s.size());
    return s;
  }
  std::vector<float> floats(int64_t n) {
    std::vector<float> v(n);
    raw(v.data(), 4 * n);
    return v;
  }
  Value value() {
    Value x;
    raw(&x.tag, 1);
    switch (x.tag) {
      case 'n': break;
      case 'i': case 'b': x.i = i64(); break;
      case 'd': x.d = f64(); break;
      case 's': x.s = text(); break;
      case 'v': x.v = floats(i64()); break;
      case 'l': x.l.resize(i64()); for (Value& e : x.l) e = value(); break;
      case 'w': x.l.resize(4); for (Value& e : x.l) e = value(); break;
      case 'k': x.l.resize(6); for (Value& e : x.l) e = value(); break;
      default: std::fprintf(stderr, "unknown tag %c\n", x.tag); std::exit(2);
    }
    return x;
  }

 private:
  std::ifstream in_;
};

// The arguments of a call, in order; numbers of either kind where one is wanted.
struct Args {
  std::vector<Value>& a;
  Buffers& buffers;
  size_t next = 0;
  std::vector<std::unique_ptr<std::vector<float>>>* keep;

  Value& take() { return a.at(next++); }
  int64_t integer() { return take().i; }
  float number() {
    const Value& v = take();
    return static_cast<float>(v.tag == 'i' ? static_cast<double>(v.i) : v.d);
  }
  std::string text() { return take().s; }
  uint8_t* at(const Value& v) { return v.tag == 'n' ? nullptr : buffers.at(v.i).data(); }
  float* f32() { return reinterpret_cast<float*>(at(take())); }
  const int32_t* i32() { return reinterpret_cast<const int32_t*>(at(take())); }
  const float* vector_of(const Value& v) {
    if (v.tag != 'v') return nullptr;
    keep->push_back(std::make_unique<std::vector<float>>(v.v));
    return keep->back()->data();
  }
  const float* vector() { return vector_of(take()); }
  Matrix matrix_of(const Value& v) {
    const int type = type_of_name(v.l[0].s.c_str());
    const TypeLayout& layout = kLayouts[type];
    const int64_t n_in = v.l[2].i;
    return {static_cast<Type>(type), at(v.l[1]), n_in, v.l[3].i, n_in / layout.block_size * layout.block_bytes};
  }
  KvRows kv() {
    const Value& v = take();
    const std::string& name = v.l[0].s;
    const KvFormat format = name == "f32" ? KvFormat::F32 : name == "f16" ? KvFormat::F16 : KvFormat::Q8_0;
    return {format, v.l[1].i, v.l[2].i, v.l[3].i, at(v.l[4]), at(v.l[5])};
  }
};

using Tables = std::vector<std::shared_ptr<RopeTable>>;

std::unique_ptr<Operation> make(const std::string& call, Args& a, Tables& tables) {
  static const std::map<std::string, Unary> unary{
      {"silu", Unary::Silu}, {"gelu", Unary::Gelu}, {"scale", Unary::Scale}, {"softcap", Unary::SoftCap}};
  static const std::map<std::string, Binary> binary{
      {"add", Binary::Add}, {"mul", Binary::Mul}, {"swiglu", Binary::SwiGLU}, {"geglu", Binary::GeGLU}};
  static const std::map<std::string, Epilogue> epilogues{{"none", Epilogue::None}, {"bias", Epilogue::Bias},
      {"add", Epilogue::Add}, {"swiglu", Epilogue::SwiGLU}, {"geglu", Epilogue::GeGLU}};
  if (call == "embed") {
    const auto ids = a.i32();
    const int64_t n = a.integer();
    const Matrix w = a.matrix_of(a.take());
    return make_embed(ids, n, w, a.f32());
  }
  if (call == "get_rows") {
    const auto x = a.f32();
    const int64_t rows = a.integer(), d = a.integer();
    const auto ids = a.i32();
    const int64_t n = a.integer();
    return make_get_rows(x, rows, d, ids, n, a.f32());
  }
  if (call == "rms_norm") {
    const auto x = a.f32();
    const int64_t d = static_cast<int64_t>(a.a.at(a.next).v.size());
    const auto gain = a.vector();
    const int64_t n = a.integer();
    const float eps = a.number();
    return make_rms_norm(x, gain, d, n, eps, a.f32());
  }
  if (call == "unary") {
    const Unary kind = unary.at(a.text());
    const auto x = a.f32();
    const float value = a.number();
    const int64_t n = a.integer();
    return make_unary(kind, x, value, n, a.f32());
  }
  if (call == "binary") {
    const Binary kind = binary.at(a.text());
    const auto x = a.f32(), y = a.f32();
    const int64_t n = a.integer();
    return make_binary(kind, x, y, n, a.f32());
  }
  if (call == "softmax") {
    const auto x = a.f32();
    const int64_t d = a.integer(), n = a.integer();
    return make_softmax(x, d, n, a.f32());
  }
  if (call == "top_k") {
    const auto x = a.f32();
    const int64_t d = a.integer(), n = a.integer(), k = a.integer();
    return make_top_k(x, d, n, k, const_cast<int32_t*>(a.i32()));
  }
  if (call == "view") {
    const auto x = a.f32();
    const int64_t stride = a.integer(), start = a.integer(), size = a.integer(), n = a.integer();
    return make_view(x, stride, start, size, n, a.f32());
  }
  if (call == "permute") {
    const auto x = a.f32();
    std::vector<int64_t> extents, strides;
    for (const Value& v : a.take().l) extents.push_back(v.i);
    for (const Value& v : a.take().l) strides.push_back(v.i);
    return make_permute(x, extents, strides, a.f32());
  }
  if (call == "rope_table") {
    auto table = std::make_shared<RopeTable>();
    table->positions = a.i32(), table->n = a.integer();
    for (const Value& v : a.take().l) table->inverse.push_back(v.d);
    table->magnitude = a.take().d;
    tables.push_back(table);
    return make_rope_table(table);
  }
  if (call == "rope") {
    const auto x = a.f32();
    const auto table = tables.at(a.integer());
    const int64_t head_dim = a.integer(), heads = a.integer();
    const bool neox = a.integer();
    return make_rope({table, head_dim, neox}, x, heads, a.f32());
  }
  if (call == "kv_store") {
    const auto k = a.f32(), v = a.f32();
    const auto cells = a.i32();
    const int64_t n = a.integer();
    const KvRows kv = a.kv();
    return make_kv_store(k, v, cells, n, kv, static_cast<int>(a.integer()));
  }
  if (call == "head_rope_store") {
    HeadRopeStoreArgs x{};
    x.qkv = a.f32(), x.cells = a.i32(), x.n = a.integer(), x.n_head = a.integer(), x.n_kv_head = a.integer();
    x.rope.table = tables.at(a.integer()), x.rope.head_dim = a.integer(), x.rope.neox = a.integer();
    const Value& biases = a.take();
    if (biases.tag == 'l')
      x.q_bias = a.vector_of(biases.l[0]), x.k_bias = a.vector_of(biases.l[1]), x.v_bias = a.vector_of(biases.l[2]);
    x.q_gain = a.vector(), x.q_eps = a.number(), x.k_gain = a.vector(), x.k_eps = a.number();
    x.kv = a.kv(), x.layer = static_cast<int>(a.integer()), x.q_out = a.f32();
    return make_head_rope_store(x);
  }
  if (call == "attn") {
    AttnArgs x{};
    x.q = a.f32(), x.positions = a.i32(), x.window = a.i32();
    x.n = a.integer(), x.n_head = a.integer(), x.n_kv_head = a.integer(), x.head_dim = a.integer();
    x.layout = static_cast<int>(a.integer()), x.scale = a.number(), x.softcap = a.number(), x.sliding = a.integer();
    x.kv = a.kv(), x.layer = static_cast<int>(a.integer()), x.out = a.f32();
    return make_attn(x);
  }
  if (call == "project") {
    ProjectArgs x{};
    x.x = a.f32(), x.n_tokens = a.integer();
    for (const Value& v : a.take().l) x.segments.push_back(a.matrix_of(v));
    x.n_in = x.segments[0].n_in;
    x.gain = a.vector(), x.eps = a.number(), x.epilogue = epilogues.at(a.text());
    for (const Value& v : a.take().l) x.biases.push_back(a.vector_of(v));
    x.residual = a.f32(), x.top_k = a.integer();
    if (x.top_k) x.ranked = const_cast<int32_t*>(a.i32());
    else x.out = a.f32();
    return make_project(x);
  }
  std::fprintf(stderr, "unknown call %s\n", call.c_str());
  std::exit(2);
}

float element(const uint8_t* row, int64_t i, const std::string& format) {
  if (format == "f16") return load_half(row + 2 * i);
  if (format == "q8_0") return load_half(row + i / 32 * 34) * static_cast<int8_t>(row[i / 32 * 34 + 2 + i % 32]);
  if (format == "i32") return static_cast<float>(reinterpret_cast<const int32_t*>(row)[i]);
  float x;
  std::memcpy(&x, row + 4 * i, 4);
  return x;
}

// The largest difference over the root mean square of what was wanted; Inf where one is finite and the other is not.
double error(Reader& in, const Buffers& buffers, double* bound) {
  const std::vector<uint8_t>& got = buffers.at(in.i64());
  const std::string format = in.text();
  const int64_t rows = in.i64(), width = in.i64(), row_bytes = in.i64();
  *bound = in.f64();
  const std::vector<float> want = in.floats(rows * width);
  double worst = 0, squares = 0;
  for (int64_t i = 0; i < rows * width; ++i) {
    const bool index = format == "top_k" && i % width < width / 2;  // its first k words
    const double w = want[i], g = element(got.data() + i / width * row_bytes, i % width, index ? "i32" : format);
    if (std::isfinite(g) != std::isfinite(w)) return INFINITY;
    if (!std::isfinite(w)) continue;
    worst = std::max(worst, std::fabs(g - w)), squares += w * w;
  }
  return worst / std::max(std::sqrt(squares / std::max<double>(1, static_cast<double>(want.size()))), 1e-30);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: replay FILE [threads]\n"), 2;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const char* why = "";
#ifdef MINFER_EMULATED
  const Kernels* kernels = &MINFER_EMULATED;  // of a processor that this one is not
#else
  const Kernels* kernels = pick_kernels(std::getenv("MINFER_CPU"), &why);
#endif
  if (!kernels) return std::fprintf(stderr, "MINFER_CPU: %s\n", why), 2;
  const auto pool = std::make_shared<Pool>(threads);
  Reader in(argv[1]);
  const int64_t n_cases = in.i64();
  int64_t failed = 0;
  for (int64_t c = 0; c < n_cases; ++c) {
    const std::string name = in.text();
    Buffers buffers(in.i64());
    for (auto& buffer : buffers) buffer.resize(in.i64()), in.raw(buffer.data(), buffer.size());
    std::vector<std::unique_ptr<std::vector<float>>> keep;
    Tables tables;
    Program program(std::make_shared<Workspace>(pool, *kernels));
    for (int64_t calls = in.i64(); calls > 0; --calls) {
      const std::string call = in.text();
      std::vector<Value> values(in.i64());
      for (Value& v : values) v = in.value();
      Args args{values, buffers, 1, &keep};  // the first argument is the node's name
      program.add(name, make(call, args, tables));
    }
    program.run();
    for (int64_t checks = in.i64(); checks > 0; --checks) {
      double bound;
      const double e = error(in, buffers, &bound);
      if (!(e <= bound)) ++failed, std::printf("FAILED %s: error %g, at most %g\n", name.c_str(), e, bound);
    }
  }
  std::printf("%s, %d threads: %lld passed, %lld failed\n", kernels->name, threads,
              static_cast<long long>(n_cases - failed), static_cast<long long>(failed));
  return failed ? 1 : 0;
}
