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
#include "formats.h"

// ---- gemv: up to 16 rows of x; the bits of a row do not depend on how many there are ------------

// Rows of x as integers q with scales, and sums of x, for minima. Scales and sums are kept per 16
// numbers [0] and per 32 [1], for formats have groups of either. Rows end with zeros, up to `room`.
struct Rows {
  const float *x;
  int64_t count, K, room;
  Array<float> memory;
  int16_t *q;
  float *scales[2], *sums[2];
  Rows(const float *x, int64_t count, int64_t K)
      : x(x), count(count), K(K), room((K + 255) / 256 * 256) {
    const int64_t n = count * room / 32;
    memory = array<float>(22 * n);
    if (K < room) std::fill_n(memory.get(), 22 * n, 0.f);
    q = (int16_t *)memory.get();
    scales[0] = &memory[16 * n], sums[0] = scales[0] + 2 * n;
    scales[1] = sums[0] + 2 * n, sums[1] = scales[1] + n;
  }
};

// The r-th row of x -> its integers, scales and sums. The integers are as large as int16 allows,
// and small enough that a sum of SPAN of them times `most` stays within int32.
template <int SPAN> static void quantize_row(Rows &to, int64_t r, int most) {
  int64_t k = r * to.room;
  for (const float *x = to.x + r * to.K, *end = x + to.K; x < end; x += SPAN, k += SPAN) {
    f32 v[SPAN / VL], top = {}, sizes = {}, sums[SPAN / 16] = {};
    for (int i = 0; i < SPAN / VL; i++) {
      v[i] = load<f32>(x + VL * i);
      f32 size = v[i] < 0 ? -v[i] : v[i];
      top = max(size, top), sizes += size;
    }
    float limit = top[0], all = sum(sizes);  // NaN if an x is
    for (int i = 1; i < VL; i++) limit = top[i] > limit ? top[i] : limit;
    const float least = all / (0x7fff0000 / most - SPAN / 2);
    const float scale = limit / 32639 > least ? limit / 32639 : least;  // 127.5 * 256
    const float inverse = limit > 1e-30f ? 1 / scale : 0;
    for (int i = 0; i < SPAN / VL; i++) {
      v[i] = v[i] * inverse + 0x1.8p23f - 0x1.8p23f;  // to the nearest integer
      sums[i * VL / 16] += v[i];
      store(&to.q[k + VL * i],
            __builtin_convertvector(__builtin_convertvector(v[i], i32), i16_half));
    }
    for (int64_t i = 0, at = k / 16; i < SPAN / 16; i += 2, at += 2) {
      float first = sum(sums[i]) * scale, second = sum(sums[i + 1]) * scale;
      to.scales[0][at] = to.scales[0][at + 1] = to.scales[1][at / 2] = scale;
      to.sums[0][at] = first, to.sums[0][at + 1] = second;
      to.sums[1][at / 2] = first + second;
    }
  }
}
// Each UNIT of n numbers q, in place: the even ones, then the odd ones
template <int UNIT> static void split(int16_t *q, int64_t n) {
  for (int16_t *end = q + n; q < end; q += UNIT) {
    u32 words[UNIT / 2 / VL];
    memcpy(words, q, sizeof words);
    for (int i = 0; i < UNIT / 2 / VL; i++) {
      store(q + VL * i, __builtin_convertvector(words[i], u16_half));
      store(q + VL * i + UNIT / 2, __builtin_convertvector(words[i] >> 16, u16_half));
    }
  }
}
// Each 64 of n numbers q, in place, as multiply() wants them
template <bool PAIRED> static void split_for_gemv(int16_t *q, int64_t n) {
#ifdef VNNI  // high bytes, then low bytes: q = 256 high + low, both signed
  for (int16_t *end = q + n; q < end; q += W) {
    i16 v[2];
    memcpy(v, q, sizeof v);
    for (int i = 0; i < 2; i++) {
      store((int8_t *)q + W / 2 * i, __builtin_convertvector((v[i] + 128) >> 8, i8_half));
      store((int8_t *)q + W / 2 * i + W, __builtin_convertvector(v[i], i8_half));
    }
  }
#else
  split<W>(q, n);
  for (int16_t *end = q + n; PAIRED && q < end; q += 64) {  // eights 0 1 2 .. 7 -> 0 4 1 5 .. 7
    f32x4 eights[2][4];
    memcpy(eights, q, sizeof eights);
    for (int i = 0; i < 8; i++) store(q + 8 * i, eights[i % 2][i / 2]);
  }
#endif
}
// W weights times W numbers of x; each lane is the sum of 4 products of neighbours
INLINE i32 multiply(u8 w, Bytes x) {
#ifdef VNNI
  const i32 high = (i32)VNNI(dpbusd)(Mi{}, (Mi)w, load<Mi>(x));
  return (i32)VNNI(dpbusd)((Mi)(high << 8), (Mi)w, load<Mi>(x + W));
#else
  const i32 even = madd(i32{}, (i16)((u16)w & 255), load<i16>(x));
  return madd(even, (i16)((u16)w >> 8), load<i16>(x + W));
#endif
}
#ifdef AVX2
// Two blocks of nibbles side by side, each of the four in 16 bits times what it meets in x
INLINE i32 multiply(__m256i nibbles, Bytes x) {
  auto product = [&](__m256i v, int bits, int i) INLINE_LAMBDA {
    return madd(i32{}, (i16)_mm256_and_si256(v, _mm256_set1_epi16(bits)), load<i16>(x + 32 * i));
  };
  const __m256i high = _mm256_srli_epi16(nibbles, 4);
  const i32 even = product(nibbles, 0xf, 0) + product(high, 0xf, 1);
  return even + ((product(nibbles, 0xf00, 2) + product(high, 0xf00, 3)) >> 8);
}
#endif
// The i-th STEP weights as multiply() takes them
template <class T> INLINE auto gemv_values(Bytes b, int i) {
#ifdef AVX2
  if constexpr (T::PAIRED) {
    const Bytes p = b + (2 * i + 1) * T::SIZE - 16, q = p + T::SIZE;
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(q), 1);
  } else
