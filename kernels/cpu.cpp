// The CPU kernels of llama2.py: products with quantised matrices that stay in the format of the
// file (ggml's blocks), and whole layers made of them.
//
//   linear       y = x W^T. Up to 16 rows of x: gemv, which streams W once; more: gemm with packing
//   dequantize   blocks -> float32 or bfloat16
//   run_layers   what Block.forward does, for several layers in one call
//
// Two precisions: exact is float32 throughout; fast rounds x to int16 with a scale per 32 numbers
// (3e-5 relative), which the CPU multiplies twice as fast. GNU vector types compile to what there
// is (AVX-512, AVX2, NEON, ...); intrinsics stand where compilers do not find the one instruction.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are only passed to what is inlined
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own headers: its bug 105593
#endif

// ---------------------------------------------------------------------------------------------
// Vectors

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define HAVE_AVX512
constexpr int64_t VL = 16, NR = 12;  // numbers of 32 bits in a vector; gemm: rows of W in a tile
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HAVE_AVX2
constexpr int64_t VL = 8, NR = 6;
#else
constexpr int64_t VL = 4, NR = 6;
#endif
#if (defined(HAVE_AVX512) && defined(__AVX512VNNI__)) || defined(__AVXVNNI__)
#define HAVE_VNNI
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(clang loop unroll_count(n))
#else
#define PRAGMA(x) _Pragma(#x)
#define UNROLL(n) PRAGMA(GCC unroll n)
#endif

typedef float f32 __attribute__((vector_size(4 * VL)));
typedef int32_t i32 __attribute__((vector_size(4 * VL)));
typedef uint32_t u32 __attribute__((vector_size(4 * VL)));
typedef int16_t i16 __attribute__((vector_size(4 * VL)));
typedef int16_t i16half __attribute__((vector_size(2 * VL)));
typedef uint16_t u16half __attribute__((vector_size(2 * VL)));
typedef int8_t i8half __attribute__((vector_size(2 * VL)));
typedef int8_t i8x32 __attribute__((vector_size(32)));  // 32 weights
typedef uint8_t u8x32 __attribute__((vector_size(32)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x16 __attribute__((vector_size(64)));

template <class V>
INLINE V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}
INLINE f32 splat(float f) { return f - f32{}; }
INLINE f32 to_f32(i32 v) { return __builtin_convertvector(v, f32); }
INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }
template <class V>
INLINE float sum(V v) {
  float lanes[sizeof v / 4];
  memcpy(lanes, &v, sizeof v);
  UNROLL(4)
  for (int n = sizeof v / 8; n; n /= 2) {
    UNROLL(8)
    for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
  }
  return lanes[0];
}
INLINE float sum(float f) { return f; }
INLINE float max(f32 v) {
  float top = v[0];
  for (int i = 1; i < VL; i++) top = v[i] > top ? v[i] : top;
  return top;
}

// Sums of products of neighbours, a[2i] * b[2i] + a[2i+1] * b[2i+1], added to total
INLINE i32 dpwssd(i32 total, i16 a, i16 b) {
#if defined(HAVE_AVX512) && defined(HAVE_VNNI)
  return (i32)_mm512_dpwssd_epi32((__m512i)total, (__m512i)a, (__m512i)b);
#elif defined(HAVE_AVX512)
  return total + (i32)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(HAVE_AVX2) && defined(HAVE_VNNI)
  return (i32)_mm256_dpwssd_avx_epi32((__m256i)total, (__m256i)a, (__m256i)b);
#elif defined(HAVE_AVX2)
  return total + (i32)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else  // here a number and the one half a vector away
  i16half halves[4];
  memcpy(halves, &a, sizeof a), memcpy(halves + 2, &b, sizeof b);
  return total + __builtin_convertvector(halves[0], i32) * __builtin_convertvector(halves[2], i32) +
         __builtin_convertvector(halves[1], i32) * __builtin_convertvector(halves[3], i32);
#endif
}

// 32 bytes -> the i-th vector of them as int16 or float32
INLINE i16 widen(i8x32 v, int i) {
#if defined(HAVE_AVX512)
  return i ? i16{} : (i16)_mm512_cvtepi8_epi16((__m256i)v);
#elif defined(HAVE_AVX2)
  return (i16)_mm256_cvtepi8_epi16(i ? _mm256_extracti128_si256((__m256i)v, 1)
                                     : _mm256_castsi256_si128((__m256i)v));
#else
  return __builtin_convertvector(load<i8half>((const char*)&v + 2 * VL * i), i16);
#endif
}
INLINE f32 widen_f32(i8x32 v, int i) {
#if defined(HAVE_AVX512)
  return to_f32((i32)_mm512_cvtepi8_epi32(i ? _mm256_extracti128_si256((__m256i)v, 1)
                                            : _mm256_castsi256_si128((__m256i)v)));
#elif defined(HAVE_AVX2)
  __m128i half =
      i < 2 ? _mm256_castsi256_si128((__m256i)v) : _mm256_extracti128_si256((__m256i)v, 1);
  return to_f32((i32)_mm256_cvtepi8_epi32(i % 2 ? _mm_unpackhi_epi64(half, half) : half));
#else
  typedef int8_t i8quarter __attribute__((vector_size(VL)));
  return __builtin_convertvector(load<i8quarter>((const char*)&v + VL * i), f32);
#endif
}

// float16: one number by table (2 loads; converting it takes 4 instructions on x86), vectors by
// instruction where there is one
static const struct HalfTable {
  float f[65536];
  HalfTable() {
    for (uint32_t i = 0; i < 65536; i++) {
      uint32_t sign = (i & 0x8000) << 16, exponent = i >> 10 & 31, fraction = i & 1023;
      uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
      if (exponent == 31) bits = sign | 0x7f800000 | fraction << 13;
      f[i] = load<float>(&bits);
      if (exponent == 0) f[i] = (sign ? -1.f : 1.f) * (float)fraction / 16777216;
    }
  }
} half_table;
INLINE float half(const uint8_t* p) { return half_table.f[load<uint16_t>(p)]; }

