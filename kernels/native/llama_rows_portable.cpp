#include "llama_rows_kernel.h"

namespace pe {

const RowKernels rows_portable = {rms_norm, turn_and_keep, narrow, largest};

}  // namespace pe
