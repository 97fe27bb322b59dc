// Causal attention and its gradient, for one core. Written after `native.HEAD`; SIZE, HEADS and RATE
// are defined by `fast_attention.py`, which also says what the arguments are.
//
// ROWS queries at a time meet all tokens that the last of them may see. Their scores stay in the first-level
// cache, where mask, softmax and dropout go over them once or twice; XLA would need many passes over far more.
// Every matrix product is `product`, whose results stay in registers.

#include <stdlib.h>
#include <string.h>

enum {
  ROWS = W == 16 ? 8 : 4,
  PANEL = 2 * W,                                    // columns of a product at a time
  WIDE = (SIZE + PANEL - 1) / PANEL * PANEL,        // features, filled up with zeros to whole panels
  TALL = (SIZE + ROWS - 1) / ROWS * ROWS,           // and to whole groups of rows
};

#define at(place) (*(f *)(place))  // the vector that begins there

// c = a b, or c += a b: ROWS x inner times inner x columns. Steps between the rows of a and along them are given,
// so that a may also be turned.
static inline void product(const float *a, int row, int along, const float *b, int b_row, float *c, int c_row,
                           int inner, int columns, int add) {
  for (int j = 0; j < columns; j += PANEL) {
    f left[ROWS] = {}, right[ROWS] = {};
    if (add)
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) left[r] = at(c + r * c_row + j), right[r] = at(c + r * c_row + j + W);
    for (int k = 0; k < inner; k++) {
      f b_left = at(b + k * b_row + j), b_right = at(b + k * b_row + j + W);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        float x = a[r * row + k * along];
        left[r] += x * b_left;
        right[r] += x * b_right;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) at(c + r * c_row + j) = left[r], at(c + r * c_row + j + W) = right[r];
  }
}

static inline f exp_of_negative(f x) {  // Cephes, single precision; what is no number stays none
  i tiny = x < -87, none = x != x;
  f given = x;
  f whole = x * 1.44269504089f + 12582912.f;  // rounds: what is left of the comma is in the last bits
  i power = ((i)whole - 0x4b400000) << 23;
  whole -= 12582912.f;
  x -= whole * 0.693359375f;
  x -= whole * -2.12194440e-4f;
  f y = ((((1.9875691500e-4f * x + 1.3981999507e-3f) * x + 8.3334519073e-3f) * x + 4.1665795894e-2f) * x +
         1.6666665459e-1f) * x + 5.0000001201e-1f;
  return pick(none, given, pick(tiny, (f){}, (f)((i)(y * x * x + x + 1) + power)));
}

static inline i lane_numbers(void) {  // 0, 1, 2, ...
  i x;
  for (int k = 0; k < W; k++) x[k] = k;
  return x;
}

// All bits are set where a weight is kept: `kept` in attention.py, for elements with these numbers.
typedef uint32_t u __attribute__((vector_size(4 * W), aligned(4)));
static inline i is_kept(const uint32_t *seed, u number) {
  u x = number ^ seed[0];
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15) ^ seed[1]) * 0x846CA68Bu;
  x ^= x >> 16;
  return (i)(x < (uint32_t)((1 - RATE) * 4294967296.0));
}

static const float UPSCALE = 1 / (1 - RATE);  // of what dropout keeps

static float sum_of(f x) {
  float total = 0;
  for (int k = 0; k < W; k++) total += x[k];
  return total;
}

static float largest_of(f x) {
  float most = x[0];
  for (int k = 1; k < W; k++) most = x[k] > most ? x[k] : most;
  return most;
}

// Room for one head, allocated once per call.
typedef struct {
  float *keys, *values;                // SIZE x room, as given, filled up with zeros
  float *turned;                       // room x WIDE: the values, in the gradient the keys
  float *scores, *slopes;              // ROWS x room
  float *key_slopes, *value_slopes;    // TALL x room
  float query[ROWS * TALL], slope[ROWS * TALL], result[ROWS * WIDE];
  int tokens, room;
  int first, stride;                   // of the tokens that ask
} Head;

static void *get_memory(size_t bytes) {  // aligned, so that a vector lies in one line of the cache
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) abort();
  return memory;
}

static Head *new_head(int tokens, const int32_t *asking) {
  int room = (tokens + PANEL - 1) / PANEL * PANEL;
  size_t per_token = 2 * SIZE + WIDE + 2 * ROWS + 2 * TALL;
  Head *h = get_memory(sizeof(Head));
  float *x = get_memory(per_token * room * sizeof(float));
  h->tokens = tokens, h->room = room, h->first = asking[0], h->stride = asking[1];
  h->keys = x, x += SIZE * room;
  h->values = x, x += SIZE * room;
  h->turned = x, x += WIDE * room;
  h->scores = x, x += ROWS * room;
  h->slopes = x, x += ROWS * room;
  h->key_slopes = x, x += TALL * room;
  h->value_slopes = x;
  return h;
}