struct float16 {
  uint16_t bits;
};
INLINE f32 load_f32(const float* p) { return load<f32>(p); }
INLINE f32 load_f32(const float16* p) {
#if defined(HAVE_AVX512)
  return (f32)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(HAVE_AVX2)
  return (f32)_mm256_cvtph_ps(load<__m128i>(p));
#else
  f32 v;
  for (int i = 0; i < VL; i++) v[i] = half_table.f[p[i].bits];
  return v;
#endif
}
INLINE void store_f32(float* p, f32 v) { store(p, v); }
INLINE void store_f32(float16* p, f32 v) {  // rounded to nearest even
#if defined(HAVE_AVX512)
  store(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(HAVE_AVX2)
  store(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < VL; i++) {
    float f = v[i], size = std::fabs(f) + .5f;
    uint32_t bits = load<uint32_t>(&f), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000)
      bits = 0x7e00;
    else if (bits >= 0x47800000)
      bits = 0x7c00;
    else if (bits < 0x38800000)
      bits = load<uint32_t>(&size) - 0x3f000000;  // subnormal
    else
      bits = (bits + (bits >> 13 & 1) + 0xfff - (112u << 23)) >> 13;
    p[i].bits = (uint16_t)(sign | bits);
  }
#endif
}
INLINE u16half to_bfloat16(f32 v) {  // rounded to nearest even, NaN kept
#ifdef __AVX512BF16__
  return (u16half)_mm512_cvtneps_pbh((__m512)v);
#else
  u32 bits = (u32)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
  rounded = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded;
  return __builtin_convertvector(rounded >> 16, u16half);
#endif
}

// ---------------------------------------------------------------------------------------------
// Formats: a struct for each type of ggml. A weight is scale * value - minimum; a group of weights
// shares scale and minimum.

template <int BLOCK_, int SIZE_, int GROUP_, bool MINIMUM_ = false>
struct Block {
  enum { BLOCK = BLOCK_, SIZE = SIZE_, GROUP = GROUP_, DENSE = 0 };  // weights, bytes, weights
  static constexpr bool MINIMUM = MINIMUM_;
  typedef typename std::conditional<BLOCK / GROUP == 16, f32x16, f32x8>::type Vector;
  typedef typename std::conditional<BLOCK == GROUP, float, Vector>::type Scales;
};
template <int SIZE_>
struct Dense : Block<32, SIZE_, 32> {
  enum { DENSE = 1 };
};
typedef const uint8_t* Bytes;

// Bits `mask` << from of 32 bytes, moved to bit `to`
INLINE i8x32 bits(Bytes p, int from, int mask, int to = 0) {
  u16x16 v = load<u16x16>(p);
  return (i8x32)((u8x32)(from > to ? v >> (from - to) : v << (to - from)) & (uint8_t)(mask << to));
}
// 16 bytes: the low nibbles are values 0 to 15, the high ones 16 to 31
INLINE i8x32 nibbles(Bytes p) {
#ifdef __AVX2__
  __m256i v = _mm256_broadcastsi128_si256(load<__m128i>(p));
  return (i8x32)_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 0, 4, 4)) & 15;
#else
  uint8_t v[32];
  for (int i = 0; i < 16; i++) v[i] = p[i] & 15, v[i + 16] = p[i] >> 4;
  return load<i8x32>(v);
#endif
}
// 32 bits, the fifth of each value
INLINE i8x32 fifth(Bytes p) {
#if defined(HAVE_AVX512)
  return (i8x32)_mm256_maskz_set1_epi8(load<uint32_t>(p), 16);
#elif defined(__AVX2__)
  const __m256i each =
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  __m256i v = _mm256_shuffle_epi8(_mm256_set1_epi32(load<int32_t>(p)), each);
  const __m256i bit = _mm256_set1_epi64x((int64_t)0x8040201008040201);
  return (i8x32)_mm256_cmpeq_epi8(_mm256_and_si256(v, bit), bit) & 16;
#else
  uint32_t mask = load<uint32_t>(p);
  uint8_t v[32];
  for (int i = 0; i < 32; i++) v[i] = mask >> i << 4 & 16;
  return load<i8x32>(v);
#endif
}
// N bytes -> N float32
template <class V, class Byte = uint8_t>
INLINE V bytes_to_f32(const void* p) {
#if defined(HAVE_AVX512)
  if constexpr (sizeof(V) == 64) {
    __m128i v = load<__m128i>(p);
    return (V)_mm512_cvtepi32_ps(std::is_signed<Byte>::value ? _mm512_cvtepi8_epi32(v)
                                                             : _mm512_cvtepu8_epi32(v));
  }
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
  V v;
  for (int i = 0; i < (int)(sizeof v / 4); i++) v[i] = ((const Byte*)p)[i];
  return v;
}
// 8 scales and 8 minima of 6 bits in 12 bytes
INLINE void scales_k4(Bytes b, f32x8& s, f32x8& m) {
  const uint32_t LOW2 = 0x03030303, LOW4 = 0x0f0f0f0f, LOW6 = 0x3f3f3f3f;
  uint32_t v[3], scales[2], minima[2];
  memcpy(v, b + 4, 12);
  scales[0] = v[0] & LOW6, scales[1] = (v[2] & LOW4) | (v[0] >> 6 & LOW2) << 4;
  minima[0] = v[1] & LOW6, minima[1] = (v[2] >> 4 & LOW4) | (v[1] >> 6 & LOW2) << 4;
  s = bytes_to_f32<f32x8>(scales) * half(b);
  m = bytes_to_f32<f32x8>(minima) * half(b + 2);
}