#endif
    return T::values(b, i);
}

// One row of W (K) times R rows of x, or as many as there are, from `row` on -> y[0], y[stride] ...
template <class T, int R>
static void dot(Bytes w, const Rows &x, int64_t row, float *y, int64_t stride) {
  constexpr int GROUPS = T::GROUPS, WIDE = T::GROUP == 32, STEP = T::PAIRED ? 64 : W;
  Bytes q[R];
  const float *x_scales[R], *x_sums[R];
  for (int r = 0; r < R; r++) {
    const int64_t at = (row + r < x.count ? row + r : x.count - 1) * x.room;
    q[r] = (Bytes)(x.q + at);
    x_scales[r] = &x.scales[WIDE][at / T::GROUP], x_sums[r] = &x.sums[WIDE][at / T::GROUP];
  }
  f32 total[R] = {};
  f32x8 low[R][GROUPS / 8] = {};
  for (int64_t k = 0, K = x.K; k < K; k += 256, w += T::SIZE256) {
    uint8_t padded[T::SIZE256];
    Bytes b = w;
    if (T::BLOCK < 256 && k + 256 > K) b = pad(w, (K - k) / T::BLOCK * T::SIZE, T::SIZE256, padded);
    prefetch(w + AHEAD, T::SIZE256);
    alignas(64) float s[GROUPS], m[GROUPS], scales[R][GROUPS];
    read_scales<T>(b, s, m);
    UNROLL
    for (int r = 0; r < R; r++) UNROLL
    for (int g = 0; g < GROUPS; g += 8) {
      f32x8 v = load<f32x8>(s + g);
      store(scales[r] + g, v * load<f32x8>(x_scales[r] + k / T::GROUP + g));
      // Minima or zero points times sums of x are taken off at the end
      if (T::MINIMUM) v = load<f32x8>(m + g);
      low[r][g / 8] += v * load<f32x8>(x_sums[r] + k / T::GROUP + g);
    }
    // Reload scales from L1: broadcast loads are free, shuffles are not
    asm volatile("" : : "r"(scales) : "memory");
    unrolled<256 / STEP>([&](int i) INLINE_LAMBDA {
      const auto v = gemv_values<T>(b, i);
      UNROLL
      for (int r = 0; r < R; r++) {
        const f32 products = to_f32(multiply(v, q[r] + 2 * (k + STEP * i)));
        const f32 scale = spread<T::GROUP, STEP>(scales[r] + STEP * i / T::GROUP);
        total[r] += products * scale;
      }
    });
  }
  for (int r = 0; r < R && row + r < x.count; r++) {
    for (int g = 1; g < GROUPS / 8; g++) low[r][0] += low[r][g];
    y[r * stride] = sum(total[r]) - sum(low[r][0]) * (T::MINIMUM ? 1 : T::ZERO);
  }
}

