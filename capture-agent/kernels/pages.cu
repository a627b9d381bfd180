// Page hashing and copying on the device. One source, two compilers: NVRTC makes pages.ptx.zst of
// it, and a C++ compiler (shim.hpp) makes a library that the tests compare with another
// implementation of the same digest, without a GPU.
//
// A page is a list of segments, its bytes theirs, one after another. Segments have any length and
// any alignment. Page i has the segments first[i] .. first[i] + count[i] of the flat arrays `ptrs`
// (addresses) and `lens` (bytes).
//
// No load leaves the bytes of a segment, so a segment may end where its allocation ends.

#ifdef PF_SHIM
#include "shim.hpp"
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ROTR(x, n) __funnelshift_r((x), (x), (n))

// ---- reading

// A place in a page: walks over the segments.
struct Cursor {
  const u64* ptrs;
  const u64* lens;
  u32 left;   // segments after the present one
  u64 at;     // address of the next byte
  u64 bytes;  // bytes of the present segment from there on
};

__device__ __forceinline__ void advance(Cursor& c) {
  while (c.bytes == 0 && c.left > 0) {
    c.at = *c.ptrs++;
    c.bytes = *c.lens++;
    c.left--;
  }
}

__device__ __forceinline__ Cursor open_page(const u64* ptrs, const u64* lens, u32 first, u32 count) {
  Cursor c;
  c.ptrs = ptrs + first;
  c.lens = lens + first;
  c.left = count;
  c.at = 0;
  c.bytes = 0;
  advance(c);
  return c;
}

__device__ __forceinline__ u64 page_bytes(const u64* lens, u32 first, u32 count) {
  u64 sum = 0;
  for (u32 i = 0; i < count; i++) sum += lens[first + i];
  return sum;
}

// 64 bytes as little-endian words, all of one segment.
__device__ __forceinline__ void load_whole(u64 at, u32 w[16]) {
  u32 off = (u32)(at & 3);
  if ((at & 15) == 0) {
    const uint4* p = (const uint4*)at;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint4 v = p[i];
      w[4 * i] = v.x;
      w[4 * i + 1] = v.y;
      w[4 * i + 2] = v.z;
      w[4 * i + 3] = v.w;
    }
  } else if (off == 0) {
    const u32* p = (const u32*)at;
#pragma unroll
    for (int i = 0; i < 16; i++) w[i] = p[i];
  } else {
    // Words that straddle: the 15 aligned words inside, shifted; the first and the last are put
    // together from bytes.
    const u8* bytes = (const u8*)at;
    const u32* p = (const u32*)(at + (4 - off));
    u32 shift = off * 8;
    u32 low = 0;
    for (u32 i = 0; i < 4 - off; i++) low |= (u32)bytes[i] << (shift + 8 * i);
#pragma unroll
    for (int i = 0; i < 15; i++) {
      u32 high = p[i];
      w[i] = __funnelshift_r(low, high, shift);
      low = high;
    }
    u32 last = 0;
    for (u32 i = 0; i < off; i++) last |= (u32)bytes[64 - off + i] << (8 * i);
    w[15] = __funnelshift_r(low, last, shift);
  }
}

// The next n <= 64 bytes as little-endian words, the rest zero.
__device__ __forceinline__ void load_block(Cursor& c, u32 n, u32 w[16]) {
  if (n == 64 && c.bytes >= 64) {
    load_whole(c.at, w);
    c.at += 64;
    c.bytes -= 64;
    if (c.bytes == 0) advance(c);
    return;
  }
  // The words stay in registers: every index is known when this is unrolled.
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u32 word = 0;
#pragma unroll 1
    for (u32 j = 0; j < 4; j++) {
      if (4 * (u32)i + j < n && c.bytes > 0) {
        word |= (u32) * (const u8*)c.at << (8 * j);
        c.at++;
        c.bytes--;
        if (c.bytes == 0) advance(c);
      }
    }
    w[i] = word;
  }
}

// ---- SHA-256

__constant__ u32 SHA_K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

