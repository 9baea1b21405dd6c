// The native core's face in Python: a Workspace (threads and scratch memory) and a Program built operation by operation.
// Every buffer is checked for size here, once; a program keeps the arrays that it works on alive.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <optional>

#include "layout.h"
#include "ops.h"
#include "project.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace minfer {

namespace {

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadOnly = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// One pool for each number of threads in the process.
std::shared_ptr<Pool> pool_of(int threads) {
  static std::mutex mutex;
  static std::map<int, std::weak_ptr<Pool>> pools;
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Pool> pool = pools[threads].lock();
  if (!pool) pools[threads] = pool = std::make_shared<Pool>(threads);
  return pool;
}

std::shared_ptr<Workspace> make_workspace(int threads, const std::string& isa) {
  if (threads < 1 || threads > 1024) throw RequestError("threads is " + std::to_string(threads) + ", expected 1 to 1024");
  const char* why = "";
  const Kernels* kernels = pick_kernels(isa.c_str(), &why);
  if (kernels == nullptr) throw RequestError("no CPU kernels named '" + isa + "' here: " + why);
  return std::make_shared<Workspace>(pool_of(threads), *kernels);
}

KvFormat kv_format(const std::string& name) {
  if (name == "f32") return KvFormat::F32;
  if (name == "f16") return KvFormat::F16;
  if (name == "q8_0") return KvFormat::Q8_0;
  throw RequestError("unknown KV format " + name);
}

// A weight with the array that holds it.
struct PyMatrix {
  Matrix matrix;
  nb::object array;
};

PyMatrix make_matrix(const std::string& type, ReadOnly data, int64_t n_in, int64_t n_out) {
  const int index = type_of_name(type.c_str());
  if (index < 0) throw RequestError("unknown weight type " + type);
  const TypeLayout& layout = kLayouts[index];
  if (n_in < 1 || n_out < 0 || n_in % layout.block_size)
    throw RequestError(type + " rows of " + std::to_string(n_in) + " values: expected a multiple of " +
                       std::to_string(layout.block_size));
  const int64_t row_bytes = n_in / layout.block_size * layout.block_bytes;
  if (static_cast<int64_t>(data.size()) != row_bytes * n_out)
    throw RequestError(type + " weight of " + std::to_string(n_out) + " rows of " + std::to_string(n_in) + " values: " +
                       std::to_string(data.size()) + " bytes, expected " + std::to_string(row_bytes * n_out));
  return {{static_cast<Type>(index), data.data(), n_in, n_out, row_bytes}, nb::cast(data)};
}

struct PyKv {
  KvRows rows;
  nb::object k, v;
};

PyKv make_kv(const std::string& format, int64_t n_cells, int64_t n_values, int64_t row_bytes, Bytes k, Bytes v) {
  const KvFormat f = kv_format(format);
  const int64_t packed = f == KvFormat::F32 ? 4 * n_values : f == KvFormat::F16 ? 2 * n_values : n_values / 32 * 34;
  if (n_cells < 0 || n_cells > INT32_MAX - 1024 || n_values < 1 || row_bytes < packed ||
      static_cast<int64_t>(k.size()) < n_cells * row_bytes || static_cast<int64_t>(v.size()) < n_cells * row_bytes)
    throw RequestError("a KV region of " + std::to_string(n_cells) + " rows of " + std::to_string(row_bytes) +
                       " bytes does not fit its buffers or its format " + format);
  return {{f, n_cells, n_values, row_bytes, k.data(), v.data()}, nb::cast(k), nb::cast(v)};
}

class PyProgram {
 public:
  explicit PyProgram(std::shared_ptr<Workspace> workspace) : program_(std::move(workspace)) {}

