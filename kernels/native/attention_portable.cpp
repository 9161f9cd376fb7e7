#include "attention_kernel.h"

pe::AttentionKernels pe::attention_kernels_portable(int32_t kv_dtype) { return kernels_of(kv_dtype); }
