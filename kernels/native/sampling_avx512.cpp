#include "sampling_kernel.h"

pe::SamplingKernels pe::sampling_kernels_avx512() { return kernels_here; }