static void free_head(Head *h) {
  free(h->keys);
  free(h);
}

// Keys and values, and one of them turned as well.
static void take(Head *h, const float *keys, const float *values, const float *to_turn) {
  size_t bytes = h->tokens * sizeof(float), rest = h->room * sizeof(float) - bytes;
  for (int d = 0; d < SIZE; d++) {
    memcpy(h->keys + d * h->room, keys + d * h->tokens, bytes);
    memset(h->keys + d * h->room + h->tokens, 0, rest);
    memcpy(h->values + d * h->room, values + d * h->tokens, bytes);
    memset(h->values + d * h->room + h->tokens, 0, rest);
  }
  memset(h->turned, 0, WIDE * h->room * sizeof(float));
  for (int t = 0; t < h->tokens; t++)
    for (int d = 0; d < SIZE; d++) h->turned[t * WIDE + d] = to_turn[d * h->tokens + t];
}

// Some rows of an array of queries x SIZE, times `factor`; rows after the last are zero.
static void take_rows(float *to, const float *from, int start, int queries, float factor) {
  memset(to, 0, ROWS * TALL * sizeof(float));
  for (int r = 0; r < ROWS && start + r < queries; r++)
    for (int d = 0; d < SIZE; d++) to[r * TALL + d] = factor * from[(start + r) * SIZE + d];
}

static int last_seen(const Head *h, int query) { return h->first + h->stride * query; }

// Tokens that ROWS queries meet, filled up to whole panels.
static int meets(const Head *h, int start) {
  int seen = last_seen(h, start + ROWS - 1) + 1;
  seen = seen < h->tokens ? seen : h->tokens;
  return (seen + PANEL - 1) / PANEL * PANEL;
}

static void forward_head(Head *h, const float *q, const float *k, const float *v, const uint32_t *seed, int head,
                         int queries, float *out, float *log_total) {
  i lanes = lane_numbers();
  take(h, k, v, v);
  for (int start = 0; start < queries; start += ROWS) {
    int seen = meets(h, start);
    take_rows(h->query, q, start, queries, 1 / sqrtf(SIZE));
    product(h->query, TALL, 1, h->keys, h->room, h->scores, h->room, SIZE, seen, 0);
    float totals[ROWS];
    for (int r = 0; r < ROWS; r++) {
      float *row = h->scores + r * h->room;
      i position = (i){} + last_seen(h, start + r);
      f most = (f){} - INFINITY, total = {};
      for (int t = 0; t < seen; t += W) {
        f x = pick(lanes + t <= position, at(row + t), (f){} - INFINITY);
        most = pick(x > most, x, most);
        at(row + t) = x;
      }
      float top = largest_of(most);
      uint32_t number = ((uint32_t)head * queries + start + r) * h->tokens;
      for (int t = 0; t < seen; t += W) {
        f w = exp_of_negative(at(row + t) - top);
        total += w;
        if (RATE > 0) w = pick(is_kept(seed, (u)lanes + number + (uint32_t)t), w * UPSCALE, (f){});
        at(row + t) = w;
      }
      totals[r] = sum_of(total);
      if (start + r < queries) log_total[start + r] = top + logf(totals[r]);
    }
    product(h->scores, h->room, 1, h->turned, WIDE, h->result, WIDE, seen, WIDE, 0);
    for (int r = 0; r < ROWS && start + r < queries; r++)
      for (int d = 0; d < SIZE; d++) out[(start + r) * SIZE + d] = h->result[r * WIDE + d] / totals[r];
  }
}

