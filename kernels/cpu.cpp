// The CPU kernels of llama2.py: products with matrices that stay in the format of the file (ggml's
// blocks of quantised weights), and whole layers made of them.
//
//   linear       y = x W^T: gemv up to 16 rows of x (streams W once), gemm with packing above
//   dequantize   blocks -> float32 or bfloat16
//   run_layers   what Block.forward does, for several layers in one call
//
// Two precisions. Exact: float32 throughout. Fast: x is rounded to int16 with a scale for each 32
// numbers, for gemm each 128 (3e-5 relative; gemm of Q6_K 6e-5), since integers multiply faster.
// Dense weights are float32 in both.
// GNU vector types compile to what the CPU has (AVX-512, AVX2, NEON, ...); intrinsics stand where
// compilers do not find the one instruction.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifndef _OPENMP
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are only passed to what is inlined
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 12")
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC 12's own headers (its bug 105593)
#endif
#define INLINE static inline __attribute__((always_inline))

// ---- Vectors ------------------------------------------------------------------------------------

// VL: 32-bit lanes of a vector; NR: rows of W in a tile of gemm; MM(add_ps): the intrinsic
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define AVX512
#define MM(name) _mm512_##name
constexpr int VL = 16, NR = 12;
typedef __m512 Mf;
typedef __m512i Mi;
typedef __m256i Mhalf;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define AVX2
#define MM(name) _mm256_##name
constexpr int VL = 8, NR = 6;
typedef __m256 Mf;
typedef __m256i Mi;
typedef __m128i Mhalf;
#else
constexpr int VL = 4, NR = 6;
#endif
#define VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef const uint8_t *Bytes;
typedef float f32 VECTOR(4 * VL);
typedef int32_t i32 VECTOR(4 * VL);
typedef uint32_t u32 VECTOR(4 * VL);
typedef int16_t i16 VECTOR(4 * VL);
typedef int16_t i16_half VECTOR(2 * VL);
typedef uint16_t u16_half VECTOR(2 * VL);
typedef float f32x8 VECTOR(32);  // scales of a block of 256
typedef int8_t i8x16 VECTOR(16);
typedef int8_t i8x32 VECTOR(32);  // 32 weights, the unit in which formats are unpacked
template <class V> constexpr bool is_float = std::is_same<V, f32>::value;
template <class V> constexpr bool is_int16 = std::is_same<V, i16>::value;
template <class X>
using Sum = typename std::conditional<is_int16<X>, i32, f32>::type;  // of products

template <class V> INLINE V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void store(void *p, const V &v) { memcpy(p, &v, sizeof v); }
template <class V> INLINE V splat(const void *p) { return (V)(load<uint32_t>(p) - u32{}); }
INLINE f32 splat(float f) { return f - f32{}; }
INLINE f32 to_f32(f32 v) { return v; }
INLINE f32 to_f32(i32 v) { return __builtin_convertvector(v, f32); }
INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }
INLINE float sum(f32 v) {
  float lanes[VL];
  store(lanes, v);
  UNROLL
  for (int n = VL / 2; n; n /= 2) UNROLL
  for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
  return lanes[0];
}

// total + a * b, fused for certain where it can be: bits must not depend on the compiler's choice;
// integers: 2i-th and 2i+1-th product are added to the i-th total
INLINE f32 madd(f32 total, f32 a, f32 b) {
#ifdef MM
  return (f32)MM(fmadd_ps)((Mf)a, (Mf)b, (Mf)total);
#else
  return total + a * b;
#endif
}
INLINE f32x8 madd8(f32x8 total, f32x8 a, f32x8 b) {
#if defined(AVX512) || defined(AVX2)
  return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)total);
#else
  return total + a * b;
#endif
}
INLINE float madd(float total, float a, float b) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, total);
#else
  return total + a * b;
#endif
}
INLINE f32 multiply(f32 a, f32 b) { return a * b; }
INLINE i32 madd(i32 total, i16 a, i16 b) {
#if defined(AVX512) && defined(__AVX512VNNI__)
  return (i32)_mm512_dpwssd_epi32((Mi)total, (Mi)a, (Mi)b);
#elif defined(AVX2) && defined(__AVXVNNI__)
  return (i32)_mm256_dpwssd_avx_epi32((Mi)total, (Mi)a, (Mi)b);
#elif defined(MM)
  return total + (i32)MM(madd_epi16)((Mi)a, (Mi)b);
#else  // other pairs: a number and the one half a vector away
  auto low = [](i16 v) { return __builtin_convertvector(load<i16_half>(&v), i32); };
  auto high = [](i16 v) {
    return __builtin_convertvector(load<i16_half>((Bytes)&v + 2 * VL), i32);
  };
  return total + low(a) * low(b) + high(a) * high(b);
#endif
}

INLINE i32 multiply(i16 a, i16 b) {
#ifdef MM  // GCC does not see that adding to zero is this
  return (i32)MM(madd_epi16)((Mi)a, (Mi)b);
#else
  return madd(i32{}, a, b);
#endif
}

// As many bytes as I has lanes -> int16 or int32
template <class I, bool SIGNED> INLINE I widen(const void *p) {
#ifdef MM
  if constexpr (is_int16<I>) {
    const Mhalf v = load<Mhalf>(p);
    return (I)(SIGNED ? MM(cvtepi8_epi16)(v) : MM(cvtepu8_epi16)(v));
  } else {
    const __m128i v = VL == 16 ? load<__m128i>(p) : _mm_loadl_epi64((__m128i *)p);
    return (I)(SIGNED ? MM(cvtepi8_epi32)(v) : MM(cvtepu8_epi32)(v));
  }
#else
  typedef typename std::conditional<SIGNED, int8_t, uint8_t>::type Byte;
  typedef Byte Part VECTOR(is_int16<I> ? 2 * VL : VL);
  return __builtin_convertvector(load<Part>(p), I);
#endif
}

struct float16 {
  uint16_t bits;
};
// One float16 -> float by table: 2 loads, where conversion takes 4 instructions and a broadcast
static const struct HalfTable {
  float f[65536];
  HalfTable() {
    for (int i = 0; i < 65536; i++) {
      int exponent = i >> 10 & 31, fraction = i & 1023;
      float size = exponent == 0    ? std::ldexp((float)fraction, -24)
                   : exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : std::ldexp((float)(1024 + fraction), exponent - 25);
      f[i] = i & 0x8000 ? -size : size;
    }
  }
} half_table;
INLINE float half(const void *p) { return half_table.f[load<uint16_t>(p)]; }

