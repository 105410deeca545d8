// The blocks of ggml: weight = scale * (value - ZERO) + minimum. A group of weights has one scale
// and one minimum. Q4_0 has 32 weights in 18 bytes, which are one group, and no minimum:
//   byte               0     1     2    3    ...  17
//   low four bits      scale       w0   w1   ... w15
//   high four bits     scale       w16  w17  ... w31
//
// Q4_K has 256 weights in 144 bytes, eight groups; D and Dm are factors of all scales and minima:
//   byte               0 1   2 3   4 ... 15    16  17  ... 47    48  ... 79     80 ... 143
//   low four bits      D     Dm    8 scales,   w0  w1  ... w31   w64 ... w95    the next 128
//   high four bits     D     Dm    8 minima    w32 w33 ... w63   w96 ... w127   in the same way
//
// values() unpacks W weights to bytes, 16 by 16: any 16 in a row are in 16 bytes in a row.
#pragma once
#include "vectors.h"

// The order in which gemv takes 256 weights, as vectors of W bytes: which sixteens of the weights
// (0: w0 to w15, ...) stand side by side in the i-th vector. With AVX-512 (W = 64) these are
//
//   order     vector 0      vector 1      vector 2      vector 3       types
//   NATURAL   0  1  2  3    4  5  6  7    8  9  10 11   12 13 14 15    groups of 16: Q2_K, Q6_K ...
//   HALVES    0  2  4  6    1  3  5  7    8 10  12 14    9 11 13 15    blocks of 32: Q4_0, Q8_0 ...
//   PARITY    0  4  8 12    1  5  9 13    2  6  10 14    3  7 11 15    groups of 32: Q4_K, Q5_K
//
// HALVES and PARITY take groups of 32 by halves: vectors 0 and 1 have the same groups in the same
// places, and so have 2 and 3. PARITY suits bytes that have two groups: in Q4_K, vector 0 is in the
// low bits of bytes 16 to 31, 48 to 63, 80 to 95 and 112 to 127, vector 2 in their high bits.
enum { NATURAL, HALVES, PARITY };
struct Sixteens {  // that are unpacked to the i-th vector of bytes
  int i, order;
  __attribute__((always_inline)) int operator[](int p) const {
    const int a = i / 2, group = order == HALVES ? W / 16 * a + p : a / 2 * W / 8 + 2 * p + a % 2;
    return order == NATURAL ? W / 16 * i + p : 2 * group + i % 2;
  }
};
template <class F> INLINE u32 by_lanes(F f) {  // f(0), f(1) ..., as one constant
  uint32_t lanes[VL];
  EACH (i, VL) lanes[i] = f(i);
  return load<u32>(lanes);
}

// BLOCK weights in SIZE bytes, in groups of GROUP. Blocks of 32 begin with float16: the scale and
// the minimum. Blocks of 256 (K types) have an integer for each group, and at byte D a float16 by
// which all are multiplied. MAX: of a value times its integer. SPAN: columns with one scale in gemm
constexpr int NO_ZERO = -1;  // of dense types
template <int BLOCK_, int SIZE_, int ZERO_ = 0, bool MINIMUM_ = false, int GROUP_ = 32,
          int MAX_ = 128, int D_ = 0>
struct Block {
  enum { BLOCK = BLOCK_, SIZE = SIZE_, ZERO = ZERO_, MINIMUM = MINIMUM_, GROUP = GROUP_ };
  enum { MAX = MAX_, D = D_, DENSE = ZERO_ == NO_ZERO };
  enum { SPAN = SIGNED ? GROUP_ : BLOCK_ == 256 ? 128 : 32 };
  enum { GROUPS = 256 / GROUP_, SIZE256 = 256 / BLOCK_ * SIZE_ };
  enum { ORDER = GROUP_ == 16 ? NATURAL : BLOCK_ == 32 ? HALVES : PARITY };
};

