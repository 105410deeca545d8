// The CPU kernels of llama2.py: products with matrices that stay in the format of the file (ggml's
// blocks of quantised weights), and whole layers made of them. Python calls linear (y = x W^T: gemv
// for up to GEMV_TOKENS tokens, gemm for more), run_blocks (what Block.forward does, one Block
// after the other) and embed (some rows of W). Exact: float32 throughout. Fast: x is rounded to
// int16 with a scale for each 256 numbers, in gemm each 128 (relative error 3e-5, gemm of Q6_K
// 6e-5), unless the weights are dense.
//
// gemv reads W once. Threads take groups of HIGH rows of W in parallel. Before that, x is cut into
// slices: 256 numbers of a token, in the order in which weights are unpacked.
//             slice 0   slice 1          for each group, for each 4 tokens:
//           +---------+---------+--        for each NW rows, for each slice (dot):
//   group 0 | HIGH rows         | ...        unpack 256 weights of each row, and multiply them by
//           +---------+---------+--          the slices of the 4 tokens (dot_slice)
//
// gemm, as in Goto and BLIS, first packs x into panels of MR tokens: for each column, the numbers
// of the MR tokens, which are V vectors. Threads take strips of W in parallel.
//             KC columns  KC columns     for each strip, for up to PANELS panels:
//           +-----------+-----------+--    for each KC columns: unpack STRIP x KC weights;
//   strip 0 | NR rows   |           | ...    for each panel, for each NR rows: a tile, whose
//           | NR rows   |           |          NR x MR sums the microkernel has in registers
#include "formats.h"
#include "team.h"
#include "tensor.h"

// ---- gemv: few tokens; the bits of one do not depend on how many there are ----------------------

// As measured: gemv unpacks W again for each 4 tokens; gemm is faster from 13 on, with AVX2 from 7
constexpr int64_t GEMV_TOKENS = VL == 16 ? 12 : 6;

// SPAN numbers of x -> integers q, a scale, and sums of each GROUP (for gemv: of q). The constants:
//   32639             127 * 256 + 127, the largest q that split() can cut into signed bytes
//   0x7fff0000        A sum of products with weights up to `weight` must stay within int32. A q is
//                     at most |x| / scale + 1/2, so |q| sum up to all / scale + SPAN / 2: times
//                     `weight`, that is 2^31 less 2^16, which is room for rounding in `all`.
//   0x1.8p23f         floats from 2^23 to 2^24 are whole numbers: adding 1.5 * 2^23 rounds to the
//                     nearest one, also of negative numbers, and subtracting it gives that.
//   1e-30f            below it, 1 / scale could be infinite; all q are 0 then
template <int SPAN, int GROUP>
static float quantize(const float *x, int weight, int16_t *q, float *sums) {
  f32 v[SPAN / VL], top = {}, sizes = {}, groups[SPAN / GROUP] = {};
  for (int i = 0; i < SPAN / VL; i++) {
    v[i] = load<f32>(x + VL * i);
    f32 size = v[i] < 0 ? -v[i] : v[i];
    top = max(size, top), sizes += size;
  }
  float limit = top[0], all = sum(sizes);  // NaN if an x is
  for (int i = 1; i < VL; i++) limit = top[i] > limit ? top[i] : limit;
  const float smallest = all / (0x7fff0000 / weight - SPAN / 2);
  const float scale = limit / 32639 > smallest ? limit / 32639 : smallest;
  const float inverse = limit > 1e-30f ? 1 / scale : 0;
  for (int i = 0; i < SPAN / VL; i++) {
    v[i] = v[i] * inverse + 0x1.8p23f - 0x1.8p23f;  // to the nearest integer
    groups[i * VL / GROUP] += v[i];
    store(q + VL * i, __builtin_convertvector(__builtin_convertvector(v[i], i32), i16_half));
  }
  for (int i = 0; i < SPAN / GROUP; i++) sums[i] = sum(groups[i]) * (SPAN < 256 ? scale : 1);
  return scale;
}
// Each UNIT of n numbers q, in place: the even ones, then the odd ones; or by bytes: high ones,
// then low ones, q = 256 high + low, both signed
template <int UNIT, bool BY_BYTES> static void split(int16_t *q, int64_t n) {
  using Whole = std::conditional_t<BY_BYTES, i16, u32>;
  using Half = std::conditional_t<BY_BYTES, i8_half, u16_half>;
  for (int16_t *end = q + n; q < end; q += UNIT) {
    Whole v[2 * UNIT / W];
    memcpy(v, q, sizeof v);
    for (int i = 0; i < 2 * UNIT / W; i++) {
      store(q + VL * i, __builtin_convertvector(BY_BYTES ? (v[i] + 128) >> 8 : v[i], Half));
      store(q + VL * i + UNIT / 2, __builtin_convertvector(BY_BYTES ? v[i] : v[i] >> 16, Half));
    }
  }
}

// 256 numbers of a token: integers in the order of unpacked weights, sums of groups, their scale
struct alignas(64) Slice {
  int16_t q[256];
  float sums[16], scale;
};
template <int ORDER> static void slice(const float *x, Slice &to) {
  int16_t q[256];
  to.scale = quantize<256, ORDER == NATURAL ? 16 : 32>(x, 1, q, to.sums);
  static const Fours<ORDER> fours;
  for (int i = 0; i < 64; i++) memcpy(to.q + 4 * i, q + 4 * fours.at[i], 8);
  split<W, HAS_BYTES>(to.q, 256);
}
// x for gemv, as slices or float32: (K / 256, stride, 256); tokens from `count` on are zeros
struct Input {
  int64_t count, K, stride;
  Array<float> x;
  Array<Slice> slices;
  Input(const float *from, int64_t count, int64_t K, decltype(&slice<NATURAL>) slice, int threads)
      : count(count), K(K), stride(count) {
    if (count > 2) stride = slice ? count + 1 : (count + 3) / 4 * 4;
    const int64_t blocks = (K + 255) / 256 * stride;
    x = array<float>(slice ? 0 : 256 * blocks), slices = array<Slice>(slice ? blocks : 0);
    for_all(blocks, count > 1 ? threads : 1, [=](int64_t i) {
      const int64_t k = i / stride * 256, r = i % stride;
      const int64_t there = r < count ? std::min<int64_t>(K - k, 256) : 0;
      float buffer[256], *to = slice ? buffer : &x[256 * i];
      std::fill(std::copy_n(from + (there ? r * K + k : 0), there, to), to + 256, 0.f);
      if (slice) slice(to, slices[i]);
    });
  }
};
// N vectors of W weights times the numbers of one of R tokens; each lane sums up 4 N products
template <int N, int R> INLINE i32 multiply(const u8 *w, const int16_t *x) {
  i32 high = {}, low = {};
  if constexpr (HAS_BYTES) {
    EACH (i, N) high = dot(high, w[i], x + W * i);
    if (N < 4 || R > 1) low = high << 8, high = i32{};  // else both sums grow at the same time
    EACH (i, N) low = dot(low, w[i], x + W * i + W / 2);
  } else {
    EACH (i, N) {
      low = madd(low, (i16)((u16)w[i] & 255), load<i16>(x + W * i));
      low = madd(low, (i16)((u16)w[i] >> 8), load<i16>(x + W * i + W / 2));
    }
  }
  return (high << 8) + low;
}