// VL numbers of memory, float32 or float16 -> f32, and back, rounded to nearest even
INLINE f32 load_f32(const float *p) { return load<f32>(p); }
INLINE f32 load_f32(const float16 *p) {
#ifdef MM
  return (f32)MM(cvtph_ps)(load<Mhalf>(p));
#else
  f32 v;
  for (int i = 0; i < VL; i++) v[i] = half(p + i);
  return v;
#endif
}
INLINE void store_f32(float *p, f32 v) { store(p, v); }
INLINE void store_f32(float16 *p, f32 v) {
#ifdef MM
  store(p, MM(cvtps_ph)((Mf)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < VL; i++) {
    float f = v[i], shifted = std::fabs(f) + .5f;  // to where a unit is the smallest float16
    uint32_t bits = load<uint32_t>(&f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    bits = size > 0x7f800000    ? 0x7e00
           : size >= 0x47800000 ? 0x7c00
           : size < 0x38800000  ? load<uint32_t>(&shifted) - 0x3f000000
                                : (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    p[i].bits = (uint16_t)(sign | bits);
  }
#endif
}
INLINE void store_bfloat16(void *p, f32 v) {
#ifdef __AVX512BF16__
  store(p, _mm512_cvtneps_pbh((__m512)v));
#else
  u32 bits = (u32)v, nearest = bits + 0x7fff + (bits >> 16 & 1);
  nearest = (bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : nearest;  // NaN stays NaN
  store(p, __builtin_convertvector(nearest >> 16, u16_half));
#endif
}

// ---- Formats: weight = scale * (value - ZERO) - minimum, each shared by a group -----------------

template <int BLOCK_, int SIZE_, int GROUP_, bool MINIMUM_ = false> struct Block {
  enum { BLOCK = BLOCK_, SIZE = SIZE_, GROUP = GROUP_ };  // weights, bytes, weights
  enum { GROUPS = BLOCK / GROUP, MINIMUM = MINIMUM_, SPAN = BLOCK == 256 ? 128 : 32 };
  enum { DENSE = 0, MAX = 128, HIGH_BITS = 0, ZERO = 0 };
};
// K types: a group's scale and minimum are integers of 8 bits times one float16 of the block, found
// at bytes D and DMIN; no value times its scale is more than MAX.
template <int MAX_, int SIZE_, int GROUP_, int D_, int DMIN_ = -1>
struct KBlock : Block<256, SIZE_, GROUP_, (DMIN_ >= 0)> {
  enum { D = D_, DMIN = DMIN_, MAX = MAX_ };
};
template <int SIZE_> struct Dense : Block<32, SIZE_, 32> {
  enum { DENSE = 1 };
  INLINE void scales(Bytes, float *s, float *) { *s = 1; }
};

// Bits `mask` << from of bytes, one for each lane of I, moved to bit `to`
template <class I> INLINE I bits(Bytes p, int from, int mask, int to = 0) {
#ifdef AVX2
  if constexpr (std::is_same<I, i8x32>::value) {
    __m256i v = load<__m256i>(p);
    v = from > to ? _mm256_srli_epi16(v, from - to) : _mm256_slli_epi16(v, to - from);
    return (i8x32)v & (int8_t)(mask << to);
  }
#endif
  I v = widen<I, false>(p);
  v = from > to ? v >> (from - to) : v << (to - from);
  auto kept = v[0];
  kept = mask << to;
  return to == 0 && 255 >> from <= mask ? v : v & kept;
}
// Of 32 values, those from `at` on: 16 bytes hold values 0 to 15 in their low nibbles, the others
// in the high ones
template <class I> INLINE I nibbles(Bytes p, int at) {
#ifdef AVX512
  if constexpr (is_int16<I>) {
    Mi v = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(load<__m128i>(p)));
    return (I)_mm512_mask_srli_epi16(v, 0xffff0000, v, 4) & 15;
  }
#endif
  return bits<I>(p + at % 16, at / 16 * 4, 15);
}
// 32 bits, the fifth of each value
template <class I> INLINE I fifth(Bytes p, int at) {
#ifdef AVX512
  if constexpr (is_int16<I>) return (I)_mm512_maskz_set1_epi16(load<uint32_t>(p), 16);
#endif
  auto word = I{}[0];
  word = (decltype(word))(load<uint32_t>(p) >> at);
  I lanes = {};
  for (int i = 0; i < (int)(sizeof lanes / sizeof word); i++) lanes[i] = (decltype(word))(1 << i);
  return (((I{} + word) & lanes) != 0) & 16;
}
// 8 signed bytes -> float32, times a factor
INLINE void widen8(const uint64_t &bytes, float factor, float *to) {
  typedef int32_t i32x8 VECTOR(32);
#if defined(AVX512) || defined(AVX2)  // which GCC does byte by byte
  i32x8 v = (i32x8)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  typedef int8_t i8x8 VECTOR(8);
  i32x8 v = __builtin_convertvector(load<i8x8>(&bytes), i32x8);
#endif
  store(to, __builtin_convertvector(v, f32x8) * factor);
}
constexpr uint64_t each(uint64_t byte) { return byte * 0x0101010101010101; }
// 8 scales and 8 minima of 6 bits in 12 bytes, four at a time
INLINE void integers_k4(Bytes b, uint64_t *s, uint64_t *m) {
#ifdef __AVX2__
  const __m128i v = load<__m128i>(b), six = _mm_set1_epi8(63), top = _mm_set1_epi8(48);
  __m128i low = _mm_shuffle_epi32(v, 0xa5), last = _mm_shuffle_epi32(v, 0xff);  // words 1122, 3333
  low = _mm_srlv_epi32(low, _mm_setr_epi32(0, 2, 0, 2)) & _mm_unpacklo_epi32(six, top);
  last = _mm_srlv_epi32(last, _mm_setr_epi32(32, 0, 32, 4)) & _mm_set1_epi8(15);
  low |= last;
  memcpy(s, &low, 8), memcpy(m, (Bytes)&low + 8, 8);
#else
  const uint64_t v = load<uint64_t>(b + 4), last = load<uint32_t>(b + 12), top = v >> 6 & each(3);
  const uint64_t low = last & each(15), high = last >> 4 & each(15), LOW32 = 0xffffffff;
  *s = (v & each(63) & LOW32) | (low | (top & LOW32) << 4) << 32;
  *m = (v & each(63)) >> 32 | (high | top >> 32 << 4) << 32;
#endif
}

struct F32 : Dense<128> {
  INLINE f32 values(Bytes b, int i) { return load<f32>(b + 4 * VL * i); }
};
struct F16 : Dense<64> {
  INLINE f32 values(Bytes b, int i) { return load_f32((const float16 *)b + VL * i); }
};
struct BF16 : Dense<64> {
  INLINE f32 values(Bytes b, int i) {
    return (f32)(__builtin_convertvector(load<u16_half>(b + 2 * VL * i), u32) << 16);
  }
};
struct Q4_0 : Block<32, 18, 32> {
  enum { ZERO = 8 };
  INLINE void scales(Bytes b, float *s, float *) { *s = half(b); }
  template <class I> INLINE I values(Bytes b, int, int p) { return nibbles<I>(b + 2, p); }
};
struct Q4_1 : Block<32, 20, 32, true> {
  INLINE void scales(Bytes b, float *s, float *m) { *s = half(b), *m = -half(b + 2); }
  template <class I> INLINE I values(Bytes b, int, int p) { return nibbles<I>(b + 4, p); }
};
struct Q5_0 : Block<32, 22, 32> {
  enum { ZERO = 16 };
  INLINE void scales(Bytes b, float *s, float *) { *s = half(b); }
  template <class I> INLINE I values(Bytes b, int, int p) {
    return nibbles<I>(b + 6, p) | fifth<I>(b + 2, p);
  }
};
struct Q5_1 : Block<32, 24, 32, true> {
  INLINE void scales(Bytes b, float *s, float *m) { *s = half(b), *m = -half(b + 2); }
  template <class I> INLINE I values(Bytes b, int, int p) {
    return nibbles<I>(b + 8, p) | fifth<I>(b + 4, p);
  }
};
struct Q8_0 : Block<32, 34, 32> {
  INLINE void scales(Bytes b, float *s, float *) { *s = half(b); }
  template <class I> INLINE I values(Bytes b, int, int p) { return widen<I, true>(b + 2 + p); }
};
struct Q2_K : KBlock<3 * 15, 84, 16, 80, 82> {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *m) {
    for (int i = 0; i < 2; i++) {
      const uint64_t v = load<uint64_t>(b + 8 * i);
      s[i] = v & each(15), m[i] = v >> 4 & each(15);
    }
  }
  template <class I> INLINE I values(Bytes b, int i, int p) {
    return bits<I>(b + 16 + i / 4 * 32 + p, i % 4 * 2, 3);
  }
};
struct Q3_K : KBlock<4 * 32, 110, 16, 108> {
  enum { HIGH_BITS = 1, ZERO = 4 };  // stored apart
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *) {
    const uint64_t low = load<uint64_t>(b + 96), top = load<uint32_t>(b + 104);
    for (int i = 0; i < 2; i++) {
      uint64_t high = (top >> 4 * i & 0x03030303) | (top >> (4 * i + 2) & 0x03030303) << 32;
      uint64_t v = ((low >> 4 * i & each(15)) | high << 4) ^ each(32), sign = v & each(32);
      s[i] = v | sign << 1 | sign << 2;  // less 32
    }
  }
  template <class I> INLINE I values(Bytes b, int i, int p) {
    return bits<I>(b + 32 + i / 4 * 32 + p, i % 4 * 2, 3) | bits<I>(b + p, i, 1, 2);
  }
};
struct Q4_K : KBlock<15 * 63, 144, 32, 0, 2> {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *m) { integers_k4(b, s, m); }
  template <class I> INLINE I values(Bytes b, int i, int p) {
    return bits<I>(b + 16 + i / 2 * 32 + p, i % 2 * 4, 15);
  }
};
struct Q5_K : KBlock<31 * 63, 176, 32, 0, 2> {
  enum { HIGH_BITS = 1 };  // stored apart
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *m) { integers_k4(b, s, m); }
  template <class I> INLINE I values(Bytes b, int i, int p) {
    return bits<I>(b + 48 + i / 2 * 32 + p, i % 2 * 4, 15) | bits<I>(b + 16 + p, i, 1, 4);
  }
};
struct Q6_K : KBlock<32 * 128, 210, 16, 208> {
  enum { HIGH_BITS = 1, ZERO = 32 };  // stored apart
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *) { memcpy(s, b + 192, 16); }
  template <class I> INLINE I values(Bytes b, int i, int p) {
    I low = bits<I>(b + i / 4 * 64 + i % 2 * 32 + p, i / 2 % 2 * 4, 15);
    return low | bits<I>(b + 128 + i / 4 * 32 + p, i % 4 * 2, 3, 4);
  }
};

