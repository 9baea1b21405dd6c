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
  int index;
  uint32_t run;  // number of the program's run
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
  // Memory that this thread will read first, if that is known and much: it is fetched while the thread waits.
  virtual Span ahead(const Thread&) const { return {}; }
  // After the run. Throws what went wrong with the values.
  virtual void finish() {}
  virtual int64_t shared_bytes(const Kernels&) const { return 0; }
  virtual int64_t thread_bytes(const Kernels&) const { return 0; }

  std::string name;
  std::vector<Range> ranges;  // buffers read and written, for the barriers between operations
  bool waits = true;          // begins only when all threads have finished what is before it

  void divide_among(int threads) {
    for (auto& parts : parts_) parts = std::vector<Part>(threads);
  }

 protected:
  // Calls f(i) for each i in [0, n), each on one thread. Every thread has a part of its own, which it takes in order, so
  // that it reads memory in order, too; one that is done helps the others. A phase is used once a run.
  template <class F>
  void share(const Thread& me, int phase, int64_t n, F f) {
    std::vector<Part>& parts = parts_[phase];
    const int64_t threads = static_cast<int64_t>(parts.size());
    for (int64_t turn = 0; turn < threads; ++turn) {
      const int64_t part = (me.index + turn) % threads, begin = begin_of(part, threads, n);
      const int64_t size = begin_of(part + 1, threads, n) - begin;
      for (int64_t i; (i = parts[part].next(me.run, size)) >= 0;) f(begin + i);
    }
  }
  int threads() const { return static_cast<int>(parts_[0].size()); }
  static int64_t begin_of(int64_t part, int64_t parts, int64_t n) { return n * part / parts; }
  void reads(const void* p, int64_t bytes) { ranges.push_back({static_cast<const uint8_t*>(p), bytes, false}); }
  void writes(const void* p, int64_t bytes) { ranges.push_back({static_cast<const uint8_t*>(p), bytes, true}); }

 private:
  // How many tasks of a part are taken, with the number of the run above, which makes old counts count as none.
  class Part {
   public:
    int64_t next(uint32_t run, int64_t size) {
      uint64_t seen = taken_.load(std::memory_order_relaxed), taken;
      do {
        taken = seen >> 32 == run ? seen : uint64_t{run} << 32;
        if (static_cast<int64_t>(taken & UINT32_MAX) >= size) return -1;
      } while (!taken_.compare_exchange_weak(seen, taken + 1, std::memory_order_relaxed));
      return static_cast<int64_t>(taken & UINT32_MAX);
    }

   private:
    alignas(64) std::atomic<uint64_t> taken_{0};
  };

  std::vector<Part> parts_[2];
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
  uint32_t runs_ = 0;
};

}  // namespace minfer
