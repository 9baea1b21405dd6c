#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>

namespace minfer {

void Workspace::Free::operator()(uint8_t* p) const { std::free(p); }

Workspace::Memory Workspace::allocate(int64_t bytes) {
  void* p = std::aligned_alloc(64, static_cast<size_t>(round_up(std::max<int64_t>(bytes, 64), 64)));
  if (p == nullptr) throw std::bad_alloc();
  return Memory(static_cast<uint8_t*>(p));
}

Workspace::Workspace(std::shared_ptr<Pool> pool, const Kernels& kernels) : pool_(std::move(pool)), kernels_(kernels) {
  scratch_.resize(pool_->size());
}

void Workspace::reserve(int64_t shared_bytes, int64_t thread_bytes) {
  if (shared_bytes > shared_bytes_) shared_ = allocate(shared_bytes), shared_bytes_ = shared_bytes;
  if (thread_bytes > thread_bytes_) {
    for (Memory& memory : scratch_) memory = allocate(thread_bytes);
    thread_bytes_ = thread_bytes;
  }
}

namespace {

using Clock = std::chrono::steady_clock;

bool conflict(const Range& a, const Range& b) {
  return (a.write || b.write) && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

}  // namespace

void Program::add(const std::string& name, std::unique_ptr<Operation> operation) {
  operation->name = name;
  operation->divide_among(workspace_->pool().size());
  const Kernels& kernels = workspace_->kernels();
  const int64_t shared = operation->shared_bytes(kernels);
  workspace_->reserve(shared, operation->thread_bytes(kernels));
  // The shared workspace is one more buffer that operations write and read.
  if (shared > 0) operation->ranges.push_back({reinterpret_cast<const uint8_t*>(workspace_.get()), 1, true});
  operation->waits = false;
  for (const Range& mine : operation->ranges)
    for (const Range& other : pending_) operation->waits |= conflict(mine, other);
  if (operation->waits) pending_.clear();
  pending_.insert(pending_.end(), operation->ranges.begin(), operation->ranges.end());
  operations_.push_back(std::move(operation));
}

size_t Program::barriers() const {
  return std::count_if(operations_.begin(), operations_.end(), [](const auto& op) { return op->waits; });
}

void Program::profile(bool on) { seconds_.assign(on ? operations_.size() : 0, 0.0); }

std::vector<std::pair<std::string, double>> Program::profiled() const {
  std::vector<std::pair<std::string, double>> result;
  for (size_t i = 0; i < seconds_.size(); ++i) result.emplace_back(operations_[i]->name, seconds_[i]);
  return result;
}

void Program::run() {
  for (const auto& operation : operations_) operation->prepare();
  Workspace& w = *workspace_;
  if (++runs_ == 0) ++runs_;  // 0 is what a counter begins with
  w.pool().run([&](int thread) {
    Thread me{w.kernels(), w.pool(), thread, runs_, w.shared(), w.scratch(thread)};
    const bool timed = thread == 0 && !seconds_.empty();
    auto before = timed ? Clock::now() : Clock::time_point();
    // What the next operation with much to read will read first.
    size_t reader = 0;
    Span ahead;
    const auto look_from = [&](size_t i) {
      for (reader = i, ahead = {}; reader < operations_.size(); ++reader)
        if ((ahead = operations_[reader]->ahead(me)).bytes > 0) break;
    };
    look_from(0);
    for (size_t i = 0; i < operations_.size(); ++i) {
      if (reader < i) look_from(i);
      if (operations_[i]->waits) me.pool.barrier(&ahead);
      operations_[i]->run(me);
      if (timed) {
        const auto now = Clock::now();
        seconds_[i] += std::chrono::duration<double>(now - before).count();
        before = now;
      }
    }
  });
  for (const auto& operation : operations_) operation->finish();
}

}  // namespace minfer