// Scales and minima of a block's groups, or of `count` blocks of 32
template <class T> INLINE void read_scales(Bytes b, int count, float *s, float *m) {
  if constexpr (T::BLOCK == 256) {
    uint64_t scale[2], minimum[2];
    T::integers(b, scale, minimum);
    if (T::GROUPS == VL) store(s, to_f32(widen<i32, true>(scale)) * half(b + T::D));
    for (int i = 0; i < T::GROUPS / 8; i++) {
      if (T::GROUPS != VL) widen8(scale[i], half(b + T::D), s + 8 * i);
      if constexpr (T::MINIMUM) widen8(minimum[i], half(b + T::DMIN), m + 8 * i);
    }
  } else {
    UNROLL
    for (int i = 0; i < count; i++) T::scales(b + i * T::SIZE, s + i, m + i);
  }
}
// Some bytes into L2
INLINE void prefetch(Bytes p, int count) {
  for (int i = 0; i < count; i += 64) __builtin_prefetch(p + i, 0, 2);
}
// The i-th 32 weights from b on, not yet scaled, as vectors; integers not yet less ZERO
template <class T, class V, int COUNT> INLINE void values32(Bytes b, int i, V (&v)[COUNT]) {
  if (T::BLOCK == 32) b += i * T::SIZE;
  for (int p = 0; p < COUNT; p++)
    if constexpr (T::DENSE) v[p] = T::values(b, p);
    else if constexpr (is_float<V>)
      v[p] = to_f32(T::template values<i32>(b, i, VL * p)) - (float)T::ZERO;
#ifdef AVX2  // two sets of bits are joined as bytes: 1.05 to 1.09 times as fast
    else if constexpr (T::HIGH_BITS) {
      i8x32 bytes = T::template values<i8x32>(b, i, 0);
      v[p] = widen<V, false>((Bytes)&bytes + 16 * p);
    }
#endif
    else
      v[p] = T::template values<V>(b, i, 2 * VL * p);
}

// ---- gemv: up to 16 rows of x; the bits of a row do not depend on how many there are ------------

struct Free {
  void operator()(void *p) const { operator delete[](p, std::align_val_t(64)); }
};
template <class X> using Array = std::unique_ptr<X[], Free>;
template <class X> static Array<X> array(int64_t n) {  // 64-byte aligned, uninitialised
  return Array<X>(new (std::align_val_t(64)) X[n]);
}

