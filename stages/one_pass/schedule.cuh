#pragma once

// What a block of whole heads works on: its share of the chunks (shares.cu), as jobs that one warp
// makes out and all roles take from a ring.
//
// A share that begins inside a sequence looks back, by the gates alone, for the chunk from which on
// the past has faded when the share begins. Where there is none, the block in front walks on. What
// keys that are not normalised add to the bound is found on the way, from the diagonal of K K^T,
// and enters the check: the block that is the last of a sequence's and head's to be done makes it,
// and where it does not pass computes the head again in one piece.

#include "device/barrier.cuh"
#include "device/dependent_launch.cuh"
#include "device/gates.cuh"
#include "one_pass/one_pass.cuh"
#include "one_pass/shares.hpp"
#include "one_pass/walks.hpp"
#include "segments/block_plan.cuh"

#include <climits>
#include <cstdint>

namespace gdnflow::stages::one_pass {

struct Job : Task {
  enum Kind : int { walk, rehearse, hand_on, end };
  Kind kind = walk;
  bool fresh = false;      // no output of chunks in front of it is on its way
  bool flush = false;      // none is left on its way behind it
  bool continues = false;  // begins with the state that the job before has left
  int number = 0;          // chunks of this block in front of it
  int outputs = 0;         // more than that
  int first_mark = 0;      // chunk of the block from which on max |S| is recorded
};

// A job before it is one.
struct Walk {
  Place begin;  // what is in front of it is for the state alone
  Job::Kind kind;
  std::int32_t from, to;     // chunks of the sequence
  std::int32_t waiting_row;  // as Task has it
  bool cut;                  // whether other blocks have chunks of the same head
  bool continues;            // as Job has it
  bool last;                 // no chunks behind it, as far as is known
};

// How far a block's scheduler is.
struct Progress {
  enum Step : int { share, followers, finish_begin, finish_end, end, ended };
  Share shares[2];  // this block's and the next one's
  Span span;        // of what comes next,
  int span_of;      // of sequence
  Place at;
  Step step;
  Job::Kind kind;     // of walks
  std::int64_t left;  // chunks of the share behind the jobs so far
  std::int32_t block;
  int announced, chunks, starts, flushes;  // of jobs so far
  bool found;                              // whether there is a job now,
  Walk walk;                               // this one
};

constexpr int job_stages = 6;

struct JobRing {
  Job jobs[job_stages];
  Progress progress;
  Barrier announced[job_stages], done[job_stages];

  __device__ void init(std::uint32_t readers) {
    for (int i = 0; i < job_stages; ++i) {
      announced[i].init(32);
      done[i].init(readers);
    }
  }
};

// By every lane of a warp that takes jobs, in turn: take(job) for each but the last.
template <class Take>
__device__ __forceinline__ void for_each_job(JobRing& ring, Take&& take) {
#pragma unroll 1
  for (int i = 0;; ++i) {
    const int index = i % job_stages;
    ring.announced[index].wait(static_cast<std::uint32_t>(i / job_stages % 2));
    // By a vote, so that the loop is uniform for the compiler, too.
    if (__any_sync(~0U, ring.jobs[index].kind == Job::end)) return;
    take(ring.jobs[index]);
    ring.done[index].arrive();
  }
}

__device__ __forceinline__ bool same_head(const Place& a, const Place& b) {
  return a.sequence == b.sequence && a.head == b.head;
}

__device__ __forceinline__ Span load_span(const Params& p, std::int32_t sequence) {
  const std::int64_t prefix = device::safe_prefix(p.prefix_lens, p.wide_index, sequence);
  const std::int32_t first = p.chunks.offsets[sequence];
  return {first,
          p.chunks.offsets[sequence + 1] - first,
          p.starts[sequence],
          p.starts[sequence + 1],
          static_cast<std::int32_t>(prefix % chunk_tokens),
          static_cast<std::int32_t>(prefix / chunk_tokens)};
}

// First token of chunk `index` of a sequence; of the one behind its last, its end.
__device__ __forceinline__ std::int32_t token_of(const Span& span, std::int32_t index) {
  return index == 0 ? span.start : min(span.start + index * rows - span.in_first, span.end);
}

// The nearest chunk of a sequence in front of chunk `begin` where what is older has faded when that
// begins; by a warp, eight chunks at a time. A NaN never has.
__device__ __forceinline__ segments::Start look_back(const Params& p, const Span& span,
                                                     const Place& begin) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
  const float nothing = -__int_as_float(0x7f800000);
  const std::int32_t least = max(0, begin.chunk - segments::most_lead);
  float before = 0.0F;
#pragma unroll 1
  for (std::int32_t from = begin.chunk - 1; from >= least; from -= 8) {
    const std::int32_t index = from - lane / 4;
    float sum = 0.0F;
    if (index >= least) {
      const std::int32_t end = token_of(span, index + 1);
#pragma unroll 8
      for (std::int32_t token = token_of(span, index) + lane % 4; token < end; token += 4) {
        sum += device::clamp_log_decay(p.g.at(token, begin.head));
      }
    }
    sum += __shfl_xor_sync(~0U, sum, 1);
    sum += __shfl_xor_sync(~0U, sum, 2);
    sum *= device::log2_e;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float x = __shfl_up_sync(~0U, sum, step);
      if (lane >= step) sum += x;
    }
    sum += before;
    const unsigned found = __ballot_sync(
        ~0U, index >= least && sum <= segments::log2_resolution + segments::log2_margin);
    if (found != 0) {
      const int first = __ffs(static_cast<int>(found)) - 1;
      const std::int32_t chunk = from - first / 4;
      const float bound = __shfl_sync(~0U, sum, first);
      return {chunk, chunk == 0 ? nothing : bound};
    }
    before = __shfl_sync(~0U, sum, 31);
  }
  return {-1, nothing};
}

