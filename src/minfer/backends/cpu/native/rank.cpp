#include "rank.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace minfer {

namespace {

float key(float value) { return std::isfinite(value) ? value : INFINITY; }

}  // namespace

bool Ranking::Item::before(const Item& other) const {
  const float mine = key(value), theirs = key(other.value);
  return mine > theirs || (mine == theirs && index < other.index);
}

Ranking::Ranking(int64_t d, int64_t n, int64_t k, int32_t* out)
    : d_(d), n_(n), k_(k), out_(out), parts_((d + kPart - 1) / kPart), sums_(n * parts_), unfinished_(n) {}

void Ranking::begin(int threads) {
  threads_ = threads;
  best_.resize(threads * n_ * k_);
  counts_.assign(threads * n_, 0);
  for (auto& left : unfinished_) left.store(parts_, std::memory_order_relaxed);
}

void Ranking::insert(int32_t& count, Item* best, Item item) const {
  int64_t at = count < k_ ? count++ : k_ - 1;
  for (; at > 0 && item.before(best[at - 1]); --at) best[at] = best[at - 1];
  best[at] = item;
}

void Ranking::take(const Thread& thread, int64_t row, int64_t part, const float* x) {
  const int64_t first = part * kPart, n = std::min(kPart, d_ - first);
  Item* mine = best(thread.index, row);
  int32_t& known = count(thread.index, row);
  for (int64_t i = 0; i < n; ++i) {
    // A thread may have later parts first, so an equal number can come before one that it knows.
    if (known == k_ && (i = thread.k.next_above(x, i, n, std::nextafter(key(mine[k_ - 1].value), -INFINITY))) == n) break;
    const Item item{x[i], static_cast<int32_t>(first + i)};
    if (known < k_ || item.before(mine[k_ - 1])) insert(known, mine, item);
  }
  Sum& sum = sums_[row * parts_ + part];
  sum.total = thread.k.exp_sum(x, n, &sum.most);
  if (unfinished_[row].fetch_sub(1, std::memory_order_acq_rel) == 1) join(row);
}

void Ranking::join(int64_t row) {
  int32_t* out = out_ + row * (2 * k_ + 1);
  std::vector<int32_t> next(threads_);
  for (int64_t i = 0; i < k_; ++i) {
    int from = -1;
    for (int t = 0; t < threads_; ++t)
      if (next[t] < count(t, row) && (from < 0 || best(t, row)[next[t]].before(best(from, row)[next[from]]))) from = t;
    const Item& item = best(from, row)[next[from]++];
    out[i] = item.index, std::memcpy(out + k_ + i, &item.value, 4);
  }
  const Sum* sums = sums_.data() + row * parts_;
  float most = sums[0].most;
  for (int64_t part = 1; part < parts_; ++part)
    if (!(sums[part].most <= most) && most == most) most = sums[part].most;
  double total = 0.0;
  for (int64_t part = 0; part < parts_; ++part)
    total += sums[part].total * std::exp(static_cast<double>(sums[part].most) - most);
  const float log_sum = static_cast<float>(most + std::log(total));
  std::memcpy(out + 2 * k_, &log_sum, 4);
}

}  // namespace minfer