// Rows of x, as float32 or, if fast, as integers q with scales; sums of x, for minima. Scales and
// sums are kept per 16 numbers [0] and per 32 [1], for formats have groups of either.
struct Rows {
  const float *x;
  int64_t count, K;
  bool fast;
  Array<int16_t> q;
  Array<float> scales[2], sums[2];
  Rows(const float *x, int64_t count, int64_t K, bool fast) : x(x), count(count), K(K), fast(fast) {
    if (fast) q = array<int16_t>(count * K);
    for (int i = 0; i < 2; i++) {
      scales[i] = array<float>(count * K / (16 << i) + 8);
      sums[i] = array<float>(count * K / (16 << i));
    }
  }
  template <class X> const void *data(int64_t at) const {
    return is_float<X> ? (const void *)(x + at) : (const void *)(q.get() + at);
  }
};

// One row of x (K) -> its integers, scales and sums. The integers are as large as int16 allows, and
// small enough that a sum of SPAN of them times `most` stays within int32.
template <int SPAN> static void quantize_row(Rows &to, int64_t row, int most) {
  for (int64_t k = row * to.K; k < (row + 1) * to.K; k += SPAN) {
    f32 v[SPAN / VL], top = {}, sizes = {}, sums[SPAN / 16] = {};
    for (int i = 0; i < SPAN / VL; i++) {
      v[i] = load<f32>(to.x + k + VL * i);
      f32 size = v[i] < 0 ? -v[i] : v[i];
      top = max(size, top), sizes += size;
      if (!to.fast) sums[i * VL / 16] += v[i];
    }
    float scale = 1;
    if (to.fast) {
      float limit = top[0], all = sum(sizes);  // NaN if an x is
      for (int i = 1; i < VL; i++) limit = top[i] > limit ? top[i] : limit;
      const float least = all / (0x7fff0000 / most - SPAN / 2);
      scale = limit / 32767 > least ? limit / 32767 : least;
      const float inverse = limit > 1e-30f ? 1 / scale : 0;
      for (int i = 0; i < SPAN / VL; i++) {
        v[i] = v[i] * inverse + 0x1.8p23f - 0x1.8p23f;  // to the nearest integer
        sums[i * VL / 16] += v[i];
        store(&to.q[k + VL * i],
              __builtin_convertvector(__builtin_convertvector(v[i], i32), i16_half));
      }
    }
    for (int64_t i = 0, at = k / 16; i < SPAN / 16; i += 2, at += 2) {
      float first = sum(sums[i]) * scale, second = sum(sums[i + 1]) * scale;
      to.scales[0][at] = to.scales[0][at + 1] = to.scales[1][at / 2] = scale;
      to.sums[0][at] = first, to.sums[0][at + 1] = second;
      to.sums[1][at / 2] = first + second;
    }
  }
}

// One row of W (K) times R rows of x, or as many as there are, from `row` on -> y[0], y[stride] ...
template <class T, class X, int R>
static void dot(Bytes w, const Rows &x, int64_t row, float *y, int64_t stride) {
  constexpr int COUNT = (is_float<X> ? 32 : 16) / VL;  // vectors of 32 weights
  constexpr int PARTS = T::GROUP == 16 && COUNT > 1 ? 2 : 1, WIDE = T::GROUP == 32;
  constexpr int GROUPS = 256 / T::GROUP, SIZE = 256 / T::BLOCK * T::SIZE;  // of 256 weights
  Bytes at[R];
  const float *x_scales[R], *x_sums[R];
  for (int r = 0; r < R; r++) {
    const int64_t from = (row + r < x.count ? row + r : x.count - 1) * x.K;
    at[r] = (Bytes)x.data<X>(from);
    x_scales[r] = &x.scales[WIDE][from / T::GROUP], x_sums[r] = &x.sums[WIDE][from / T::GROUP];
  }
  f32 total[R][2] = {};
  f32x8 low[R][GROUPS / 8] = {};
  alignas(64) float s[GROUPS] = {}, m[GROUPS] = {}, scales[R][GROUPS];
  auto add = [&](int64_t k, int count) __attribute__((always_inline)) {  // count: of 32 weights
    read_scales<T>(w, count, s, m);
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int g = 0; g < GROUPS; g += 8) {  // as vectors by hand: Q4_K 23 -> 37 G weights/s
      const float *x_scale = x_scales[r] + k / T::GROUP + g, *x_sum = x_sums[r] + k / T::GROUP + g;
      f32x8 v = load<f32x8>(s + g);
      store(scales[r] + g, is_float<X> ? v : v * load<f32x8>(x_scale));
      // Minima or zero points times sums of x are taken off at the end
      if (T::MINIMUM) v = load<f32x8>(m + g);
      else if (T::ZERO != 0 && !is_float<X>) v *= (float)T::ZERO;
      else continue;
      if (count == 8) low[r][g / 8] = madd8(low[r][g / 8], v, load<f32x8>(x_sum));
      else
        for (int i = 0; i < count; i++) low[r][0][i] = madd(low[r][0][i], v[i], x_sum[i]);
    }
#ifdef AVX512
    f32 pairs[R] = {};  // a scale for each half of the vector
    if constexpr (T::GROUP == 16 && PARTS == 1)
      for (int r = 0; r < R; r++) pairs[r] = load<f32>(s) * load<f32>(x_scales[r] + k / T::GROUP);
#endif
    // Reload scales from L1: broadcast loads are free, shuffles are not
    asm volatile("" : : "r"(scales) : "memory");
    UNROLL
    for (int i = 0; i < count; i++) {
      X v[COUNT];
      values32<T>(w, i, v);
      for (int r = 0; r < R; r++) {
        Bytes from = at[r] + (k + 32 * i) * (is_float<X> ? 4 : 2);
        for (int part = 0; part < PARTS; part++) {
          int p = part * COUNT / PARTS;
          Sum<X> products = multiply(v[p], load<X>(from + p * sizeof(X)));
          for (p++; p < (part + 1) * COUNT / PARTS; p++)
            products = madd(products, v[p], load<X>(from + p * sizeof(X)));
          f32 scale;
#ifdef AVX512
          if constexpr (T::GROUP == 16 && PARTS == 1) {
            __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
            lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(2 * i));
            scale = (f32)_mm512_permutexvar_ps(lanes, (__m512)pairs[r]);
          } else
#endif
            scale = splat(scales[r][PARTS * i + part]);
          f32 &to = total[r][(i + part) % 2];
          to = madd(to, to_f32(products), scale);
        }
      }
    }
  };
  int64_t k = 0;
  for (; k + 256 <= x.K; k += 256, w += SIZE) {
    // Beyond what hardware does at a page's end: F16 9.5 -> 15.2 G weights/s
    prefetch(w + 6144, SIZE);
    add(k, 8);
  }
  if (T::BLOCK == 32)
    for (; k < x.K; k += 32, w += T::SIZE) add(k, 1);
  for (int r = 0; r < R && row + r < x.count; r++) {
    float below = 0;
    for (int g = 0; g < GROUPS; g++) below += low[r][g / 8][g % 8];
    y[r * stride] = sum(total[r][0] + total[r][1]) - below;
  }
}