// Where 16 weights have some of their bits: in 16 bytes from `at` on, from `bit` on
struct Piece {
  int at, bit;
};
#ifdef MM
INLINE __m256i load_pieces(Bytes b, int first, int second) {
  const __m128i v = load<__m128i>(b + first);
  if (second == first) return _mm256_broadcastsi128_si256(v);
  if (second == first + 16) return load<__m256i>(b + first);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(v), load<__m128i>(b + second), 1);
}
#endif
// Bits `mask` of W weights, moved to bit `to` of a byte each; piece(j) says where the j-th 16 are
template <class F> INLINE u8 bits(Bytes b, Sixteens w, F piece, int mask, int to = 0) {
  const int first = piece(w[0]).at;
  const uint8_t kept = mask << to;
#ifdef MM
  const int second = piece(w[1]).at;
#ifdef AVX512
  const int third = piece(w[2]).at, last = piece(w[3]).at;
  Mi all;
  if (second == first + 16 && third == first + 32 && last == first + 48) all = load<Mi>(b + first);
  else if (second == first + 32 && third == first + 64 && last == first + 96) {
    const Mi low = load<Mi>(b + first / 32 * 32), high = load<Mi>(b + first / 32 * 32 + 64);
    all =
        first % 32 ? _mm512_shuffle_i64x2(low, high, 0xdd) : _mm512_shuffle_i64x2(low, high, 0x88);
  } else {
    const __m256i v = load_pieces(b, first, second);
    if (third == first && last == second) all = _mm512_broadcast_i64x4(v);
    else all = _mm512_inserti64x4(_mm512_castsi256_si512(v), load_pieces(b, third, last), 1);
  }
#else
  const Mi all = load_pieces(b, first, second);
#endif
  auto bit = [&](int l) INLINE_LAMBDA { return piece(w[l / 4]).bit; };
  const u32 right = by_lanes([&](int l) INLINE_LAMBDA { return std::max(bit(l) - to, 0); });
  const u32 left = by_lanes([&](int l) INLINE_LAMBDA { return std::max(to - bit(l), 0); });
  return (u8)((u32)all >> right << left) & kept;
#else  // of 16 weights
  const int bit = piece(w[0]).bit;
  u8 all = load<u8>(b + first);
  all = bit > to ? all >> (uint8_t)(bit - to) : all << (uint8_t)(to - bit);
  const bool alone = to == 0 && mask == 255 >> bit;  // the shift has left no others
  return alone ? all : all & kept;
#endif
}
// Of K types: 32 weights have the lowest bits of 32 bytes, the next 32 the bits above them
template <int BITS> INLINE u8 stacked(Bytes b, Sixteens w, int to = 0) {
  constexpr int PER = 8 / BITS;  // weights in a byte
  auto piece = [](int j) { return Piece{j / 2 / PER * 32 + j % 2 * 16, j / 2 % PER * BITS}; };
  return bits(b, w, piece, (1 << BITS) - 1, to);
}
constexpr uint64_t each(uint64_t byte) { return byte * 0x0101010101010101; }
// Of blocks that hold the fifth bit of 32 weights in 32 bits
template <int SIZE> INLINE u8 fifth(Bytes b, Sixteens w) {
#ifdef NEON
  const uint8x16_t all = (uint8x16_t)uint32x4_t{load<uint32_t>(b + w[0] / 2 * SIZE)};
  const uint64x2_t at = {each(w[0] % 2 * 2), each(w[0] % 2 * 2 + 1)};
  const uint8x16_t mask = (uint8x16_t)vdupq_n_u64(0x8040201008040201);
  return (u8)vtstq_u8(vqtbl1q_u8(all, (uint8x16_t)at), mask) & 16;
#else
  uint64_t high = 0;
  for (int p = 0; p < W / 16; p++)
    high |= (uint64_t)load<uint16_t>(b + w[p] / 2 * SIZE + w[p] % 2 * 2) << 16 * p;
#ifdef AVX512
  return (u8)_mm512_maskz_set1_epi8(high, 16);
#else
#ifdef AVX2
  const Mi at = (Mi)u64{each(0), each(1), each(2), each(3)};
  const Mi v = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)high), at);
#else
  const u64 v = {each(high & 255), each(high >> 8)};
#endif
  return (u8)((u8)((u64)v & 0x8040201008040201) != 0) & 16;
#endif
#endif
}
// 8 scales and 8 minima of 6 bits in 12 bytes, four at a time
struct Integers6 {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *m) {
    const uint64_t v = load<uint64_t>(b + 4), last = load<uint32_t>(b + 12), top = v >> 6 & each(3);
    const uint64_t low = last & each(15), high = last >> 4 & each(15), LOW32 = 0xffffffff;
    *s = (v & each(63) & LOW32) | (low | (top & LOW32) << 4) << 32;
    *m = (v & each(63)) >> 32 | (high | top >> 32 << 4) << 32;
  }
};

