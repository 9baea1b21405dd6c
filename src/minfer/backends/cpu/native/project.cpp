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
constexpr int64_t kTaskBytes = 8192;
// So many rows at least: whole vectors of each run.
constexpr int64_t kTaskRows = 8 * kStreams;
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
    int64_t width = 0;  // of a task's products, for a token
    if (a_.epilogue != Epilogue::None)
      for (const Matrix& w : a_.segments) width = std::max(width, 2 * cut(w, k).width());
    if (ranking_) width = kRankStride;
    const int64_t tiles = 4 * width * std::min(a_.n_tokens, kBlockTokens);
    return kOwnTokens * token_bytes() + 4 * round_up(a_.n_in, 16) + unpack_bytes(k) + tiles + 256;
  }

  Span ahead(const Thread& thread) const override {
    if (many(thread.k)) return {};
    const int threads = thread.pool.size();
    const auto first_of = [&](const Matrix& w, const Cut& rows) {
      return streams_from(w, rows.at(begin_of(thread.index, threads, rows.tasks())));
    };
    if (ranking_) return first_of(a_.segments[0], ranked_cut(thread.k));
    if (joined_) return first_of(a_.segments[0], joined_cut(thread.k));
    const Tasks tasks(*this, thread.k);
    const Place first = tasks.place(begin_of(thread.index, threads, tasks.total));
    return streams_from(a_.segments[first.segment], first.rows);
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

  // How the rows of a weight are cut into tasks: `count` of each run, runs beginning `apart` rows from each other.
  struct Cut {
    int64_t count, apart, n_out;
    int64_t tasks() const { return (apart + count - 1) / count; }
    int64_t width() const { return count * (apart < n_out ? kStreams : 1); }
    RowRuns at(int64_t task) const { return {task * count, std::min(count, apart - task * count), apart, n_out}; }
  };
  // `rows` a task: in runs where the weight streams past, in one where it stays for many tokens.
  Cut cut_into(const Matrix& w, const Kernels& k, int64_t rows, int64_t unit) const {
    if (many(k)) return {rows, w.n_out, w.n_out};
    return {rows / kStreams, round_up((w.n_out + kStreams - 1) / kStreams, unit), w.n_out};
  }
  int64_t task_rows(const Matrix& w, const Kernels& k) const {
    if (many(k) && !is_float(w.type)) return k.panel_rows;
    return std::min<int64_t>(std::max<int64_t>(round_up(kTaskBytes / w.row_bytes, kTaskRows), kTaskRows), 128);
  }
  Cut cut(const Matrix& w, const Kernels& k) const { return cut_into(w, k, task_rows(w, k), 1); }
  Cut joined_cut(const Kernels& k) const {
    const Matrix &gate = a_.segments[0], &up = a_.segments[1];
    return cut_into(gate, k, std::min(task_rows(gate, k), task_rows(up, k)), 1);
  }
  Cut ranked_cut(const Kernels& k) const {
    return cut_into(a_.segments[0], k, Ranking::kPart * (many(k) ? 1 : kStreams), Ranking::kPart);
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

  // Calls f(run, row, n) for the runs that are there.
  template <class F>
  static void for_runs(const RowRuns& rows, F f) {
    for (int64_t run = 0, row = rows.first; run < kStreams && row < rows.end; ++run, row += rows.apart)
      f(run, row, std::min(rows.count, rows.end - row));
  }

  // Tokens [t0, t0 + n) times some rows; those of run s go to out + s * apart.
  void multiply(const Kernels& k, const Matrix& w, const RowRuns& rows, Activations x, int64_t t0, int64_t n, float* out,
                int64_t apart, int64_t stride, uint8_t* scratch) const {
    x.f32 += t0 * x.f32_stride, x.q8 += t0 * x.q8_stride;
    if (!is_float(w.type) && !many(k)) return k.matvec(w, rows, x, n, out, apart, stride);
    for_runs(rows, [&](int64_t run, int64_t r, int64_t count) {
      float* to = out + run * apart;
      if (is_float(w.type)) k.matmul_float(w, r, r + count, x, n, to, stride, reinterpret_cast<float*>(scratch));
      else k.gemm(w, r, r + count, x, n, to, stride, scratch);
    });
  }

  int64_t blocks() const { return (a_.n_tokens + kBlockTokens - 1) / kBlockTokens; }
  int64_t block_size(int64_t block) const { return std::min(kBlockTokens, a_.n_tokens - block * kBlockTokens); }

  // The rows of all segments, cut into tasks.
  struct Place {
    size_t segment;
    RowRuns rows;
    int64_t column;  // where the segment begins in an output row
  };
  struct Tasks {
    Tasks(const Project& project, const Kernels& k) : segments(project.a_.segments) {
      for (size_t s = 0; s < segments.size(); ++s) total += (cuts[s] = project.cut(segments[s], k)).tasks();
    }
    Place place(int64_t task) const {
      size_t s = 0;
      int64_t column = 0;
      for (; task >= cuts[s].tasks(); ++s) task -= cuts[s].tasks(), column += segments[s].n_out;
      return {s, cuts[s].at(task), column};
    }
    const std::vector<Matrix>& segments;
    Cut cuts[3] = {};
    int64_t total = 0;
  };
  static Span streams_from(const Matrix& w, const RowRuns& rows) {
    return {w.data + rows.first * w.row_bytes, kAheadBytes / kStreams, kStreams, rows.apart * w.row_bytes};
  }

  void run_segments(Thread& thread, const Activations& x, uint8_t* scratch) {
    float* tile = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    const Tasks tasks(*this, thread.k);
    share(thread, 1, tasks.total * blocks(), [&](int64_t number) {
      const Place place = tasks.place(number % tasks.total);
      const size_t s = place.segment;
      const RowRuns& rows = place.rows;
      const int64_t block = number / tasks.total, t0 = block * kBlockTokens, n_tokens = block_size(block);
      const Matrix& w = a_.segments[s];
      float* out = a_.out + t0 * width_ + place.column;
      if (a_.epilogue == Epilogue::None)
        return multiply(thread.k, w, rows, x, t0, n_tokens, out + rows.first, rows.apart, width_, scratch);
      // Not straight into `out`: the residual may lie there.
      const int64_t width = tasks.cuts[s].width();
      multiply(thread.k, w, rows, x, t0, n_tokens, tile, rows.count, width, scratch);
      const float* add = a_.epilogue == Epilogue::Bias ? a_.biases[s] : a_.residual + t0 * width_ + place.column;
      const int64_t add_stride = a_.epilogue == Epilogue::Bias ? 0 : width_;
      for_runs(rows, [&](int64_t run, int64_t r, int64_t n) {
        for (int64_t t = 0; t < n_tokens; ++t)
          thread.k.binary(Binary::Add, add + t * add_stride + r, tile + t * width + run * rows.count, n, out + t * width_ + r);
      });
    });
  }

  void run_joined(Thread& thread, const Activations& x, uint8_t* scratch) {
    const Matrix &gate = a_.segments[0], &up = a_.segments[1];
    const Binary join = a_.epilogue == Epilogue::SwiGLU ? Binary::SwiGLU : Binary::GeGLU;
    const Cut cut = joined_cut(thread.k);
    const int64_t width = cut.width();
    float* first = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    float* second = first + width * std::min(a_.n_tokens, kBlockTokens);
    share(thread, 1, cut.tasks() * blocks(), [&](int64_t number) {
      const RowRuns rows = cut.at(number % cut.tasks());
      const int64_t block = number / cut.tasks(), t0 = block * kBlockTokens, n_tokens = block_size(block);
      multiply(thread.k, gate, rows, x, t0, n_tokens, first, rows.count, width, scratch);
      multiply(thread.k, up, rows, x, t0, n_tokens, second, rows.count, width, scratch);
      // Of the whole tile at once, since a run's rows are few; what is behind rows that are not there goes nowhere.
      thread.k.binary(join, first, second, width * n_tokens, first);
      for_runs(rows, [&](int64_t run, int64_t r, int64_t n) {
        for (int64_t t = 0; t < n_tokens; ++t)
          std::memcpy(a_.out + (t0 + t) * width_ + r, first + t * width + run * rows.count, 4 * n);
      });
    });
  }

  // Products are ranked while they are in the cache, and go nowhere else.
  void run_ranked(Thread& thread, const Activations& x, uint8_t* scratch) {
    const Matrix& w = a_.segments[0];
    float* tile = reinterpret_cast<float*>(scratch + unpack_bytes(thread.k));
    const Cut cut = ranked_cut(thread.k);
    share(thread, 1, cut.tasks() * blocks(), [&](int64_t number) {
      const RowRuns rows = cut.at(number % cut.tasks());
      const int64_t block = number / cut.tasks(), t0 = block * kBlockTokens, n_tokens = block_size(block);
      multiply(thread.k, w, rows, x, t0, n_tokens, tile, Ranking::kPart, kRankStride, scratch);
      for_runs(rows, [&](int64_t run, int64_t r, int64_t) {
        for (int64_t t = 0; t < n_tokens; ++t)
          ranking_->take(thread, t0 + t, r / Ranking::kPart, tile + t * kRankStride + run * Ranking::kPart);
      });
    });
  }

  // Not a power of two, whose rows would take each other's place in the cache.
  static constexpr int64_t kRankStride = kStreams * Ranking::kPart + 16;

  ProjectArgs a_;
  std::optional<Ranking> ranking_;
  int64_t width_ = 0;
  bool any_float_ = false, any_block_ = false, joined_ = false;
};

}  // namespace

std::unique_ptr<Operation> make_project(const ProjectArgs& args) { return std::make_unique<Project>(args); }

}  // namespace minfer
