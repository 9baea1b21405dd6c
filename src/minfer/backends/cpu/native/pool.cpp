#include "pool.h"

namespace minfer {

namespace {

// Looks at the condition before a thread gives up its core: long enough for the next operation (about 50 us), too short
// to matter for a machine that runs other things.
constexpr int kSpins = 2000;
constexpr int kYields = 200;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once `done` holds; false after a bounded wait.
template <class Done>
bool spin_until(Done done) {
  for (int i = 0; i < kSpins; ++i) {
    if (done()) return true;
    relax();
  }
  for (int i = 0; i < kYields; ++i) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace

Pool::Pool(int size) : size_(size) {
  for (int i = 1; i < size; ++i) workers_.emplace_back([this, i] { serve(i); });
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(sleep_);
    stop_ = true;
    epoch_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& work) {
  std::lock_guard<std::mutex> alone(one_run_);
  if (size_ > 1) {
    std::lock_guard<std::mutex> lock(sleep_);
    work_ = &work;
    epoch_.fetch_add(1, std::memory_order_release);
    if (asleep_ > 0) wake_.notify_all();
  }
  work(0);
  barrier();
}

void Pool::barrier() {
  if (size_ == 1) return;
  const unsigned generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  // The others are at work: where there are fewer cores than threads, they need this one.
  while (!spin_until([&] { return generation_.load(std::memory_order_acquire) != generation; })) {
  }
}

void Pool::serve(int thread) {
  unsigned seen = 0;
  for (;;) {
    const auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(called)) {
      std::unique_lock<std::mutex> lock(sleep_);
      ++asleep_;
      wake_.wait(lock, called);
      --asleep_;
    }
    seen = epoch_.load(std::memory_order_acquire);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      if (stop_) return;
    }
    (*work_)(thread);
    barrier();
  }
}

}  // namespace minfer
