// Vectors as wide as the CPU has them, and what compilers need to be told. GNU vector types compile
// to AVX-512, AVX2, NEON, ...; intrinsics stand where compilers do not find the one instruction.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

// VL: 32-bit lanes of a vector; MM(add_ps): the intrinsic
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include <immintrin.h>
#define AVX512
#define ISA "AVX-512"
#define MM(name) _mm512_##name
constexpr int VL = 16, REGISTERS = 32;
typedef __m512 Mf;
typedef __m512i Mi;
typedef __m256i Mhalf;
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define AVX2
#define ISA "AVX2"
#define MM(name) _mm256_##name
constexpr int VL = 8, REGISTERS = 16;
typedef __m256 Mf;
typedef __m256i Mi;
typedef __m128i Mhalf;
#elif defined(__aarch64__)
#include <arm_neon.h>
#define NEON
#define ISA "NEON"
constexpr int VL = 4, REGISTERS = 32;
#else
#define ISA "128 bits"
#define EACH_VECTOR(i, count) for (int i = 0; i < (count); i++)  // too many for 16 registers
constexpr int VL = 4, REGISTERS = 16;
#endif
#pragma GCC diagnostic ignored "-Wpsabi"  // wide vectors are only passed to what is inlined
#ifdef __clang__
#define COMPILER __VERSION__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_4 _Pragma("clang loop unroll_count(4)")
#else
#define COMPILER "GCC " __VERSION__
#ifndef UNROLL  // under sanitizers it stands for nothing: else they take minutes to compile this
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define UNROLL_4 _Pragma("GCC unroll 4")
#pragma GCC diagnostic ignored "-Wuninitialized"  // in GCC 12's own headers (its bug 105593)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define EACH(i, count) UNROLL for (int i = 0; i < (count); i++)
#ifndef EACH_VECTOR
#define EACH_VECTOR EACH
#endif
#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#if defined(NEON) && !defined(__clang__)  // GCC would load earlier, and more than registers hold
#define LOAD_LATER asm volatile("" : : : "memory")
#else
#define LOAD_LATER
#endif

#if defined(AVX512) && defined(__AVX512VNNI__)
#define VNNI(name) _mm512_##name##_epi32
#elif defined(AVX2) && defined(__AVXVNNI__)
#define VNNI(name) _mm256_##name##_avx_epi32
#elif defined(NEON) && defined(__ARM_FEATURE_DOTPROD)
#define SDOT
#endif
// HAS_BYTES: activations of 16 bits are two bytes, four of which an instruction multiplies; SIGNED:
// weights are signed there; I8MM: in prompts one takes eight bytes, of two tokens and two rows
#if defined(VNNI)
#define BYTES " with VNNI"
constexpr bool HAS_BYTES = true, SIGNED = false, I8MM = false;
#elif defined(SDOT) && defined(__ARM_FEATURE_MATMUL_INT8)
#define BYTES " with i8mm"
constexpr bool HAS_BYTES = true, SIGNED = true, I8MM = true;
#elif defined(SDOT)
#define BYTES " with dotprod"
constexpr bool HAS_BYTES = true, SIGNED = true, I8MM = false;
#else
#define BYTES ""
constexpr bool HAS_BYTES = false, SIGNED = false, I8MM = false;
#endif
#define VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef const uint8_t *Bytes;
typedef float f32 VECTOR(4 * VL), f32x4 VECTOR(16), f32x8 VECTOR(32);
typedef int32_t i32 VECTOR(4 * VL), i32x8 VECTOR(32);
typedef uint32_t u32 VECTOR(4 * VL);
typedef int16_t i16 VECTOR(4 * VL), i16_half VECTOR(2 * VL);
typedef uint16_t u16 VECTOR(4 * VL), u16_half VECTOR(2 * VL);
typedef int8_t i8_half VECTOR(2 * VL), i8x8 VECTOR(8);
typedef uint8_t u8 VECTOR(4 * VL), u8_quarter VECTOR(VL);
typedef uint64_t u64 VECTOR(4 * VL);
constexpr int W = 4 * VL;  // weights that are unpacked at a time, to bytes
template <class V> constexpr bool is_int16 = std::is_same<V, i16>::value;
template <class X> using Sum = std::conditional_t<is_int16<X>, i32, f32>;  // of products