  void embed(const std::string& name, Bytes ids, int64_t n, const PyMatrix& w, Bytes out) {
    add(name, make_embed(i32(ids, n), n, keep(w), f32(out, n * w.matrix.n_in)));
  }
  void get_rows(const std::string& name, Bytes x, int64_t n_rows, int64_t d, Bytes ids, int64_t n, Bytes out) {
    add(name, make_get_rows(f32(x, n_rows * d), n_rows, d, i32(ids, n), n, f32(out, n * d)));
  }
  void rms_norm(const std::string& name, Bytes x, Floats gain, int64_t n, float eps, Bytes out) {
    const int64_t d = static_cast<int64_t>(gain.size());
    add(name, make_rms_norm(f32(x, n * d), vector(gain, d), d, n, eps, f32(out, n * d)));
  }
  void unary(const std::string& name, const std::string& kind, Bytes x, float value, int64_t n, Bytes out) {
    static const std::map<std::string, Unary> kinds{
        {"silu", Unary::Silu}, {"gelu", Unary::Gelu}, {"scale", Unary::Scale}, {"softcap", Unary::SoftCap}};
    add(name, make_unary(kinds.at(kind), f32(x, n), value, n, f32(out, n)));
  }
  void binary(const std::string& name, const std::string& kind, Bytes x, Bytes y, int64_t n, Bytes out) {
    static const std::map<std::string, Binary> kinds{
        {"add", Binary::Add}, {"mul", Binary::Mul}, {"swiglu", Binary::SwiGLU}, {"geglu", Binary::GeGLU}};
    add(name, make_binary(kinds.at(kind), f32(x, n), f32(y, n), n, f32(out, n)));
  }
  void softmax(const std::string& name, Bytes x, int64_t d, int64_t n, Bytes out) {
    add(name, make_softmax(f32(x, n * d), d, n, f32(out, n * d)));
  }
  void top_k(const std::string& name, Bytes x, int64_t d, int64_t n, int64_t k, Bytes out) {
    add(name, make_top_k(f32(x, n * d), d, n, k, ranked(name, d, n, k, out)));
  }
  void view(const std::string& name, Bytes x, int64_t stride, int64_t start, int64_t size, int64_t n, Bytes out) {
    if (start < 0 || size < 0 || start + size > stride) throw RequestError(name + ": the view leaves its rows");
    add(name, make_view(f32(x, n * stride), stride, start, size, n, f32(out, n * size)));
  }
  void permute(const std::string& name, Bytes x, std::vector<int64_t> extents, std::vector<int64_t> strides, Bytes out) {
    int64_t n = 1, last = 0;
    if (extents.size() != strides.size()) throw RequestError(name + ": one stride an axis");
    for (size_t i = 0; i < extents.size(); ++i) {
      if (extents[i] < 0 || strides[i] < 0) throw RequestError(name + ": negative extent or stride");
      n *= extents[i], last += std::max<int64_t>(extents[i] - 1, 0) * strides[i];
    }
    add(name, make_permute(f32(x, n ? last + 1 : 0), std::move(extents), std::move(strides), f32(out, n)));
  }

