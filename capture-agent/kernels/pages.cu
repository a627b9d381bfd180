// Page hashing and copying on the device. One source, two compilers: NVRTC makes pages.ptx of it, and a C++ compiler (shim.hpp)
// makes a library that the tests compare with other implementations of the same digests, without a GPU.
//
// A page is a list of segments, its bytes theirs, one after another. Segments have any length and any alignment. Page i has the
// segments first[i] .. first[i] + count[i] of the flat arrays `ptrs` (addresses) and `lens` (bytes).
//
// No load leaves the bytes of a segment, so a segment may end where its allocation ends.

#ifdef PF_SHIM
#include "shim.hpp"
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define ROTR(x, n) __funnelshift_r((x), (x), (n))

// ---------------------------------------------------------------------------------------------------------------- reading

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

__device__ __forceinline__ void skip(Cursor& c, u64 n) {
  while (n > 0) {
    u64 now = n < c.bytes ? n : c.bytes;
    if (now == 0) return;
    c.at += now;
    c.bytes -= now;
    n -= now;
    advance(c);
  }
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
    // Words that straddle: the 15 aligned words inside, shifted; the first and the last are put together from bytes.
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

// ---------------------------------------------------------------------------------------------------------------- SHA-256

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

// One page per thread, any number of threads per block up to 128. `out` gets 8 words a page: the 32 bytes of the digest.
extern "C" __global__ void __launch_bounds__(128)
    pf_sha256_pages(const u64* ptrs, const u64* lens, const u32* first, const u32* count, u32 pages, u32* out) {
  u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pages) return;
  u64 bytes = page_bytes(lens, first[i], count[i]);
  Cursor c = open_page(ptrs, lens, first[i], count[i]);
  u32 s[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  // The next block is on its way while this one is hashed: a thread has no other work to hide the wait behind.
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

// ---------------------------------------------------------------------------------------------------------------- BLAKE3

#define B3_CHUNK 1024u
#define B3_CHUNK_START 1u
#define B3_CHUNK_END 2u
#define B3_PARENT 4u
#define B3_ROOT 8u

__constant__ u32 B3_IV[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

#define B3_G(a, b, c, d, x, y) \
  a = a + b + (x);             \
  d = ROTR(d ^ a, 16);         \
  c = c + d;                   \
  b = ROTR(b ^ c, 12);         \
  a = a + b + (y);             \
  d = ROTR(d ^ a, 8);          \
  c = c + d;                   \
  b = ROTR(b ^ c, 7);

// One block; the chaining value is replaced, m is used up.
__device__ __forceinline__ void b3_compress(u32 cv[8], u32 m[16], u64 counter, u32 bytes, u32 flags) {
  u32 v[16];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    v[i] = cv[i];
    v[8 + i] = B3_IV[i];
  }
  v[12] = (u32)counter;
  v[13] = (u32)(counter >> 32);
  v[14] = bytes;
  v[15] = flags;
#pragma unroll
  for (int r = 0; r < 7; r++) {
    B3_G(v[0], v[4], v[8], v[12], m[0], m[1])
    B3_G(v[1], v[5], v[9], v[13], m[2], m[3])
    B3_G(v[2], v[6], v[10], v[14], m[4], m[5])
    B3_G(v[3], v[7], v[11], v[15], m[6], m[7])
    B3_G(v[0], v[5], v[10], v[15], m[8], m[9])
    B3_G(v[1], v[6], v[11], v[12], m[10], m[11])
    B3_G(v[2], v[7], v[8], v[13], m[12], m[13])
    B3_G(v[3], v[4], v[9], v[14], m[14], m[15])
    u32 t[16] = {m[2], m[6], m[3], m[10], m[7], m[0], m[4], m[13], m[1], m[11], m[12], m[5], m[9], m[14], m[15], m[8]};
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = t[i];
  }
#pragma unroll
  for (int i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

// The chaining value of one chunk (the digest, if it is the only one) of n <= 1024 bytes, read from the cursor.
__device__ __forceinline__ void b3_chunk(Cursor& c, u64 index, u32 n, bool only, u32 cv[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) cv[i] = B3_IV[i];
  u32 blocks = n > 64 ? (n + 63) / 64 : 1;
  u32 next[16], m[16];
  u32 size = n < 64 ? n : 64;
  load_block(c, size, next);
  for (u32 b = 0; b < blocks; b++) {
#pragma unroll
    for (int i = 0; i < 16; i++) m[i] = next[i];
    u32 now = size;
    bool end = b + 1 == blocks;
    if (!end) {
      u32 done = (b + 1) * 64;
      size = n - done < 64 ? n - done : 64;
      load_block(c, size, next);
    }
    u32 flags = (b == 0 ? B3_CHUNK_START : 0u) | (end ? B3_CHUNK_END : 0u) | (end && only ? B3_ROOT : 0u);
    b3_compress(cv, m, index, now, flags);
  }
}

// One page per block at a time, the blocks taking turns; any number of threads per block up to 256.
//
// `scratch` has room for chunks + (chunks + 1) / 2 chaining values of 8 words per block, chunks = those of the largest page:
// `room` words per block. `out` gets 8 words a page.
extern "C" __global__ void __launch_bounds__(256)
    pf_blake3_pages(const u64* ptrs, const u64* lens, const u32* first, const u32* count, u32 pages, u32* scratch, u64 room, u32* out) {
  u32* mine = scratch + (u64)blockIdx.x * room;
  for (u64 page = blockIdx.x; page < pages; page += gridDim.x) {
    u64 bytes = page_bytes(lens, first[page], count[page]);
    u64 chunks = bytes > B3_CHUNK ? (bytes + B3_CHUNK - 1) / B3_CHUNK : 1;
    // Chunks over threads: thread t takes t, t + blockDim, …, walking forward through the segments.
    Cursor c = open_page(ptrs, lens, first[page], count[page]);
    u64 at = 0;
    for (u64 chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
      u64 begin = chunk * B3_CHUNK;
      u32 n = (u32)(bytes - begin < B3_CHUNK ? bytes - begin : B3_CHUNK);
      skip(c, begin - at);
      at = begin + n;
      u32 cv[8];
      b3_chunk(c, chunk, n, chunks == 1, cv);
#pragma unroll
      for (int i = 0; i < 8; i++) mine[chunk * 8 + i] = cv[i];
    }
    __syncthreads();
    // Neighbours are merged until one is left, an odd last one going up as it is: the same tree as BLAKE3's, whose left subtrees
    // are the largest powers of two. Levels alternate between two buffers, so no thread reads what another writes.
    u32* from = mine;
    u32* to = mine + chunks * 8;
    for (u64 left = chunks; left > 1;) {
      u64 pairs = left / 2;
      for (u64 k = threadIdx.x; k < pairs; k += blockDim.x) {
        u32 m[16], cv[8];
#pragma unroll
        for (int i = 0; i < 16; i++) m[i] = from[k * 16 + i];
#pragma unroll
        for (int i = 0; i < 8; i++) cv[i] = B3_IV[i];
        b3_compress(cv, m, 0, 64, B3_PARENT | (left == 2 ? B3_ROOT : 0u));
#pragma unroll
        for (int i = 0; i < 8; i++) to[k * 8 + i] = cv[i];
      }
      if (left % 2 == 1) {
        for (u32 i = threadIdx.x; i < 8; i += blockDim.x) to[pairs * 8 + i] = from[(left - 1) * 8 + i];
      }
      __syncthreads();
      u32* swap = from;
      from = to;
      to = swap;
      left = pairs + left % 2;
    }
    for (u32 i = threadIdx.x; i < 8; i += blockDim.x) out[page * 8 + i] = from[i];
    // The next page overwrites what a slower thread of this one may still read.
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------------------------------------- copying

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

// Segment i, lens[i] bytes at ptrs[i], to base + at[i]. One segment per block at a time; no two may have a byte of the target in common.
extern "C" __global__ void __launch_bounds__(256)
    pf_gather(const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  for (u64 i = blockIdx.x; i < segments; i += gridDim.x) copy_bytes(base + at[i], ptrs[i], lens[i]);
}

// The way back: from base + at[i] to ptrs[i].
extern "C" __global__ void __launch_bounds__(256)
    pf_scatter(const u64* ptrs, const u64* lens, const u64* at, u32 segments, u64 base) {
  for (u64 i = blockIdx.x; i < segments; i += gridDim.x) copy_bytes(ptrs[i], base + at[i], lens[i]);
}