// Makes out this block's jobs; by a warp, whose registers are few: what it has to remember is in
// shared memory.
class Scheduler {
 public:
  __device__ __forceinline__ Scheduler(const WholeParams& p, JobRing& ring)
      : p_(p), ring_(ring), now_(ring.progress) {}

  __device__ __forceinline__ void run() {
    rehearse();
    device::wait_for_predecessors();
    begin();
    while (now_.step != Progress::ended) {
      segments::Start start{now_.at.chunk, 0.0F};
      if (now_.step <= Progress::followers && now_.at.chunk > 0) {
        start = look_back(p_, now_.span, now_.at);
        if (now_.step == Progress::share && is_first_lane()) {
          p_.share_starts[blockIdx.x] = start.chunk;
          p_.share_bounds[blockIdx.x] = start.log2_bound;
        }
      }
      // What this block has of a head is visible when every role is done with it.
      if (now_.step == Progress::finish_begin) wait_for_first();
      if (now_.step == Progress::finish_end) wait_for_all();
      one_step(start);
    }
  }

 private:
  __device__ __forceinline__ static bool is_first_lane() { return threadIdx.x % 32 == 0; }

  __device__ __forceinline__ void one_step(const segments::Start& start) {
    __syncwarp();
    if (is_first_lane()) next(start);
    __syncwarp();
    if (now_.found) announce();
  }

  // A chunk in front of an imagined share, of which nothing remains: every role has fetched its
  // instructions when the first job comes, this one, too.
  __device__ __forceinline__ void rehearse() {
    if (is_first_lane()) {
      now_.announced = now_.chunks = now_.starts = now_.flushes = 0;
      now_.shares[0].begin = now_.at = {0, 0, 1};
      now_.shares[1].begin = {0, 1, 0};
      now_.span = {0, 1, 0, rows, 0, 0};
      now_.span_of = 0;
      now_.left = 0;
      now_.step = Progress::share;
      now_.kind = Job::rehearse;
    }
    one_step({0, 0.0F});
  }

