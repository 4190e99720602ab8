#include "ports.hpp"

namespace gdnflow::stages::chunk_index {

Variant host();
#if GDNFLOW_WITH_CUDA
Variant naive();
Variant one_launch();
#endif

Stage stage() {
  return {
      "chunk_index",
      "cuts sequences into chunks of 64 tokens",
      {optional(in("cu_seqlens", TypeRule::index, {"N+1"})),
       optional(in("prefix_lens", TypeRule::index, {"N"})),
       out("chunk_table", TypeRule::i32, {"NC", 4}), out("chunk_offsets", TypeRule::i32, {"N+1"}),
       out("checkpoint_offsets", TypeRule::i32, {"N+1"}), out("chunk_counts", TypeRule::i32, {4})},
      {
#if GDNFLOW_WITH_CUDA
          one_launch(),
          naive(),
#endif
          host(),
      },
  };
}

}  // namespace gdnflow::stages::chunk_index
