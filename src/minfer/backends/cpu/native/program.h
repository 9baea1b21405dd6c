// A split as a list of operations over fixed buffers. One call runs it on all threads of a pool.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace minfer {

// Becomes minfer.errors.RequestError, and NumericsError, in Python.
struct RequestError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct NumericsError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory of a thread team that operations share in turn, grown when a program is made and never while one runs.
class Workspace {
 public:
  Workspace(std::shared_ptr<Pool> pool, const Kernels& kernels);
  void reserve(int64_t shared_bytes, int64_t thread_bytes);

  Pool& pool() const { return *pool_; }
  const Kernels& kernels() const { return kernels_; }
  uint8_t* shared() const { return shared_.get(); }
  uint8_t* scratch(int thread) const { return scratch_[thread].get(); }
  int64_t bytes() const { return shared_bytes_ + thread_bytes_ * pool_->size(); }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  using Memory = std::unique_ptr<uint8_t[], Free>;
  static Memory allocate(int64_t bytes);

  std::shared_ptr<Pool> pool_;
  const Kernels& kernels_;
  int64_t shared_bytes_ = 0, thread_bytes_ = 0;
  Memory shared_;
  std::vector<Memory> scratch_;
};

// What an operation sees of the thread that runs it.
struct Thread {
  const Kernels& k;
  Pool& pool;
  uint8_t* shared;
  uint8_t* scratch;
};

struct Range {
  const uint8_t* begin;
  int64_t bytes;
  bool write;
};

class Operation {
 public:
  virtual ~Operation() = default;

  // On the caller's thread, before anything of the program runs: refuse inputs that would leave their buffers.
  virtual void prepare() {}
  // On every thread; they divide the work among them by `share`.
  virtual void run(Thread& thread) = 0;
  // After the run. Throws what went wrong with the values.
  virtual void finish() {}
  virtual int64_t shared_bytes(const Kernels&) const { return 0; }
  virtual int64_t thread_bytes(const Kernels&) const { return 0; }

  std::string name;
  std::vector<Range> ranges;  // buffers read and written, for the barriers between operations
  bool waits = true;          // begins only when all threads have finished what is before it

  void reset() {
    for (auto& counter : next_) counter.store(0, std::memory_order_relaxed);
  }

 protected:
  // Calls f(i) for each i in [0, n), each on one thread, whichever is free. A phase's counter is used once a run.
  template <class F>
  void share(int phase, int64_t n, F f) {
    for (int64_t i; (i = next_[phase].fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  }
  void reads(const void* p, int64_t bytes) { ranges.push_back({static_cast<const uint8_t*>(p), bytes, false}); }
  void writes(const void* p, int64_t bytes) { ranges.push_back({static_cast<const uint8_t*>(p), bytes, true}); }

 private:
  std::atomic<int64_t> next_[2] = {};
};

class Program {
 public:
  explicit Program(std::shared_ptr<Workspace> workspace) : workspace_(std::move(workspace)) {}
  Program(Program&&) = default;

  void add(const std::string& name, std::unique_ptr<Operation> operation);

  // Throws RequestError before anything is written where an input is out of range.
  void run();

  size_t size() const { return operations_.size(); }
  size_t barriers() const;

  // Seconds of the caller's thread by operation, waits included, summed over the runs since profiling began.
  void profile(bool on);
  std::vector<std::pair<std::string, double>> profiled() const;
  const Workspace& workspace() const { return *workspace_; }

 private:
  std::shared_ptr<Workspace> workspace_;
  std::vector<std::unique_ptr<Operation>> operations_;
  std::vector<double> seconds_;  // empty: not profiling
  std::vector<Range> pending_;  // of the operations since the last barrier
};

}  // namespace minfer