static void backward_head(Head *h, const float *q, const float *k, const float *v, const uint32_t *seed, int head,
                          int queries, const float *out, const float *log_total, const float *slope, float *dq,
                          float *dk, float *dv) {
  i lanes = lane_numbers();
  take(h, k, v, k);
  memset(h->key_slopes, 0, 2 * TALL * h->room * sizeof(float));
  for (int start = 0; start < queries; start += ROWS) {
    int seen = meets(h, start);
    take_rows(h->query, q, start, queries, 1 / sqrtf(SIZE));
    take_rows(h->slope, slope, start, queries, 1);
    product(h->query, TALL, 1, h->keys, h->room, h->scores, h->room, SIZE, seen, 0);
    product(h->slope, TALL, 1, h->values, h->room, h->slopes, h->room, SIZE, seen, 0);
    for (int r = 0; r < ROWS; r++) {
      float along = 0, shift = 0;  // the slope along the output itself; rows after the last have none
      if (start + r < queries) {
        for (int d = 0; d < SIZE; d++) along += h->slope[r * TALL + d] * out[(start + r) * SIZE + d];
        shift = log_total[start + r];
      }
      float *row = h->scores + r * h->room, *slopes = h->slopes + r * h->room;
      i position = (i){} + last_seen(h, start + r);
      uint32_t number = ((uint32_t)head * queries + start + r) * h->tokens;
      for (int t = 0; t < seen; t += W) {
        f x = at(row + t) - shift, g = at(slopes + t);
        f w = pick(lanes + t <= position, exp_of_negative(x), (f){}), shown = w;
        if (RATE > 0) {
          i kept = is_kept(seed, (u)lanes + number + (uint32_t)t);
          g = pick(kept, g * UPSCALE, (f){});
          shown = pick(kept, w * UPSCALE, (f){});
        }
        at(row + t) = w * (g - along);
        at(slopes + t) = shown;
      }
    }
    product(h->scores, h->room, 1, h->turned, WIDE, h->result, WIDE, seen, WIDE, 0);
    for (int r = 0; r < ROWS && start + r < queries; r++)
      for (int d = 0; d < SIZE; d++) dq[(start + r) * SIZE + d] = h->result[r * WIDE + d] / sqrtf(SIZE);
    for (int d = 0; d < TALL; d += ROWS) {
      product(h->query + d, 1, TALL, h->scores, h->room, h->key_slopes + d * h->room, h->room, ROWS, seen, 1);
      product(h->slope + d, 1, TALL, h->slopes, h->room, h->value_slopes + d * h->room, h->room, ROWS, seen, 1);
    }
  }
  for (int d = 0; d < SIZE; d++) {
    memcpy(dk + d * h->tokens, h->key_slopes + d * h->room, h->tokens * sizeof(float));
    memcpy(dv + d * h->tokens, h->value_slopes + d * h->room, h->tokens * sizeof(float));
  }
}

// --- what XLA calls -----------------------------------------------------------------------------------

static XLA_FFI_Buffer *input(XLA_FFI_CallFrame *frame, int k) { return frame->args.args[k]; }
static void *result(XLA_FFI_CallFrame *frame, int k) { return ((XLA_FFI_Buffer *)frame->rets.rets[k])->data; }

XLA_FFI_Error *forward(XLA_FFI_CallFrame *frame) {
  if (introduced(frame)) return 0;
  XLA_FFI_Buffer *q = input(frame, 0), *k = input(frame, 1);
  int64_t queries = q->dims[q->rank - 2], tokens = k->dims[k->rank - 1], heads = 1;
  for (int n = 0; n < q->rank - 2; n++) heads *= q->dims[n];
  float *qs = q->data, *ks = k->data, *vs = input(frame, 2)->data, *out = result(frame, 0), *totals = result(frame, 1);
  uint32_t *seeds = input(frame, 3)->data;
  Head *h = new_head(tokens, input(frame, 4)->data);
  for (int64_t n = 0; n < heads; n++) {
    int64_t at = n * queries * SIZE, token = n * tokens * SIZE;
    forward_head(h, qs + at, ks + token, vs + token, seeds + n / HEADS * 2, n % HEADS, queries, out + at,
                 totals + n * queries);
  }
  free_head(h);
  return 0;
}

XLA_FFI_Error *backward(XLA_FFI_CallFrame *frame) {
  if (introduced(frame)) return 0;
  XLA_FFI_Buffer *q = input(frame, 0), *k = input(frame, 1);
  int64_t queries = q->dims[q->rank - 2], tokens = k->dims[k->rank - 1], heads = 1;
  for (int n = 0; n < q->rank - 2; n++) heads *= q->dims[n];
  float *qs = q->data, *ks = k->data, *vs = input(frame, 2)->data;
  uint32_t *seeds = input(frame, 3)->data;
  float *out = input(frame, 5)->data, *totals = input(frame, 6)->data, *slope = input(frame, 7)->data;
  float *dq = result(frame, 0), *dk = result(frame, 1), *dv = result(frame, 2);
  Head *h = new_head(tokens, input(frame, 4)->data);
  for (int64_t n = 0; n < heads; n++) {
    int64_t at = n * queries * SIZE, token = n * tokens * SIZE;
    backward_head(h, qs + at, ks + token, vs + token, seeds + n / HEADS * 2, n % HEADS, queries, out + at,
                  totals + n * queries, slope + at, dq + at, dk + token, dv + token);
  }
  free_head(h);
  return 0;
}