template <class E> struct Dense : Block<1, sizeof(E), NO_ZERO> {
  INLINE f32 load(Bytes b, int i) { return load_f32((const E *)b + i); }
};
struct F32 : Dense<float> {};
struct F16 : Dense<float16> {};
struct BF16 : Block<1, 2, NO_ZERO> {
  INLINE f32 load(Bytes b, int i) {
#ifdef NEON
    return (f32)vshll_n_u16(::load<uint16x4_t>(b + 2 * i), 16);
#else
    return (f32)(__builtin_convertvector(::load<u16_half>(b + 2 * i), u32) << 16);
#endif
  }
};
// The scale, a minimum, fifth bits, and 16 weights in low nibbles, the others in high ones
template <int BITS, bool MINIMUM_, int SIZE_ = 2 + 2 * MINIMUM_ + 4 * BITS>
struct Nibbles : Block<32, SIZE_, MINIMUM_ ? 0 : 1 << (BITS - 1), MINIMUM_> {
  INLINE u8 values(Bytes b, Sixteens w) {
    auto piece = [](int j) { return Piece{j / 2 * SIZE_ + SIZE_ - 16, j % 2 * 4}; };
    const u8 low = bits(b, w, piece, 15);
    return BITS == 4 ? low : low | fifth<SIZE_>(b + SIZE_ - 20, w);
  }
};
struct Q4_0 : Nibbles<4, false> {};
struct Q4_1 : Nibbles<4, true> {};
struct Q5_0 : Nibbles<5, false> {};
struct Q5_1 : Nibbles<5, true> {};
struct Q8_0 : Block<32, 34, 128> {
  INLINE u8 values(Bytes b, Sixteens w) {
    return bits(b, w, [](int j) { return Piece{j / 2 * 34 + 2 + j % 2 * 16, 0}; }, 255) ^ 128;
  }
};
struct Q2_K : Block<256, 84, 0, true, 16, 3 * 15, 80> {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *m) {
    for (int i = 0; i < 2; i++) {
      const uint64_t v = load<uint64_t>(b + 8 * i);
      s[i] = v & each(15), m[i] = v >> 4 & each(15);
    }
  }
  INLINE u8 values(Bytes b, Sixteens w) { return stacked<2>(b + 16, w); }
};
struct Q3_K : Block<256, 110, 4, false, 16, 4 * 32, 108> {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *) {
    const uint64_t low = load<uint64_t>(b + 96), top = load<uint32_t>(b + 104);
    for (int i = 0; i < 2; i++) {
      uint64_t high = (top >> 4 * i & 0x03030303) | (top >> (4 * i + 2) & 0x03030303) << 32;
      uint64_t v = ((low >> 4 * i & each(15)) | high << 4) ^ each(32), sign = v & each(32);
      s[i] = v | sign << 1 | sign << 2;  // less 32
    }
  }
  INLINE u8 values(Bytes b, Sixteens w) { return stacked<2>(b + 32, w) | stacked<1>(b, w, 2); }
};
struct Q4_K : Block<256, 144, 0, true, 32, 15 * 63>, Integers6 {
  INLINE u8 values(Bytes b, Sixteens w) { return stacked<4>(b + 16, w); }
};
struct Q5_K : Block<256, 176, 0, true, 32, 31 * 63>, Integers6 {
  INLINE u8 values(Bytes b, Sixteens w) { return stacked<4>(b + 48, w) | stacked<1>(b + 16, w, 4); }
};
struct Q6_K : Block<256, 210, 32, false, 16, 32 * 128, 208> {
  INLINE void integers(Bytes b, uint64_t *s, uint64_t *) { memcpy(s, b + 192, 16); }
  INLINE u8 values(Bytes b, Sixteens w) {
    auto low = [](int j) { return Piece{j / 8 * 64 + j % 4 * 16, j / 4 % 2 * 4}; };
    return bits(b, w, low, 15) | stacked<2>(b + 128, w, 4);
  }
};

template <class T> INLINE void read_scales(Bytes b, float *s, float *m) {  // of 256 weights
  if constexpr (T::BLOCK == 256) {
    uint64_t scale[2], minimum[2];
    T::integers(b, scale, minimum);
    const float d = half(b + T::D), d_minimum = T::MINIMUM ? -half(b + T::D + 2) : 0;
    EACH (i, T::GROUPS / 8) {
      scale8(scale[i], d, s + 8 * i);
      if constexpr (T::MINIMUM) scale8(minimum[i], d_minimum, m + 8 * i);
    }
#ifdef AVX512
  } else if constexpr (T::SIZE <= 20) {  // four blocks begin within a vector, the others in another
    auto word = [](int i) INLINE_LAMBDA { return i % 4 * T::SIZE / 2 + i / 4 % 2 * 32 + i / 8; };
    auto words = [=](int l) INLINE_LAMBDA { return word(2 * l) | word(2 * l + 1) << 16; };
    const Mi v = load<Mi>(b), w = load<Mi>(b + 4 * T::SIZE), at = (Mi)by_lanes(words);
    const __m512 all = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutex2var_epi16(v, at, w)));
    store(s, _mm512_castps512_ps256(all));
    if (T::MINIMUM) store(m, _mm512_extractf32x8_ps(all, 1));
