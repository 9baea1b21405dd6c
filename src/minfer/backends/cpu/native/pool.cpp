#include "pool.h"

#include <chrono>

namespace minfer {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins before it gives up its core. Inside a run the others are at work and will come: a yield there
// may cost a whole time slice on a busy machine. After a run the next step of a generation follows within this time.
constexpr auto kBarrierSpin = std::chrono::milliseconds(2);
constexpr auto kIdleSpin = std::chrono::microseconds(300);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// True once `done` holds; false after `longest`.
template <class Done>
bool spin_until(Done done, Clock::duration longest) {
  const auto end = Clock::now() + longest;
  do {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      relax();
    }
  } while (Clock::now() < end);
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

void Pool::barrier(Span* ahead) {
  if (size_ == 1) return;
  const unsigned generation = generation_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    generation_.store(generation + 1, std::memory_order_release);
    return;
  }
  const auto opened = [&] { return generation_.load(std::memory_order_acquire) != generation; };
  for (; ahead && ahead->bytes > 0; ahead->begin += 64, ahead->bytes -= 64) {
    if (opened()) return;
    for (int i = 0; i < ahead->streams; ++i) __builtin_prefetch(ahead->begin + i * ahead->apart, 0, 2);
  }
  // Where there are fewer cores than threads, the others need this one.
  if (!spin_until(opened, kBarrierSpin))
    while (!opened()) std::this_thread::yield();
}

void Pool::serve(int thread) {
  unsigned seen = 0;
  for (;;) {
    const auto called = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (!spin_until(called, kIdleSpin)) {
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
