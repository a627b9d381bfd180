// What pages.cu needs of CUDA, for an ordinary C++17 compiler. Tests only.
//
// A block's threads are real threads, __syncthreads() a barrier that all of them must reach: an
// early exit hangs, a missing barrier gives wrong results. With one thread per block nothing is
// spawned.
#pragma once
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __constant__ static const
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct uint4 {
  unsigned x, y, z, w;
};

namespace shim {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

class Barrier {
 public:
  explicit Barrier(unsigned threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    unsigned long turn = turn_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      turn_++;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn != turn_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  unsigned threads_, waiting_ = 0;
  unsigned long turn_ = 0;
};

}  // namespace shim

static thread_local shim::Index blockIdx, threadIdx, blockDim, gridDim;
static thread_local shim::Barrier* shim_barrier = nullptr;

static inline void __syncthreads() {
  if (shim_barrier) shim_barrier->wait();
}

// The low word of (hi:lo) >> n, n taken modulo 32.
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  unsigned long long both = ((unsigned long long)hi << 32) | lo;
  return (unsigned)(both >> (n & 31));
}

// Four bytes chosen by the nibbles of `choice` out of the eight bytes b:a.
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
  unsigned long long both = ((unsigned long long)b << 32) | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= (unsigned)((both >> (8 * ((choice >> (4 * i)) & 7))) & 255) << (8 * i);
  return out;
}

namespace shim {

// Runs `kernel` on a grid of `blocks` blocks of `threads` threads, block after block.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, Kernel kernel) {
  Barrier barrier(threads);
  auto thread = [&](unsigned index) {
    blockDim.x = threads;
    gridDim.x = blocks;
    threadIdx.x = index;
    shim_barrier = threads > 1 ? &barrier : nullptr;
    for (unsigned block = 0; block < blocks; block++) {
      blockIdx.x = block;
      kernel();
      __syncthreads();
    }
    shim_barrier = nullptr;
  };
  if (threads == 1) return thread(0);
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads; i++) all.emplace_back(thread, i);
  for (auto& one : all) one.join();
}

}  // namespace shim
