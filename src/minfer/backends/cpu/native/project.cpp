#include "project.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include "rank.h"

namespace minfer {

namespace {

// Up to this many tokens every thread prepares the activations for itself: less work than a barrier.
constexpr int64_t kOwnTokens = 2;
// A one-token task reads about this many bytes of weights: small enough to end together, large enough to be worth taking.
constexpr int64_t kTaskBytes = 16384;
// What a thread fetches of its weights before it begins, at most: a part of its L2 cache.
constexpr int64_t kAheadBytes = 65536;
// Many tokens are multiplied in blocks whose activations stay in the L2 cache while panels of rows pass by.
constexpr int64_t kBlockTokens = 128;

class Project : public Operation {
 public:
  explicit Project(const ProjectArgs& args) : a_(args) {
    for (const Matrix& w : a_.segments) {
      width_ += w.n_out;
      any_float_ |= is_float(w.type);
      any_block_ |= !is_float(w.type);
    }
    joined_ = a_.epilogue == Epilogue::SwiGLU || a_.epilogue == Epilogue::GeGLU;
    if (joined_) width_ /= 2;
    const int64_t n = a_.n_tokens;
    reads(a_.x, 4 * n * a_.n_in);
    if (a_.residual) reads(a_.residual, 4 * n * width_);
    if (a_.top_k) {
      ranking_.emplace(width_, n, a_.top_k, a_.ranked);
      writes(a_.ranked, 4 * n * (2 * a_.top_k + 1));
    } else {
      writes(a_.out, 4 * n * width_);
    }
  }

  int64_t shared_bytes(const Kernels&) const override { return own() ? 0 : a_.n_tokens * token_bytes(); }

  int64_t thread_bytes(const Kernels& k) const override {
    int64_t row_floats = 0;  // of a task's rows, for a token
    if (a_.epilogue != Epilogue::None)
      for (const Matrix& w : a_.segments) row_floats = std::max(row_floats, 2 * task_rows(w, k));
    if (ranking_) row_floats = kRankStride;
    const int64_t tiles = row_floats * std::min(a_.n_tokens, kBlockTokens) * 4;
    return kOwnTokens * token_bytes() + 4 * round_up(a_.n_in, 16) + unpack_bytes(k) + tiles + 256;
  }

  Span ahead(const Thread& thread) const override {
    if (many(thread.k)) return {};
    const int threads = thread.pool.size();
    if (ranking_) return rows_from(a_.segments[0], begin_of(thread.index, threads, ranking_->parts()) * Ranking::kPart);
    if (joined_) {
      const Matrix& gate = a_.segments[0];
      const int64_t rows = joined_rows(thread.k), total = (gate.n_out + rows - 1) / rows;
      return rows_from(gate, begin_of(thread.index, threads, total) * rows);
    }
    const Tasks tasks(*this, thread.k);
    const Place first = tasks.place(begin_of(thread.index, threads, tasks.total));
    return rows_from(a_.segments[first.segment], first.row);
  }

  void prepare() override {
    if (ranking_) ranking_->begin(threads());
  }

  void run(Thread& thread) override {
    uint8_t* scratch = thread.scratch;
    uint8_t* base = own() ? scratch : thread.shared;
    scratch += kOwnTokens * token_bytes();
    float* normed = reinterpret_cast<float*>(scratch);
    scratch += round_up(4 * a_.n_in, 64);
    Activations x{a_.x, a_.n_in, base, q8_bytes()};
    if (a_.gain && any_float_) {
      x.f32 = reinterpret_cast<const float*>(base + a_.n_tokens * q8_bytes());
      x.f32_stride = f32_bytes() / 4;
    }
    if (own()) {
      for (int64_t t = 0; t < a_.n_tokens; ++t) prepare_token(thread.k, base, t, normed);
    } else if (any_block_ || a_.gain) {
      share(thread, 0, a_.n_tokens, [&](int64_t t) { prepare_token(thread.k, base, t, normed); });
      thread.pool.barrier();
    }
    if (ranking_) run_ranked(thread, x, scratch);
    else if (joined_) run_joined(thread, x, scratch);
    else run_segments(thread, x, scratch);
  }

 private:
  bool own() const { return a_.n_tokens <= kOwnTokens; }
  int64_t q8_bytes() const { return any_block_ ? round_up(q8_row_bytes(a_.n_in), 64) : 0; }
  int64_t f32_bytes() const { return any_float_ && a_.gain ? round_up(4 * a_.n_in, 64) : 0; }
  int64_t token_bytes() const { return q8_bytes() + f32_bytes(); }
  bool many(const Kernels& k) const { return a_.n_tokens >= k.gemm_tokens; }
  int64_t unpack_bytes(const Kernels& k) const {
    return round_up(std::max(any_float_ ? 4 * a_.n_in : 0, any_block_ && many(k) ? k.gemm_scratch(a_.n_in) : 0), 64);
  }

  int64_t task_rows(const Matrix& w, const Kernels& k) const {
    if (many(k) && !is_float(w.type)) return k.panel_rows;
    return std::min<int64_t>(std::max<int64_t>(round_up(kTaskBytes / w.row_bytes, 8), 8), 128);
  }

  // Activations of one token in the forms its weights take. `normed` holds a row.
  void prepare_token(const Kernels& k, uint8_t* base, int64_t t, float* normed) const {
    const float* row = a_.x + t * a_.n_in;
    if (a_.gain) {
      float* to = f32_bytes() ? reinterpret_cast<float*>(base + a_.n_tokens * q8_bytes() + t * f32_bytes()) : normed;
      k.rms_norm(row, a_.gain, a_.n_in, a_.eps, to);
      row = to;
    }
    if (any_block_) k.quantize_row(row, a_.n_in, base + t * q8_bytes());
  }

