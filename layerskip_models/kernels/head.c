/* The head without its logits: of every row the token that wins, and how sure the row is of it. Part of kernels.c.
 *
 * Logits are computed as `normalised_linear` computes them, bit for bit, and looked at while they are in the cache. The
 * vocabulary is cut into chunks in the same way for any number of threads, and the chunks' summaries are put together in
 * order: so these numbers depend on the row alone, like everything else here.
 */

#define CHUNK 128  /* fewest outputs that are summed up together */
#define CHUNKS 256 /* and most chunks of a vocabulary */

typedef struct {
  float best, second; /* of the logits */
  float sum, moment;  /* of e^(logit - best), and of that times (logit - best) */
  int64_t token;      /* the first one whose logit is `best` */
} Summary;

INLINE int64_t chunk_size(int64_t out) {
  int64_t size = (out + CHUNKS - 1) / CHUNKS;
  return size <= CHUNK ? CHUNK : (size + GROUP - 1) / GROUP * GROUP;
}

INLINE int64_t chunk_count(int64_t out) { return (out + chunk_size(out) - 1) / chunk_size(out); }

INLINE vf choose_lanes(vi first, vf a, vf b) { return (vf)(((vi)a & first) | ((vi)b & ~first)); }

/* Of `count` logits, behind which there is room for LANES more; a NaN among them makes `best` NaN. */
static Summary summarise(float *logits, int64_t count, int64_t first, int spread) {
  for (int64_t i = count; i < count + LANES; i++) logits[i] = -INFINITY;
  vf most = all(-INFINITY), next = most;
  vi odd = {0};
  for (int64_t i = 0; i < count; i += LANES) {
    vf v = load(logits + i);
    odd |= v != v;
    vf lower = choose_lanes(v > most, most, v);
    most = choose_lanes(v > most, v, most);
    next = choose_lanes(lower > next, lower, next);
  }
  Summary s = {-INFINITY, -INFINITY, 0, 0, first};
  for (int i = 0; i < LANES; i++) {
    if (odd[i]) s.best = NAN;
    if (most[i] > s.best) s.second = s.best > next[i] ? s.best : next[i], s.best = most[i];
    else if (most[i] > s.second) s.second = most[i];
  }
  if (s.best != s.best) return s;
  for (int64_t i = 0; i < count; i++)
    if (logits[i] == s.best) {
      s.token = first + i;
      break;
    }
  if (!spread || s.best == -INFINITY) return s;
  vf sums = {0}, moments = {0};
  for (int64_t i = 0; i < count; i += LANES) {
    vf below = load(logits + i) - s.best;
    below = choose_lanes(below < -1000.0f, all(-1000.0f), below); /* times e^-infinity = 0 it must be 0 */
    vf e = exponential(below);
    sums += e;
    moments += below * e;
  }
  s.sum = sum(sums);
  s.moment = sum(moments);
  return s;
}

/* Everything about a row from its chunks' summaries. */
static Summary joined(const Summary *chunks, int64_t count, int spread) {
  Summary s = chunks[0];
  for (int64_t c = 1; c < count; c++) {
    const Summary *other = chunks + c;
    if (other->best != other->best) s.best = NAN;
    if (other->best > s.best) {
      s.second = s.best > other->second ? s.best : other->second;
      s.best = other->best, s.token = other->token;
    } else if (other->best > s.second) s.second = other->best;
  }
  if (!spread) return s;
  s.sum = s.moment = s.best != s.best ? NAN : 0;
  for (int64_t c = 0; c < count; c++) {
    if (chunks[c].sum == 0) continue; /* of masked tokens alone */
    float below = chunks[c].best - s.best, factor = expf(below);
    s.sum += factor * chunks[c].sum;
    if (factor > 0) s.moment += factor * (chunks[c].moment + below * chunks[c].sum);
  }
  return s;
}

/* Bytes of scratch that `choose` wants. */
int64_t choose_scratch(const Matrix *m, int64_t rows, int64_t threads) {
  int64_t floats = threads * (rows * m->in + rows * (chunk_size(m->out) + LANES));
  return rows * chunk_count(m->out) * (int64_t)sizeof(Summary) + floats * (int64_t)sizeof(float);
}

/* For rows [rows, in], normalised first: tokens[r], the argmax of its logits (the first of equal ones), and numbers[r], its logit,
 * NaN if any logit of the row is. With `spread` also, rows numbers each: the probability of the token, its logit less the
 * second largest, and the entropy in nats. scratch: aligned to 8 bytes. */
void choose(const Matrix *m, const float *norm, float eps, const float *x, int64_t rows, void *scratch, int spread,
            int64_t *tokens, float *numbers, int threads) {
  int64_t size = chunk_size(m->out), chunks = chunk_count(m->out), ahead = outputs_ahead(m);
  Summary *summaries = scratch;
  float *floats = (float *)(summaries + rows * chunks);
#pragma omp parallel num_threads(threads)
  {
    int t = omp_get_thread_num(), n = omp_get_num_threads();
    int64_t width = size + LANES, last = chunks * (t + 1) / n;
    float *own = floats + t * rows * (m->in + width), *logits = own + rows * m->in;
    normalise(x, norm, eps, rows, m->in, own);
    const float *packed = packed_rows(own, rows, m->in);
    for (int64_t c = chunks * t / n; c < last; c++) {
      int64_t begin = c * size, end = least(begin + size, m->out);
      for (int64_t first = begin; first < end; first += GROUP)
        for (int64_t r = 0; r < rows; r += together(r, rows)) {
          int64_t count = together(r, rows);
          for (int64_t o = first; o < least(first + GROUP, end); o += BLOCK) {
            float block[ROWS * BLOCK];
            outputs(m, o, packed + r * m->in, count, r == 0 && o + ahead + BLOCK <= m->out ? ahead : 0, block);
            for (int64_t i = 0; i < count; i++)
              memcpy(logits + (r + i) * width + o - begin, block + i * BLOCK, least(BLOCK, end - o) * sizeof(float));
          }
        }
      for (int64_t r = 0; r < rows; r++)
        summaries[r * chunks + c] = summarise(logits + r * width, end - begin, begin, spread);
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    Summary s = joined(summaries + r * chunks, chunks, spread);
    tokens[r] = s.token;
    numbers[r] = s.best;
    if (spread) {
      numbers[rows + r] = 1.0f / s.sum;
      numbers[2 * rows + r] = s.best - s.second;
      numbers[3 * rows + r] = logf(s.sum) - s.moment / s.sum;
    }
  }
}