struct F32 : Dense<128> {
  INLINE f32 floats(Bytes b, int i) { return load<f32>(b + 4 * VL * i); }
};
struct F16 : Dense<64> {
  INLINE f32 floats(Bytes b, int i) { return load_f32((const float16*)b + VL * i); }
};
struct BF16 : Dense<64> {
  INLINE f32 floats(Bytes b, int i) {
    return (f32)(__builtin_convertvector(load<u16half>(b + 2 * VL * i), u32) << 16);
  }
};
struct Q4_0 : Block<32, 18, 32> {
  INLINE void scales(Bytes b, float& s, float&) { s = half(b); }
  INLINE i8x32 values(Bytes b, int) { return nibbles(b + 2) - 8; }
};
struct Q4_1 : Block<32, 20, 32, true> {
  INLINE void scales(Bytes b, float& s, float& m) { s = half(b), m = -half(b + 2); }
  INLINE i8x32 values(Bytes b, int) { return nibbles(b + 4); }
};
struct Q5_0 : Block<32, 22, 32> {
  INLINE void scales(Bytes b, float& s, float&) { s = half(b); }
  INLINE i8x32 values(Bytes b, int) { return (nibbles(b + 6) | fifth(b + 2)) - 16; }
};
struct Q5_1 : Block<32, 24, 32, true> {
  INLINE void scales(Bytes b, float& s, float& m) { s = half(b), m = -half(b + 2); }
  INLINE i8x32 values(Bytes b, int) { return nibbles(b + 8) | fifth(b + 4); }
};
struct Q8_0 : Block<32, 34, 32> {
  INLINE void scales(Bytes b, float& s, float&) { s = half(b); }
  INLINE i8x32 values(Bytes b, int) { return load<i8x32>(b + 2); }
};
struct Q2_K : Block<256, 84, 16, true> {
  INLINE void scales(Bytes b, f32x16& s, f32x16& m) {
    uint64_t v[2], low[2], high[2];
    memcpy(v, b, 16);
    for (int i = 0; i < 2; i++) {
      low[i] = v[i] & 0x0f0f0f0f0f0f0f0f;
      high[i] = v[i] >> 4 & 0x0f0f0f0f0f0f0f0f;
    }
    s = bytes_to_f32<f32x16>(low) * half(b + 80), m = bytes_to_f32<f32x16>(high) * half(b + 82);
  }
  INLINE i8x32 values(Bytes b, int i) { return bits(b + 16 + i / 4 * 32, i % 4 * 2, 3); }
};
struct Q3_K : Block<256, 110, 16> {
  INLINE void scales(Bytes b, f32x16& s, f32x16&) {
    const uint32_t LOW2 = 0x03030303, LOW4 = 0x0f0f0f0f;
    uint32_t v[3], scales[4];
    memcpy(v, b + 96, 12);
    for (int i = 0; i < 4; i++)
      scales[i] = (v[i % 2] >> i / 2 * 4 & LOW4) | (v[2] >> 2 * i & LOW2) << 4;
    s = (bytes_to_f32<f32x16>(scales) - 32) * half(b + 108);
  }
  INLINE i8x32 values(Bytes b, int i) {
    return (bits(b + 32 + i / 4 * 32, i % 4 * 2, 3) | bits(b, i, 1, 2)) - 4;
  }
};
struct Q4_K : Block<256, 144, 32, true> {
  INLINE void scales(Bytes b, f32x8& s, f32x8& m) { scales_k4(b, s, m); }
  INLINE i8x32 values(Bytes b, int i) { return bits(b + 16 + i / 2 * 32, i % 2 * 4, 15); }
};
struct Q5_K : Block<256, 176, 32, true> {
  INLINE void scales(Bytes b, f32x8& s, f32x8& m) { scales_k4(b, s, m); }
  INLINE i8x32 values(Bytes b, int i) {
    return bits(b + 48 + i / 2 * 32, i % 2 * 4, 15) | bits(b + 16, i, 1, 4);
  }
};
struct Q6_K : Block<256, 210, 16> {
  INLINE void scales(Bytes b, f32x16& s, f32x16&) {
    s = bytes_to_f32<f32x16, int8_t>(b + 192) * half(b + 208);
  }
  INLINE i8x32 values(Bytes b, int i) {
    return (bits(b + i / 4 * 64 + i % 2 * 32, i / 2 % 2 * 4, 15) |
            bits(b + 128 + i / 4 * 32, i % 4 * 2, 3, 4)) -
           32;
  }
};

// ---------------------------------------------------------------------------------------------
// gemv: up to 16 rows of x. Each is multiplied in the same order however many there are.

struct Free {
  void operator()(void* p) const { operator delete[](p, std::align_val_t(64)); }
};
template <class X>
using Array = std::unique_ptr<X[], Free>;
template <class X>
INLINE Array<X> array(int64_t n) {  // 64-byte aligned, uninitialised
  return Array<X>(new (std::align_val_t(64)) X[n]);
}

// Rows of x: as float32, or as integers q with a scale; sums of x are multiplied by minima.
// Scales and sums are per 16 numbers [0] and per 32 [1]: formats have groups of either.
struct Rows {
  const float* x;
  int64_t rows, K;
  Array<int16_t> q;
  Array<float> scales[2], sums[2];
  Rows(const float* from, int64_t n, int64_t columns, bool fast) : x(from), rows(n), K(columns) {
    q = array<int16_t>(fast ? rows * K : 0);
    for (int i = 0; i < 2; i++) {
      scales[i] = array<float>(rows * K / (16 << i));
      sums[i] = array<float>(rows * K / (16 << i));
    }
  }
};

// One row of x (K) -> sums of its groups; if fast, integers and scales as well
static void quantize_row(Rows& to, int64_t row, bool fast) {
  for (int64_t k = row * to.K; k < (row + 1) * to.K; k += 32) {
    f32 v[32 / VL], top = {}, total = {};
    for (int i = 0; i < 32 / VL; i++) {
      v[i] = load<f32>(to.x + k + VL * i);
      top = max(v[i] < 0 ? -v[i] : v[i], top), total += v[i];
    }
    float scale = 1;
    if (fast) {
      float limit = max(top), inverse = limit > 1e-30f ? 32767 / limit : 0;
      scale = limit / 32767 + 0 * sum(total);  // NaN if an x is
      for (int i = 0; i < 32 / VL; i++) {
        v[i] = v[i] * inverse + 0x1.8p23f - 0x1.8p23f;  // to the nearest integer
        i16half integers = __builtin_convertvector(__builtin_convertvector(v[i], i32), i16half);
        store(&to.q[k + VL * i], integers);
      }
    }
    float pair[2];
    for (int j = 0; j < 2; j++) {
      f32 half = {};
      for (int i = 0; i < 16 / VL; i++) half += v[j * (16 / VL) + i];
      pair[j] = sum(half) * scale;
      to.scales[0][k / 16 + j] = scale, to.sums[0][k / 16 + j] = pair[j];
    }
    to.scales[1][k / 32] = scale, to.sums[1][k / 32] = pair[0] + pair[1];
  }
}