  // The table's number, for the ropes that read it.
  int rope_table(const std::string& name, Bytes positions, int64_t n, std::vector<double> inverse, double magnitude) {
    auto table = std::make_shared<RopeTable>();
    table->positions = i32(positions, n), table->n = n;
    table->inverse = std::move(inverse), table->magnitude = magnitude;
    tables_.push_back(table);
    add(name, make_rope_table(table));
    return static_cast<int>(tables_.size()) - 1;
  }
  void rope(const std::string& name, Bytes x, int table, int64_t head_dim, int64_t n_heads, bool neox, Bytes out) {
    const RopeArgs args = rope_args(table, head_dim, neox);
    const int64_t floats = args.table->n * n_heads * head_dim;
    add(name, make_rope(args, f32(x, floats), n_heads, f32(out, floats)));
  }
  void kv_store(const std::string& name, Bytes k, Bytes v, Bytes cells, int64_t n, const PyKv& kv, int layer) {
    const int64_t floats = n * kv.rows.n_values;
    add(name, make_kv_store(f32(k, floats), f32(v, floats), i32(cells, n), n, keep(kv), layer));
  }
  void head_rope_store(const std::string& name, Bytes qkv, Bytes cells, int64_t n, int64_t n_head, int64_t n_kv_head,
                       int table, int64_t head_dim, bool neox, std::optional<std::tuple<Floats, Floats, Floats>> biases,
                       std::optional<Floats> q_gain, float q_eps, std::optional<Floats> k_gain, float k_eps,
                       const PyKv& kv, int layer, Bytes out) {
    const int64_t q = n_head * head_dim, width = n_kv_head * head_dim;
    if (width != kv.rows.n_values) throw RequestError(name + ": KV heads do not fill a KV row");
    HeadRopeStoreArgs a{};
    a.qkv = f32(qkv, n * (q + 2 * width)), a.cells = i32(cells, n);
    a.n = n, a.n_head = n_head, a.n_kv_head = n_kv_head;
    a.rope = rope_args(table, head_dim, neox);
    if (a.rope.table->n != n) throw RequestError(name + ": the rope table is of another number of tokens");
    if (biases) {
      a.q_bias = vector(std::get<0>(*biases), q);
      a.k_bias = vector(std::get<1>(*biases), width), a.v_bias = vector(std::get<2>(*biases), width);
    }
    if (q_gain) a.q_gain = vector(*q_gain, head_dim);
    if (k_gain) a.k_gain = vector(*k_gain, head_dim);
    a.q_eps = q_eps, a.k_eps = k_eps;
    a.kv = keep(kv), a.layer = layer, a.q_out = f32(out, n * q);
    add(name, make_head_rope_store(a));
  }
  void attn(const std::string& name, Bytes q, Bytes positions, std::optional<Bytes> window, int64_t n, int64_t n_head,
            int64_t n_kv_head, int64_t head_dim, int layout, float scale, float softcap, int64_t sliding, const PyKv& kv,
            int layer, Bytes out) {
    if (n_kv_head < 1 || n_head % n_kv_head || n_kv_head * head_dim != kv.rows.n_values || head_dim % 8)
      throw RequestError(name + ": heads do not fill a KV row");
    if (layout != 0 && layout != 2 && layout != 8) throw RequestError(name + ": a query's window has 0, 2 or 8 values");
    AttnArgs a{};
    a.q = f32(q, n * n_head * head_dim), a.positions = i32(positions, n);
    if (layout) a.window = i32(window.value(), n * layout);
    a.n = n, a.n_head = n_head, a.n_kv_head = n_kv_head, a.head_dim = head_dim, a.layout = layout;
    a.scale = scale, a.softcap = softcap, a.sliding = sliding;
    a.kv = keep(kv), a.layer = layer, a.out = f32(out, n * n_head * head_dim);
    add(name, make_attn(a));
  }
  void project(const std::string& name, Bytes x, int64_t n, std::vector<PyMatrix*> segments, std::optional<Floats> gain,
               float eps, const std::string& epilogue, std::vector<Floats> biases, std::optional<Bytes> residual, int64_t top_k,
               Bytes out) {
    static const std::map<std::string, Epilogue> epilogues{{"none", Epilogue::None}, {"bias", Epilogue::Bias},
        {"add", Epilogue::Add}, {"swiglu", Epilogue::SwiGLU}, {"geglu", Epilogue::GeGLU}};
    if (segments.empty() || segments.size() > 3) throw RequestError(name + ": one to three weights");
    ProjectArgs a{};
    a.n_in = segments[0]->matrix.n_in, a.n_tokens = n, a.epilogue = epilogues.at(epilogue), a.eps = eps;
    a.x = f32(x, n * a.n_in);
    int64_t width = 0;
    for (const PyMatrix* w : segments) {
      if (w->matrix.n_in != a.n_in) throw RequestError(name + ": weights of different row lengths");
      a.segments.push_back(keep(*w)), width += w->matrix.n_out;
    }
    if (gain) a.gain = vector(*gain, a.n_in);
    if (a.epilogue == Epilogue::SwiGLU || a.epilogue == Epilogue::GeGLU) {
      if (segments.size() != 2 || a.segments[0].n_out != a.segments[1].n_out)
        throw RequestError(name + ": two weights of equal size are joined");
      width /= 2;
    }
    if (a.epilogue == Epilogue::Bias) {
      if (biases.size() != segments.size()) throw RequestError(name + ": one bias a weight");
      for (size_t i = 0; i < biases.size(); ++i) a.biases.push_back(vector(biases[i], a.segments[i].n_out));
    }
    if (a.epilogue == Epilogue::Add) a.residual = f32(residual.value(), n * width);
    a.top_k = top_k;
    if (top_k == 0) {
      a.out = f32(out, n * width);
    } else {
      if (segments.size() != 1 || a.epilogue != Epilogue::None) throw RequestError(name + ": only plain products are ranked");
      a.ranked = ranked(name, width, n, top_k, out);
    }
    add(name, make_project(a));
  }

  void run() { program_.run(); }
  void profile(bool on) { program_.profile(on); }
  std::vector<std::pair<std::string, double>> profiled() const { return program_.profiled(); }
  size_t size() const { return program_.size(); }
  size_t barriers() const { return program_.barriers(); }

 private:
  void add(const std::string& name, std::unique_ptr<Operation> operation) { program_.add(name, std::move(operation)); }

  template <class T>
  T* buffer(const Bytes& array, int64_t count) {
    if (count < 0 || static_cast<int64_t>(array.size()) < 4 * count)
      throw RequestError("a buffer of " + std::to_string(array.size()) + " bytes is too small for " +
                         std::to_string(count) + " values");
    if (reinterpret_cast<uintptr_t>(array.data()) % 4) throw RequestError("a buffer is not aligned to 4 bytes");
    keep_.push_back(nb::cast(array));
    return reinterpret_cast<T*>(array.data());
  }
  float* f32(const Bytes& array, int64_t count) { return buffer<float>(array, count); }
  const int32_t* i32(const Bytes& array, int64_t count) { return buffer<int32_t>(array, count); }
  int32_t* ranked(const std::string& name, int64_t d, int64_t n, int64_t k, const Bytes& out) {
    if (k < 1 || k > d) throw RequestError(name + ": the " + std::to_string(k) + " best of " + std::to_string(d) + " values");
    return buffer<int32_t>(out, n * (2 * k + 1));
  }
  const float* vector(const Floats& array, int64_t count) {
    if (static_cast<int64_t>(array.size()) != count)
      throw RequestError("a vector of " + std::to_string(array.size()) + " values, expected " + std::to_string(count));
    keep_.push_back(nb::cast(array));
    return array.data();
  }
  const Matrix& keep(const PyMatrix& w) {
    keep_.push_back(w.array);
    return w.matrix;
  }
  const KvRows& keep(const PyKv& kv) {
    keep_.push_back(kv.k), keep_.push_back(kv.v);
    return kv.rows;
  }
  RopeArgs rope_args(int table, int64_t head_dim, bool neox) const {
    if (table < 0 || table >= static_cast<int>(tables_.size())) throw RequestError("no such rope table");
    if (static_cast<int64_t>(2 * tables_[table]->inverse.size()) > head_dim)
      throw RequestError("rope turns more dimensions than a head has");
    return {tables_[table], head_dim, neox};
  }