template <class V> INLINE V load(const void *p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V> INLINE void store(void *p, const V &v) { memcpy(p, &v, sizeof v); }
template <class V, int WORDS = 1> INLINE V splat(const void *p) {  // one after the other
  return WORDS == 2 ? (V)(load<uint64_t>(p) - u64{}) : (V)(load<uint32_t>(p) - u32{});
}
template <bool SHARED> INLINE f32 keep(f32 v) {  // a register; GCC would load it for each use
#if defined(MM)
  if (SHARED) asm("" : "+v"(v));
#elif defined(NEON)
  if (SHARED) asm("" : "+w"(v));
#endif
  return v;
}
INLINE f32 splat(float f) { return f - f32{}; }
INLINE f32 to_f32(i32 v) { return __builtin_convertvector(v, f32); }
INLINE f32 max(f32 a, f32 b) { return a > b ? a : b; }
using Narrow = std::conditional_t<VL == 16, f32x8, f32>;  // of at most 8 lanes
constexpr int NL = sizeof(Narrow) / 4;
typedef int32_t Mask VECTOR(4 * NL);  // of Narrow
INLINE float sum(const f32x4 &v) { return v[0] + v[1] + (v[2] + v[3]); }
#ifdef AVX512
INLINE i32 widen(const void *p) { return (i32)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
INLINE f32 with_zeros(f32x8 v) { return (f32)_mm512_zextps256_ps512((__m256)v); }
INLINE f32x8 halves(f32 v) {  // added
  return (f32x8)_mm512_castps512_ps256((Mf)v) + (f32x8)_mm512_extractf32x8_ps((Mf)v, 1);
}
#else
INLINE f32 with_zeros(f32 v) { return v; }
INLINE f32 halves(f32 v) { return v; }
#endif

// As each processor does it best: float16 (its bits) -> f32, and back, rounded to nearest even; VL
// bytes -> i32; 8 signed bytes -> i32x8; add_pairs(): the sums of neighbours, in each half
enum float16 : uint16_t {};
INLINE f32 load_f32(const float *p) { return load<f32>(p); }
INLINE void store_f32(float *p, f32 v) { store(p, v); }
#ifdef MM
#ifdef AVX2
INLINE i32 widen(const void *p) { return (i32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((Mhalf *)p)); }
#endif
INLINE i32x8 widen8(const uint64_t &v) {  // GCC would do it one by one
  return (i32x8)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)v));
}
INLINE Narrow add_pairs(Narrow a, Narrow b) { return (Narrow)_mm256_hadd_ps((__m256)a, (__m256)b); }
INLINE float sum(f32 v) {  // by parts of what lies in memory, GCC would leave it there
  const __m256 h = (__m256)halves(v);
  return sum((f32x4)_mm256_castps256_ps128(h) + (f32x4)_mm256_extractf128_ps(h, 1));
}
INLINE float half(const void *p) { return _cvtsh_ss(load<uint16_t>(p)); }
INLINE f32 load_f32(const float16 *p) { return (f32)MM(cvtph_ps)(load<Mhalf>(p)); }
INLINE void store_f32(float16 *p, f32 v) { store(p, MM(cvtps_ph)((Mf)v, _MM_FROUND_NINT)); }
#elif defined(NEON)
INLINE i32 widen(const void *p) {
  const uint8x8_t v = vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(p)));
  return (i32)vmovl_u16(vget_low_u16(vmovl_u8(v)));
}
INLINE i32x8 widen8(const uint64_t &v) { return __builtin_convertvector(load<i8x8>(&v), i32x8); }
INLINE f32 add_pairs(f32 a, f32 b) { return (f32)vpaddq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE float half(const void *p) { return load<__fp16>(p); }
INLINE f32 load_f32(const float16 *p) { return (f32)vcvt_f32_f16(load<float16x4_t>(p)); }
INLINE void store_f32(float16 *p, f32 v) { store(p, vcvt_f16_f32((float32x4_t)v)); }
#else
INLINE i32 widen(const void *p) { return __builtin_convertvector(load<u8_quarter>(p), i32); }
INLINE i32x8 widen8(const uint64_t &v) { return __builtin_convertvector(load<i8x8>(&v), i32x8); }
INLINE f32 add_pairs(f32 a, f32 b) {
  return f32{a[0], a[2], b[0], b[2]} + f32{a[1], a[3], b[1], b[3]};
}
INLINE float half(const void *p) {
  const uint32_t v = load<uint16_t>(p), bits = (v & 0x7fff) << 13;  // exponent: 112 too low
  const float size = bits >> 23 < 31 ? load<float>(&bits) * 0x1p112f : bits << 9 ? NAN : INFINITY;
  return v & 0x8000 ? -size : size;
}
INLINE f32 load_f32(const float16 *p) {
  f32 v;
  for (int i = 0; i < VL; i++) v[i] = half(p + i);
  return v;
}
INLINE void store_f32(float16 *p, f32 v) {
  for (int i = 0; i < VL; i++) {
    float f = v[i], shifted = std::fabs(f) + .5f;  // to where a unit is the smallest float16
    uint32_t bits = load<uint32_t>(&f), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    bits = size > 0x7f800000    ? 0x7e00
           : size >= 0x47800000 ? 0x7c00
           : size < 0x38800000  ? load<uint32_t>(&shifted) - 0x3f000000
                                : (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    p[i] = (float16)(sign | bits);
  }
}
#endif

INLINE f32x8 sums(const f32 *v) {  // of each of eight
  auto two = [&](int i) INLINE_LAMBDA { return add_pairs(halves(v[i]), halves(v[i + 1])); };
  const Narrow all[2] = {add_pairs(two(0), two(2)), add_pairs(two(4), two(6))};
#ifdef MM
  const __m256 a = (__m256)all[0], b = (__m256)all[1];
  return (f32x8)_mm256_permute2f128_ps(a, b, 0x20) + (f32x8)_mm256_permute2f128_ps(a, b, 0x31);
#else
  return load<f32x8>(all);
#endif
}

INLINE f32 madd(f32 total, f32 a, f32 b) { return total + a * b; }  // fused: -ffp-contract=fast
// The 2i-th and the 2i+1-th product are added to the i-th total
INLINE i32 madd(i32 total, i16 a, i16 b) {
#if defined(VNNI)
  return (i32)VNNI(dpwssd)((Mi)total, (Mi)a, (Mi)b);
#elif defined(MM)
  return total + (i32)MM(madd_epi16)((Mi)a, (Mi)b);
#elif defined(NEON)  // other pairs, as below
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  const int32x4_t low = vmlal_s16((int32x4_t)total, vget_low_s16(x), vget_low_s16(y));
  return (i32)vmlal_high_s16(low, x, y);
#else                // other pairs: a number and the one half a vector away
  auto part = [](const i16 &v, int at) INLINE_LAMBDA {
    return __builtin_convertvector(load<i16_half>((Bytes)&v + at), i32);
  };
  return total + part(a, 0) * part(b, 0) + part(a, 2 * VL) * part(b, 2 * VL);
#endif
}

// The 4i-th to the 4i+3-rd product are added to the i-th total. VNNI: w is unsigned; NEON: signed
INLINE i32 dot(i32 total, [[maybe_unused]] u8 w, [[maybe_unused]] const void *x) {
#if defined(VNNI)
  total = (i32)VNNI(dpbusd)((Mi)total, (Mi)w, load<Mi>(x));
#elif defined(SDOT)
  total = (i32)vdotq_s32((int32x4_t)total, (int8x16_t)w, load<int8x16_t>(x));
#endif
  return total;
}
#ifdef SDOT  // with the same four bytes of w for all; GCC would copy the total of the intrinsic
template <int LANE> INLINE void dot_lane(i32 &total, u8 x, u8 w) {
  asm volatile("sdot %0.4s, %1.16b, %2.4b[%c3]" : "+w"(total) : "w"(x), "w"(w), "i"(LANE));
}
// Of two tokens and two rows, of which each has eight bytes
INLINE void dot_pairs(i32 &total, u8 x, u8 w) {
  asm volatile("smmla %0.4s, %1.16b, %2.16b" : "+w"(total) : "w"(x), "w"(w));
}
#endif

INLINE void scale8(const uint64_t &bytes, float scale, float *to) {  // 8 signed bytes
#ifdef NEON
  const int16x8_t v = vmovl_s8(vcreate_s8(bytes));
  store(to, to_f32((i32)vmovl_s16(vget_low_s16(v))) * scale);
  store(to + 4, to_f32((i32)vmovl_high_s16(v)) * scale);
#else
  store(to, __builtin_convertvector(widen8(bytes), f32x8) * scale);
#endif
}

// 2e-7 relative: 2^n e^r. 0 below -64, where it would only make denormals of what it multiplies:
// they made a prompt's attention 7 times slower where scores are far apart
INLINE f32 exp(f32 x) {
  constexpr float TERMS[] = {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1, 1};
  const f32 low = keep<true>(splat(-64)), high = keep<true>(splat(88)), zero = splat(-88);
  x = x < low ? zero : x, x = high < x ? high : x;  // NaN stays NaN; GCC compares with constants
  f32 n = x * 1.44269504f + 0x1.8p23f - 0x1.8p23f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32 p = splat(1.f / 720);
  EACH (i, 6) p = p * r + TERMS[i];
  return p * (f32)((__builtin_convertvector(n, i32) + 127) << 23);
}

// Arrays of the thread that calls the kernels, in slots: the last one is given back first. Memory
// is kept for the next call: pages fresh from the system would cost a tenth of a prompt's time.
using Line = std::aligned_storage_t<64, 64>;
static thread_local std::vector<std::vector<Line>> slots;
static thread_local size_t slots_used;
struct GiveBack {
  void operator()(void *) const {
    slots_used--;
#ifdef __SANITIZE_ADDRESS__  // which is to see what is used after
    slots[slots_used] = {};
#endif
  }
};
template <class X> using Array = std::unique_ptr<X[], GiveBack>;
template <class X> static Array<X> array(int64_t n) {  // of n numbers, whatever they are
  const size_t lines = n * sizeof(X) / 64 + 1;
  if (slots_used == slots.size()) slots.emplace_back();
  std::vector<Line> &slot = slots[slots_used];
  if (slot.size() < lines) slot = {}, slot.resize(lines);
  slots_used++;
  return Array<X>((X *)slot.data());
}
