// Threads that run one function together, and the barrier between its parts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace minfer {

// Memory to fetch: `streams` pieces of it, the beginnings `apart` bytes from each other.
struct Span {
  const uint8_t* begin = nullptr;
  int64_t bytes = 0;
  int streams = 1;
  int64_t apart = 0;
};

// `size` threads, the caller of `run` being one. Workers spin a little after a run, then sleep. One run at a time: a
// second caller waits, so that two engines in one process do not fight over the cores.
class Pool {
 public:
  explicit Pool(int size);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int size() const { return size_; }

  // Calls work(thread) on every thread and returns when all have. `work` does not throw.
  void run(const std::function<void(int)>& work);

  // Inside a run: no thread leaves before all have come. Who waits fetches `ahead` into its cache meanwhile, and takes what
  // it has fetched off it.
  void barrier(Span* ahead = nullptr);

 private:
  void serve(int thread);

  const int size_;
  std::vector<std::thread> workers_;
  std::mutex one_run_;

  std::mutex sleep_;
  std::condition_variable wake_;
  int asleep_ = 0;  // under sleep_
  bool stop_ = false;
  const std::function<void(int)>* work_ = nullptr;

  // On lines of their own: the waiting threads read one while the arriving ones write the other.
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> generation_{0};
};

}  // namespace minfer