// Bytes of Q8_0, which are signed in the file, get their sign bit back
template <class T> constexpr uint8_t FLIP = SIGNED ? T::ZERO & 128 : 0;

// total (N, R) += the first `there` of 256 weights of N rows of W times the slices of R tokens
template <class T, int N, int R>
INLINE void dot_slice(const Bytes *w, const Slice *x, int there, f32 (*total)[R]) {
  constexpr int GROUPS = T::GROUPS, VECTORS = SHARE<T::ORDER>, ZERO = T::ZERO - FLIP<T>;
  Narrow scales[N][GROUPS / NL];
  f32 part[N][R];
  EACH (n, N) {
    Narrow minima[GROUPS / NL];
    read_scales<T>(w[n], (float *)scales[n], (float *)minima);
    if (there < 256) {  // behind them is the next row
      const i32x8 in_row = i32x8{0, 1, 2, 3, 4, 5, 6, 7} < there / T::BLOCK;
      EACH (g, 8 / NL) {
        const Mask mask = load<Mask>((int32_t *)&in_row + NL * g);
        scales[n][g] = (Narrow)((Mask)scales[n][g] & mask);
        minima[g] = (Narrow)((Mask)minima[g] & mask);
      }
    }
    EACH (g, GROUPS / NL) minima[g] = T::MINIMUM ? minima[g] : scales[n][g] * (float)-ZERO;
    EACH (r, R) {
      Narrow low = {};  // what minima or zero points come to
      if (T::MINIMUM || ZERO)
        EACH (g, GROUPS / NL) low += minima[g] * load<Narrow>(x[r].sums + NL * g);
      part[n][r] = with_zeros(low);
    }
  }
  EACH_VECTOR (i, 256 / W / VECTORS) {
    if (i * VECTORS * W >= there) break;
    LOAD_LATER;
    u8 v[N][VECTORS];
    f32 scale[N];
    EACH (n, N) {
      EACH (j, VECTORS) v[n][j] = T::values(w[n], {VECTORS * i + j, T::ORDER}) ^ FLIP<T>;
      mix<T::ORDER>(v[n]);
      scale[n] = spread_mixed<T>(scales[n], VECTORS * i);
    }
    EACH (r, R)
      EACH (n, N)
        part[n][r] += to_f32(multiply<VECTORS, R>(v[n], x[r].q + VECTORS * W * i)) * scale[n];
  }
  EACH (r, R)
    EACH (n, N) total[n][r] += part[n][r] * x[r].scale;
}
// `high` rows of W (K), NW at a time, times R tokens from `first_token` on -> y (count, high),
// whose rows are `stride` numbers apart; `count` may be less than R. W ends at `end`. With AVX2 and
// more than two tokens, COLUMNS of all rows come first: so the tokens' slices stay in L1.
constexpr int NW = REGISTERS / 16, HIGH = 8, COLUMNS = 2048;
template <class T, int R>
static void dot(Bytes w, Bytes end, int64_t high, const Input &input, int64_t first_token,
                int64_t count, float *y, int64_t stride) {
  constexpr int N = R == 1 && VL > 4 ? 1 : NW;
  const int64_t K = input.K, size = K / T::BLOCK * T::SIZE, cols = R > 2 && VL < 16 ? COLUMNS : K;
  f32 totals[HIGH][R] = {};
  for (int64_t start = 0; start < K; start += cols)
    for (int first = 0; first < high; first += N) {
      f32 total[N][R];  // in registers
      memcpy(total, totals[first], sizeof total);
      const Slice *x = &input.slices[first_token + start / 256 * input.stride];
      const int64_t width = std::min(K - start, cols), down = first + 1 < high ? size : 0;
      Bytes line = w + first * size + start / 256 * T::SIZE256;
      Bytes ahead = line + (cols < K ? 2 * size : std::max<int64_t>(N * size, AHEAD));  // a row on
      for (int64_t k = 256; k <= width; k += 256, x += input.stride, line += T::SIZE256) {
        Bytes b[N];
        EACH (n, N) {
          b[n] = line + n * down;
          prefetch(ahead, T::SIZE256), ahead += T::SIZE256;
        }
        dot_slice<T, N, R>(b, x, 256, total);
      }
      if (const int there = T::BLOCK < 256 ? width % 256 : 0) {
        uint8_t padded[N][T::SIZE256];
        Bytes b[N];
        EACH (n, N) {  // the matrix may end with them
          b[n] = line + n * down;
          if (b[n] + T::SIZE256 > end)
            b[n] = pad(b[n], there / T::BLOCK * T::SIZE, T::SIZE256, padded[n]);
        }
        dot_slice<T, N, R>(b, x, there, total);
      }
      memcpy(totals[first], total, sizeof total);
    }
  for (int r = 0; r < (R > 2 ? count : R); r++) {
    f32 rows[HIGH];
    EACH (n, HIGH) rows[n] = totals[n][r];
    const f32x8 all = sums(rows);
    for (int n = 0; n < high; n++) y[r * stride + n] = all[n];
  }
}

