#include "rowwise_kernel.h"

pe::RowwiseKernels pe::rowwise_kernels_avx512() { return kernels_here; }