// One row of W (K) times R rows of x, from `row` on -> y[0], y[stride], ...
template <class T, int R, bool FAST>
static void dot(Bytes w, const Rows& x, int64_t row, float* y, int64_t stride) {
  const int64_t K = x.K;
  f32 total[R][2] = {};
  if constexpr (T::DENSE) {
    for (int64_t k = 0; k < K; k += 32, w += T::SIZE)
      for (int i = 0; i < 32 / VL; i++) {
        f32 v = T::floats(w, i);
        for (int r = 0; r < R; r++)
          total[r][i % 2] += v * load<f32>(x.x + (row + r) * K + k + VL * i);
      }
    for (int r = 0; r < R; r++) y[r * stride] = sum(total[r][0] + total[r][1]);
  } else {
    typedef typename T::Scales Scales;
    const int PER32 = FAST ? 16 / VL : 32 / VL;  // vectors of 32 weights
    const int HALVES = T::GROUP == 16 && PER32 > 1 ? 2 : 1;
    const int WIDE = T::GROUP == 32;
    typedef typename std::conditional<FAST, int16_t, float>::type X;
    const X* from;
    if constexpr (FAST)
      from = x.q.get() + row * K;
    else
      from = x.x + row * K;
    const float* x_scales = x.scales[WIDE].get() + row * K / T::GROUP;
    const float* x_sums = x.sums[WIDE].get() + row * K / T::GROUP;
    Scales low[R] = {};
    alignas(64) float scales[R][16];
    for (int64_t k = 0; k < K; k += T::BLOCK, w += T::SIZE) {
      for (int j = 0; j < T::SIZE; j += 64)
        __builtin_prefetch(w + 32 * 256 * T::SIZE / T::BLOCK + j, 0, 2);
      Scales s, m;
      T::scales(w, s, m);
      for (int r = 0; r < R; r++) {
        int64_t group = (r * K + k) / T::GROUP;
        Scales scaled = FAST ? s * load<Scales>(x_scales + group) : s;
        store(scales[r], scaled);
        if (T::MINIMUM) low[r] += m * load<Scales>(x_sums + group);
      }
      // Reload scales from L1: broadcast loads are free, shuffles are not
      if (T::BLOCK == 256) asm volatile("" : : "r"(scales) : "memory");
      UNROLL(8)
      for (int i = 0; i < T::BLOCK / 32; i++) {
        i8x32 v = T::values(w, i);
        typename std::conditional<FAST, i16, f32>::type q[PER32];
        for (int p = 0; p < PER32; p++)
          if constexpr (FAST)
            q[p] = widen(v, p);
          else
            q[p] = widen_f32(v, p);
        for (int r = 0; r < R; r++) {
          const X* xi = from + r * K + k + 32 * i;
          for (int h = 0; h < HALVES; h++) {
            f32 part;
            if constexpr (FAST) {
              i32 products = {};
              for (int p = h * PER32 / HALVES; p < (h + 1) * PER32 / HALVES; p++)
                products = dpwssd(products, q[p], load<i16>(xi + 2 * VL * p));
              part = to_f32(products);
            } else {
              part = f32{};
              for (int p = h * PER32 / HALVES; p < (h + 1) * PER32 / HALVES; p++)
                part += q[p] * load<f32>(xi + VL * p);
            }
            f32 scale;
#ifdef HAVE_AVX512
            if constexpr (T::GROUP == 16 && HALVES == 1) {  // one scale for each half of the vector
              const __m512i lanes = _mm512_add_epi32(
                  _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                  _mm512_set1_epi32(2 * i));
              scale = (f32)_mm512_permutexvar_ps(lanes, load<__m512>(scales[r]));
            } else
#endif
              scale = splat(scales[r][HALVES * i + h]);
            total[r][(i + h) % 2] += part * scale;
          }
        }
      }
    }
    for (int r = 0; r < R; r++) y[r * stride] = sum(total[r][0] + total[r][1]) - sum(low[r]);
  }
}

// ---------------------------------------------------------------------------------------------
// gemm, as in Goto and BLIS: x is packed in panels of MR rows, W is unpacked tile by tile. The
// microkernel multiplies NR rows of W by a panel; words of 32 bits hold one float32, two bfloat16
// or two int16.

constexpr int64_t V = 2, MR = V * VL, KC = 256, STRIP = 24, MC = 16 * MR;

struct Float32 {
  typedef f32 Sum;
  enum { PER_WORD = 1 };
  INLINE f32 madd(f32 total, Bytes x, Bytes w) { return total + load<f32>(x) * load<float>(w); }
};
#ifdef __AVX512BF16__
struct BFloat16 {
  typedef f32 Sum;
  enum { PER_WORD = 2 };
  INLINE f32 madd(f32 total, Bytes x, Bytes w) {
    return (f32)_mm512_dpbf16_ps((__m512)total, (__m512bh)load<__m512i>(x),
                                 (__m512bh)_mm512_set1_epi32(load<int32_t>(w)));
  }
};
#endif
struct Int16 {
  typedef i32 Sum;
  enum { PER_WORD = 2 };
  INLINE i32 madd(i32 total, Bytes x, Bytes w) {
    return dpwssd(total, load<i16>(x), (i16)(load<int32_t>(w) - i32{}));
  }
};
#if defined(__AVX512BF16__) && defined(HAVE_AVX512)
typedef BFloat16 Fast;
#elif defined(HAVE_VNNI)
typedef Int16 Fast;
#else
typedef Float32 Fast;
#endif

// sums (NR, MR) += w (NR, count) . x (count, MR), all words; rows of w are ROW words apart, columns
// `step`
template <class E, int ROW>
INLINE void microkernel(typename E::Sum (&sums)[NR][V], const void* w, int64_t step, const void* x,
                        int64_t count) {
  Bytes a = (Bytes)w, b = (Bytes)x;
  for (int64_t k = 0; k < count; k++, a += 4 * step, b += 4 * MR) {
    UNROLL(12)
    for (int n = 0; n < NR; n++) {
      UNROLL(2)
      for (int i = 0; i < V; i++) sums[n][i] = E::madd(sums[n][i], b + 4 * VL * i, a + 4 * n * ROW);
    }
  }
}

