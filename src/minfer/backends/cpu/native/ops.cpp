#include "ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "rank.h"

namespace minfer {

namespace {

// Floats of an elementwise task.
constexpr int64_t kTask = 4096;

void check_ids(const std::string& name, const char* what, const int32_t* ids, int64_t n, int64_t rows) {
  for (int64_t i = 0; i < n; ++i)
    if (ids[i] < 0 || ids[i] >= rows)
      throw RequestError(name + ": " + what + " " + std::to_string(ids[i]) + " (number " + std::to_string(i) +
                         ") is outside 0 to " + std::to_string(rows - 1));
}

class Embed : public Operation {
 public:
  Embed(const int32_t* ids, int64_t n, const Matrix& w, float* out) : ids_(ids), n_(n), w_(w), out_(out) {
    writes(out, 4 * n * w.n_in);
  }
  void prepare() override { check_ids(name, "token id", ids_, n_, w_.n_out); }
  void run(Thread& thread) override {
    share(thread, 0, n_, [&](int64_t i) { dequantize_row(w_.type, w_.data + ids_[i] * w_.row_bytes, w_.n_in, out_ + i * w_.n_in); });
  }

 private:
  const int32_t* ids_;
  int64_t n_;
  Matrix w_;
  float* out_;
};

class GetRows : public Operation {
 public:
  GetRows(const float* x, int64_t n_rows, int64_t d, const int32_t* ids, int64_t n, float* out)
      : x_(x), rows_(n_rows), d_(d), ids_(ids), n_(n), out_(out) {
    reads(x, 4 * n_rows * d), writes(out, 4 * n * d);
  }
  void prepare() override { check_ids(name, "row", ids_, n_, rows_); }
  void run(Thread& thread) override {
    share(thread, 0, n_, [&](int64_t i) { std::memcpy(out_ + i * d_, x_ + ids_[i] * d_, 4 * d_); });
  }

 private:
  const float* x_;
  int64_t rows_, d_;
  const int32_t* ids_;
  int64_t n_;
  float* out_;
};

// An operation on flat ranges or rows: f(kernels, first, count) over n things, `step` a task.
template <class F>
class Over : public Operation {
 public:
  Over(int64_t n, int64_t step, F f, std::vector<Range> touched) : n_(n), step_(step), f_(f) { ranges = std::move(touched); }
  void run(Thread& thread) override {
    share(thread, 0, (n_ + step_ - 1) / step_,
          [&](int64_t task) { f_(thread.k, task * step_, std::min(step_, n_ - task * step_)); });
  }

 private:
  int64_t n_, step_;
  F f_;
};

template <class F>
std::unique_ptr<Operation> over(int64_t n, int64_t step, std::vector<Range> touched, F f) {
  return std::make_unique<Over<F>>(n, step, f, std::move(touched));
}

Range in(const void* p, int64_t floats) { return {static_cast<const uint8_t*>(p), 4 * floats, false}; }
Range out_of(const void* p, int64_t floats) { return {static_cast<const uint8_t*>(p), 4 * floats, true}; }

int64_t rows_a_task(int64_t d) { return std::max<int64_t>(kTask / std::max<int64_t>(d, 1), 1); }

void add_to(const Kernels& k, const float* bias, int64_t n, float* x) {
  if (bias) k.binary(Binary::Add, x, bias, n, x);
}

// The cells that a store writes: checked, and whether some cell comes twice (the later row must win).
class Cells {
 public:
  bool check(const std::string& name, int layer, const int32_t* cells, int64_t n, int64_t n_cells) {
    bool rising = true;
    for (int64_t i = 0; i < n; ++i) {
      if (cells[i] < 0 || cells[i] >= n_cells)
        throw RequestError(name + ": layer " + std::to_string(layer) + ": cell " + std::to_string(cells[i]) +
                           " does not fit a KV region of " + std::to_string(n_cells));
      rising &= i == 0 || cells[i] > cells[i - 1];
    }
    if (rising) return true;
    sorted_.assign(cells, cells + n);
    std::sort(sorted_.begin(), sorted_.end());
    return std::adjacent_find(sorted_.begin(), sorted_.end()) == sorted_.end();
  }

