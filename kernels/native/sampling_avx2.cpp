#include "sampling_kernel.h"

pe::SamplingKernels pe::sampling_kernels_avx2() { return kernels_here; }