// W (N, K) of a product y (tokens, N) = x (tokens, K) W^T
struct Matrix {
  const struct Format *format;
  Bytes w;
  int64_t N;
  float *y;
  bool fast;
};
struct Format {
  int64_t type, block, size, span, max, minimum;
  decltype(&::unpack<F32>) unpack = nullptr;
  void (*exact)(const Matrix &, int64_t n, int64_t high, const Input &) = nullptr;
  decltype(&dot<Q8_0, 1>) fast[4] = {};                    // for 1 to 4 tokens; null: as if exact
  decltype(&::slice<NATURAL>) slice = nullptr;             // for these
  decltype(&::unpack_int16<Q8_0>) unpack_int16 = nullptr;  // null: as if exact
  // A division by a power of two, as a shift, because gemv calls it often
  int64_t bytes(int64_t weights) const { return (weights >> __builtin_ctzll(block)) * size; }
};
// Up to `high` rows of W, from the n-th on, times all tokens in float32. For 256 columns after the
// other, all rows are multiplied, so that x stays in L1. If D is not their type, they are unpacked.
constexpr int STRIP = 16, TILE = VL == 16 ? 4 : 2;  // tokens, whose sums fit into the registers
constexpr int PARTS = VL == 16 ? 2 : 4;             // vectors of sums for each
template <class D> static void dot_exact(const Matrix &m, int64_t n, int64_t high, const Input &x) {
  const int64_t K = x.K, size = m.format->bytes(256), row = m.format->bytes(K);
  const auto unpack = m.format->slice ? m.format->unpack : nullptr;
  const Bytes w = m.w + n * row;
  high = std::min(high, m.N - n);
  f32 total[(GEMV_TOKENS + 3) / 4 * 4][STRIP];
  memset(total, 0, x.stride * sizeof *total);
  Bytes ahead = w + std::max<int64_t>(high * row, AHEAD);
  for (int64_t k = 0; k < K; k += 256)
    for (int64_t first = 0; first < high; first += NW) {
      const Bytes at = w + first * row + k / 256 * size;
      uint8_t padded[NW][1024];
      alignas(64) float line[NW][256];
      Bytes b[NW];
      for (int i = 0; i < NW; i++, ahead += size) {
        b[i] = first + i < high ? at + i * row : at;
        if (K - k < 256) b[i] = pad(b[i], row - k / 256 * size, size, padded[i]);
        if (VL > 4 || std::is_same<D, F32>::value) prefetch(ahead, size);
        else
          EACH (j, D::SIZE256 / 64) __builtin_prefetch(ahead + 64 * j, 0, 2);
        if (unpack) unpack(b[i], line[i]), b[i] = (Bytes)line[i];
      }
      auto multiply = [&](auto count, int64_t r) INLINE_LAMBDA {
        constexpr int R = count;
        const float *from = &x.x[k * x.stride + 256 * r];
        f32 sums[NW][R][PARTS] = {};
        for (int at = 0; at < 256; at += PARTS * VL)
          EACH (part, PARTS) {
            f32 v[NW];
            EACH (i, NW) v[i] = keep<(R > 1)>(D::load(b[i], at + VL * part));
            EACH (j, R) {
              const f32 numbers = keep<(NW > 1)>(load<f32>(from + 256 * j + at + VL * part));
              EACH (i, NW) sums[i][j][part] += v[i] * numbers;
            }
          }
        EACH (j, R)
          EACH (i, NW)
            EACH (part, PARTS) total[r + j][first + i] += sums[i][j][part];
      };
      int64_t r = 0;
      for (; x.count - r > TILE / 2; r += TILE) multiply(std::integral_constant<int, TILE>(), r);
      for (; r < x.count; r++) multiply(std::integral_constant<int, 1>(), r);
    }
  for (int64_t r = 0; r < x.count; r++)
    for (int64_t i = 0; i < high; i++) m.y[r * m.N + n + i] = sum(total[r][i]);
}

// ---- The table of formats -----------------------------------------------------------------------