 private:
  std::vector<int32_t> sorted_;
};

[[noreturn]] void beyond_format(const std::string& name, const KvRows& kv) {
  throw NumericsError(name + ": a K or V value is " +
                      (kv.format == KvFormat::F16 ? "beyond the range of f16 (65504)" : "NaN, Inf or beyond what q8_0 holds") +
                      "; run with the KV format f32");
}

class KvStore : public Operation {
 public:
  KvStore(const float* k, const float* v, const int32_t* cells, int64_t n, const KvRows& kv, int layer)
      : k_(k), v_(v), cells_(cells), n_(n), kv_(kv), layer_(layer) {
    reads(k, 4 * n * kv.n_values), reads(v, 4 * n * kv.n_values);
    writes(kv.k, kv.n_cells * kv.row_bytes), writes(kv.v, kv.n_cells * kv.row_bytes);
  }
  void prepare() override {
    distinct_ = check_.check(name, layer_, cells_, n_, kv_.n_cells);
    ok_.store(true, std::memory_order_relaxed);
  }
  void run(Thread& thread) override {
    const auto store = [&](int64_t i) {
      const int64_t at = cells_[i] * kv_.row_bytes;
      const bool ok = thread.k.pack_kv(kv_.format, k_ + i * kv_.n_values, kv_.n_values, kv_.k + at, kv_.row_bytes) &
                      thread.k.pack_kv(kv_.format, v_ + i * kv_.n_values, kv_.n_values, kv_.v + at, kv_.row_bytes);
      if (!ok) ok_.store(false, std::memory_order_relaxed);
    };
    if (distinct_) share(thread, 0, n_, store);
    else share(thread, 0, 1, [&](int64_t) { for (int64_t i = 0; i < n_; ++i) store(i); });
  }
  void finish() override {
    if (!ok_.load(std::memory_order_relaxed)) beyond_format(name, kv_);
  }

 private:
  const float *k_, *v_;
  const int32_t* cells_;
  int64_t n_;
  KvRows kv_;
  int layer_;
  Cells check_;
  bool distinct_ = true;
  std::atomic<bool> ok_{true};
};

class TopK : public Operation {
 public:
  TopK(const float* x, int64_t d, int64_t n, int64_t k, int32_t* out) : x_(x), d_(d), n_(n), ranking_(d, n, k, out) {
    reads(x, 4 * n * d), writes(out, 4 * n * (2 * k + 1));
  }
  void prepare() override { ranking_.begin(threads()); }
  void run(Thread& thread) override {
    const int64_t parts = ranking_.parts();
    share(thread, 0, n_ * parts, [&](int64_t task) {
      const int64_t row = task / parts, part = task % parts;
      ranking_.take(thread, row, part, x_ + row * d_ + part * Ranking::kPart);
    });
  }

 private:
  const float* x_;
  int64_t d_, n_;
  Ranking ranking_;
};

class FillRopeTable : public Operation {
 public:
  explicit FillRopeTable(std::shared_ptr<RopeTable> table) : t_(std::move(table)) {
    const int64_t floats = t_->n * static_cast<int64_t>(t_->inverse.size());
    t_->cos.resize(floats), t_->sin.resize(floats);
    writes(t_->cos.data(), 4 * floats), writes(t_->sin.data(), 4 * floats);
  }
  void run(Thread& thread) override {
    const int64_t pairs = static_cast<int64_t>(t_->inverse.size());
    share(thread, 0, t_->n, [&](int64_t i) {
      for (int64_t j = 0; j < pairs; ++j) {
        const double angle = static_cast<double>(t_->positions[i]) * t_->inverse[j];
        t_->cos[i * pairs + j] = static_cast<float>(std::cos(angle) * t_->magnitude);
        t_->sin[i * pairs + j] = static_cast<float>(std::sin(angle) * t_->magnitude);
      }
    });
  }