// `count` weights (KC, or less at the end of a row) -> words; Int16: with scales and minima
template <class T, class E>
static void unpack(Bytes w, int64_t count, void* words, float* scales, float* minima) {
  for (int64_t k = 0; k < count; k += T::BLOCK, w += T::SIZE) {
    if constexpr (T::DENSE) {
      for (int i = 0; i < 32 / VL; i++) {
        if constexpr (E::PER_WORD == 1)
          store((float*)words + k + VL * i, T::floats(w, i));
        else
          store((uint16_t*)words + k + VL * i, to_bfloat16(T::floats(w, i)));
      }
    } else {
      const int G = T::BLOCK / T::GROUP;
      typename T::Scales vectors[2];
      T::scales(w, vectors[0], vectors[1]);
      float s[G], m[G] = {};
      memcpy(s, &vectors[0], sizeof s);
      if (T::MINIMUM) memcpy(m, &vectors[1], sizeof m);
      if (std::is_same<E, Int16>::value) {
        memcpy(scales + k / T::GROUP, s, sizeof s), memcpy(minima + k / T::GROUP, m, sizeof m);
      }
      UNROLL(8)
      for (int i = 0; i < T::BLOCK / 32; i++) {
        i8x32 v = T::values(w, i);
        if constexpr (std::is_same<E, Int16>::value) {
          for (int p = 0; p < 16 / VL; p++)
            store((int16_t*)words + k + 32 * i + 2 * VL * p, widen(v, p));
        } else {
          for (int p = 0; p < 32 / VL; p++) {
            int group = (32 * i + VL * p) / T::GROUP;
            f32 f = widen_f32(v, p) * s[group];
            if (T::MINIMUM) f -= splat(m[group]);
            int64_t at = k + 32 * i + VL * p;
            if constexpr (E::PER_WORD == 1)
              store((float*)words + at, f);
            else
              store((uint16_t*)words + at, to_bfloat16(f));
          }
        }
      }
    }
  }
}
#if !defined(__AVX512BF16__) || !defined(HAVE_AVX512)
struct BFloat16 {
  enum { PER_WORD = 2 };
};
#endif
// ---------------------------------------------------------------------------------------------
// The table of formats

typedef void (*Dot)(Bytes w, const Rows& x, int64_t row, float* y, int64_t stride);
typedef void (*Unpack)(Bytes w, int64_t count, void* words, float* scales, float* minima);
struct Format {
  int64_t type, block, size, group;
  bool dense, minimum;
  Dot dot[2][3];  // exact and fast; for 1, 2 and 4 rows
  Unpack floats, bfloat16, fast;
};
template <class T>
static constexpr Format format(int64_t type) {
  typedef
      typename std::conditional<T::DENSE && std::is_same<Fast, Int16>::value, Float32, Fast>::type
          E;
  constexpr bool fast = !T::DENSE;
  return {type,
          T::BLOCK,
          T::SIZE,
          T::GROUP,
          T::DENSE,
          T::MINIMUM,
          {{dot<T, 1, false>, dot<T, 2, false>, dot<T, 4, false>},
           {dot<T, 1, fast>, dot<T, 2, fast>, dot<T, 4, fast>}},
          unpack<T, Float32>,
          unpack<T, BFloat16>,
          unpack<T, E>};
}
static const Format FORMATS[] = {
    format<F32>(0),   format<F16>(1),   format<Q4_0>(2),  format<Q4_1>(3),  format<Q5_0>(6),
    format<Q5_1>(7),  format<Q8_0>(8),  format<Q2_K>(10), format<Q3_K>(11), format<Q4_K>(12),
    format<Q5_K>(13), format<Q6_K>(14), format<BF16>(30),
};
static const Format* find_format(int64_t type, int64_t K) {  // null if there is none
  for (const Format& f : FORMATS)
    if (f.type == type && K % f.block == 0) return &f;
  return nullptr;
}

// One matrix of a product: y (rows, N) = x (rows, K) W^T
struct Matrix {
  const Format* format;
  Bytes w;
  int64_t N;
  float* y;
};

// Several matrices times the same rows of x, in one parallel loop
static void gemv(const Matrix* matrices, int count, Rows& x, bool fast) {
  int64_t total = 0;
  for (int i = 0; i < count; i++) total += matrices[i].N;
  for (int64_t r = 0; r < x.rows; r++) quantize_row(x, r, fast);
#pragma omp parallel for schedule(guided, 16) if (total * x.K > 1 << 16)  // long runs of memory
  for (int64_t i = 0; i < total; i++) {
    const Matrix* m = matrices;
    int64_t n = i, r = 0;
    while (n >= m->N) n -= m++->N;
    const Format* f = m->format;
    Bytes w = m->w + n * (x.K / f->block * f->size);
    for (; r + 4 <= x.rows; r += 4) f->dot[fast][2](w, x, r, m->y + r * m->N + n, m->N);
    if (x.rows - r >= 2) f->dot[fast][1](w, x, r, m->y + r * m->N + n, m->N), r += 2;
    if (x.rows - r >= 1) f->dot[fast][0](w, x, r, m->y + r * m->N + n, m->N);
  }
}