  __device__ __forceinline__ void begin() {
    constexpr int words = 2 * sizeof(Share) / sizeof(int);
    static_assert(words <= 32);
    const auto lane = static_cast<int>(threadIdx.x % 32);
    if (lane < words) {
      reinterpret_cast<int*>(now_.shares)[lane] =
          reinterpret_cast<const int*>(p_.shares + blockIdx.x)[lane];
    }
    __syncwarp();
    if (is_first_lane()) {
      now_.span = now_.shares[0].span;
      now_.span_of = now_.shares[0].begin.sequence;
      now_.at = now_.shares[0].begin;
      now_.step = Progress::share;
      now_.kind = Job::walk;
      now_.left = chunks_in_front(now_.shares[1]) - chunks_in_front(now_.shares[0]);
    }
    __syncwarp();
  }
  __device__ __forceinline__ std::int64_t chunks_in_front(const Share& share) const {
    const Place& place = share.begin;
    if (place.head == 0 && place.chunk == 0) {
      return std::int64_t{p_.chunks.offsets[place.sequence]} * p_.heads.v;
    }
    return std::int64_t{share.span.first_chunk} * p_.heads.v +
           std::int64_t{place.head} * share.span.chunks + place.chunk;
  }

  __device__ __forceinline__ void wait_done(int i) {
    ring_.done[i % job_stages].wait(static_cast<std::uint32_t>(i / job_stages % 2));
  }
  // The first job behind the rehearsal, if it has not been waited for.
  __device__ __forceinline__ void wait_for_first() {
    if (now_.announced > 1 && now_.announced <= 1 + job_stages) wait_done(1);
  }
  __device__ __forceinline__ void wait_for_all() {
#pragma unroll 1
    for (int i = max(0, now_.announced - job_stages); i < now_.announced; ++i) wait_done(i);
  }

  __device__ __forceinline__ void announce() {
    const int number = now_.announced;
    if (number >= job_stages) wait_done(number - job_stages);
    __syncwarp();
    if (is_first_lane()) {
      fill(ring_.jobs[number % job_stages]);
      now_.announced = number + 1;
    }
    __syncwarp();
    ring_.announced[number % job_stages].arrive();
  }

  // From what `next` has found; by one lane, as all that follows.
  __device__ __forceinline__ void fill(Job& job) {
    const Walk& walk = now_.walk;
    const Span& span = now_.span;
    job.kind = walk.kind;
    job.sequence = walk.begin.sequence;
    job.head = walk.begin.head;
    job.qk_head = p_.heads.qk_of(walk.begin.head);
    job.first_column = 0;
    job.waiting_row = walk.waiting_row;
    job.chunks = 0;
    if (walk.kind == Job::hand_on || walk.kind == Job::end) return;
    job.first = span.first_chunk;
    job.first_chunk = span.first_chunk + walk.from;
    job.chunks = walk.to - walk.from;
    job.lead = walk.begin.chunk - walk.from;
    job.from_start = walk.from == 0;
    job.to_end = walk.to == span.chunks && walk.kind == Job::walk;
    job.continues = walk.continues;
    job.fresh = now_.flushes == now_.starts;
    job.flush = walk.last && job.chunks > 0;
    job.number = now_.chunks;
    job.outputs = now_.flushes;
    job.first_mark = walk.cut ? job.number + job.lead : INT_MAX;
    if (job.chunks == 0) return;
    job.first_number = span.first_number;
    job.chunk.first_token = token_of(span, walk.from);
    job.chunk.tokens = token_of(span, walk.from + 1) - job.chunk.first_token;
    job.end_token = token_of(span, walk.to);
    now_.chunks += job.chunks;
    now_.starts += job.fresh ? 1 : 0;
    now_.flushes += job.flush ? 1 : 0;
  }

  // One step on: of the share, then behind it. `start` is that of the place.
  __device__ __forceinline__ void next(const segments::Start& start) {
    now_.found = false;
    const Place& begin = now_.shares[0].begin;
    const Place& end = now_.shares[1].begin;
    switch (now_.step) {
      case Progress::share:
        next_of_share(start);
        break;
      case Progress::followers:
        next_follower(start);
        break;
      case Progress::finish_begin:  // the head that the share begins inside,
        now_.step = Progress::finish_end;
        if (begin.chunk > 0) finish(now_.shares[0]);
        break;
      case Progress::finish_end:  // and that which it ends inside
        now_.step = Progress::end;
        if (end.chunk > 0 && !(begin.chunk > 0 && same_head(begin, end))) finish(now_.shares[1]);
        break;
      default:
        now_.walk.kind = Job::end;
        now_.found = true;
        now_.step = Progress::ended;
    }
  }