#elif defined(NEON)
  } else if constexpr (T::SIZE <= 20) {  // four blocks begin within 64 bytes
    auto byte = [](int i) INLINE_LAMBDA { return i % 4 * T::SIZE + i / 4 * 2; };
    auto two = [=](int i) INLINE_LAMBDA { return byte(i) | (byte(i) + 1) << 8; };
    auto four = [=](int l) INLINE_LAMBDA { return two(2 * l) | two(2 * l + 1) << 16; };
    const uint8x16_t at = (uint8x16_t)by_lanes(four);
    EACH (i, 2) {
      const uint8x16_t v = vqtbl4q_u8(vld1q_u8_x4(b + i * 4 * T::SIZE), at);
      const float16x8_t eight = vreinterpretq_f16_u8(v);
      store(s + 4 * i, vcvt_f32_f16(vget_low_f16(eight)));
      if (T::MINIMUM) store(m + 4 * i, vcvt_high_f32_f16(eight));
    }
#endif
  } else {
    EACH (i, 1 + T::MINIMUM) {
#ifdef MM  // joined as scalars: vectors have enough to do
      uint64_t four[2] = {};
      EACH (j, 8) four[j / 4] |= load<uint16_t>(b + 2 * i + j * T::SIZE) * (1ull << j % 4 * 16);
      store(i ? m : s, _mm256_cvtph_ps(_mm_set_epi64x((int64_t)four[1], (int64_t)four[0])));
#else
      EACH (j, 8) (i ? m : s)[j] = half(b + 2 * i + j * T::SIZE);
#endif
    }
  }
}
// Of all groups' numbers those of the lanes, whose groups are group(0), group(1), ...
template <int GROUPS, class F> INLINE f32 spread(const Narrow *v, F group) {
#ifdef AVX512
  const Mf all = GROUPS == 16 ? load<Mf>(v) : _mm512_castps256_ps512((__m256)*v);
  return (f32)_mm512_permutexvar_ps((Mi)by_lanes(group), all);
#elif defined(AVX2)
  const u32 lane = by_lanes([&](int l) INLINE_LAMBDA { return group(l) % 8; });
  if (group(0) != group(VL - 1))
    return (f32)_mm256_permutevar8x32_ps((__m256)v[group(0) / 8], (Mi)lane);
#endif
  return splat(v[group(0) / NL][group(0) % NL]);  // there is one
}
// gemv takes SHARE vectors of weights at a time, in whose lanes (four bytes) are the same groups:
// their products are added before a scale multiplies them. Two vectors are like that as they are,
// with NATURAL one. With AVX-512, mix() makes all 4 vectors of a K type so, by swapping parts of
// them. The groups of the 16 lanes of each vector are then
//
//   PARITY    0  0  1  1    2  2  3  3    4  4  5  5    6  6  7  7     8 groups of 32
//   NATURAL   0  4  8 12    1  5  9 13    2  6 10 14    3  7 11 15    16 groups of 16
//
// spread_mixed() puts scales into the lanes in this order, and Fours, by the same mix(), tells
// slice() where the numbers of x go. These and Sixteens must agree.
template <int ORDER> constexpr int SHARE = VL == 16 && ORDER != HALVES ? 4 : 2 - (ORDER == NATURAL);
template <int ORDER> INLINE void mix([[maybe_unused]] u8 *v) {
#ifdef AVX512
  auto interleave = [&](int a, int b, bool words) INLINE_LAMBDA {
    const Mi x = (Mi)v[a], y = (Mi)v[b];
    v[a] = (u8)(words ? _mm512_unpacklo_epi32(x, y) : _mm512_unpacklo_epi64(x, y));
    v[b] = (u8)(words ? _mm512_unpackhi_epi32(x, y) : _mm512_unpackhi_epi64(x, y));
  };
  if (ORDER == NATURAL) interleave(0, 1, true), interleave(2, 3, true);
  if (ORDER != HALVES) interleave(0, 2, false), interleave(1, 3, false);
#endif
}
// The groups of the lanes of SHARE vectors from the i-th on
template <class T> INLINE f32 spread_mixed(const Narrow *v, int i) {
  return spread<T::GROUPS>(v, [&](int lane) INLINE_LAMBDA {
    if (SHARE<T::ORDER> == 4) return T::GROUP == 16 ? lane % 4 * 4 + lane / 4 : lane / 2;
    return Sixteens{i, T::ORDER}[lane / 4] * 16 / T::GROUP;
  });
}
template <int ORDER> struct Fours {  // of 256 weights, that are in one lane after the other then
  alignas(64) uint32_t at[64];
  Fours() {
    for (int i = 0; i < 64; i++) at[i] = 4 * Sixteens{i / VL, ORDER}[i % VL / 4] + i % 4;
    mix<ORDER>((u8 *)at);
  }
};
// Some bytes into L2. AHEAD: beyond what hardware fetches at a page's end (F16 1.6 times as fast)
constexpr int AHEAD = 6144;
INLINE void prefetch(Bytes p, int64_t count) {
  for (int64_t i = 0; i < count; i += 64) __builtin_prefetch(p + i, 0, 2);
}
// The last blocks of a row that are fewer than 256 weights, and zeros in place of the others
__attribute__((noinline, cold)) static Bytes pad(Bytes w, int there, int whole, uint8_t *padded) {
  memset(padded + there, 0, whole - there);
  return (Bytes)memcpy(padded, w, there);
}