// x (rows, K) in panels of MR rows: words (K / PER_WORD, MR); Int16: scales and sums (groups, MR)
template <class E>
struct Panels {
  int64_t rows, K, panels;
  Array<uint32_t> words;
  Array<float> scales, sums[2];
  explicit Panels(Rows& x) : rows(x.rows), K(x.K), panels((rows + MR - 1) / MR) {
    const bool quantized = std::is_same<E, Int16>::value;
    words = array<uint32_t>(panels * MR * K / E::PER_WORD);
    scales = array<float>(quantized ? panels * MR * K / 32 : 0);
    for (int i = 0; i < 2; i++) sums[i] = array<float>(quantized ? panels * MR * K / (16 << i) : 0);
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < panels; p++) {
      for (int64_t i = 0; i < MR; i++) {
        int64_t r = p * MR + i < rows ? p * MR + i : rows - 1;  // the last one fills the panel
        if (quantized && p * MR + i < rows) quantize_row(x, r, true);
        for (int64_t k = 0; k < K; k += 32) {
          const float* f = x.x + r * K + k;
          uint32_t line[32 / E::PER_WORD], *to = &words[(p * K + k) * MR / E::PER_WORD + i];
          if (E::PER_WORD == 1)
            memcpy(line, f, sizeof line);
          else if (quantized)
            memcpy(line, &x.q[r * K + k], sizeof line);
          else
            for (int j = 0; j < 32 / VL; j++)
              store((uint16_t*)line + VL * j, to_bfloat16(load<f32>(f + VL * j)));
          for (int j = 0; j < 32 / E::PER_WORD; j++) to[j * MR] = line[j];
        }
        for (int64_t g = 0; quantized && g < K / 32; g++) {
          scales[(p * K / 32 + g) * MR + i] = x.scales[1][r * K / 32 + g];
          sums[1][(p * K / 32 + g) * MR + i] = x.sums[1][r * K / 32 + g];
          for (int j = 0; j < 2; j++)
            sums[0][(p * K / 16 + 2 * g + j) * MR + i] = x.sums[0][r * K / 16 + 2 * g + j];
        }
      }
    }
  }
};

// total (NR, MR) += w (NR, k) . x (k, MR), of KC columns; Int16: group by group
template <class E>
INLINE void tile(float* total, const uint32_t* w, const float* scales, const float* minima,
                 const Panels<E>& x, int64_t panel, int64_t k, int64_t count, const Format* f) {
  const int ROW = KC / E::PER_WORD;
  const uint32_t* words = &x.words[(panel * x.K + k) * MR / E::PER_WORD];
  if constexpr (!std::is_same<E, Int16>::value) {
    f32 sums[NR][V] = {};
    microkernel<E, ROW>(sums, w, 1, words, count / E::PER_WORD);
    for (int n = 0; n < NR; n++)
      for (int i = 0; i < V; i++) {
        float* to = total + n * MR + i * VL;
        store(to, load<f32>(to) + sums[n][i]);
      }
  } else {
    int64_t group = f->group, G = KC / 16;
    for (int64_t g = 0; g < count / group; g++) {
      i32 sums[NR][V] = {};
      microkernel<E, ROW>(sums, w + g * group / 2, 1, words + g * group / 2 * MR, group / 2);
      const float* xs = &x.scales[(panel * x.K + k + g * group) / 32 * MR];
      const float* xm = &x.sums[group == 32][(panel * x.K + k + g * group) / group * MR];
      UNROLL(12)
      for (int n = 0; n < NR; n++) {
        UNROLL(2)
        for (int i = 0; i < V; i++) {
          float* to = total + n * MR + i * VL;
          f32 sum = load<f32>(to);
          sum += to_f32(sums[n][i]) * scales[n * G + g] * load<f32>(xs + i * VL);
          if (f->minimum) sum -= load<f32>(xm + i * VL) * minima[n * G + g];
          store(to, sum);
        }
      }
    }
  }
}

template <class E>
static void gemm(const Matrix& m, const Panels<E>& x, Unpack unpack) {
  const Format* f = m.format;
  const int64_t K = x.K, row = K / f->block * f->size;
#pragma omp parallel for schedule(dynamic)
  for (int64_t n = 0; n < m.N; n += STRIP) {
    int64_t high = m.N - n < STRIP ? m.N - n : STRIP;
    alignas(64) uint32_t w[STRIP][KC / E::PER_WORD] = {};
    alignas(64) float scales[STRIP][KC / 16] = {}, minima[STRIP][KC / 16] = {};
    alignas(64) float total[MC / MR][STRIP][MR];
    for (int64_t first = 0; first < x.panels; first += MC / MR) {
      int64_t panels = x.panels - first < MC / MR ? x.panels - first : MC / MR;
      memset(total, 0, panels * sizeof total[0]);
      for (int64_t k = 0; k < K; k += KC) {
        int64_t count = K - k < KC ? K - k : KC;
        for (int64_t i = 0; i < high; i++)
          unpack(m.w + (n + i) * row + k / f->block * f->size, count, w[i], scales[i], minima[i]);
        for (int64_t p = 0; p < panels; p++)
          for (int64_t i = 0; i < high; i += NR)
            tile<E>(total[p][i], w[i], scales[i], minima[i], x, first + p, k, count, f);
      }
      for (int64_t r = first * MR; r < x.rows && r < (first + panels) * MR; r++)
        for (int64_t i = 0; i < high; i++) m.y[r * m.N + n + i] = total[r / MR - first][i][r % MR];
    }
  }
}