// One row of W (K) times one of x, in float32
template <class T> static float dot_exact(Bytes w, const float *x, int64_t K) {
  f32 total[32 / VL] = {};
  for (int64_t k = 0; k < K; k += 256, w += T::SIZE256) {
    uint8_t padded[T::SIZE256];
    const Bytes b = k + 256 <= K ? w : pad(w, (K - k) / T::BLOCK * T::SIZE, T::SIZE256, padded);
    prefetch(w + AHEAD, T::SIZE256);
    alignas(64) float line[256];
    if (!T::DENSE) unpack<T>(b, line);
    for (int i = 0; i < 256 && i < K - k; i += 32) UNROLL
    for (int j = 0; j < 32; j += VL) {
      f32 v;
      if constexpr (T::DENSE) v = T::load(b, i + j);
      else v = load<f32>(line + i + j);
      total[j / VL] += v * load<f32>(x + k + i + j);
    }
  }
  UNROLL
  for (int j = 1; j < 32 / VL; j++) total[0] += total[j];
  return sum(total[0]);
}

// ---- The table of formats -----------------------------------------------------------------------

struct Format {
  int64_t type, block, size, span, max;
  bool minimum;
  decltype(&::unpack<F32>) unpack;
  decltype(&dot_exact<F32>) exact;
  decltype(&split_for_gemv<false>) split;
  decltype(&dot<Q8_0, 1>) one = nullptr, four = nullptr;   // rows of x at most; null: as if exact
  decltype(&::unpack_int16<Q8_0>) unpack_int16 = nullptr;  // null: as if exact
  int64_t bytes(int64_t weights) const { return weights / block * size; }
};
template <class T> static constexpr Format format(int64_t type) {
  Format f = {type,      T::BLOCK,     T::SIZE,
              T::SPAN,   T::MAX,       T::MINIMUM,
              unpack<T>, dot_exact<T>, split_for_gemv<T::PAIRED>};
  if constexpr (!T::DENSE) {
    f.one = dot<T, 1>, f.four = dot<T, 4>;
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

// Several matrices, whose formats split x alike, times the same rows of x, in one parallel loop
static void gemv(const Matrix *matrices, int count, const float *x, int64_t rows, int64_t K,
                 bool fast) {
  int64_t total = 0;
  for (int i = 0; i < count; i++) total += matrices[i].N;
  Rows vectors(x, fast ? rows : 0, K);
  for (int64_t r = 0; r < vectors.count; r++) quantize_row<32>(vectors, r, 1);
  matrices->format->split(vectors.q, vectors.count * vectors.room);
#pragma omp parallel for schedule(guided, 16) if (total * K > 1 << 16)  // long runs of memory
  for (int64_t i = 0; i < total; i++) {
    const Matrix *m = matrices;
    int64_t n = i;
    while (n >= m->N) n -= m++->N;
    const Format *f = m->format;
    const Bytes w = m->w + n * f->bytes(K);
    if (fast && f->one)
      for (int64_t r = 0; r < rows; r += 4)
        (rows - r > 1 ? f->four : f->one)(w, vectors, r, m->y + r * m->N + n, m->N);
    else
      for (int64_t r = 0; r < rows; r++) m->y[r * m->N + n] = f->exact(w, x + r * K, K);
  }
}

// ---- gemm, as in Goto and BLIS ------------------------------------------------------------------
// x is packed in panels of MR rows; strips of W are unpacked, KC columns at a time; the microkernel
// multiplies NR of their rows by a panel. Both consist of words of 32 bits: one float32 or two
// int16. Sums of integers are scaled span by span; minima are taken off HELD columns at a time.

constexpr int V = 2, MR = V * VL, KC = 256, HELD = 1024, STRIP = 48, PANELS = 16;
template <class X> constexpr int PER_WORD = is_int16<X> ? 2 : 1;

// sums (NR, MR) += w (NR, count) . x (count, MR), in words; w has strides `down` and `right`
template <class X>
INLINE void microkernel(Sum<X> (&sums)[NR][V], const void *w, int64_t down, int64_t right,
                        const void *x, int64_t count) {
  Bytes a = (Bytes)w, b = (Bytes)x;
  UNROLL_4
  for (int64_t k = 0; k < count; k++, a += 4 * right, b += 4 * MR) {
    X v[V];
    for (int i = 0; i < V; i++) v[i] = load<X>(b + 4 * VL * i);
    for (int i = 0; i < 4 * MR; i += 64) __builtin_prefetch(b + i + 2048);  // panels lie in L2
    UNROLL
    for (int n = 0; n < NR; n++) {
      const X word = splat<X>(a + 4 * n * down);
      for (int i = 0; i < V; i++) sums[n][i] = madd(sums[n][i], v[i], word);
    }
  }
}

// The p-th MR of so many rows of n words, `stride` words apart -> (n, MR); the last row fills up
static void turn(int64_t p, const void *rows, int64_t count, int64_t n, int64_t stride, void *to) {
  auto row = [&](int64_t i) { return (Bytes)rows + 4 * stride * std::min(p * MR + i, count - 1); };
  for (int64_t first = 0; first < n; first += 16)  // what is written at a time stays in L1
    for (int64_t i = 0; i < MR; i += 4) {
      const Bytes a = row(i), b = row(i + 1), c = row(i + 2), d = row(i + 3);
      for (int64_t k = first; k < n && k < first + 16; k++) {
        auto word = [&](Bytes row) { return load<float>(row + 4 * k); };  // whatever it is
        store((float *)to + k * MR + i, f32x4{word(a), word(b), word(c), word(d)});
      }
    }
}

// x (rows, K): words (panels, K / PER_WORD, MR); for int16 scales and sums (panels, K / 32, MR)
template <class X> struct Panels {
  int64_t rows, K, count;
  Array<uint32_t> words;
  Array<float> scales, sums;
  Panels(const float *x, int64_t rows, int64_t K, int max)
      : rows(rows), K(K), count((rows + MR - 1) / MR) {
    words = array<uint32_t>(count * MR * K / PER_WORD<X>);
    const int64_t groups = is_int16<X> ? count * MR * K / 32 : 0;
    scales = array<float>(groups), sums = array<float>(groups);
    Rows vectors(x, is_int16<X> ? rows : 0, K);
#pragma omp parallel for schedule(dynamic)
    for (int64_t p = 0; p < count; p++) {
      for (int64_t i = p * MR; is_int16<X> && i < (p + 1) * MR && i < rows; i++) {
        (K % 128 ? quantize_row<32> : quantize_row<128>)(vectors, i, max);
        split<32>(vectors.q + i * vectors.room, K);
      }
      if constexpr (!is_int16<X>) turn(p, x, rows, K, K, &words[p * MR * K]);
      else {
        turn(p, vectors.q, rows, K / 2, vectors.room / 2, &words[p * MR * K / 2]);
        turn(p, vectors.scales[1], rows, K / 32, vectors.room / 32, &scales[p * MR * K / 32]);
        turn(p, vectors.sums[1], rows, K / 32, vectors.room / 32, &sums[p * MR * K / 32]);
      }
    }
  }
};

// total (NR, MR) += w (NR, count), of strides `down` and `right`, times x (count, MR), in float32
INLINE void tile(float (*total)[MR], const void *w, int64_t down, int64_t right, const void *x,
                 int64_t count) {
  f32 sums[NR][V] = {};  // not what total is: GCC would keep half of that in memory
  microkernel<f32>(sums, w, down, right, x, count);
  UNROLL
  for (int j = 0; j < NR; j++)
    for (int i = 0; i < V; i++) store(&total[j][i * VL], load<f32>(&total[j][i * VL]) + sums[j][i]);
}

// The same with int16: w has a scale for each `span` columns, x (words) one for each 32
INLINE void tile_int16(float (*total)[MR], const uint32_t (*w)[KC / 2], const float (*scales)[8],
                       const uint32_t *x, const float *x_scales, int64_t span, int64_t spans) {
  for (int64_t g = 0; g < spans; g++) {
    i32 sums[NR][V] = {};
    microkernel<i16>(sums, w[0] + g * span / 2, KC / 2, 1, x + g * span / 2 * MR, span / 2);
    f32 x_scale[V];  // loaded once: a store to total might change them
    for (int i = 0; i < V; i++) x_scale[i] = load<f32>(x_scales + g * span / 32 * MR + i * VL);
    UNROLL
    for (int j = 0; j < NR; j++) {
      f32 scale = splat(scales[j][g]);
      for (int i = 0; i < V; i++) {
        f32 old = load<f32>(&total[j][i * VL]);
        store(&total[j][i * VL], old + to_f32(sums[j][i]) * scale * x_scale[i]);
      }
    }
  }
}

template <class X> static void gemm(const Matrix &m, const Panels<X> &x) {
  const Format *f = m.format;
  const int64_t K = x.K, size = f->bytes(256);
  std::atomic<int64_t> taken(0);  // strips, by a thread each
#pragma omp parallel
  {
    alignas(64) uint32_t words[STRIP][KC / PER_WORD<X>] = {};
    alignas(64) float total[PANELS][STRIP][MR], scales[STRIP][8] = {};
    float minima[HELD / 32][STRIP] = {};
    uint8_t padded[1024];
    for (int64_t n = STRIP * taken++, next = n; n < m.N; n = next) {
      const int high = (int)std::min<int64_t>(m.N - n, STRIP);
      for (int64_t first = 0; first < x.count; first += PANELS) {
        const int64_t panels = std::min<int64_t>(x.count - first, PANELS);
        memset(total, 0, panels * sizeof *total);
        for (int64_t k = 0; k < K; k += KC) {
          const int64_t count = std::min<int64_t>(K - k, KC), end = k + count, held = k % HELD;
          if (end == K && first + PANELS >= x.count) next = STRIP * taken++;
          const Bytes ahead = m.w + f->bytes(end < K ? n * K + end : next * K);  // to be fetched
          for (int i = 0; i < high; i++) {
            Bytes blocks = m.w + f->bytes((n + i) * K + k);
            if (count < 256) blocks = pad(blocks, f->bytes(count), size, padded);
            if constexpr (!is_int16<X>) f->unpack(blocks, (float *)words[i]);
            else {
              float minimum[8];
              f->unpack_int16(blocks, (int16_t *)words[i], scales[i], minimum);
              for (int j = 0; f->minimum && j < 8; j++) minima[held / 32 + j][i] = minimum[j];
            }
          }
          for (int64_t p = 0; p < panels; p++)
            for (int i = 0; i < high; i += NR) {
              for (int64_t j = i + p * NR / panels; j < i + (p + 1) * NR / panels; j++)
                prefetch(ahead + f->bytes(j * K), size + 63);
              const int64_t at = ((first + p) * K + k) * MR;
              const uint32_t *panel = &x.words[at / PER_WORD<X>];
              if constexpr (!is_int16<X>) tile(total[p] + i, words[i], KC, 1, panel, count);
              else {
                tile_int16(total[p] + i, words + i, scales + i, panel, &x.scales[at / 32], f->span,
                           count / f->span);
                if (f->minimum && (end == K || end % HELD == 0))
                  tile(total[p] + i, &minima[0][i], 1, STRIP, &x.sums[(at - held * MR) / 32],
                       (held + count) / 32);
              }
            }
        }
        for (int64_t r = first * MR; r < x.rows && r < (first + panels) * MR; r++)
          for (int i = 0; i < high; i++) m.y[r * m.N + n + i] = total[r / MR - first][i][r % MR];
      }
    }
  }
}

// Each of the matrices times x (rows, K)
static void multiply(const Matrix *matrices, int count, const float *x, int64_t rows, int64_t K,
                     bool fast) {
  while (rows <= 16 && count) {
    int alike = 1;
    while (alike < count && matrices[alike].format->split == matrices->format->split) alike++;
    gemv(matrices, alike, x, rows, K, fast);
    matrices += alike, count -= alike;
  }
  std::optional<Panels<f32>> exact_panels;
  std::optional<Panels<i16>> fast_panels;
  int64_t max = 0;
  for (int i = 0; i < count; i++) max = std::max(max, matrices[i].format->max);
  for (const Matrix *m = matrices; m < matrices + count; m++) {
    if (fast && m->format->unpack_int16) {
      if (!fast_panels) fast_panels.emplace(x, rows, K, (int)max);
      gemm(*m, *fast_panels);
    } else {
      if (!exact_panels) exact_panels.emplace(x, rows, K, 0);
      gemm(*m, *exact_panels);
    }
  }
}

// ---- Layers: what Block.forward does ------------------------------------------------------------

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
  std::fill_n(top, J, -INFINITY), std::fill_n(p, J * room, -INFINITY);
  for (int64_t s = 0; s < length; s++) {
    f32 products[J] = {};
    prefetch((Bytes)(keys + s * D) + AHEAD, D * sizeof(E));
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
    for (int64_t s = 0; s < length; s++) {
      if (d == 0) prefetch((Bytes)(values + s * D) + AHEAD, D * sizeof(E));
      UNROLL
      for (int i = 0; i < V; i++) {  // the last one twice if there is but one
        f32 value = load_f32(values + s * D + d + std::min<int64_t>(i, vectors - 1) * VL);
        UNROLL
        for (int j = 0; j < J; j++) mix[j][i] += value * p[j * room + s];
      }
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
  turn(0, q, tokens, D, row, queries);
  std::fill_n(total, (D + NR) * MR, 0.f), std::fill_n(some, (KEYS + NR) * D, 0.f);
  for (int64_t from = 0; from < count; from += KEYS) {
    const int64_t n = count - from < KEYS ? count - from : KEYS;
    for (int64_t i = 0; i < n * D; i += VL) store(some + i, load_f32(keys + from * D + i));
    for (int64_t s = from; s < from + n; s += NR) {
      f32 sums[NR][V] = {};
      microkernel<f32>(sums, some + (s - from) * D, D, 1, queries, D);
      for (int j = 0; j < NR; j++)
        for (int i = 0; i < V; i++) {
          const auto seen = lane + (int)(VL * i + length) > (int)s + j;
          f32 score = seen ? sums[j][i] * scale : splat(-INFINITY);
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
  for (f32 &w : weight) w = 1 / w;
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t d = 0; d < D; d++) y[i * row + d] = total[d * MR + i] * ((float *)weight)[i];
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
#pragma omp parallel if (rows * (pos + T) > 64)
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

// NOT_SUPPORTED: an unknown type, or K no multiple of its block
enum { DONE, NO_MEMORY, NOT_SUPPORTED };

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
  for (int64_t k = 0; k < count; k += 256) {
    const int64_t size = std::min(count - k, (int64_t)256);
    uint8_t padded[1024];
    float line[256];
    Bytes b = blocks + f->bytes(k);
    if (size < 256) b = pad(b, f->bytes(size), f->bytes(256), padded);
    f->unpack(b, line);
    if (!bfloat16) memcpy((float *)y + k, line, size * sizeof(float));
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
