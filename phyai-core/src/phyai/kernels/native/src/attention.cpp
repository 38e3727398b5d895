// softmax(scale * q k^T + mask) v per head, a block of queries against all keys at a time.
//
// The query heads of one key/value head are rows of one product. K and V of a head are packed to
// fp32 panels once, by all threads, then each thread takes blocks of rows: scores of a block stay
// in its cache. Rounding points, for T = bf16: q k^T, its product with scale, the probabilities,
// the result.
#include <omp.h>

#include <cstdlib>

#include "rows.h"
#include "tile.h"

namespace phyai {
namespace {

constexpr float kMaskValue = -2.3819763e38f;
constexpr int64_t kBlockRows = 48;        // a multiple of kTileRows
constexpr int64_t kBlockScores = 1 << 16;  // fp32 scores of a block: 256 KB
constexpr int64_t kDepth = 256;           // keys per pass over a panel of V: it stays in L1
constexpr int64_t kPackFloats = 1 << 19;  // heads packed at a time: about 2 MB
static_assert(kBlockRows % kTileRows == 0, "blocks are whole tiles");

struct AttentionArgs {
  int64_t q, q_batch, q_token, q_head;
  int64_t k, k_batch, k_token, k_head;
  int64_t v, v_batch, v_token, v_head;
  int64_t mask, mask_batch, mask_key;  // bytes, 0 where nobody may look; 0: no mask
  int64_t out;                         // contiguous [batch, queries, heads, dim]
  int64_t batch, queries, heads, kv_heads, dim, keys, dtype, threads;
  int64_t causal;                      // query t sees keys 0 .. t
  double scale;
};

// Memory that lives as long as its thread and only grows when a larger problem comes.
class Workspace {
 public:
  ~Workspace() { std::free(data_); }
  float* get(int64_t floats) {
    if (floats > size_) {
      std::free(data_);
      data_ = static_cast<float*>(std::aligned_alloc(64, size_t(padded(floats * 4, 64))));
      size_ = data_ ? floats : 0;
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  int64_t size_ = 0;
};

// How one problem is cut up, and where its pieces are in the workspace.
struct Plan {
  const AttentionArgs& args;
  int64_t group, folded;             // query heads per kv head; rows per (batch, kv head)
  int64_t key_room, dim_room;        // keys and dim, rounded up to whole vectors
  int64_t pairs, pairs_at_once;      // (batch, kv head)
  int64_t tiles, blocks;             // of the rows of one pair
  int64_t ldq, lds, ldo, block_rows;  // strides of a block's queries, scores and results
  int64_t k_floats, v_floats, thread_floats;
  float *mask = nullptr, *k = nullptr, *v = nullptr, *scratch = nullptr;

  explicit Plan(const AttentionArgs& a) : args(a) {
    group = a.heads / a.kv_heads;
    folded = a.queries * group;
    key_room = padded(a.keys, kWidth);
    dim_room = padded(a.dim, kWidth);
    k_floats = padded(key_room * a.dim, 16);
    v_floats = padded(dim_room * a.keys, 16);
    pairs = a.batch * a.kv_heads;
    pairs_at_once = std::clamp<int64_t>(kPackFloats / (k_floats + v_floats), 1, pairs);
    if (pairs_at_once > a.threads) pairs_at_once -= pairs_at_once % a.threads;
    // odd multiples of a line: rows a power of two apart would share one set of the cache
    ldq = padded(a.dim, 16) + 16;
    lds = padded(a.keys, 16) + 16;
    ldo = padded(a.dim, 16) + 16;
    tiles = (folded + kTileRows - 1) / kTileRows;
    const int64_t fit = std::max<int64_t>(1, std::min(kBlockRows, kBlockScores / lds) / kTileRows);
    blocks = (tiles + fit - 1) / fit;
    // few blocks: as many for one thread as for the other
    if (pairs_at_once * blocks < 8 * a.threads) blocks = padded(blocks, a.threads);
    blocks = std::min(blocks, tiles);
    block_rows = (tiles + blocks - 1) / blocks * kTileRows;
    thread_floats = block_rows * (ldq + lds + ldo);
  }

  int64_t floats() const {
    const int64_t masks = args.mask ? args.batch * (key_room + 16) : 0;
    return padded(masks, 16) + pairs_at_once * (k_floats + v_floats) + args.threads * thread_floats;
  }

  void place(float* base) {
    mask = base;
    k = mask + (args.mask ? padded(args.batch * (key_room + 16), 16) : 0);
    v = k + pairs_at_once * k_floats;
    scratch = v + pairs_at_once * v_floats;
  }

  float* mask_row(int64_t b) const { return mask + b * (key_room + 16); }

  // Keys that are read: those behind the last visible one have no weight.
  int64_t seen(int64_t b) const {
    if (!args.mask) return args.keys;
    int32_t n;
    std::memcpy(&n, mask_row(b) + key_room, sizeof n);
    return n;
  }

  // What is added to the scores, and how many keys are read: all, if none is visible.
  void spread_mask() {
    if (!args.mask) return;
    for (int64_t b = 0; b < args.batch; ++b) {
      float* row = mask_row(b);
      const uint8_t* visible = at<const uint8_t>(args.mask) + b * args.mask_batch;
      int32_t n = 0;
      for (int64_t s = 0; s < args.keys; ++s) {
        const bool seen = visible[s * args.mask_key];
        row[s] = seen ? 0.0f : kMaskValue;
        if (seen) n = int32_t(s + 1);
      }
      if (n == 0) n = int32_t(args.keys);
      std::memcpy(row + key_room, &n, sizeof n);
    }
  }
};

// Keys [first, first + width) of K as a panel [dim][width]; zero behind the last key.
template <typename T>
void pack_keys(const T* k, int64_t stride, int64_t first, int width, int64_t keys, int64_t dim,
               float* panel) {
  for (int j = 0; j < width; ++j) {
    const T* key = k + (first + j) * stride;
    if (first + j < keys) {
      for (int64_t d = 0; d < dim; ++d) panel[d * width + j] = scalar(key[d]);
    } else {
      for (int64_t d = 0; d < dim; ++d) panel[d * width + j] = 0;
    }
  }
}

// Keys [first, last) of V, each spread over the panels [keys][width] of its columns.
template <typename T>
void pack_values(const T* v, int64_t stride, int64_t first, int64_t last, const AttentionArgs& a,
                 float* panels) {
  for (int64_t s = first; s < last; ++s) {
    for (int64_t d = 0; d < a.dim;) {
      const int width = panel_width(a.dim, d);
      float* to = panels + d * a.keys + s * width;
      for (int w = 0; w < width; w += kWidth, d += kWidth) {
        const int64_t left = a.dim - d;  // at least 1: a panel is no wider than it must be
        const T* from = v + s * stride + d;
        store(to + w, left >= kWidth ? load(from) : load_part(from, int(left)));
      }
    }
  }
}

// c[rows][n] (+)= a[rows][depth] * panels; panel j starts at panels + j * panel_stride.
void multiply(const float* a, int64_t lda, int64_t rows, const float* panels, int64_t panel_stride,
              int64_t n, int64_t first, int64_t depth, float* c, int64_t ldc, bool add) {
  for (int64_t j = 0; j < n; j += kPanel) {
    const int width = panel_width(n, j);
    const float* panel = panels + j * panel_stride + first * width;
    for (int64_t i = 0; i < rows; i += kTileRows) {
      const Tile run = find_tile(std::min<int64_t>(kTileRows, rows - i), width);
      run(a + i * lda, lda, panel, depth, c + i * ldc + j, ldc, add);
    }
  }
}

// exp(x) of x <= 0; 0 below -87.
inline Vec exp_of_negative(Vec x) {
  const VecI low = x < -87.0f;
  return select(low, splat(0), exp_bounded(select(low, splat(-87.0f), x)));
}

// Products with the keys -> probabilities, in place; mask null: all keys are visible.
template <typename T>
void softmax(float* s, const float* mask, float scale, int64_t n) {
  const T* type = nullptr;
  Vec top = splat(-INFINITY);
  for (int64_t i = n; i < padded(n, kWidth); ++i) s[i] = 0;
  for (int64_t i = 0; i < n; i += kWidth) {
    Vec v = round_fast(type, round_fast(type, load(s + i)) * scale);
    if (mask) v += load(mask + i);
    if (n - i < kWidth) {
      for (int j = int(n - i); j < kWidth; ++j) v[j] = -INFINITY;
    }
    store(s + i, v);
    top = max(v, top);
  }
  float highest = top[0];
  for (int j = 1; j < kWidth; ++j) highest = std::max(highest, top[j]);
  Vec total = splat(0);
  for (int64_t i = 0; i < n; i += kWidth) {
    const Vec e = exp_of_negative(load(s + i) - highest);
    store(s + i, e);
    total += e;
  }
  const float inverse = 1 / sum(total);
  for (int64_t i = 0; i < n; i += kWidth) store(s + i, round_fast(type, load(s + i) * inverse));
}

// Row r of the folded queries of kv head h: query r / group, head h * group + r % group.
template <typename T>
void attend(const Plan& p, int64_t pair, int64_t slot, int64_t block, float* scratch) {
  const AttentionArgs& a = p.args;
  const int64_t b = pair / a.kv_heads, h = pair % a.kv_heads, keys = p.seen(b);
  const int64_t first = p.tiles * block / p.blocks * kTileRows;
  const int64_t last = std::min(p.tiles * (block + 1) / p.blocks * kTileRows, p.folded);
  float *q = scratch, *s = q + p.block_rows * p.ldq, *o = s + p.block_rows * p.lds;
  for (int64_t r = first; r < last; ++r) {
    const T* from = at<const T>(a.q) + b * a.q_batch + r / p.group * a.q_token +
                    (h * p.group + r % p.group) * a.q_head;
    float* to = q + (r - first) * p.ldq;
    sweep(a.dim, [&](int64_t i, auto part) { part.put(to + i, part.get(from + i)); });
  }
  const int64_t rows = last - first;
  // Keys that some row of the block sees; whole panels of them are multiplied.
  const int64_t seen = a.causal ? std::min(keys, (last - 1) / p.group + 1) : keys;
  const int64_t whole = std::min(padded(seen, kPanel), keys);
  multiply(q, p.ldq, rows, p.k + slot * p.k_floats, a.dim, whole, 0, a.dim, s, p.lds, false);
  const float* mask = a.mask ? p.mask_row(b) : nullptr;
  for (int64_t i = 0; i < rows; ++i) {
    float* row = s + i * p.lds;
    const int64_t own = a.causal ? std::min(seen, (first + i) / p.group + 1) : seen;
    softmax<T>(row, mask, float(a.scale), own);
    for (int64_t j = padded(own, kWidth); j < seen; ++j) row[j] = 0;
  }
  const float* v = p.v + slot * p.v_floats;
  for (int64_t l = 0; l < seen; l += kDepth) {
    multiply(s + l, p.lds, rows, v, a.keys, a.dim, l, std::min(kDepth, seen - l), o, p.ldo, l > 0);
  }
  for (int64_t r = first; r < last; ++r) {
    T* to = at<T>(a.out) +
            ((b * a.queries + r / p.group) * a.heads + h * p.group + r % p.group) * a.dim;
    const float* from = o + (r - first) * p.ldo;
    sweep(a.dim, [&](int64_t i, auto part) { part.put(to + i, part.get(from + i)); });
  }
}

template <typename T>
void pack(const Plan& p, int64_t pair, int64_t slot, int64_t first) {
  const AttentionArgs& a = p.args;
  const int64_t b = pair / a.kv_heads, h = pair % a.kv_heads, keys = p.seen(b);
  if (first >= keys) return;
  const T* k = at<const T>(a.k) + b * a.k_batch + h * a.k_head;
  const T* v = at<const T>(a.v) + b * a.v_batch + h * a.v_head;
  pack_keys(k, a.k_token, first, panel_width(keys, first), keys, a.dim,
            p.k + slot * p.k_floats + first * a.dim);
  pack_values(v, a.v_token, first, std::min(first + kPanel, keys), a, p.v + slot * p.v_floats);
}

template <typename T>
void run(const Plan& p, int thread) {
  const int64_t parts = (p.args.keys + kPanel - 1) / kPanel;
  float* scratch = p.scratch + thread * p.thread_floats;
  for (int64_t start = 0; start < p.pairs; start += p.pairs_at_once) {
    const int64_t count = std::min(p.pairs_at_once, p.pairs - start);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count * parts; ++i) {
      pack<T>(p, start + i / parts, i / parts, i % parts * kPanel);
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count * p.blocks; ++i) {
      attend<T>(p, start + i / p.blocks, i / p.blocks, i % p.blocks, scratch);
    }
  }
}

}  // namespace
}  // namespace phyai

// 0, or 1 with nothing written when there is no memory.
PHYAI_API int phyai_attention(const phyai::AttentionArgs* args) {
  using namespace phyai;
  thread_local Workspace workspace;
  AttentionArgs a = *args;
  a.threads = team(a.threads, a.batch * a.queries * a.heads * a.dim * a.keys / 16);
  Plan plan(a);
  float* memory = workspace.get(plan.floats());
  if (!memory) return 1;
  plan.place(memory);
  plan.spread_mask();
  with_type(a.dtype, [&](auto x) {
    using T = type_of<decltype(x)>;
#pragma omp parallel num_threads(int(a.threads)) if (a.threads > 1)
    run<T>(plan, omp_get_thread_num());
  });
  return 0;
}