 private:
  std::shared_ptr<RopeTable> t_;
};

// Rotates `heads` heads of token i in place.
void rotate_heads(const Kernels& k, const RopeArgs& rope, int64_t i, float* x, int64_t heads) {
  const int64_t pairs = static_cast<int64_t>(rope.table->inverse.size());
  const float *cos = rope.table->cos.data() + i * pairs, *sin = rope.table->sin.data() + i * pairs;
  for (int64_t h = 0; h < heads; ++h) k.rotate(x + h * rope.head_dim, cos, sin, static_cast<int>(2 * pairs), rope.neox);
}

Range table_range(const RopeArgs& rope) { return in(rope.table->cos.data(), static_cast<int64_t>(rope.table->cos.size())); }

class HeadRopeStore : public Operation {
 public:
  explicit HeadRopeStore(const HeadRopeStoreArgs& args) : a_(args) {
    d_ = a_.rope.head_dim, q_width_ = a_.n_head * d_, kv_width_ = a_.n_kv_head * d_;
    reads(a_.qkv, 4 * a_.n * (q_width_ + 2 * kv_width_)), ranges.push_back(table_range(a_.rope));
    writes(a_.q_out, 4 * a_.n * q_width_);
    writes(a_.kv.k, a_.kv.n_cells * a_.kv.row_bytes), writes(a_.kv.v, a_.kv.n_cells * a_.kv.row_bytes);
  }
  int64_t thread_bytes(const Kernels&) const override { return 4 * round_up(kv_width_, 16); }
  void prepare() override {
    distinct_ = check_.check(name, a_.layer, a_.cells, a_.n, a_.kv.n_cells);
    ok_.store(true, std::memory_order_relaxed);
  }
  void run(Thread& thread) override {
    // A task is a token's q, k or v.
    if (distinct_) share(thread, 0, 3 * a_.n, [&](int64_t task) { part(thread, task / 3, task % 3); });
    else share(thread, 0, 1, [&](int64_t) { for (int64_t task = 0; task < 3 * a_.n; ++task) part(thread, task / 3, task % 3); });
  }
  void finish() override {
    if (!ok_.load(std::memory_order_relaxed)) beyond_format(name, a_.kv);
  }

 private:
  void part(Thread& thread, int64_t i, int64_t which) {
    const float* from = a_.qkv + i * (q_width_ + 2 * kv_width_) + (which == 0 ? 0 : q_width_ + (which - 1) * kv_width_);
    const int64_t width = which == 0 ? q_width_ : kv_width_;
    float* x = which == 0 ? a_.q_out + i * q_width_ : reinterpret_cast<float*>(thread.scratch);
    std::memcpy(x, from, 4 * width);
    add_to(thread.k, which == 0 ? a_.q_bias : which == 1 ? a_.k_bias : a_.v_bias, width, x);
    if (which < 2) {
      const float* gain = which == 0 ? a_.q_gain : a_.k_gain;
      const float eps = which == 0 ? a_.q_eps : a_.k_eps;
      for (int64_t h = 0; gain && h < width / d_; ++h) thread.k.rms_norm(x + h * d_, gain, d_, eps, x + h * d_);
      rotate_heads(thread.k, a_.rope, i, x, width / d_);
    }
    if (which == 0) return;
    uint8_t* rows = which == 1 ? a_.kv.k : a_.kv.v;
    if (!thread.k.pack_kv(a_.kv.format, x, width, rows + a_.cells[i] * a_.kv.row_bytes, a_.kv.row_bytes))
      ok_.store(false, std::memory_order_relaxed);
  }