  __device__ __forceinline__ void next_of_share(const segments::Start& start) {
    const Share& share = now_.shares[0];
    const Place& end = now_.shares[1].begin;
    Place& at = now_.at;
    const bool last = same_head(at, end);
    if (last && at.chunk == end.chunk) {
      now_.step = share.begin.chunk > 0 ? Progress::finish_begin : Progress::end;
      return;
    }
    if (at.sequence != now_.span_of) {
      now_.span_of = at.sequence;
      now_.span = load_span(p_, at.sequence);
    }
    const std::int32_t stop = last ? end.chunk : now_.span.chunks;
    now_.left -= stop - at.chunk;
    if (start.chunk >= 0) {
      const bool waits = at.chunk > 0 && p_.waiting.data != nullptr;
      now_.walk = {at,
                   now_.kind,
                   start.chunk,
                   stop,
                   waits ? share.first_block : -1,
                   at.chunk > 0 || last,
                   false,
                   now_.left == 0};
      now_.found = true;
    }
    if (last) {
      now_.step = start.chunk >= 0 ? Progress::followers : Progress::finish_begin;
      at = end;
      now_.block = blockIdx.x;
      return;
    }
    at.chunk = 0;
    if (++at.head < p_.heads.v) return;
    at.head = 0;
    ++at.sequence;
  }

  // The shares behind this one's end that have no start of their own are this one's.
  __device__ __forceinline__ void next_follower(const segments::Start& start) {
    Place& at = now_.at;
    if (at.chunk < now_.span.chunks && start.chunk < 0) {
      ++now_.block;
      const Place behind = p_.shares[now_.block + 1].begin;
      at.chunk = same_head(at, behind) ? behind.chunk : now_.span.chunks;
      return;
    }
    now_.step = Progress::finish_begin;
    const Place& end = now_.shares[1].begin;
    if (at.chunk == end.chunk) return;
    Walk& walk = now_.walk;  // that to the share's end
    walk.begin = end;
    walk.from = end.chunk;
    walk.to = at.chunk;
    walk.continues = true;
    walk.last = true;
    now_.found = true;
  }

  // Whether the share of `block` holds: what it cut off is below the resolution of what it has.
  __device__ __forceinline__ bool holds(const Place& begin, std::int32_t block) const {
    const std::int32_t start = __ldcg(&p_.share_starts[block]);
    const std::int32_t first = p_.chunks.offsets[begin.sequence];
    float log2_bound = __ldcg(&p_.share_bounds[block]);
    for (int i = 0; i < 4; ++i) log2_bound += __ldcg(&p_.segments.log2_growth[4 * block + i]);
    return most(begin.head, first + start) * exp2f(log2_bound) <=
           exp2f(segments::log2_resolution) * most(begin.head, first + begin.chunk);
  }
  __device__ __forceinline__ float most(int head, std::int32_t chunk) const {
    const float* const parts =
        p_.segments.marks + (std::int64_t{chunk} * p_.heads.v + head) * SegmentPlan::parts;
    std::uint32_t most = 0;  // as bits: a NaN is more than any number
    for (int i = 0; i < SegmentPlan::parts; ++i) {
      most = max(most, __float_as_uint(__ldcg(&parts[i])));
    }
    return __uint_as_float(most);
  }

  // This block's part of the head that `share` begins inside is done.
  __device__ __forceinline__ void finish(const Share& share) {
    __threadfence();
    if (atomicAdd(&p_.finished[share.first_block], 1) < share.last_block - share.first_block) {
      return;
    }
    __threadfence();
    bool passed = true;
    bool cut = false;
#pragma unroll 1
    for (std::int32_t i = share.first_block + 1; i <= share.last_block; ++i) {
      if (__ldcg(&p_.share_starts[i]) < 0) continue;
      cut = true;
      passed = passed && holds(p_.shares[i].begin, i);
    }
    if (passed && !(cut && p_.waiting.data != nullptr)) return;
    now_.span = share.span;
    now_.walk = {{share.begin.sequence, share.begin.head, 0},
                 passed ? Job::hand_on : Job::walk,
                 0,
                 share.span.chunks,
                 passed ? share.first_block : -1,
                 false,
                 false,
                 true};
    now_.found = true;
  }

  const WholeParams& p_;
  JobRing& ring_;
  Progress& now_;
};

}  // namespace gdnflow::stages::one_pass
