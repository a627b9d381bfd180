// The kernels as functions of a shared library: the grid first, then the kernel's own arguments.
// Tests only.
#define PF_SHIM
#include "pages.cu"

extern "C" {

void shim_sha256_pages(u32 blocks, u32 threads, const u64* ptrs, const u64* lens, const u32* first, const u32* count, u32 pages, u32* out) {
  shim::launch(blocks, threads, [&] { pf_sha256_pages(ptrs, lens, first, count, pages, out); });
}

void shim_gather(u32 blocks, u32 threads, const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  shim::launch(blocks, threads, [&] { pf_gather(ptrs, lens, at, segments, base); });
}

void shim_scatter(u32 blocks, u32 threads, const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  shim::launch(blocks, threads, [&] { pf_scatter(ptrs, lens, at, segments, base); });
}
}
