// Attention as an operation: windows to runs of cells, runs to tasks.
#include <algorithm>
#include <cstring>

#include "ops.h"

namespace minfer {

namespace {

// Rows (queries times heads of a group) in a tile at most, so that its sums stay in the L2 cache.
constexpr int64_t kTileRows = 64;
// With fewer (query, KV head) pairs than this, each query's context is cut into some kParts parts for the threads.
constexpr int64_t kSplitBelow = 16;
constexpr int32_t kParts = 16;

class Attn : public Operation {
 public:
  explicit Attn(const AttnArgs& args) : a_(args), group_(args.n_head / args.n_kv_head) {
    const int64_t floats = a_.n * a_.n_head * a_.head_dim;
    reads(a_.q, 4 * floats), writes(a_.out, 4 * floats);
    reads(a_.kv.k, a_.kv.n_cells * a_.kv.row_bytes), reads(a_.kv.v, a_.kv.n_cells * a_.kv.row_bytes);
    split_ = a_.n * a_.n_kv_head < kSplitBelow;
    tile_queries_ = std::clamp<int64_t>(kTileRows / group_, 1, kAttendQueries);
    part_floats_ = 2 + a_.head_dim;
    windows_.resize(a_.n);
    if (split_) parts_.reserve(a_.n * kMostParts), unfinished_ = std::vector<std::atomic<int>>(a_.n);
    tiles_.reserve(a_.n);
    first_part_.resize(a_.n + 1);
  }

  int64_t shared_bytes(const Kernels&) const override {
    return split_ ? 4 * a_.n * a_.n_head * kMostParts * part_floats_ : 0;
  }
  int64_t thread_bytes(const Kernels&) const override {
    return 4 * attend_scratch_floats(std::max(tile_queries_ * group_, a_.n_head), a_.head_dim);
  }

  void prepare() override {
    for (int64_t i = 0; i < a_.n; ++i) windows_[i] = window(i);
    if (split_) cut_into_parts();
    else gather_tiles();
  }