// ---- The table of formats -----------------------------------------------------------------------

// `count` weights (whole blocks) -> float32
template <class T> static void unpack(Bytes w, int64_t count, float *y) {
  for (int64_t k = 0; k < count; k += T::BLOCK, w += T::SIZE) {
    prefetch(w + count / T::BLOCK * T::SIZE, T::SIZE);  // the next columns, while these are used
    float s[T::GROUPS], m[T::GROUPS] = {};
    read_scales<T>(w, 1, s, m);
    UNROLL
    for (int i = 0; i < T::BLOCK / 32; i++) {
      f32 v[32 / VL];
      values32<T>(w, i, v);
      for (int p = 0; p < 32 / VL; p++) {
        const int group = (32 * i + VL * p) / T::GROUP;
        v[p] = T::MINIMUM ? v[p] * s[group] - m[group] : v[p] * s[group];
      }
      store(y + k + 32 * i, v);
    }
  }
}
// The same as int16, with a scale for each SPAN and, negated, the minima
template <class T>
static void unpack_int16(Bytes w, int64_t count, int16_t *y, float *scale, float *minima) {
  typedef int16_t i16x16 VECTOR(32);
  for (int64_t k = 0; k < count; k += T::BLOCK, w += T::SIZE) {
    prefetch(w + count / T::BLOCK * T::SIZE, T::SIZE);
    alignas(16) int8_t integers[16];
    float s[T::GROUPS], m[T::GROUPS];
    read_scales<T>(w, 1, s, m);
    if constexpr (T::BLOCK == 256) {  // s is then left to the compiler to drop
      uint64_t minimum[2];
      T::integers(w, (uint64_t *)integers, minimum);
      for (int i = 0; i < 256 / T::SPAN; i++) scale[k / T::SPAN + i] = half(w + T::D);
    } else scale[k / 32] = s[0];
    for (int i = 0; T::MINIMUM && i < T::GROUPS; i++) minima[k / T::GROUP + i] = -m[i];
    UNROLL
    for (int i = 0; i < T::BLOCK / 32; i++) {
      i16 v[16 / VL];
      values32<T>(w, i, v);
      for (i16 &part : v) part -= (int16_t)T::ZERO;
      if constexpr (T::BLOCK == 256 && T::GROUP % (2 * VL) == 0) {
        for (int p = 0; p < 16 / VL; p++)
          v[p] *= (int16_t)integers[(32 * i + 2 * VL * p) / T::GROUP];
      } else if constexpr (T::BLOCK == 256) {
        i16x16 halves[2];
        memcpy(halves, v, sizeof v);
        for (int j = 0; j < 2; j++) halves[j] *= (int16_t)integers[(32 * i + 16 * j) / T::GROUP];
        memcpy(v, halves, sizeof v);
      }
      store(y + k + 32 * i, v);
    }
  }
}
typedef void (*Unpack)(Bytes w, int64_t count, float *y);
typedef void (*UnpackInt16)(Bytes w, int64_t count, int16_t *y, float *scales, float *minima);
typedef void (*Dot)(Bytes w, const Rows &x, int64_t row, float *y, int64_t stride);
struct Format {
  int64_t type, block, size, span;
  int max;
  bool minimum;
  Unpack unpack;
  Dot exact, fast, fast4;    // for one row of x or, the last, up to four; null: exact if fast, too
  UnpackInt16 unpack_int16;  // null: float32 if fast, too
};
template <class T> static constexpr Format format(int64_t type) {
  Format f = {type,      T::BLOCK,       T::SIZE, T::SPAN, T::MAX, T::MINIMUM,
              unpack<T>, dot<T, f32, 1>, nullptr, nullptr, nullptr};
  if constexpr (!T::DENSE) {
    f.fast = dot<T, i16, 1>, f.fast4 = dot<T, i16, 4>;
#ifdef MM  // without VNNI, too: additions go to a port that float32 cannot use (1.3 times)
    if constexpr (!T::MINIMUM || T::GROUP == 32) f.unpack_int16 = unpack_int16<T>;
#endif
  }
  return f;
}
static const Format FORMATS[] = {
    format<F32>(0),   format<F16>(1),   format<Q4_0>(2),  format<Q4_1>(3),  format<Q5_0>(6),
    format<Q5_1>(7),  format<Q8_0>(8),  format<Q2_K>(10), format<Q3_K>(11), format<Q4_K>(12),
    format<Q5_K>(13), format<Q6_K>(14), format<BF16>(30),
};
static const Format *find_format(int64_t type, int64_t K) {  // null if there is none
  for (const Format &f : FORMATS)
    if (f.type == type && K % f.block == 0) return &f;
  return nullptr;
}

// W (N, K) of a product y (rows, N) = x (rows, K) W^T
struct Matrix {
  const Format *format;
  Bytes w;
  int64_t N;
  float *y;
};

// Several matrices times the same rows of x, in one parallel loop
static void gemv(const Matrix *matrices, int count, Rows &x) {
  int64_t total = 0;
  for (int i = 0; i < count; i++) total += matrices[i].N;
  for (int64_t r = 0; r < x.count; r++) quantize_row<32>(x, r, 128);
#pragma omp parallel for schedule(guided, 16) if (total * x.K > 1 << 16)  // long runs of memory
  for (int64_t i = 0; i < total; i++) {
    const Matrix *m = matrices;
    int64_t n = i;
    while (n >= m->N) n -= m++->N;
    const Format *f = m->format;
    const bool fast = x.fast && f->fast;
    Bytes w = m->w + n * (x.K / f->block * f->size);
    for (int64_t r = 0; r < x.count; r += fast ? 4 : 1)
      (!fast ? f->exact : x.count - r > 1 ? f->fast4 : f->fast)(w, x, r, m->y + r * m->N + n, m->N);
  }
}

// ---- gemm, as in Goto and BLIS ------------------------------------------------------------------
// x is packed in panels of MR rows; strips of W are unpacked, KC columns at a time; the microkernel
// multiplies NR of their rows by a panel. Both consist of words of 32 bits: one float32 or two
// int16. Integers are scaled, span by span, when they are added to the total.