  Program program_;
  std::vector<std::shared_ptr<RopeTable>> tables_;
  std::vector<nb::object> keep_;
};

// For tests: activation quantization as products use it. (codes, d, sums of 32, sums of 16).
nb::tuple quantize(const Workspace& w, Floats x) {
  const int64_t n = static_cast<int64_t>(x.size()), padded = round_up(n, 256);
  std::vector<uint8_t> row(q8_row_bytes(n));
  w.kernels().quantize_row(x.data(), n, row.data());
  const Q8Row q = q8_row(row.data(), n);
  const auto bytes = [](const void* p, int64_t size) { return nb::bytes(static_cast<const char*>(p), size); };
  return nb::make_tuple(bytes(q.codes, padded), bytes(q.d, padded / 8), bytes(q.sums, padded / 8),
                        bytes(q.sums_half, padded / 4));
}

PyObject* error_class(const char* name) { return nb::object(nb::module_::import_("minfer.errors").attr(name)).release().ptr(); }

}  // namespace

NB_MODULE(_native, m) {
  static PyObject* request_error = error_class("RequestError");
  static PyObject* numerics_error = error_class("NumericsError");
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const RequestError& error) {
      PyErr_SetString(request_error, error.what());
    } catch (const NumericsError& error) {
      PyErr_SetString(numerics_error, error.what());
    }
  });

  nb::class_<Workspace>(m, "Workspace")
      .def_prop_ro("threads", [](const Workspace& w) { return w.pool().size(); })
      .def_prop_ro("isa", [](const Workspace& w) { return w.kernels().name; })
      .def_prop_ro("few_tokens", [](const Workspace& w) { return w.kernels().few_tokens; })
      .def_prop_ro("gemm_tokens", [](const Workspace& w) { return w.kernels().gemm_tokens; })
      .def_prop_ro("panel_rows", [](const Workspace& w) { return w.kernels().panel_rows; })
      .def_prop_ro("nbytes", &Workspace::bytes)
      .def("quantize", &quantize, "x"_a);
  m.def("workspace", [](int threads, const std::string& isa) { return make_workspace(threads, isa); }, "threads"_a, "isa"_a);
  nb::class_<PyMatrix>(m, "Matrix");
  m.def("matrix", &make_matrix, "type"_a, "data"_a, "n_in"_a, "n_out"_a);
  nb::class_<PyKv>(m, "Kv");
  m.def("kv", &make_kv, "format"_a, "n_cells"_a, "n_values"_a, "row_bytes"_a, "k"_a, "v"_a);
  nb::class_<PyProgram>(m, "Program")
      .def(nb::init<std::shared_ptr<Workspace>>(), "workspace"_a)
      .def("embed", &PyProgram::embed)
      .def("get_rows", &PyProgram::get_rows)
      .def("rms_norm", &PyProgram::rms_norm)
      .def("unary", &PyProgram::unary)
      .def("binary", &PyProgram::binary)
      .def("softmax", &PyProgram::softmax)
      .def("top_k", &PyProgram::top_k)
      .def("view", &PyProgram::view)
      .def("permute", &PyProgram::permute)
      .def("rope_table", &PyProgram::rope_table)
      .def("rope", &PyProgram::rope)
      .def("kv_store", &PyProgram::kv_store)
      .def("head_rope_store", &PyProgram::head_rope_store, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg())
      .def("attn", &PyProgram::attn, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("project", &PyProgram::project, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg().none(), nb::arg(), nb::arg())
      .def("run", &PyProgram::run, nb::call_guard<nb::gil_scoped_release>())
      .def("profile", &PyProgram::profile)
      .def("profiled", &PyProgram::profiled)
      .def_prop_ro("size", &PyProgram::size)
      .def_prop_ro("barriers", &PyProgram::barriers);
}

}  // namespace minfer
