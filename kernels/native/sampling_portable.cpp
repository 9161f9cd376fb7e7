#include "sampling_kernel.h"

pe::SamplingKernels pe::sampling_kernels_portable() { return kernels_here; }
