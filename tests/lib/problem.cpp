#include <gdnflow/problem.hpp>

#include "support/expect_error.hpp"

#include <functional>
#include <limits>
#include <unordered_set>
#include <vector>

#include <doctest/doctest.h>

using namespace gdnflow;
using gdnflow::test::expect_error;

namespace {

using Change = std::function<void(Problem&)>;

// One change to each field; a forgotten field in the hash or in equality shows here.
const std::vector<Change>& changes() {
  static const std::vector<Change> list{
      [](Problem& p) { p.qk_heads = 8; },
      [](Problem& p) { p.v_heads = 64; },
      [](Problem& p) { p.qk_dim = 64; },
      [](Problem& p) { p.v_dim = 64; },
      [](Problem& p) { p.activation = DType::f16; },
      [](Problem& p) { p.state = DType::bf16; },
      [](Problem& p) { p.index = DType::i64; },
      [](Problem& p) { p.state_layout = StateLayout::vk; },
      [](Problem& p) { p.head_map = HeadMap::interleaved; },
      [](Problem& p) { p.gate = GateForm::raw; },
      [](Problem& p) { p.beta = BetaForm::logit; },
      [](Problem& p) { p.qk_norm = true; },
      [](Problem& p) { p.scale = 0.5F; },
      [](Problem& p) { p.cu_seqlens = false; },
      [](Problem& p) { p.prefix_lens = true; },
      [](Problem& p) { p.initial_state = true; },
      [](Problem& p) { p.final_state = false; },
      [](Problem& p) { p.state_indices = true; },
      [](Problem& p) { p.output_state_indices = true; },
      [](Problem& p) { p.has_initial_state = true; },
      [](Problem& p) { p.checkpoint_interval = 64; },
      [](Problem& p) { p.checkpoint_state_indices = true; },
      [](Problem& p) { p.zero_padding = true; },
      [](Problem& p) { p.mode = Mode::batch_invariant; },
      [](Problem& p) { p.model_v_heads = 64; },
  };
  return list;
}

// The most chunks of at most `sequences` sequences with `tokens` tokens in all, by trying every
// split and, where prefixes shift the grid, every phase.
std::int64_t most_chunks(std::int64_t tokens, std::int64_t sequences, bool prefixes) {
  std::vector<std::int64_t> chunks_of(static_cast<std::size_t>(tokens) + 1, 0);
  for (std::int64_t n = 1; n <= tokens; ++n) {
    for (std::int64_t phase = 0; phase < (prefixes ? chunk_tokens : 1); ++phase) {
      chunks_of[n] = std::max(chunks_of[n], (phase + n + chunk_tokens - 1) / chunk_tokens);
    }
  }
  std::vector<std::int64_t> best(static_cast<std::size_t>(tokens) + 1, 0);
  for (std::int64_t s = 0; s < sequences; ++s) {
    for (std::int64_t total = tokens; total >= 0; --total) {
      for (std::int64_t n = 0; n <= total; ++n) {
        best[total] = std::max(best[total], best[total - n] + chunks_of[n]);
      }
    }
  }
  return best.back();
}

}  // namespace

TEST_CASE("each field of a problem takes part in equality, in the hash and in what is printed")
{
  const Problem usual;
  std::unordered_set<std::size_t> hashes{hash_value(usual)};
  std::unordered_set<std::string> texts{to_string(usual)};
  for (std::size_t i = 0; i < changes().size(); ++i) {
    CAPTURE(i);
    Problem changed;
    changes()[i](changed);
    CHECK_FALSE(changed == usual);
    CHECK(hashes.insert(hash_value(changed)).second);
    CHECK(texts.insert(to_string(changed)).second);
    Problem again;
    changes()[i](again);
    CHECK(hash_value(again) == hash_value(changed));
  }
}

TEST_CASE("a problem and a capacity print themselves")
{
  Problem p;
  p.initial_state = true;
  p.qk_norm = true;
  CHECK(to_string(p) == "16/32 heads, d 128, bf16, state f32 kv, qk norm, initial state");
  CHECK(to_string(Capacity{2048, 3}) == "2048 tokens, 3 sequences");
  CHECK(to_string(Capacity{1, 1}) == "1 token, 1 sequence");
  CHECK(hash_value(Capacity{2, 3}) != hash_value(Capacity{3, 2}));
}