constexpr int V = 2, MR = V * VL, KC = 256, STRIP = 24, PANELS = 16;
template <class X> constexpr int PER_WORD = is_float<X> ? 1 : 2;

// sums (NR, MR) += w (NR, count) . x (count, MR), in words; w has strides `down` and `right`
template <class X>
INLINE void microkernel(Sum<X> (&sums)[NR][V], const void *w, int64_t down, int64_t right,
                        const void *x, int64_t count) {
  Bytes a = (Bytes)w, b = (Bytes)x;
  for (int64_t k = 0; k < count; k++, a += 4 * right, b += 4 * MR) {
    X v[V];
    for (int i = 0; i < V; i++) v[i] = load<X>(b + 4 * VL * i);
    UNROLL
    for (int n = 0; n < NR; n++) {
      X word = splat<X>(a + 4 * n * down);
      for (int i = 0; i < V; i++) sums[n][i] = madd(sums[n][i], v[i], word);
    }
  }
}

// x (rows, K): words (panels, K / PER_WORD, MR); for int16 scales and sums (panels, K / 32, MR)
template <class X> struct Panels {
  int64_t rows, K, count;
  Array<uint32_t> words;
  Array<float> scales, sums;
  Panels(Rows &x, int max) : rows(x.count), K(x.K), count((x.count + MR - 1) / MR) {
    words = array<uint32_t>(count * MR * K / PER_WORD<X>);
    if (is_int16<X>) scales = array<float>(count * MR * K / 32);
    if (is_int16<X>) sums = array<float>(count * MR * K / 32);
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < count; p++)
      for (int64_t i = p * MR; i < (p + 1) * MR; i++) {
        const int64_t row = i < rows ? i : rows - 1;  // the last one fills its panel
        if (is_int16<X>) (K % 128 ? quantize_row<32> : quantize_row<128>)(x, row, max);
        for (int64_t k = 0; k < K; k += 32) {
          const int64_t at = row * K + k, to = (p * K + k) * MR;
          uint32_t line[32];
          memcpy(line, x.data<X>(at), 128 / PER_WORD<X>);
          for (int j = 0; j < 32 / PER_WORD<X>; j++)
            words[to / PER_WORD<X> + j * MR + i % MR] = line[j];
          if (!is_int16<X>) continue;
          scales[to / 32 + i % MR] = x.scales[1][at / 32];
          sums[to / 32 + i % MR] = x.sums[1][at / 32];
        }
      }
  }
};

// NR rows of a strip of W: words and, for int16, scales and minima of their groups
template <class X> struct Strip {
  alignas(64) uint32_t words[STRIP][KC / PER_WORD<X>] = {};
  float scales[STRIP][KC / 32] = {}, minima[STRIP][KC / 32] = {};
};

// total (NR, MR) += rows n to n + NR of w . `count` columns of a panel, from column k on
template <class X>
INLINE void tile(float (*total)[MR], const Strip<X> &w, int n, const Panels<X> &x, int64_t panel,
                 int64_t k, int64_t count, const Format *f) {
  const int64_t first = panel * x.K + k;
  if constexpr (!is_int16<X>) {
    Sum<X> sums[NR][V] = {};
    microkernel<X>(sums, w.words[n], KC / PER_WORD<X>, 1, &x.words[first * MR / PER_WORD<X>],
                   count / PER_WORD<X>);
    for (int j = 0; j < NR; j++)
      for (int i = 0; i < V; i++)
        store(&total[j][i * VL], load<f32>(&total[j][i * VL]) + sums[j][i]);
    return;
  }
  const int64_t span = f->span;
  for (int64_t g = 0, at = first; g < count / span; g++, at += span) {
    i32 sums[NR][V] = {};
    microkernel<i16>(sums, &w.words[n][g * span / 2], KC / 2, 1, &x.words[at * MR / 2], span / 2);
    f32 scales[V];  // loaded once: a store to total might change them
    for (int i = 0; i < V; i++) scales[i] = load<f32>(&x.scales[at / 32 * MR + i * VL]);
    UNROLL
    for (int j = 0; j < NR; j++) {
      f32 scale = splat(w.scales[n + j][g]);
      for (int i = 0; i < V; i++) {
        f32 old = load<f32>(&total[j][i * VL]);
        store(&total[j][i * VL], madd(old, to_f32(sums[j][i]) * scale, scales[i]));
      }
    }
  }
  if (f->minimum) {
    f32 sums[NR][V];
    UNROLL
    for (int j = 0; j < NR; j++)
      for (int i = 0; i < V; i++) sums[j][i] = load<f32>(&total[j][i * VL]);
    microkernel<f32>(sums, w.minima[n], KC / 32, 1, &x.sums[first / 32 * MR], count / 32);
    UNROLL
    for (int j = 0; j < NR; j++)
      for (int i = 0; i < V; i++) store(&total[j][i * VL], sums[j][i]);
  }
}

template <class X> static void gemm(const Matrix &m, const Panels<X> &x) {
  const Format *f = m.format;
  const int64_t K = x.K;
#pragma omp parallel for schedule(dynamic)
  for (int64_t n = 0; n < m.N; n += STRIP) {
    const int high = (int)(m.N - n < STRIP ? m.N - n : STRIP);
    Strip<X> strip;
    alignas(64) float total[PANELS][STRIP][MR];
    for (int64_t first = 0; first < x.count; first += PANELS) {
      const int64_t panels = x.count - first < PANELS ? x.count - first : PANELS;
      memset(total, 0, sizeof total);
      for (int64_t k = 0; k < K; k += KC) {
        const int64_t count = K - k < KC ? K - k : KC;
        for (int i = 0; i < high; i++) {
          Bytes blocks = m.w + ((n + i) * K + k) / f->block * f->size;
          if constexpr (is_float<X>) f->unpack(blocks, count, (float *)strip.words[i]);
          else
            f->unpack_int16(blocks, count, (int16_t *)strip.words[i], strip.scales[i],
                            strip.minima[i]);
        }
        for (int64_t p = 0; p < panels; p++)
          for (int i = 0; i < high; i += NR)
            tile<X>(total[p] + i, strip, i, x, first + p, k, count, f);
      }
      for (int64_t r = first * MR; r < x.rows && r < (first + panels) * MR; r++)
        for (int i = 0; i < high; i++) m.y[r * m.N + n + i] = total[r / MR - first][i][r % MR];
    }
  }
}

