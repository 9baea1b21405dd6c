// The k largest of each of n rows of d numbers, and the logarithm of the sum of their exponentials, from parts of rows that
// threads give in any order. NaN and Inf come before every number; of equal ones the first of the row comes first.
#pragma once

#include <atomic>
#include <vector>

#include "program.h"

namespace minfer {

class Ranking {
 public:
  // Values a part. Exponentials are summed by parts, whoever has them, so that the sum does not depend on threads.
  static constexpr int64_t kPart = 128;

  // `out`: as minfer.graph.ir.TopK says: k indices, k values, the logarithm.
  Ranking(int64_t d, int64_t n, int64_t k, int32_t* out);
  int64_t parts() const { return parts_; }
  // Before a run on this many threads.
  void begin(int threads);
  // `x` has the part's values. Every part of every row once a run; who gives the last of a row writes its results.
  void take(const Thread& thread, int64_t row, int64_t part, const float* x);

 private:
  struct Item {
    float value;
    int32_t index;
    bool before(const Item& other) const;
  };
  struct Sum {
    float most, total;  // total: of exp(x - most)
  };

  Item* best(int thread, int64_t row) { return best_.data() + (thread * n_ + row) * k_; }
  int32_t& count(int thread, int64_t row) { return counts_[thread * n_ + row]; }
  void insert(int32_t& count, Item* best, Item item) const;
  void join(int64_t row);

  int64_t d_, n_, k_;
  int32_t* out_;
  int64_t parts_;
  int threads_ = 0;
  std::vector<Item> best_;       // [thread][row][k], largest first: of all the parts that a thread had
  std::vector<int32_t> counts_;  // [thread][row]
  std::vector<Sum> sums_;        // [row][part]
  std::vector<std::atomic<int64_t>> unfinished_;  // parts of a row
};

}  // namespace minfer