  void run(Thread& thread) override {
    if (!split_) return run_tiles(thread);
    float* partials = reinterpret_cast<float*>(thread.shared);
    share(thread, 0, static_cast<int64_t>(parts_.size()), [&](int64_t task) {
      const Part& part = parts_[task];
      AttendTile tile = tile_of(part.query, &part.window, 1, 0, a_.n_kv_head);
      const int64_t first = first_part_[part.query], n_parts = first_part_[part.query + 1] - first;
      if (n_parts > 1) {
        tile.partial = partials + task * a_.n_head * part_floats_;
        tile.partial_stride = part_floats_;
      }
      thread.k.attend(tile, reinterpret_cast<float*>(thread.scratch));
      // Who ends the last part of a query joins them all.
      if (n_parts == 1 || unfinished_[part.query].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      for (int64_t head = 0; head < a_.n_head; ++head)
        thread.k.join_partials(partials + (first * a_.n_head + head) * part_floats_, n_parts, a_.n_head * part_floats_,
                               static_cast<int>(a_.head_dim), a_.out + (part.query * a_.n_head + head) * a_.head_dim);
    });
  }

 private:
  struct Part {
    int64_t query;
    Window window;
  };
  struct Tile {
    int32_t first, count;
  };

  // A run may begin, and a part end, inside a block.
  static constexpr int64_t kMostParts = kParts + 3 * kRuns;

  [[noreturn]] void refuse(int64_t query, int64_t begin, int64_t end) const {
    throw RequestError(name + ": layer " + std::to_string(a_.layer) + ": query " + std::to_string(query) + " reads cells " +
                       std::to_string(begin) + " to " + std::to_string(end - 1) + " of " + std::to_string(a_.kv.n_cells));
  }

  // The cells that a query reads: its window, cut to its last `sliding` rows.
  Window window(int64_t query) const {
    int64_t begin[kRuns] = {}, end[kRuns] = {};
    if (a_.layout == 0) {
      end[0] = static_cast<int64_t>(a_.positions[query]) + 1;
    } else if (a_.layout == 2) {
      begin[0] = a_.window[2 * query], end[0] = a_.window[2 * query + 1];
    } else {
      for (int r = 0; r < kRuns; ++r) {
        begin[r] = a_.window[8 * query + 2 * r];
        end[r] = begin[r] + a_.window[8 * query + 2 * r + 1];
      }
    }
    int64_t left = a_.sliding > 0 ? a_.sliding : INT64_MAX;
    Window result{};
    for (int r = kRuns - 1; r >= 0; --r) {
      const int64_t length = std::min(std::max<int64_t>(end[r] - begin[r], 0), left);
      if (length == 0) continue;
      left -= length;
      begin[r] = end[r] - length;
      if (begin[r] < 0 || end[r] > a_.kv.n_cells) refuse(query, begin[r], end[r]);
      result.runs[r] = {static_cast<int32_t>(begin[r]), static_cast<int32_t>(end[r])};
    }
    return result;
  }

  void cut_into_parts() {
    parts_.clear();
    for (int64_t i = 0; i < a_.n; ++i) {
      first_part_[i] = static_cast<int64_t>(parts_.size());
      int32_t cells = 0;
      for (const Run& run : windows_[i].runs) cells += run.end - run.begin;
      // A part is whole blocks: its size depends on the query's window alone, and so do its sums.
      const int32_t step = static_cast<int32_t>(round_up(std::max(cells / kParts, 1), kAttendBlock));
      for (const Run& run : windows_[i].runs)
        for (int32_t at = run.begin; at < run.end;) {
          const int32_t end = std::min(at / kAttendBlock * kAttendBlock + step, run.end);
          Part part{i, {}};
          part.window.runs[0] = {at, end};
          parts_.push_back(part);
          at = end;
        }
      if (static_cast<int64_t>(parts_.size()) == first_part_[i]) parts_.push_back({i, {}});  // no rows: gives zeros
      unfinished_[i].store(static_cast<int>(parts_.size() - first_part_[i]), std::memory_order_relaxed);
    }
    first_part_[a_.n] = static_cast<int64_t>(parts_.size());
  }

  // Neighbouring queries share a tile where together they read hardly more cells than one alone.
  void gather_tiles() {
    tiles_.clear();
    for (int64_t first = 0; first < a_.n;) {
      Run all[kRuns];
      std::copy(windows_[first].runs, windows_[first].runs + kRuns, all);
      int64_t end = first + 1;
      for (; end < a_.n && end - first < tile_queries_ && join(all, windows_[end]); ++end) {
      }
      tiles_.push_back({static_cast<int32_t>(first), static_cast<int32_t>(end - first)});
      first = end;
    }
  }

  static bool join(Run all[kRuns], const Window& next) {
    Run joined[kRuns];
    for (int r = 0; r < kRuns; ++r) {
      const Run a = all[r], b = next.runs[r];
      const bool none = a.begin >= a.end;
      if (none != (b.begin >= b.end)) return false;
      joined[r] = none ? a : Run{std::min(a.begin, b.begin), std::max(a.end, b.end)};
      const int32_t longest = std::max(a.end - a.begin, b.end - b.begin);
      if (joined[r].end - joined[r].begin > longest + 2 * kAttendBlock) return false;
    }
    std::copy(joined, joined + kRuns, all);
    return true;
  }

  AttendTile tile_of(int64_t query, const Window* windows, int count, int64_t first_kv_head, int64_t n_kv_heads) const {
    const int64_t width = a_.n_head * a_.head_dim;
    return {&a_.kv, static_cast<int>(first_kv_head), static_cast<int>(n_kv_heads), a_.q + query * width, a_.out + query * width,
            width, windows, count, static_cast<int>(group_), static_cast<int>(a_.head_dim), a_.scale, a_.softcap, nullptr, 0};
  }

  void run_tiles(Thread& thread) {
    const int64_t n_tiles = static_cast<int64_t>(tiles_.size());
    // A query alone takes all heads, which lie side by side in memory.
    const int64_t heads = n_tiles == a_.n ? a_.n_kv_head : 1, tasks = a_.n_kv_head / heads;
    share(thread, 0, n_tiles * tasks, [&](int64_t task) {
      const Tile& t = tiles_[task / tasks];
      const AttendTile tile = tile_of(t.first, windows_.data() + t.first, t.count, task % tasks, heads);
      thread.k.attend(tile, reinterpret_cast<float*>(thread.scratch));
    });
  }

  AttnArgs a_;
  int64_t group_, tile_queries_, part_floats_;
  bool split_;
  std::vector<Window> windows_;
  std::vector<Part> parts_;
  std::vector<int64_t> first_part_;
  std::vector<std::atomic<int>> unfinished_;  // parts of a query
  std::vector<Tile> tiles_;
};

}  // namespace

std::unique_ptr<Operation> make_attn(const AttnArgs& args) { return std::make_unique<Attn>(args); }

}  // namespace minfer