template <class T> static constexpr Format format(int64_t type) {
  Format f = {type, T::BLOCK, T::SIZE, T::SPAN, T::MAX, T::MINIMUM};
  f.unpack = unpack<T>, f.exact = dot_exact<std::conditional_t<T::DENSE, T, F32>>;
  if constexpr (!T::DENSE) {
    f.slice = slice<T::ORDER>;
    f.fast[0] = dot<T, 1>, f.fast[1] = dot<T, 2>;
    f.fast[2] = f.fast[3] = dot<T, 4>;  // for 3 takes as long
    // Without VNNI, too: additions go to a port that float32 cannot use (1.3 times as fast)
    if constexpr ((VL > 4 || SIGNED) && (!T::MINIMUM || T::GROUP == 32))
      f.unpack_int16 = unpack_int16<T>;
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

// Several matrices that need x in the same form, times the same tokens, in one parallel loop
static void gemv(const Matrix *matrices, int count, const float *x, int64_t tokens, int64_t K,
                 int threads) {
  const bool integers = matrices->fast && matrices->format->slice;
  const int64_t high = integers ? HIGH : tokens > 2 ? STRIP : 4;  // one token waits for memory
  int64_t total = 0;
  for (int i = 0; i < count; i++) total += (matrices[i].N + high - 1) / high;
  const Input vectors(x, tokens, K, integers ? matrices->format->slice : nullptr, threads);
  for_all(total, total * high * K > 1 << 17 ? threads : 1, [&](int64_t i) {
    const Matrix *m = matrices;
    int64_t n = i * high;
    for (; n >= m->N; m++) n -= (m->N + high - 1) / high * high;
    const Format *f = m->format;
    if (!integers) f->exact(*m, n, high, vectors);
    for (int64_t r = 0; integers && r < tokens; r += 4) {
      const int64_t four = std::min<int64_t>(tokens - r, 4);
      f->fast[four - 1](m->w + n * f->bytes(K), m->w + m->N * f->bytes(K), std::min(high, m->N - n),
                        vectors, r, four, m->y + r * m->N + n, m->N);
    }
  });
}

// ---- gemm ---------------------------------------------------------------------------------------
// Panels and strips consist of words of 32 bits: one float32 or two int16. A token has S lanes of a
// panel, which take its words in turn: only integers, whose sums do not depend on that. These are
// scaled span by span; minima are added for HELD columns at a time.

constexpr int V = 2, MR = V * VL;  // of large panels, and of attention
constexpr int KC = 256, HELD = 1024, LANES = 16 * MR, SPANS = VL == 4 ? 16 : 8;
template <int V> constexpr int NR = V == 1 ? 12 : VL == 16 ? (V == 3 ? 8 : 12) : V == 3 ? 3 : 6;
template <class X> constexpr int PER_WORD = is_int16<X> ? 2 : 1;
template <int S> constexpr int ROWS = VL == 4 ? S : 1;  // of W, whose sums share a vector

// sums (NR, V) += w (NR, count) . x (count, V vectors), in words; w has strides `down` and `right`.
// With every S columns one line of memory `ahead` is fetched into L2, `step` bytes from the last.
template <class X, int S = 1, int V, int R>
INLINE void microkernel(Sum<X> (&sums)[R][V], const void *w, int64_t down, int64_t right,
                        const void *x, int64_t count, Bytes &ahead, int64_t step) {
  Bytes a = (Bytes)w, b = (Bytes)x;
#ifdef NEON
  // Eight columns of a row are loaded at a time
  if constexpr (!is_int16<X>)
    for (; right == 1 && count >= 8; count -= 8, a += 32, b += 128 * V) {
      asm("" : "+r"(a));  // one address: GCC would have R
      f32 row[R][2];
      EACH (n, R)
        EACH (half, 2) row[n][half] = keep<true>(load<f32>(a + 4 * n * down + 16 * half));
      EACH (column, 8) {
        f32 v[V];
        if (column % 4 == 0) LOAD_LATER;
        EACH (i, V) v[i] = load<f32>(b + 16 * (V * column + i));
        EACH (n, R)
          EACH (i, V) sums[n][i] += v[i] * row[n][column / 4][column % 4];
      }
      EACH (i, 2) __builtin_prefetch(ahead, 0, 2), ahead += 4 * step;
    }
#endif
  UNROLL_4
  for (int64_t k = 0; k < count; k += S, a += 4 * S * right, b += 4 * VL * V) {
    X v[V];
    EACH (i, V) v[i] = load<X>(b + 4 * VL * i);
    __builtin_prefetch(ahead, 0, 2), ahead += step;
    EACH (n, R) {
      const X words = splat<X, S>(a + 4 * n * down);
      EACH (i, V) sums[n][i] = madd(sums[n][i], v[i], words);
    }
  }
}

// Rows of n words, `stride` words apart -> (n / UNIT, lanes): S lanes for each row, with its UNIT
// words in turn; the last row fills up
template <int UNIT, int S = UNIT>
static void turn(const void *rows, int64_t count, int64_t n, int64_t stride, void *to, int lanes) {
  for (int64_t first = 0; first < n; first += 16)  // what is written at a time stays in L1
    for (int64_t i = 0; i < lanes; i += 4) {
      Bytes from[4];
      for (int j = 0; j < 4; j++)
        from[j] = (Bytes)rows + 4 * (stride * std::min((i + j) / S, count - 1) + j % UNIT);
      for (int64_t k = first; k < n && k < first + 16; k += UNIT) {
        auto word = [&](int j) { return load<float>(from[j] + 4 * k); };  // whatever it is
        store((float *)to + k / UNIT * lanes + i, f32x4{word(0), word(1), word(2), word(3)});
      }
    }
}

// x (tokens, K): words (panels, K / PER_WORD, MR); of int16 scales, sums (panels, K / 32, lanes)
template <class X, int V, int S> struct Panels {
  enum { LANES = V * VL, MR = LANES / S };
  int64_t tokens, K, count;
  Array<uint32_t> words;
  Array<float> scales, sums;
  Panels(const float *x, int64_t tokens, int64_t K, int max, int threads)
      : tokens(tokens), K(K), count((tokens + MR - 1) / MR) {
    words = array<uint32_t>(count * MR * K / PER_WORD<X>);
    const int64_t rounded = is_int16<X> ? tokens : 0, groups = rounded ? count * LANES * K / 32 : 0;
    scales = array<float>(groups), sums = array<float>(groups);
    const auto q = array<int16_t>(rounded * K);
    const auto scale = array<float>(rounded * K / 32), sum = array<float>(rounded * K / 32);
    const int64_t span = K % 128 ? 32 : 128;
    const auto f = span == 32 ? quantize<32, 32> : quantize<128, 32>;
    for_all(rounded, threads, [&](int64_t r) {
      for (int64_t k = r * K; k < (r + 1) * K; k += span)
        std::fill_n(&scale[k / 32], span / 32, f(x + k, max, &q[k], &sum[k / 32]));
      split<SIGNED ? W : 32, SIGNED>(&q[r * K], K);
    });
    const Bytes rows = rounded ? (Bytes)q.get() : (Bytes)x;
    const int64_t line = K / PER_WORD<X>, part = K / 32;
    for_all(count, threads, [&](int64_t p) {
      const int64_t r = p * MR, n = std::min<int64_t>(tokens - r, MR), to = p * LANES * part;
      turn<S>(rows + 4 * r * line, n, line, line, &words[r * line], LANES);
      if (!rounded) return;
      turn<1, S>(&scale[r * part], n, part, part, &scales[to], LANES);
      turn<1, S / ROWS<S>>(&sum[r * part], n, part, part, &sums[to / ROWS<S>], LANES / ROWS<S>);
    });
  }
};

#ifdef SDOT
// sums (R, V) = w (R, COUNT bytes), whose rows are `down` bytes apart, . x (COUNT, V vectors),
// which has the high and the low bytes of 16 columns in turn; or with ROWS = 2 for pairs of rows
template <int ROWS, int COUNT, int V, int R>
INLINE void multiply_bytes(i32 (&sums)[R][V], Bytes w, int64_t down, Bytes x) {
  constexpr int LANES = 4 / ROWS, PARTS = COUNT / 16;
  u8 row[R][PARTS * ROWS];
  asm("" : "+r"(w));  // one address: GCC would have R
  EACH (n, R)
    EACH (i, PARTS * ROWS) row[n][i] = load<u8>(w + n * down + 16 * i);
  EACH (low, 2) {
    if (low)
      EACH (n, R)
        EACH (i, V) sums[n][i] <<= 8;
    EACH (part, PARTS) {
      Bytes from = x + (2 * part + low) * 16 * LANES * V;
      LOAD_LATER;
      auto column = [&](auto lane) INLINE_LAMBDA {  // of four bytes each, or eight
        u8 v[V];
        EACH (i, V) v[i] = load<u8>(from + 16 * (lane * V + i));
        EACH (n, R)
          EACH (i, V) {
            if constexpr (ROWS == 1) dot_lane<lane>(sums[n][i], v[i], row[n][part]);
            else dot_pairs(sums[n][i], v[i], row[n][2 * part + lane]);
          }
      };
      column(std::integral_constant<int, 0>()), column(std::integral_constant<int, 1>());
      if constexpr (ROWS == 1)
        column(std::integral_constant<int, 2>()), column(std::integral_constant<int, 3>());
    }
  }
}
#endif

// total (NR, lanes) += w (NR, count), of strides `down` and `right`, times x (count, lanes)
template <int V, int R = NR<V>>
INLINE void tile(float (*total)[V * VL], const void *w, int64_t down, int64_t right, const void *x,
                 int64_t count, Bytes ahead = nullptr, int64_t step = 0) {
  if (!ahead) ahead = (Bytes)x;  // there is nothing to fetch
  f32 sums[R][V] = {};           // not what total is: GCC would keep half of that in memory
  microkernel<f32>(sums, w, down, right, x, count, ahead, step);
  EACH (j, R)
    EACH (i, V) store(&total[j][i * VL], load<f32>(&total[j][i * VL]) + sums[j][i]);
}
// The same, where two rows share a vector: of two tokens each has two sums
template <int V>
INLINE void tile_pairs(float (*total)[V * VL], const void *w, int64_t down, const void *x,
                       int64_t count) {
  float sums[NR<V>][V / 2 * VL] = {};
  tile<V / 2, NR<V>>(sums, w, down, 1, x, count);
  EACH (j, NR<V> / 2)
    EACH (i, V / 2) {
      const float *a = &sums[2 * j][i * VL], *b = &sums[2 * j + 1][i * VL];
      float *to = &total[j][2 * i * VL];
      store(to, load<f32>(to) + f32{a[0], b[0], a[1], b[1]});
      store(to + VL, load<f32>(to + VL) + f32{a[2], b[2], a[3], b[3]});
    }
}
// The same with int16: w has a scale for each `span` columns, x (words) one for each 32
template <int V, int S>
INLINE void tile_int16(float (*total)[V * VL], const uint32_t *w, const float (*scales)[SPANS],
                       const uint32_t *x, const float *x_scales, int64_t span, int64_t spans,
                       Bytes ahead, int64_t step) {
  constexpr int R = NR<V> / ROWS<S>;
  for (int64_t g = 0; g < spans; g++) {
    i32 sums[R][V] = {};
#ifdef SDOT
    Bytes row = (Bytes)w + g * span * ROWS<S>, columns = (Bytes)x + g * span * 2 * (V * VL / S);
    if (span == 32) multiply_bytes<ROWS<S>, 32>(sums, row, KC * 2 * ROWS<S>, columns);
    else multiply_bytes<ROWS<S>, 16>(sums, row, KC * 2 * ROWS<S>, columns);
    __builtin_prefetch(ahead, 0, 2), ahead += span / 2 * step;
#else
    microkernel<i16, S>(sums, w + g * span / 2, KC / 2, 1, x + g * span / 2 * (V * VL / S),
                        span / 2, ahead, step);
#endif
    f32 x_scale[V];  // loaded once: a store to total might change them
    EACH (i, V) x_scale[i] = load<f32>(x_scales + g * span / 32 * V * VL + i * VL);
    EACH (j, R) {
      f32 scale = splat(scales[j * ROWS<S>][g]);
      if (ROWS<S> == 2) scale[1] = scale[3] = scales[2 * j + 1][g];
      EACH (i, V) {
        i32 products = sums[j][i];
#ifdef MM
        if (S == 2) products += (i32)MM(shuffle_epi32)((Mi)products, _MM_PERM_CDAB);
#endif
        f32 old = load<f32>(&total[j][i * VL]);
        store(&total[j][i * VL], old + to_f32(products) * scale * x_scale[i]);
      }
    }
    asm volatile("" : : : "memory");  // GCC would keep some of total in registers, others not
  }
}

template <class X, int V, int S>
static void gemm(const Matrix &m, const Panels<X, V, S> &x, int threads) {
  constexpr int ALL = V * VL, MR = ALL / S, ROWS = ::ROWS<S>, PANELS = LANES * ROWS / ALL;
  constexpr int STRIP = (V == 1 && VL < 16 ? 12 : 24) * PER_WORD<X>;  // one panel reads W once
  const Format *f = m.format;
  const int64_t K = x.K, size = f->bytes(256), row = f->bytes(K);
  struct Scratch {  // of a thread, with up to 24 KB of words; stacks may be small
    uint32_t words[STRIP][KC / PER_WORD<X>];
    float scales[STRIP][SPANS], minima[STRIP][HELD / 32], total[PANELS][STRIP / ROWS][ALL];
  };
  const auto memory = array<Scratch>(threads);
  std::atomic<int64_t> taken(0), started(0);  // strips, by a thread each; threads
  team.run(threads, [&] {
    Scratch &s = memory[started++];
    uint8_t padded[1024];
    memset(&s, 0, sizeof s - sizeof s.total);
    for (int64_t n = STRIP * taken++, next = n; n < m.N; n = next) {
      const int high = (int)std::min<int64_t>(m.N - n, STRIP);
      for (int64_t first = 0; first < x.count; first += PANELS) {
        const int64_t panels = std::min<int64_t>(x.count - first, PANELS);
        memset(s.total, 0, panels * sizeof *s.total);
        if (first + PANELS >= x.count) next = STRIP * taken++;
        for (int64_t k = 0; k < K; k += KC) {
          const int64_t count = std::min<int64_t>(K - k, KC), end = k + count, held = k % HELD;
          for (int i = 0; i < high; i++) {
            Bytes b = m.w + (n + i) * row + k / 256 * size;
            if (count < 256) b = pad(b, f->bytes(count), size, padded);
            if constexpr (!is_int16<X>) f->unpack(b, (float *)s.words[i]);
            else  // of a pair, a row has the first half of 16 bytes, or the second
              f->unpack_int16(b, (int16_t *)s.words[i - i % ROWS] + i % ROWS * 4, s.scales[i],
                              s.minima[i] + held / 32);
          }
          for (int64_t p = 0; p < panels; p++)
            for (int i = 0; i < high; i += NR<V>) {
              const int64_t at = (first + p) * K + k, group = at / 32 * ALL;
              const uint32_t *panel = &x.words[at * MR / PER_WORD<X>];
              auto *total = s.total[p] + i / ROWS;
              auto ahead = p ? (Bytes)panel + 2048 : m.w + next * row + (k / KC * STRIP + i) * size;
              const int64_t step = p ? 4 * ALL : NR<V> * size * PER_WORD<X> * S / 256 + 1;
              if constexpr (!is_int16<X>)
                tile<V>(total, s.words[i], KC, 1, panel, count, ahead, step);
              else {
                tile_int16<V, S>(total, s.words[i], s.scales + i, panel, &x.scales[group], f->span,
                                 count / f->span, ahead, step);
                if (f->minimum && (end == K || end % HELD == 0)) {
                  const float *x_sums = &x.sums[(group - held / 32 * ALL) / ROWS];
                  if constexpr (ROWS == 1)
                    tile<V>(total, s.minima[i], HELD / 32, 1, x_sums, (held + count) / 32);
                  else tile_pairs<V>(total, s.minima[i], HELD / 32, x_sums, (held + count) / 32);
                }
              }
            }
        }
        for (int64_t r = first * MR; r < x.tokens && r < (first + panels) * MR; r++)
          for (int i = 0; i < high; i++)
            m.y[r * m.N + n + i] = s.total[r / MR - first][i / ROWS][r % MR * S + i % ROWS];
      }
    }
  });
}
// Panels of the width that leaves fewest lanes empty, else wide ones (int16, AVX2: before middle)
template <class X>
static void gemm(const Matrix *m, int count, const float *x, int64_t tokens, int64_t K, int max,
                 int threads) {
  auto filled = [=](int64_t panel) { return (tokens + panel - 1) / panel * panel; };
  constexpr int S = is_int16<X> ? 2 : 1;
  const int64_t narrow = filled(VL), middle = filled(3 * VL / S), wide = filled(2 * VL);
  auto by = [=](const auto &panels) {
    for (int i = 0; i < count; i++) gemm(m[i], panels, threads);
  };
  if constexpr (VL == 8 || (VL == 16 && S == 2)) {
    const bool fuller = VL == 8 && S == 2 ? middle < narrow : middle <= narrow;
    if (fuller && middle < wide) return by(Panels<X, 3, S>(x, tokens, K, max, threads));
  }
  constexpr int PAIR = I8MM ? S : 1;
  if (narrow < wide) by(Panels<X, PAIR, PAIR>(x, tokens, K, max, threads));
  else by(Panels<X, 2 * PAIR, PAIR>(x, tokens, K, max, threads));
}

// Each of the matrices times x (tokens, K)
static void multiply(std::initializer_list<Matrix> all, const float *x, int64_t tokens, int64_t K,
                     int threads) {
  auto integers = [](const Matrix &m) { return m.fast && m.format->unpack_int16; };
  for (const Matrix *m = all.begin(), *next = m; m < all.end(); m = next) {
    auto alike = [&](const Matrix &other) {  // they need x in the same form
      if (tokens > GEMV_TOKENS) return integers(other) == integers(*m);
      return other.format->slice == m->format->slice && other.fast == m->fast;
    };
    int max = 0;
    for (; next < all.end() && alike(*next); next++) max = std::max(max, (int)next->format->max);
    const int count = (int)(next - m);
    if (tokens <= GEMV_TOKENS) gemv(m, count, x, tokens, K, threads);
    else if (integers(*m)) gemm<i16>(m, count, x, tokens, K, max, threads);
    else gemm<f32>(m, count, x, tokens, K, max, threads);
  }
}

// ---- Layers: what Block.forward does ------------------------------------------------------------

// RMSNorm: x (tokens, C) -> y (tokens, C)
static void norm(const float *x, const float *w, double eps, float *y, int64_t tokens, int64_t C,
                 int threads) {
  for_all(tokens, threads, [=](int64_t r) {
    f32 squares = {};
    for (int64_t i = r * C; i < (r + 1) * C; i += VL)
      squares += load<f32>(x + i) * load<f32>(x + i);
    float scale = 1 / std::sqrt(sum(squares) / (float)C + (float)eps);
    for (int64_t i = 0; i < C; i += VL)
      store(y + r * C + i, load<f32>(x + r * C + i) * scale * load<f32>(w + i));
  });
}
static void add(const float *a, const float *b, float *y, int64_t n, int threads) {
  for_all(n / VL, n > 1 << 16 ? threads : 1,
          [=](int64_t i) { store(y + i * VL, load<f32>(a + i * VL) + load<f32>(b + i * VL)); });
}
// One head (D): pairs (2i, 2i + 1) are turned by their angle
static void rotate(float *x, const float *cos, const float *sin, int64_t D) {
  for (int64_t i = 0; i < D / 2; i++) {
    float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] - odd * sin[i], x[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

// The last VL of n numbers; if there are fewer, these and zeros
template <class E> INLINE f32 load_last(const E *row, int64_t n) {
  if (n >= VL) return load_f32(row + n - VL);
#ifdef AVX512
  const auto these = (__mmask16)((1 << n) - 1);
  if constexpr (sizeof(E) == 4) return (f32)_mm512_maskz_loadu_ps(these, row);
  else return (f32)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(these, row));
#else
  E all[VL];
  for (int64_t i = 0; i < VL; i++) all[i] = i < n ? row[i] : E{};
  return load_f32(all);
#endif
}
// n numbers, float32 or float16, become the other
template <class From, class To> static void convert(const From *from, To *to, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) store_f32(to + i, load_f32(from + i));
  To rest[VL];
  store_f32(rest, load_last(from + i, n - i));
  std::copy_n(rest, n - i, to + i);
}

// Attention of one token: J heads q (J, D) of one key/value head -> y (J, D); p has J length + 16
template <int J, class E>
static void attend(const float *q, const E *keys, const E *values, float *y, float *p,
                   int64_t length, int64_t D) {
  // Keys at a time, and vectors of a value, whose J sums each are in registers
  constexpr int KEYS = 8 / J, N = J == 1 ? 64 / VL : VL == 4 ? 2 * NW : V;
  const float scale = 1 / std::sqrt((float)D);
  f32x8 tops = f32x8{} - INFINITY;
  const int64_t whole = D - D % VL;
  f32 rest[J] = {};  // of q: what fills no vector, and zeros where load_last() has more of a key
  for (int j = 0; j < J; j++)
    for (int64_t d = whole; d < D; d++) rest[j][D < VL ? d : d - D + VL] = q[j * D + d];
  for (int64_t s = 0; s < length; s += KEYS) {
    f32 products[8] = {};
    prefetch((Bytes)(keys + s * D) + AHEAD, KEYS * D * sizeof(E));
    auto add = [&](const f32 *numbers, auto load_key) INLINE_LAMBDA {
      EACH (i, KEYS) {  // the last one again if there are fewer
        const f32 key = keep<(J > 1)>(load_key(keys + std::min(s + i, length - 1) * D));
        EACH (j, J) products[i * J + j] += numbers[j] * key;
      }
    };
    for (int64_t d = 0; d < whole; d += VL) {
      f32 numbers[J];
      EACH (j, J) numbers[j] = keep<(KEYS > 1)>(load<f32>(q + j * D + d));
      add(numbers, [=](const E *key) INLINE_LAMBDA { return load_f32(key + d); });
    }
    if (whole < D) add(rest, [=](const E *key) INLINE_LAMBDA { return load_last(key, D); });
    const f32x8 scores = sums(products) * scale;
    tops = tops > scores ? tops : scores;
    store(p + s * J, scores);
  }
  std::fill_n(p + length * J, VL, -INFINITY);  // not the last key again
  f32 top, total = {};
  for (int i = J; i < 8; i++) tops[i % J] = std::max(tops[i % J], tops[i]);
  for (int i = 0; i < VL; i++) top[i] = tops[i % J];
  for (int64_t s = 0; s < length * J; s += VL) {
    f32 e = exp(load<f32>(p + s) - top);
    store(p + s, e), total += e;
  }
  for (int i = J; i < VL; i++) total[i % J] += total[i];
  auto mix_values = [&](auto vectors, int64_t d) INLINE_LAMBDA {
    constexpr int COUNT = vectors;
    f32 mix[J][COUNT] = {};
    auto at = [=](int i) INLINE_LAMBDA { return std::min(d + i * VL, D - VL); };
    for (int64_t s = 0; s < length; s++) {
      if (d == 0) prefetch((Bytes)(values + s * D) + AHEAD, D * sizeof(E));
      EACH (i, COUNT) {
        f32 value = D < VL ? load_last(values + s * D, D) : load_f32(values + s * D + at(i));
        EACH (j, J) mix[j][i] += value * p[s * J + j];
      }
    }
    EACH (j, J)
      EACH (i, COUNT) {
        const f32 mean = mix[j][i] / total[j];
        if (D < VL) memcpy(y + j * D, &mean, 4 * D);
        else store(y + j * D + at(i), mean);
      }
  };
  if (D < VL) return mix_values(std::integral_constant<int, 1>(), 0);
  for (int64_t d = 0; d < D; d += N * VL) mix_values(std::integral_constant<int, N>(), d);
}

// The same for up to MR tokens of one head, `row` numbers apart: the i-th sees length + i keys
constexpr int NK = NR<V>;
constexpr int64_t KEYS = 60;  // of which values are added up before these sums are; NK divides it
static void attend_many(const float *q, const float *keys, const float *values, float *y,
                        float *scratch, int64_t length, int64_t D, int64_t tokens, int64_t row) {
  const int64_t count = length + tokens - 1;
  float *queries = scratch, *total = queries + D * MR, *p = total + (D + NK) * MR;
  f32 top[V], weight[V] = {};
  const i32 lane = (i32)by_lanes([](int i) INLINE_LAMBDA { return i; });
  float scale = 1 / std::sqrt((float)D);
  for (int i = 0; i < V; i++) top[i] = splat(-INFINITY);
  turn<1>(q, tokens, D, row, queries, MR);
  std::fill_n(total, (D + NK) * MR, 0.f);
  for (int64_t s = 0; s < count; s += NK) {
    alignas(64) float sums[NK][MR] = {};
    tile<V>(sums, keys + s * D, D, 1, queries, D);
    EACH (j, NK)
      EACH (i, V) {
        const auto seen = lane + (int)(VL * i + length) > (int)s + j;
        f32 score = seen ? load<f32>(&sums[j][VL * i]) * scale : splat(-INFINITY);
        top[i] = max(score, top[i]);
        store(p + (s + j) * MR + VL * i, score);
      }
  }
  for (int64_t from = 0; from < count; from += KEYS) {
    const int64_t n = std::min(count - from, KEYS);
    for (int64_t s = from; s < from + n; s++)
      EACH (i, V) {
        f32 e = exp(load<f32>(p + s * MR + VL * i) - top[i]);
        store(p + s * MR + VL * i, e), weight[i] += e;
      }
    for (int64_t d = 0; d < D; d += NK)
      tile<V>((float (*)[MR])(total + d * MR), values + from * D + d, 1, D, p + from * MR, n);
  }
  for (f32 &w : weight) w = 1 / w;
  for (int64_t i = 0; i < tokens; i++)
    for (int64_t d = 0; d < D; d++) y[i * row + d] = total[d * MR + i] * ((float *)weight)[i];
}

// What cpu.py packs; everything has 8 bytes
struct Pass {
  Tensor x, cos, sin, y;  // x (B, T, C), y as large; cos and sin (T, D / 2), or (B, D / 2)
  int64_t threads, layers, first, caches;  // Layers; the first one's place in Stored; Stored
};
struct Layer {
  Tensor norms[2];
  Tensor weights[7];          // of q, k, v, o, gate, up, down
  int64_t types[7], fast[7];  // of the matrices
  int64_t D;
  double eps[2];
};
struct Stored {         // of B sequences, or of each one for itself, if T is 1
  Tensor keys, values;  // of all layers (L, B, G, S, D), `pos` tokens of which are stored
  int64_t pos;
};
static_assert(sizeof(Pass) == 8 * 8 && sizeof(Layer) == 26 * 8 && sizeof(Stored) == 3 * 8);

// y = x + attention, += MLP of the layer at `index`; E: of the cache
template <class E>
static void run(const Pass &p, const Layer &l, const Stored *stored, const float *x,
                int64_t index) {
  const int64_t *shape = p.x.sizes(3), B = shape[0], T = shape[1], C = shape[2], tokens = B * T;
  const int64_t D = l.D, G = stored->keys.sizes(5)[2], H = l.weights[0].sizes(2)[0] / D;
  const int64_t inner = l.weights[4].sizes(2)[0], turns = p.cos.sizes(2)[0];
  const int threads = (int)p.threads, many = tokens > 16 ? threads : 1;
  const float *cos = p.cos.data<float>(), *sin = p.sin.data<float>();
  float *out = p.y.data<float>();
  struct Sequence {
    E *keys, *values;  // of this layer (G, S, D)
    int64_t S, pos;
  };
  const auto sequences = array<Sequence>(B);
  int64_t longest = 0;
  for (int64_t b = 0; b < B; b++) {
    const Stored &s = stored[p.caches > 1 ? b : 0];
    const int64_t *size = s.keys.sizes(5), rows = size[1], S = size[3];
    const int64_t at = (index * rows + b % rows) * G * S * D;
    sequences[b] = {s.keys.data<E>() + at, s.values.data<E>() + at, S, s.pos};
    longest = std::max(longest, s.pos + T);
  }
  auto matrix = [&](int i, int64_t K, int64_t N, const Array<float> &y) -> Matrix {
    return {find_format(l.types[i], K), l.weights[i].data<uint8_t>(), N, y.get(), l.fast[i] != 0};
  };
  auto h = array<float>(tokens * C);
  auto q = array<float>(tokens * H * D), y = array<float>(tokens * H * D);
  auto k = array<float>(tokens * G * D), v = array<float>(tokens * G * D);
  norm(x, l.norms[0].data<float>(), l.eps[0], h.get(), tokens, C, many);
  multiply({matrix(0, C, H * D, q), matrix(1, C, G * D, k), matrix(2, C, G * D, v)}, h.get(),
           tokens, C, threads);
  for_all(tokens, many, [&](int64_t i) {
    const int64_t at = i % turns * (D / 2);
    const Sequence &s = sequences[i / T];
    for (int64_t j = 0; j < H; j++) rotate(&q[(i * H + j) * D], cos + at, sin + at, D);
    for (int64_t j = 0; j < G; j++) {
      const int64_t from = (i * G + j) * D, to = (j * s.S + s.pos + i % T) * D;
      rotate(&k[from], cos + at, sin + at, D);
      convert(&k[from], s.keys + to, D), convert(&v[from], s.values + to, D);
    }
  });
  const int64_t step = T > GEMV_TOKENS ? MR : 1, steps = (T + step - 1) / step;
  const int64_t heads = step == 1 && H / G % 4 == 0 ? 4 : 1;   // that are handled together
  const int64_t floats = ((longest + NK) * D + 15) / 16 * 16;  // tiles read up to NK keys further
  const int64_t size =
      step > 1 ? 2 * floats + (2 * D + longest + MR + 3 * NK) * MR : heads * longest + 16;
  const auto scratch = array<float>(size * threads);
  std::atomic<int64_t> taken(0), started(0);  // heads and steps, by a thread each; threads
  team.run(tokens * longest > 32 ? threads : 1, [&] {
    float *ours = &scratch[size * started++];
    const E *unpacked = nullptr;  // the head whose keys and values stand there as float32
    for (int64_t i = taken++; i < B * H / heads * steps; i = taken++) {
      const int64_t b = i / steps / (H / heads), j = i / steps % (H / heads) * heads;
      const Sequence &s = sequences[b];
      const int64_t t = i % steps * step, at = j / (H / G) * s.S * D;
      const int64_t from = ((b * T + t) * H + j) * D, length = s.pos + t + 1;
      const E *keys = s.keys + at, *values = s.values + at;
      if (step > 1) {
        if (std::exchange(unpacked, keys) != keys) {
          convert(keys, ours, (s.pos + T) * D), convert(values, ours + floats, (s.pos + T) * D);
        }
        attend_many(&q[from], ours, ours + floats, &y[from], ours + 2 * floats, length, D,
                    std::min(T - t, step), H * D);
      } else
        (heads == 4 ? attend<4, E> : attend<1, E>)(&q[from], keys, values, &y[from], ours, length,
                                                   D);
    }
  });
  multiply({matrix(3, H * D, C, h)}, y.get(), tokens, H * D, threads);
  add(x, h.get(), out, tokens * C, threads);
  norm(out, l.norms[1].data<float>(), l.eps[1], h.get(), tokens, C, many);
  auto gate = array<float>(tokens * inner), up = array<float>(tokens * inner);
  multiply({matrix(4, C, inner, gate), matrix(5, C, inner, up)}, h.get(), tokens, C, threads);
  for_all(tokens * inner / VL, many, [&](int64_t i) {
    f32 g = load<f32>(&gate[i * VL]);
    store(&gate[i * VL], g / (1 + exp(-g)) * load<f32>(&up[i * VL]));
  });
  multiply({matrix(6, inner, C, h)}, gate.get(), tokens, inner, threads);
  add(out, h.get(), out, tokens * C, threads);
}

// ---- What Python calls --------------------------------------------------------------------------

enum { DONE, NO_MEMORY, NOT_SUPPORTED };  // sizes that do not fit, an unknown type

extern "C" {
int32_t kernels_version() { return 12; }
void use(const Torch &functions, int32_t cores) { torch = functions, team.limit = cores - 1; }
const char *kernels_built_for() { return ISA BYTES ", " COMPILER THREADS; }
int32_t kernels_gemv_tokens() { return GEMV_TOKENS; }
int32_t linear(const uint8_t *weights, const float *x, float *y, int32_t threads, int32_t type,
               int64_t bytes, int64_t tokens, int64_t N, int64_t K, int32_t fast) try {
  const Matrix m = {find_format(type, K), weights, N, y, fast != 0};
  if (!weights || !x || !m.format || bytes != N * m.format->bytes(K)) return NOT_SUPPORTED;
  multiply({m}, x, tokens, K, threads);
  return DONE;
} catch (const std::bad_alloc &) { return NO_MEMORY; }
int32_t embed(const uint8_t *weights, const int64_t *ids, float *y, int32_t threads, int32_t type,
              int64_t bytes, int64_t count, int64_t K) {
  const Format *f = find_format(type, K);
  if (!f || K < 256) return NOT_SUPPORTED;
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= bytes / f->bytes(K)) return NOT_SUPPORTED;
  for_all(count, count > 16 ? threads : 1, [=](int64_t i) {
    for (int64_t k = 0, at; k < K; k += 256)  // some weights come twice
      at = std::min(k, K - 256), f->unpack(weights + f->bytes(ids[i] * K + at), y + i * K + at);
  });
  return DONE;
}
int32_t run_blocks(const Pass &p, const Layer *layers, const Stored *stored) try {
  const int64_t *x = p.x.sizes(3), *keys = stored->keys.sizes(5), D = layers->D;
  if (!x || !keys || p.first < 0 || p.first + p.layers > keys[0]) return NOT_SUPPORTED;
  const int64_t B = x[0], T = x[1], C = x[2], G = keys[2], KV = G * D, several = p.caches > 1;
  const int64_t turns = several ? B : T, rows = several ? 1 : B;
  if (D % 2 || C % 32 || (several && (T != 1 || p.caches != B))) return NOT_SUPPORTED;
  bool fits = p.x.is(FLOAT32, {B, T, C}) && p.y.is(FLOAT32, {B, T, C});
  fits = fits && p.cos.is(FLOAT32, {turns, D / 2}) && p.sin.is(FLOAT32, {turns, D / 2});
  const int32_t type = stored->keys.is(FLOAT16, {keys[0], rows, G, keys[3], D}) ? FLOAT16 : FLOAT32;
  for (const Stored *s = stored; s < stored + p.caches && fits; s++) {
    const int64_t *size = s->keys.sizes(5), S = size ? size[3] : 0;
    fits =
        s->keys.is(type, {keys[0], rows, G, S, D}) && s->values.is(type, {keys[0], rows, G, S, D});
    fits = fits && s->pos >= 0 && s->pos + T <= S;
  }
  for (const Layer *l = layers; l < layers + p.layers && fits; l++) {
    const int64_t *q = l->weights[0].sizes(2), *gate = l->weights[4].sizes(2);
    if (!q || !gate || l->D != D || q[0] % KV || gate[0] % 32) return NOT_SUPPORTED;
    const int64_t height[] = {q[0], KV, KV, C, gate[0], gate[0], C};
    const int64_t width[] = {C, C, C, q[0], C, C, gate[0]};
    fits = l->norms[0].is(FLOAT32, {C}) && l->norms[1].is(FLOAT32, {C});
    for (int i = 0; i < 7 && fits; i++) {
      const Format *f = find_format(l->types[i], width[i]);
      fits = f && l->weights[i].is(UINT8, {height[i], f->bytes(width[i])});
    }
  }
  if (!fits) return NOT_SUPPORTED;
  for (int64_t i = 0; i < p.layers; i++)
    (type == FLOAT16 ? run<float16> : run<float>)(p, layers[i], stored,
                                                  (i ? p.y : p.x).data<float>(), p.first + i);
  return DONE;
} catch (const std::bad_alloc &) { return NO_MEMORY; }
}