// Each of the matrices times x (rows, K)
static void multiply(const Matrix *matrices, int count, const float *x, int64_t rows, int64_t K,
                     bool fast) {
  Rows vectors(x, rows, K, fast);
  if (rows <= 16) return gemv(matrices, count, vectors);
  std::optional<Panels<f32>> exact_panels;
  std::optional<Panels<i16>> fast_panels;
  int max = 0;
  for (int i = 0; i < count; i++) max = std::max(max, matrices[i].format->max);
  for (const Matrix *m = matrices; m < matrices + count; m++) {
    if (fast && m->format->unpack_int16) {
      if (!fast_panels) fast_panels.emplace(vectors, max);
      gemm(*m, *fast_panels);
    } else {
      if (!exact_panels) exact_panels.emplace(vectors, max);
      gemm(*m, *exact_panels);
    }
  }
}

// ---- Layers: what Block.forward does ------------------------------------------------------------

INLINE f32 exp(f32 x) {  // 2e-7 relative: 2^n e^r
  x = x < -87 ? splat(-87) : x > 88 ? splat(88) : x;
  f32 n = x * 1.44269504f + 0x1.8p23f - 0x1.8p23f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32 p = splat(1.f / 720);
  const float terms[] = {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f};
  for (float term : terms) p = p * r + term;
  return p * (f32)((__builtin_convertvector(n, i32) + 127) << 23);
}

