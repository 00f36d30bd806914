// Processors that multiply fours of 8 bits: Ice Lake, Zen 4 and later.

#include "blocks_avx512.h"

namespace spectr {

void Avx512VnniBlocks(const BlockProduct& product, int64_t first, int64_t last) {
  BlocksOf<BlocksVnni>(product, first, last);
}

}  // namespace spectr