  HeadRopeStoreArgs a_;
  int64_t d_, q_width_, kv_width_;
  Cells check_;
  bool distinct_ = true;
  std::atomic<bool> ok_{true};
};

}  // namespace

std::unique_ptr<Operation> make_embed(const int32_t* ids, int64_t n, const Matrix& w, float* out) {
  return std::make_unique<Embed>(ids, n, w, out);
}

std::unique_ptr<Operation> make_get_rows(const float* x, int64_t n_rows, int64_t d, const int32_t* ids, int64_t n, float* out) {
  return std::make_unique<GetRows>(x, n_rows, d, ids, n, out);
}

std::unique_ptr<Operation> make_rms_norm(const float* x, const float* gain, int64_t d, int64_t n, float eps, float* out) {
  return over(n, rows_a_task(d), {in(x, n * d), out_of(out, n * d)}, [=](const Kernels& k, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) k.rms_norm(x + i * d, gain, d, eps, out + i * d);
  });
}

std::unique_ptr<Operation> make_unary(Unary kind, const float* x, float value, int64_t n, float* out) {
  return over(n, kTask, {in(x, n), out_of(out, n)}, [=](const Kernels& k, int64_t first, int64_t count) {
    k.unary(kind, x + first, value, count, out + first);
  });
}

std::unique_ptr<Operation> make_binary(Binary kind, const float* x, const float* y, int64_t n, float* out) {
  return over(n, kTask, {in(x, n), in(y, n), out_of(out, n)}, [=](const Kernels& k, int64_t first, int64_t count) {
    k.binary(kind, x + first, y + first, count, out + first);
  });
}

std::unique_ptr<Operation> make_softmax(const float* x, int64_t d, int64_t n, float* out) {
  return over(n, rows_a_task(d), {in(x, n * d), out_of(out, n * d)}, [=](const Kernels& k, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) k.softmax(x + i * d, d, out + i * d);
  });
}

std::unique_ptr<Operation> make_top_k(const float* x, int64_t d, int64_t n, int64_t k, int32_t* out) {
  return std::make_unique<TopK>(x, d, n, k, out);
}

std::unique_ptr<Operation> make_view(const float* x, int64_t stride, int64_t start, int64_t size, int64_t n, float* out) {
  return over(n, rows_a_task(size), {in(x, n * stride), out_of(out, n * size)},
              [=](const Kernels&, int64_t first, int64_t count) {
                for (int64_t i = first; i < first + count; ++i) std::memcpy(out + i * size, x + i * stride + start, 4 * size);
              });
}

std::unique_ptr<Operation> make_permute(const float* x, std::vector<int64_t> extents, std::vector<int64_t> strides, float* out) {
  int64_t n = 1;
  for (const int64_t extent : extents) n *= extent;
  return over(n, kTask, {in(x, n), out_of(out, n)}, [=](const Kernels&, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; ++i) {
      int64_t rest = i, at = 0;
      for (size_t axis = extents.size(); axis-- > 0; rest /= extents[axis]) at += rest % extents[axis] * strides[axis];
      out[i] = x[at];
    }
  });
}

std::unique_ptr<Operation> make_rope_table(std::shared_ptr<RopeTable> table) {
  return std::make_unique<FillRopeTable>(std::move(table));
}

std::unique_ptr<Operation> make_rope(const RopeArgs& rope, const float* x, int64_t n_heads, float* out) {
  const int64_t width = n_heads * rope.head_dim, n = rope.table->n;
  return over(n, rows_a_task(width), {in(x, n * width), table_range(rope), out_of(out, n * width)},
              [=](const Kernels& k, int64_t first, int64_t count) {
                for (int64_t i = first; i < first + count; ++i) {
                  if (out != x) std::memcpy(out + i * width, x + i * width, 4 * width);
                  rotate_heads(k, rope, i, out + i * width, n_heads);
                }
              });
}

std::unique_ptr<Operation> make_kv_store(const float* k, const float* v, const int32_t* cells, int64_t n, const KvRows& kv,
                                         int layer) {
  return std::make_unique<KvStore>(k, v, cells, n, kv, layer);
}

std::unique_ptr<Operation> make_head_rope_store(const HeadRopeStoreArgs& args) { return std::make_unique<HeadRopeStore>(args); }

}  // namespace minfer