TEST_CASE("the usual problem is valid")
{
  CHECK_NOTHROW(validate(Problem{}));
  CHECK_NOTHROW(validate(Problem{}, Capacity{0, 1}));
}

TEST_CASE("a wrong field is refused with its name and what was got")
{
  const auto refused = [](const Change& change, std::initializer_list<std::string_view> parts) {
    Problem p;
    change(p);
    expect_error(ErrorCode::invalid_argument, parts, [&] { validate(p); });
  };
  refused([](Problem& p) { p.qk_heads = 0; }, {"qk_heads", "got 0"});
  refused([](Problem& p) { p.v_heads = 24; }, {"v_heads", "16", "got 24"});
  refused([](Problem& p) { p.v_heads = 0; }, {"v_heads", "got 0"});
  refused([](Problem& p) { p.qk_dim = 0; }, {"qk_dim", "got 0"});
  refused([](Problem& p) { p.v_dim = 4097; }, {"v_dim", "4096", "got 4097"});
  refused([](Problem& p) { p.activation = DType::i32; }, {"activation", "got i32"});
  refused([](Problem& p) { p.state = DType::u8; }, {"state", "got u8"});
  refused([](Problem& p) { p.index = DType::f32; }, {"index", "got f32"});
  refused([](Problem& p) { p.scale = -1.0F; }, {"scale", "-1"});
  refused([](Problem& p) { p.scale = std::numeric_limits<float>::quiet_NaN(); }, {"scale", "nan"});
  refused([](Problem& p) { p.checkpoint_interval = 100; }, {"checkpoint_interval", "64", "100"});
  refused([](Problem& p) { p.state_indices = true; }, {"state_indices", "initial_state"});
  refused([](Problem& p) { p.has_initial_state = true; }, {"has_initial_state", "initial_state"});
  refused([](Problem& p) { p.checkpoint_state_indices = true; }, {"checkpoint_interval"});
  refused(
      [](Problem& p) {
        p.output_state_indices = true;
        p.final_state = false;
      },
      {"output_state_indices", "final_state"});
  refused([](Problem& p) { p.model_v_heads = 64; },
          {"model_v_heads", "batch_invariant", "fastest"});
  refused(
      [](Problem& p) {
        p.mode = Mode::batch_invariant;
        p.model_v_heads = 16;
      },
      {"model_v_heads", "at least v_heads (32)", "got 16"});
}

TEST_CASE("a capacity that no plan can serve is refused")
{
  const auto refused = [](bool packed, Capacity c, std::initializer_list<std::string_view> parts) {
    Problem p;
    p.cu_seqlens = packed;
    expect_error(ErrorCode::invalid_argument, parts, [&] { validate(p, c); });
  };
  refused(true, {-1, 1}, {"max_tokens", "-1"});
  refused(true, {std::int64_t{1} << 31, 1}, {"max_tokens", "2147483648"});
  refused(true, {64, 0}, {"max_sequences", "got 0"});
  refused(false, {64, 3}, {"max_tokens", "multiple", "64 tokens for 3 sequences"});
}

TEST_CASE("value heads read the q/k head that the map says")
{
  Problem p;
  p.qk_heads = 2;
  p.v_heads = 6;
  for (std::int32_t h = 0; h < 6; ++h) CHECK(p.qk_head_of(h) == h / 3);
  p.head_map = HeadMap::interleaved;
  for (std::int32_t h = 0; h < 6; ++h) CHECK(p.qk_head_of(h) == h % 2);
}

TEST_CASE("the scale is 1/sqrt(d_k) unless given")
{
  Problem p;
  p.qk_dim = 64;
  CHECK(p.effective_scale() == 0.125F);
  p.scale = 0.25F;
  CHECK(p.effective_scale() == 0.25F);
}

TEST_CASE("max_chunks is the largest number that some lengths reach")
{
  for (const bool prefixes : {false, true}) {
    Problem p;
    p.prefix_lens = prefixes;
    for (const std::int64_t tokens : {0, 1, 2, 3, 63, 64, 65, 66, 100, 128, 129, 190, 200}) {
      for (const std::int64_t sequences : {1, 2, 3, 5, 70, 260}) {
        CAPTURE(prefixes);
        CAPTURE(tokens);
        CAPTURE(sequences);
        CHECK(max_chunks(p, {tokens, sequences}) == most_chunks(tokens, sequences, prefixes));
      }
    }
  }
}
