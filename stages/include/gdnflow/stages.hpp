#pragma once

#include <gdnflow/registry.hpp>

/// The built-in stages and their tensors. Every name below is a port; pipelines use the same names
/// for edges. T tokens, N sequences, NC chunks at most, C = 64; [r, c] = [Dk, Dv] in the `kv`
/// layout and [Dv, Dk] in `vk`. Types: act = Problem::activation, work = f32 on the host, what the
/// variant declares on a GPU.
///
/// External tensors
///   q, k                      [T, Hqk, Dk] act     v, o               [T, Hv, Dv] act
///   g, beta                   [T, Hv] f32          a, b               [T, Hv] act
///   a_log, dt_bias            [Hv] f32             cu_seqlens         [N+1] index
///   prefix_lens               [N] index            initial_state      [N or P, Hv, r, c] state
///   final_state               [N or P, Hv, r, c]   state_indices      [N] i32
///   output_state_indices      [N] i32              has_initial_state  [N] u8
///   checkpoints               [K or P, Hv, r, c]   checkpoint_state_indices  [K] i32
///
/// The chunk table, made on the device by `chunk_index`; nothing downstream reads cu_seqlens.
/// Lengths are first made safe: every entry is clamped to [0, T] and to at least its predecessor,
/// so a falling pair is an empty sequence and nothing overlaps. Prefixes are clamped to [0, 2^36],
/// which keeps chunk numbers within i32. A sequence with prefix p and n > 0
/// tokens is cut at absolute multiples of 64 of p + (its token index); without prefix_lens p = 0.
///   chunk_table         [NC, 4] i32  sequence, first token, tokens, number; rows at and past the
///                                    count are zero. The number counts from the start of the
///                                    prefix: p / 64 in a sequence's first row, then rising by 1
///   chunk_offsets       [N+1] i32    first chunk of each sequence; the last entry is the count
///   checkpoint_offsets  [N+1] i32    first compact checkpoint row of each sequence
///   chunk_counts        [4] i32      chunks, tokens, checkpoint rows, sequences that are not empty
///
/// A checkpoint is the state after the last token of a chunk that ends at an absolute multiple of
/// checkpoint_interval; in order of sequence and position they take rows 0, 1, ... of
/// `checkpoints`, or row checkpoint_state_indices[i] (-1: skipped). Rows past K are not written.
/// State stages find them by the table: with m = checkpoint_interval / 64, the chunk with number c
/// of sequence n, whose first chunk has number f, ends at a checkpoint if (c + 1) % m = 0 and its
/// row, checkpoint_offsets[n] + (c + 1) / m - f / m - 1, is below checkpoint_offsets[n + 1] (a last
/// chunk that stops short of its border has no row left).
///
/// States: sequence n starts from row n of initial_state, or row state_indices[n]; from zero where
/// the index is negative or >= P, or has_initial_state[n] is 0. Its final state goes to row n of
/// final_state, or output_state_indices[n], or (with state_indices alone) state_indices[n]; nowhere
/// where the index is negative or >= P. An empty sequence's final state is its initial state.
///
/// Intermediates
///   q_normalized, k_normalized  [T, Hqk, Dk] work   g_cumsum      [T, Hv] f32, restarts per chunk
///   A                           [T, Hv, C] work     w             [T, Hv, Dk] work
///   u, v_new                    [T, Hv, Dv] work    chunk_states  [NC, Hv, Dk, Dv] work
///   A: row i of a chunk's (I + strict_lower(beta_i exp(gc_i - gc_j) k_i.k_j))^-1, columns past the
///   chunk's length zero. chunk_states: the state at each chunk's start, always [Dk, Dv].
///
/// Segments: sequences in pieces that can run side by side. A piece starts from a zero state some
/// chunks in front of its own first chunk, where what stood before has faded to nothing in fp32:
///   |S contributed from before| <= bound |S before|, column by column,  bound = product over the
///                                  tokens between of alpha_t max(1, |1 - beta_t |k_t|^2|) <= 2^-26
///   segment_slots   [NS, 4] i32   sequence (-1: no segment), first chunk, end, number within the
///                                 sequence. Every sequence has one at least, in their order;
///                                 borders lie at multiples of 4 of a sequence's chunks
///   segment_starts  [NS, Hv] i32  the chunk to start from, itself at such a multiple; a sequence's
///                                 first chunk stands for its initial state. -1: no place is near
///                                 enough, the segment in front goes on
///   segment_bounds  [NS, Hv] f32  log2 of the bound; -inf: nothing is cut off
/// max |S before| and max |S| at a segment's begin are known when it has run: whoever uses segments
/// checks then that bound x max |S before| <= 2^-24 max |S|, and computes what does not pass again
/// in one piece. A variant of one_pass that cuts has all of this in its scratch.
///
/// Stages (-> outputs). All but chunk_index, qk_norm, gate, one_pass and zero_padding also take
/// chunk_table, chunk_offsets and chunk_counts; the state stages also checkpoint_offsets.
///   chunk_index     cu_seqlens, prefix_lens -> chunk_table, chunk_offsets, checkpoint_offsets,
///                   chunk_counts
///   qk_norm         q, k -> q_normalized, k_normalized
///   gate            g | a, a_log, dt_bias; beta | b -> g_ready, beta_ready
///   chunk_cumsum    g -> g_cumsum
///   segments        k, beta, g_cumsum -> segment_slots, segment_starts, segment_bounds
///   kkt_solve       k, beta, g_cumsum -> A
///   wu              k, v, beta, g_cumsum, A -> w, u
///   chunk_state     k, w, u, g_cumsum, states -> v_new, chunk_states, final_state, checkpoints
///   residual_state  k, v, beta, g_cumsum, A, states -> the same
///   chunk_output    q, k, v_new, chunk_states, g_cumsum -> o
///   fused_prefill   q, k, v, g_cumsum, beta, A, states -> o, final_state, checkpoints; with
///                   segments, where a variant makes use of them
///   one_pass        q, k, v, g, beta, cu_seqlens, prefix_lens, states -> o, final_state,
///                   checkpoints; by tokens or by chunks. A variant with an option `qk_norm` set
///                   to 1 normalises q and k itself, as qk_norm does, and without rounding them;
///                   with `gate` it takes what the stage gate takes in the place of g and beta
///   zero_padding    cu_seqlens -> o (in place): rows no sequence owns become zero