// Each of the matrices times x (rows, K)
static void multiply(const Matrix* matrices, int count, const float* x, int64_t rows, int64_t K,
                     bool fast) {
  if (rows <= 16) {
    Rows vectors(x, rows, K, fast);
    gemv(matrices, count, vectors, fast);
    return;
  }
  Rows vectors(x, rows, K, fast && std::is_same<Fast, Int16>::value);
  std::unique_ptr<Panels<Float32>> exact_panels;
  std::unique_ptr<Panels<Fast>> fast_panels;
  for (int i = 0; i < count; i++) {
    const Matrix& m = matrices[i];
    if (fast && (!m.format->dense || !std::is_same<Fast, Int16>::value)) {
      if (!fast_panels) fast_panels.reset(new Panels<Fast>(vectors));
      gemm(m, *fast_panels, m.format->fast);
    } else {
      if (!exact_panels) exact_panels.reset(new Panels<Float32>(vectors));
      gemm(m, *exact_panels, m.format->floats);
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Layers: what Block.forward does

INLINE f32 exp(f32 x) {  // 2e-7 relative: 2^n e^r
  x = x < -87 ? splat(-87) : x > 88 ? splat(88) : x;
  f32 n = x * 1.44269504f + 0x1.8p23f - 0x1.8p23f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32 p = splat(1.f / 720);
  const float terms[] = {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f};
  for (float c : terms) p = p * r + c;
  return p * (f32)((__builtin_convertvector(n, i32) + 127) << 23);
}

// RMSNorm: x (rows, C) -> y (rows, C)
static void norm(const float* x, const float* w, double eps, float* y, int64_t rows, int64_t C) {
#pragma omp parallel for if (rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    f32 squares = {};
    for (int64_t i = r * C; i < (r + 1) * C; i += VL)
      squares += load<f32>(x + i) * load<f32>(x + i);
    float scale = 1 / std::sqrt(sum(squares) / (float)C + (float)eps);
    for (int64_t i = 0; i < C; i += VL)
      store(y + r * C + i, load<f32>(x + r * C + i) * scale * load<f32>(w + i));
  }
}
// One head (D): pairs (2i, 2i + 1) are turned by their angle
static void rotate(const float* x, float* y, const float* cos, const float* sin, int64_t D) {
  for (int64_t i = 0; i < D / 2; i++) {
    float even = x[2 * i], odd = x[2 * i + 1];
    y[2 * i] = even * cos[i] - odd * sin[i], y[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

// Attention of one token: J heads q (J, D) that share keys and values (length, D) -> y (J, D).
// p (J, length rounded up to VL) is scratch memory.
template <int J, class E>
static void attend(const float* q, const E* keys, const E* values, float* y, float* p,
                   int64_t length, int64_t D) {
  int64_t room = (length + VL - 1) / VL * VL;
  float top[J], inverse[J], scale = 1 / std::sqrt((float)D);
  for (float& score : top) score = -INFINITY;
  for (int64_t i = 0; i < J * room; i++) p[i] = -INFINITY;
  for (int64_t s = 0; s < length; s++) {
    f32 dot[J] = {};
    for (int64_t d = 0; d < D; d += VL) {
      f32 key = load_f32(keys + s * D + d);
      UNROLL(4)
      for (int j = 0; j < J; j++) dot[j] += load<f32>(q + j * D + d) * key;
    }
    for (int j = 0; j < J; j++) {
      float score = p[j * room + s] = sum(dot[j]) * scale;
      top[j] = score > top[j] ? score : top[j];
    }
  }
  for (int j = 0; j < J; j++) {
    f32 total = {};
    for (int64_t s = j * room; s < (j + 1) * room; s += VL) {
      f32 e = exp(load<f32>(p + s) - top[j]);
      store(p + s, e), total += e;
    }
    inverse[j] = 1 / sum(total);
  }
  for (int64_t from = 0; from < D; from += 2 * VL) {
    f32 mix[J][2] = {};
    int64_t second = from + VL < D ? VL : 0;
    for (int64_t s = 0; s < length; s++) {
      f32 v0 = load_f32(values + s * D + from), v1 = load_f32(values + s * D + from + second);
      UNROLL(4)
      for (int j = 0; j < J; j++) {
        mix[j][0] += v0 * p[j * room + s];
        mix[j][1] += v1 * p[j * room + s];
      }
    }
    for (int j = 0; j < J; j++) {
      store(y + j * D + from + second, mix[j][1] * inverse[j]);
      store(y + j * D + from, mix[j][0] * inverse[j]);
    }
  }
}
// Attention of up to MR tokens of one head, `row` apart: the i-th sees `length` + i keys. p has
// room for (D + keys + NR) * MR + NR * KC numbers.
template <class E>
static void attend_many(const float* q, const E* keys, const E* values, float* y, float* queries,
                        int64_t length, int64_t D, int64_t tokens, int64_t row) {
  int64_t count = length + tokens - 1;
  float *p = queries + D * MR, *w = p + (count + NR) * MR;
  f32 top[V], total[V] = {};
  i32 lane = {};
  for (int i = 0; i < VL; i++) lane[i] = i;
  float scale = 1 / std::sqrt((float)D);
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < MR; i++) queries[d * MR + i] = i < tokens ? q[i * row + d] * scale : 0;
  for (int i = 0; i < V; i++) top[i] = splat(-INFINITY);
  for (int64_t s = 0; s < count; s += NR) {
    f32 sums[NR][V] = {};
    for (int64_t d = 0; d < D; d += KC) {
      int64_t columns = D - d < KC ? D - d : KC;
      for (int64_t n = 0; n < NR; n++) {
        const E* key = keys + (s + n < count ? s + n : s) * D + d;
        for (int64_t i = 0; i < columns; i += VL) store(w + n * KC + i, load_f32(key + i));
      }
      microkernel<Float32, KC>(sums, w, 1, queries + d * MR, columns);
    }
    for (int n = 0; n < NR; n++)
      for (int i = 0; i < V; i++) {
        f32 score = sums[n][i];
        score = lane + (int)(VL * i + length) > (int)s + n ? score : splat(-INFINITY);
        top[i] = max(score, top[i]);
        store(p + (s + n) * MR + VL * i, score);
      }
  }
  for (int64_t s = 0; s < count; s++)
    for (int i = 0; i < V; i++) {
      f32 e = exp(load<f32>(p + s * MR + VL * i) - top[i]);
      store(p + s * MR + VL * i, e), total[i] += e;
    }
  for (int64_t d = 0; d < D; d += NR) {
    int64_t columns = D - d < NR ? D - d : NR;
    f32 sums[NR][V] = {};
    for (int64_t s = 0; s < count; s += KC) {
      int64_t rows = count - s < KC ? count - s : KC;
      for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < 16; n += VL)
          if (d + n < D) store(w + i * 16 + n, load_f32(values + (s + i) * D + d + n));
      microkernel<Float32, 1>(sums, w, 16, p + s * MR, rows);
    }
    for (int64_t n = 0; n < columns; n++)
      for (int64_t i = 0; i < tokens; i++)
        y[i * row + d + n] = ((float*)sums[n])[i] / ((float*)total)[i];
  }
}

struct Linear {  // this and Layer: as Python packs them
  Bytes blocks;
  int64_t type, N, K;
};
struct Layer {
  Linear q, k, v, o, gate, up, down;
  const float *norm1, *norm2;
  double eps;
  int64_t head_dim;
};
static Matrix matrix(const Linear& l, float* y) {
  return {find_format(l.type, l.K), l.blocks, l.N, y};
}

// x (B, T, C) += attention, += MLP; the cache (B, G, room, D) holds `pos` tokens
template <class E>
static int run_layer(const Layer& l, bool fast, float* x, const float* cos, const float* sin,
                     E* keys, E* values, int64_t B, int64_t T, int64_t pos, int64_t room) {
  const int64_t D = l.head_dim, C = l.q.K, H = l.q.N / D, G = l.k.N / D, rows = B * T;
  const int64_t wide = l.gate.N;
  auto h = array<float>(rows * C), q = array<float>(rows * H * D), y = array<float>(rows * H * D);
  auto k = array<float>(rows * G * D), v = array<float>(rows * G * D);
  norm(x, l.norm1, l.eps, h.get(), rows, C);
  Matrix qkv[] = {matrix(l.q, q.get()), matrix(l.k, k.get()), matrix(l.v, v.get())};
  multiply(qkv, 3, h.get(), rows, C, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows; i++) {
    const float *c = cos + i % T * (D / 2), *s = sin + i % T * (D / 2);
    for (int64_t j = 0; j < H; j++) rotate(&q[(i * H + j) * D], &q[(i * H + j) * D], c, s, D);
    for (int64_t j = 0; j < G; j++) {
      float *key = &k[(i * G + j) * D], *value = &v[(i * G + j) * D];
      int64_t at = ((i / T * G + j) * room + pos + i % T) * D;
      rotate(key, key, c, s, D);
      for (int64_t d = 0; d < D; d += VL) {
        store_f32(keys + at + d, load<f32>(key + d));
        store_f32(values + at + d, load<f32>(value + d));
      }
    }
  }
  int64_t step = T > 16 ? MR : 1, steps = (T + step - 1) / step;
  int64_t heads = step == 1 && H / G % 4 == 0 ? 4 : 1;  // that are handled together
  int64_t scratch = step == 1 ? heads * (pos + T + VL) : (D + pos + T + NR) * MR + 16 * KC;
  int failed = 0;
#pragma omp parallel if (rows * pos > 64)
  {
    std::unique_ptr<float[]> p(new (std::nothrow) float[scratch]);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < B * H / heads * steps; i++) {
      int64_t b = i / steps / (H / heads), j = i / steps % (H / heads) * heads,
              t = i % steps * step;
      int64_t at = (b * G + j / (H / G)) * room * D, from = ((b * T + t) * H + j) * D;
      int64_t tokens = T - t < step ? T - t : step, length = pos + t + 1;
      const E *ks = keys + at, *vs = values + at;
      if (!p) {
#pragma omp atomic write
        failed = 1;
      } else if (step > 1)
        attend_many(&q[from], ks, vs, &y[from], p.get(), length, D, tokens, H * D);
      else if (heads == 4)
        attend<4>(&q[from], ks, vs, &y[from], p.get(), length, D);
      else
        attend<1>(&q[from], ks, vs, &y[from], p.get(), length, D);
    }
  }
  if (failed) return 1;
  Matrix o = matrix(l.o, h.get());
  multiply(&o, 1, y.get(), rows, H * D, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows * C; i += VL) store(x + i, load<f32>(x + i) + load<f32>(&h[i]));
  norm(x, l.norm2, l.eps, h.get(), rows, C);
  auto gate = array<float>(rows * wide), up = array<float>(rows * wide);
  Matrix gate_up[] = {matrix(l.gate, gate.get()), matrix(l.up, up.get())};
  multiply(gate_up, 2, h.get(), rows, C, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows * wide; i += VL) {
    f32 g = load<f32>(&gate[i]);
    store(&gate[i], g / (1 + exp(-g)) * load<f32>(&up[i]));
  }
  Matrix down = matrix(l.down, h.get());
  multiply(&down, 1, gate.get(), rows, wide, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows * C; i += VL) store(x + i, load<f32>(x + i) + load<f32>(&h[i]));
  return 0;
}

// ---------------------------------------------------------------------------------------------
// What Python calls. 0: done; 1: out of memory; 2: a type that is not supported, or K is no
// multiple of its block

extern "C" {
int32_t kernels_version() { return 1; }

int32_t kernels_features() {  // bit 0: OpenMP; bit 1: torch's own product has AMX
  int32_t features = 0;
#ifdef _OPENMP
  features |= 1;
#endif
#ifdef __AMX_BF16__
  features |= 2;
#endif
  return features;
}

int32_t linear(int32_t type, int32_t fast, const uint8_t* blocks, const float* x, float* y,
               int64_t rows, int64_t N, int64_t K) {
  Matrix m = {find_format(type, K), blocks, N, y};
  if (!m.format) return 2;
  try {
    multiply(&m, 1, x, rows, K, fast);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

int32_t dequantize(int32_t type, int32_t bfloat16, const uint8_t* blocks, void* y, int64_t count) {
  const Format* f = find_format(type, count);
  if (!f) return 2;
#pragma omp parallel for if (count > 1 << 16)
  for (int64_t k = 0; k < count; k += KC) {
    int64_t size = count - k < KC ? count - k : KC;
    char* to = (char*)y + k * (bfloat16 ? 2 : 4);
    (bfloat16 ? f->bfloat16 : f->floats)(blocks + k / f->block * f->size, size, to, nullptr,
                                         nullptr);
  }
  return 0;
}

int32_t run_layers(const Layer* layers, int64_t count, int32_t fast, float* x, const float* cos,
                   const float* sin, void* keys, void* values, int32_t half, int64_t B, int64_t T,
                   int64_t pos, int64_t room) {
  for (int64_t i = 0; i < count; i++)
    for (const Linear* l = &layers[i].q; l <= &layers[i].down; l++)
      if (!find_format(l->type, l->K)) return 2;
  try {
    for (int64_t i = 0; i < count; i++) {
      const Layer& l = layers[i];
      int64_t at = i * B * l.k.N * room;
      int error = half ? run_layer(l, fast, x, cos, sin, (float16*)keys + at, (float16*)values + at,
                                   B, T, pos, room)
                       : run_layer(l, fast, x, cos, sin, (float*)keys + at, (float*)values + at, B,
                                   T, pos, room);
      if (error) return error;
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
}