  // Tokens [t0, t0 + n) times rows [r0, r1).
  void multiply(const Kernels& k, const Matrix& w, int64_t r0, int64_t r1, Activations x, int64_t t0, int64_t n, float* out,
                int64_t stride, uint8_t* scratch) const {
    x.f32 += t0 * x.f32_stride, x.q8 += t0 * x.q8_stride;
    if (is_float(w.type)) k.matmul_float(w, r0, r1, x, n, out, stride, reinterpret_cast<float*>(scratch));
    else if (many(k)) k.gemm(w, r0, r1, x, n, out, stride, scratch);
    else k.matvec(w, r0, r1, x, n, out, stride);
  }

  int64_t blocks() const { return (a_.n_tokens + kBlockTokens - 1) / kBlockTokens; }
  int64_t block_size(int64_t block) const { return std::min(kBlockTokens, a_.n_tokens - block * kBlockTokens); }

  // The rows of all segments, cut into tasks.
  struct Place {
    size_t segment;
    int64_t row, rows, column;  // column: where the segment begins in an output row
  };
  struct Tasks {
    Tasks(const Project& project, const Kernels& k) : segments(project.a_.segments) {
      for (size_t s = 0; s < segments.size(); ++s) {
        rows[s] = project.task_rows(segments[s], k);
        total += count[s] = (segments[s].n_out + rows[s] - 1) / rows[s];
      }
    }
    Place place(int64_t task) const {
      size_t s = 0;
      int64_t column = 0;
      for (; task >= count[s]; ++s) task -= count[s], column += segments[s].n_out;
      const int64_t row = task * rows[s];
      return {s, row, std::min(rows[s], segments[s].n_out - row), column};
    }
    const std::vector<Matrix>& segments;
    int64_t rows[3] = {}, count[3] = {}, total = 0;
  };
  int64_t joined_rows(const Kernels& k) const { return std::min(task_rows(a_.segments[0], k), task_rows(a_.segments[1], k)); }
  static Span rows_from(const Matrix& w, int64_t row) {
    return {w.data + row * w.row_bytes, std::min(kAheadBytes, (w.n_out - row) * w.row_bytes)};
  }

  void run_segments(Thread& thread, const Activations& x, uint8_t* scratch) {
    float* tile = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    const Tasks tasks(*this, thread.k);
    share(thread, 1, tasks.total * blocks(), [&](int64_t number) {
      const auto [s, r0, n, column] = tasks.place(number % tasks.total);
      const int64_t block = number / tasks.total, t0 = block * kBlockTokens, n_tokens = block_size(block);
      const Matrix& w = a_.segments[s];
      const int64_t r1 = r0 + n;
      float* out = a_.out + t0 * width_ + column + r0;
      if (a_.epilogue == Epilogue::None) return multiply(thread.k, w, r0, r1, x, t0, n_tokens, out, width_, scratch);
      // Not straight into `out`: the residual may lie there.
      multiply(thread.k, w, r0, r1, x, t0, n_tokens, tile, n, scratch);
      for (int64_t t = 0; t < n_tokens; ++t) {
        const float* add = a_.epilogue == Epilogue::Bias ? a_.biases[s] + r0 : a_.residual + (t0 + t) * width_ + column + r0;
        thread.k.binary(Binary::Add, add, tile + t * n, n, out + t * width_);
      }
    });
  }

  void run_joined(Thread& thread, const Activations& x, uint8_t* scratch) {
    const Matrix &gate = a_.segments[0], &up = a_.segments[1];
    const Binary join = a_.epilogue == Epilogue::SwiGLU ? Binary::SwiGLU : Binary::GeGLU;
    const int64_t rows = joined_rows(thread.k);
    const int64_t total = (gate.n_out + rows - 1) / rows;
    float* first = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    float* second = first + rows * std::min(a_.n_tokens, kBlockTokens);
    share(thread, 1, total * blocks(), [&](int64_t number) {
      const int64_t block = number / total, t0 = block * kBlockTokens, n_tokens = block_size(block);
      const int64_t r0 = number % total * rows, r1 = std::min(r0 + rows, gate.n_out);
      multiply(thread.k, gate, r0, r1, x, t0, n_tokens, first, rows, scratch);
      multiply(thread.k, up, r0, r1, x, t0, n_tokens, second, rows, scratch);
      for (int64_t t = 0; t < n_tokens; ++t)
        thread.k.binary(join, first + t * rows, second + t * rows, r1 - r0, a_.out + (t0 + t) * width_ + r0);
    });
  }

  // Products are ranked while they are in the cache, and go nowhere else.
  void run_ranked(Thread& thread, const Activations& x, uint8_t* scratch) {
    const Matrix& w = a_.segments[0];
    float* tile = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    const int64_t parts = ranking_->parts();
    share(thread, 1, parts * blocks(), [&](int64_t number) {
      const int64_t block = number / parts, t0 = block * kBlockTokens, n_tokens = block_size(block), part = number % parts;
      const int64_t r0 = part * Ranking::kPart, r1 = std::min(r0 + Ranking::kPart, w.n_out);
      multiply(thread.k, w, r0, r1, x, t0, n_tokens, tile, kRankStride, scratch);
      for (int64_t t = 0; t < n_tokens; ++t) ranking_->take(thread, t0 + t, part, tile + t * kRankStride);
    });
  }

  // Not a power of two, whose rows would take each other's place in the cache.
  static constexpr int64_t kRankStride = Ranking::kPart + 16;

  ProjectArgs a_;
  std::optional<Ranking> ranking_;
  int64_t width_ = 0;
  bool any_float_ = false, any_block_ = false, joined_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_project(const ProjectArgs& args) { return std::make_unique<Project>(args); }

}  // namespace minfer