// RMSNorm: x (rows, C) -> y (rows, C)
static void norm(const float *x, const float *w, double eps, float *y, int64_t rows, int64_t C) {
#pragma omp parallel for if (rows > 16)
  for (int64_t r = 0; r < rows; r++) {
    f32 squares = {};
    for (int64_t i = r * C; i < (r + 1) * C; i += VL) {
      f32 v = load<f32>(x + i);
      squares += v * v;
    }
    float scale = 1 / std::sqrt(sum(squares) / (float)C + (float)eps);
    for (int64_t i = 0; i < C; i += VL)
      store(y + r * C + i, load<f32>(x + r * C + i) * scale * load<f32>(w + i));
  }
}
// x (n) += y (n)
static void add(float *x, const float *y, int64_t n) {
#pragma omp parallel for if (n > 1 << 16)
  for (int64_t i = 0; i < n; i += VL) store(x + i, load<f32>(x + i) + load<f32>(y + i));
}
// One head (D): pairs (2i, 2i + 1) are turned by their angle
static void rotate(float *x, const float *cos, const float *sin, int64_t D) {
  for (int64_t i = 0; i < D / 2; i++) {
    float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] - odd * sin[i], x[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

// Attention of one token: J heads q (J, D) that share keys and values (length, D) -> y (J, D), with
// J (length + VL) numbers of scratch memory
template <int J, class E>
static void attend(const float *q, const E *keys, const E *values, float *y, float *p,
                   int64_t length, int64_t D) {
  const int64_t room = (length + VL - 1) / VL * VL;
  float top[J], inverse[J], scale = 1 / std::sqrt((float)D);
  for (float &score : top) score = -INFINITY;
  for (int64_t i = 0; i < J * room; i++) p[i] = -INFINITY;
  for (int64_t s = 0; s < length; s++) {
    f32 products[J] = {};
    for (int64_t d = 0; d < D; d += VL) {
      f32 key = load_f32(keys + s * D + d);
      UNROLL
      for (int j = 0; j < J; j++) products[j] += load<f32>(q + j * D + d) * key;
    }
    for (int j = 0; j < J; j++) {
      float score = p[j * room + s] = sum(products[j]) * scale;
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
  for (int64_t d = 0; d < D; d += V * VL) {
    const int64_t vectors = D - d < V * VL ? (D - d) / VL : V;
    f32 mix[J][V] = {};
    for (int64_t s = 0; s < length; s++) UNROLL
    for (int i = 0; i < V; i++) {
      if (i >= vectors) break;
      f32 value = load_f32(values + s * D + d + i * VL);
      UNROLL
      for (int j = 0; j < J; j++) mix[j][i] += value * p[j * room + s];
    }
    for (int j = 0; j < J; j++)
      for (int i = 0; i < vectors; i++) store(y + j * D + d + i * VL, mix[j][i] * inverse[j]);
  }
}

// The same for up to MR tokens of one head, `row` numbers apart: the i-th sees length + i keys
constexpr int64_t KEYS = 5 * NR;  // are converted to float32 at a time
static int64_t scratch_size(int64_t length, int64_t D) {
  return (2 * D + length + MR + 3 * NR) * MR + (KEYS + NR) * D;
}
template <class E>
static void attend_many(const float *q, const E *keys, const E *values, float *y, float *scratch,
                        int64_t length, int64_t D, int64_t tokens, int64_t row) {
  const int64_t count = length + tokens - 1;
  float *queries = scratch, *total = queries + D * MR, *p = total + (D + NR) * MR;
  float *some = p + (count + NR) * MR;  // (KEYS, D) of keys or values
  f32 top[V], weight[V] = {};
  i32 lane = {};
  for (int i = 0; i < VL; i++) lane[i] = i;
  float scale = 1 / std::sqrt((float)D);
  for (int i = 0; i < V; i++) top[i] = splat(-INFINITY);
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < MR; i++) queries[d * MR + i] = i < tokens ? q[i * row + d] * scale : 0;
  memset(total, 0, (D + NR) * MR * sizeof *total);
  memset(some, 0, (KEYS + NR) * D * sizeof *some);
  for (int64_t from = 0; from < count; from += KEYS) {
    const int64_t n = count - from < KEYS ? count - from : KEYS;
    for (int64_t i = 0; i < n * D; i += VL) store(some + i, load_f32(keys + from * D + i));
    for (int64_t s = from; s < from + n; s += NR) {
      f32 sums[NR][V] = {};
      microkernel<f32>(sums, some + (s - from) * D, D, 1, queries, D);
      for (int j = 0; j < NR; j++)
        for (int i = 0; i < V; i++) {
          f32 score = lane + (int)(VL * i + length) > (int)s + j ? sums[j][i] : splat(-INFINITY);
          top[i] = max(score, top[i]);
          store(p + (s + j) * MR + VL * i, score);
        }
    }
  }
  for (int64_t from = 0; from < count; from += KEYS) {
    const int64_t n = count - from < KEYS ? count - from : KEYS;
    for (int64_t s = from; s < from + n; s++)
      for (int i = 0; i < V; i++) {
        f32 e = exp(load<f32>(p + s * MR + VL * i) - top[i]);
        store(p + s * MR + VL * i, e), weight[i] += e;
      }
    for (int64_t i = 0; i < n * D; i += VL) store(some + i, load_f32(values + from * D + i));
    for (int64_t d = 0; d < D; d += NR) {
      f32 sums[NR][V];
      memcpy(sums, total + d * MR, sizeof sums);
      microkernel<f32>(sums, some + d, 1, D, p + from * MR, n);
      memcpy(total + d * MR, sums, sizeof sums);
    }
  }
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < tokens; i++) y[i * row + d] = total[d * MR + i] / ((float *)weight)[i];
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
static Matrix matrix(const Linear &l, const Array<float> &y) {
  return {find_format(l.type, l.K), l.blocks, l.N, y.get()};
}

// x (B, T, C) += attention, += MLP; the cache (B, G, room, D) holds `pos` tokens. False: no memory
template <class E>
static bool run_layer(const Layer &l, bool fast, float *x, const float *cos, const float *sin,
                      E *keys, E *values, int64_t B, int64_t T, int64_t pos, int64_t room) {
  const int64_t D = l.head_dim, C = l.q.K, H = l.q.N / D, G = l.k.N / D, rows = B * T;
  auto h = array<float>(rows * C), q = array<float>(rows * H * D), y = array<float>(rows * H * D);
  auto k = array<float>(rows * G * D), v = array<float>(rows * G * D);
  norm(x, l.norm1, l.eps, h.get(), rows, C);
  const Matrix qkv[] = {matrix(l.q, q), matrix(l.k, k), matrix(l.v, v)};
  multiply(qkv, 3, h.get(), rows, C, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows; i++) {
    const float *c = cos + i % T * (D / 2), *s = sin + i % T * (D / 2);
    for (int64_t j = 0; j < H; j++) rotate(&q[(i * H + j) * D], c, s, D);
    for (int64_t j = 0; j < G; j++) {
      const int64_t from = (i * G + j) * D, to = ((i / T * G + j) * room + pos + i % T) * D;
      rotate(&k[from], c, s, D);
      for (int64_t d = 0; d < D; d += VL) {
        store_f32(keys + to + d, load<f32>(&k[from + d]));
        store_f32(values + to + d, load<f32>(&v[from + d]));
      }
    }
  }
  const int64_t step = T > 16 ? MR : 1, steps = (T + step - 1) / step;
  const int64_t heads = step == 1 && H / G % 4 == 0 ? 4 : 1;  // that are handled together
  bool failed = false;
#pragma omp parallel if (rows * pos > 64)
  {
    std::unique_ptr<float[]> scratch(
        new (std::nothrow) float[step > 1 ? scratch_size(pos + T, D) : heads * (pos + T + VL)]);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < B * H / heads * steps; i++) {
      const int64_t b = i / steps / (H / heads), j = i / steps % (H / heads) * heads;
      const int64_t t = i % steps * step, at = (b * G + j / (H / G)) * room * D;
      const int64_t from = ((b * T + t) * H + j) * D, length = pos + t + 1;
      if (!scratch) {
#pragma omp atomic write
        failed = true;
      } else if (step > 1)
        attend_many(&q[from], keys + at, values + at, &y[from], scratch.get(), length, D,
                    T - t < step ? T - t : step, H * D);
      else
        (heads == 4 ? attend<4, E> : attend<1, E>)(&q[from], keys + at, values + at, &y[from],
                                                   scratch.get(), length, D);
    }
  }
  if (failed) return false;
  const Matrix o = matrix(l.o, h);
  multiply(&o, 1, y.get(), rows, H * D, fast);
  add(x, h.get(), rows * C);
  norm(x, l.norm2, l.eps, h.get(), rows, C);
  auto gate = array<float>(rows * l.gate.N), up = array<float>(rows * l.gate.N);
  const Matrix gate_up[] = {matrix(l.gate, gate), matrix(l.up, up)};
  multiply(gate_up, 2, h.get(), rows, C, fast);
#pragma omp parallel for if (rows > 16)
  for (int64_t i = 0; i < rows * l.gate.N; i += VL) {
    f32 g = load<f32>(&gate[i]);
    store(&gate[i], g / (1 + exp(-g)) * load<f32>(&up[i]));
  }
  const Matrix down = matrix(l.down, h);
  multiply(&down, 1, gate.get(), rows, l.gate.N, fast);
  add(x, h.get(), rows * C);
  return true;
}

// ---- What Python calls --------------------------------------------------------------------------

enum {
  DONE,
  NO_MEMORY,
  NOT_SUPPORTED
};  // the last: an unknown type, or K no multiple of its block

extern "C" {
int32_t kernels_version() { return 1; }

int32_t kernels_features() {  // bit 0: OpenMP; bit 1: AMX, with which torch's own gemm is faster
  int32_t features = 0;
#ifdef _OPENMP
  features |= 1;
#endif
#ifdef __AMX_BF16__
  features |= 2;
#endif
  return features;
}

int32_t linear(int32_t type, int32_t fast, const uint8_t *blocks, const float *x, float *y,
               int64_t rows, int64_t N, int64_t K) try {
  const Matrix m = {find_format(type, K), blocks, N, y};
  if (!m.format) return NOT_SUPPORTED;
  multiply(&m, 1, x, rows, K, fast);
  return DONE;
} catch (const std::bad_alloc &) { return NO_MEMORY; }

int32_t dequantize(int32_t type, int32_t bfloat16, const uint8_t *blocks, void *y, int64_t count) {
  const Format *f = find_format(type, count);
  if (!f) return NOT_SUPPORTED;
#pragma omp parallel for if (count > 1 << 16)
  for (int64_t k = 0; k < count; k += KC) {
    const int64_t size = count - k < KC ? count - k : KC;
    float line[KC], *to = bfloat16 ? line : (float *)y + k;
    f->unpack(blocks + k / f->block * f->size, size, to);
    for (int64_t i = 0; bfloat16 && i < size; i += VL)
      store_bfloat16((uint16_t *)y + k + i, load<f32>(line + i));
  }
  return DONE;
}

int32_t run_layers(const Layer *layers, int64_t count, int32_t fast, float *x, const float *cos,
                   const float *sin, void *keys, void *values, int32_t half, int64_t B, int64_t T,
                   int64_t pos, int64_t room) try {
  for (const Layer *l = layers; l < layers + count; l++)
    for (const Linear *part : {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down})
      if (!find_format(part->type, part->K)) return NOT_SUPPORTED;
  auto run = [&](auto *k, auto *v) {
    for (const Layer *l = layers; l < layers + count; l++) {
      if (!run_layer(*l, fast, x, cos, sin, k, v, B, T, pos, room)) return NO_MEMORY;
      k += B * l->k.N * room, v += B * l->k.N * room;
    }
    return DONE;
  };
  return half ? run((float16 *)keys, (float16 *)values) : run((float *)keys, (float *)values);
} catch (const std::bad_alloc &) { return NO_MEMORY; }
}