// ---- 256 weights as numbers ---------------------------------------------------------------------

template <class T> static void unpack(Bytes w, float *y) {
  if constexpr (T::DENSE) {
    for (int i = 0; i < 256; i += VL) store(y + i, T::load(w, i));
  } else {
    float s[T::GROUPS], m[T::GROUPS];
    read_scales<T>(w, s, m);
    EACH_VECTOR (i, 256 / W) {
      const u8 v = T::values(w, {i, NATURAL});
      for (int p = 0; p < W; p += VL) {
        const int group = (W * i + p) / T::GROUP;
        f32 scaled = (to_f32(widen((Bytes)&v + p)) - (float)T::ZERO) * s[group];
        store(y + W * i + p, T::MINIMUM ? scaled + m[group] : scaled);
      }
    }
  }
}
// The same as int16, even ones of 32 first, with a scale for each SPAN and the minima
template <class T> static void unpack_int16(Bytes w, int16_t *y, float *scale, float *minima) {
#ifdef SDOT  // as signed bytes, in their order, for I8MM eight of every sixteen
  read_scales<T>(w, scale, minima);
  EACH_VECTOR (i, 256 / W) {
    const u8 v = T::values(w, {i, NATURAL}) - (uint8_t)T::ZERO;
    if (!I8MM) store((uint8_t *)y + W * i, v);
    else store(y + W * i, load<uint64_t>(&v)), store(y + W * i + 8, load<uint64_t>((Bytes)&v + 8));
  }
#else
  f32x8 factors[2];  // twice an int16
  if constexpr (T::BLOCK == 256) {
    uint64_t integers[2], minimum[2];
    T::integers(w, integers, minimum);
    for (int i = 0; i < T::GROUPS / 8; i++) {
      i32x8 v = widen8(integers[i]);
      factors[i] = (f32x8)(v << 16 | (v & 0xffff));
    }
    for (int i = 0; i < 256 / T::SPAN; i++) scale[i] = half(w + T::D);
    if constexpr (T::MINIMUM)
      store(minima, __builtin_convertvector(widen8(*minimum), f32x8) * -half(w + T::D + 2));
  } else {
    read_scales<T>(w, scale, minima);
  }
  EACH_VECTOR (i, 256 / W) {
    const u8 v = T::values(w, {i, NATURAL});
    i16 even = (i16)((u16)v & 255) - (int16_t)T::ZERO, odd = (i16)((u16)v >> 8) - (int16_t)T::ZERO;
    if constexpr (T::BLOCK == 256) {
      auto group = [&](int lane) INLINE_LAMBDA { return (W * i + 4 * lane) / T::GROUP; };
      const i16 factor = (i16)spread<T::GROUPS>(factors, group);
      even *= factor, odd *= factor;
    }
#ifdef AVX512  // two times 32
    store(y, _mm512_shuffle_i64x2((Mi)even, (Mi)odd, 0x44));
    store(y + 32, _mm512_shuffle_i64x2((Mi)even, (Mi)odd, 0xee));
#else
    store(y, even), store(y + 16, odd);
#endif
    y += W;
  }
#endif
}