// One block; w holds big-endian words and is used up.
__device__ __forceinline__ void sha_compress(u32 s[8], u32 w[16]) {
  u32 a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
#pragma unroll
  for (int i = 0; i < 64; i++) {
    if (i >= 16) {
      u32 w15 = w[(i + 1) & 15], w2 = w[(i + 14) & 15];
      w[i & 15] += (ROTR(w15, 7) ^ ROTR(w15, 18) ^ (w15 >> 3)) + w[(i + 9) & 15] + (ROTR(w2, 17) ^ ROTR(w2, 19) ^ (w2 >> 10));
    }
    u32 t1 = h + (ROTR(e, 6) ^ ROTR(e, 11) ^ ROTR(e, 25)) + ((e & f) ^ (~e & g)) + SHA_K[i] + w[i & 15];
    u32 t2 = (ROTR(a, 2) ^ ROTR(a, 13) ^ ROTR(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  s[0] += a;
  s[1] += b;
  s[2] += c;
  s[3] += d;
  s[4] += e;
  s[5] += f;
  s[6] += g;
  s[7] += h;
}

__device__ __forceinline__ u32 swap_bytes(u32 x) { return __byte_perm(x, 0, 0x0123); }

// One page per thread, any number of threads per block up to 128. `out` gets 8 words a page: the 32
// bytes of the digest.
extern "C" __global__ void __launch_bounds__(128)
    pf_sha256_pages(const u64* ptrs, const u64* lens, const u32* first, const u32* count, u32 pages, u32* out) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pages) return;
  u64 bytes = page_bytes(lens, first[i], count[i]);
  Cursor c = open_page(ptrs, lens, first[i], count[i]);
  u32 s[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // The next block is on its way while this one is hashed: a thread has no other work to hide the
  // wait behind.
  u64 blocks = bytes / 64;
  u32 rest = (u32)(bytes % 64);
  u32 next[16], w[16];
  load_block(c, blocks > 0 ? 64 : rest, next);
  for (u64 b = 0; b < blocks; b++) {
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = swap_bytes(next[j]);
    load_block(c, b + 1 < blocks ? 64 : rest, next);
    sha_compress(s, w);
  }
  // The rest, a one bit, zeros, and the length in bits; in two blocks if they do not fit in one.
#pragma unroll
  for (int j = 0; j < 16; j++) {
    u32 word = next[j];
    if ((u32)j == rest / 4) word |= 0x80u << (8 * (rest % 4));
    w[j] = swap_bytes(word);
  }
  if (rest >= 56) {
    sha_compress(s, w);
#pragma unroll
    for (int j = 0; j < 16; j++) w[j] = 0;
  }
  u64 bits = bytes * 8;
  w[14] = (u32)(bits >> 32);
  w[15] = (u32)bits;
  sha_compress(s, w);
#pragma unroll
  for (int j = 0; j < 8; j++) out[i * 8 + j] = swap_bytes(s[j]);
}

// ---- copying

// n bytes by all threads of the block, 16 at a time where both sides allow it.
__device__ __forceinline__ void copy_bytes(u64 to, u64 from, u64 n) {
  u64 t = threadIdx.x, step = blockDim.x;
  u64 done = 0;
  u64 differ = to ^ from;
  if ((differ & 3) == 0) {
    u64 unit = (differ & 15) == 0 ? 16 : 4;
    u64 head = (unit - (from & (unit - 1))) & (unit - 1);
    if (head > n) head = n;
    for (u64 i = t; i < head; i += step) *(u8*)(to + i) = *(const u8*)(from + i);
    u64 units = (n - head) / unit;
    if (unit == 16) {
      const uint4* f = (const uint4*)(from + head);
      uint4* d = (uint4*)(to + head);
#pragma unroll 4
      for (u64 i = t; i < units; i += step) d[i] = f[i];
    } else {
      const u32* f = (const u32*)(from + head);
      u32* d = (u32*)(to + head);
#pragma unroll 4
      for (u64 i = t; i < units; i += step) d[i] = f[i];
    }
    done = head + units * unit;
  }
  for (u64 i = done + t; i < n; i += step) *(u8*)(to + i) = *(const u8*)(from + i);
}

// Segment i, lens[i] bytes at ptrs[i], to base + at[i]. One segment per block at a time; no two may
// have a byte of the target in common.
extern "C" __global__ void __launch_bounds__(256)
    pf_gather(const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  for (u64 i = blockIdx.x; i < segments; i += gridDim.x) copy_bytes(base + at[i], ptrs[i], lens[i]);
}

// The way back: from base + at[i] to ptrs[i].
extern "C" __global__ void __launch_bounds__(256)
    pf_scatter(const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  for (u64 i = blockIdx.x; i < segments; i += gridDim.x) copy_bytes(ptrs[i], base + at[i], lens[i]);
}
