#include "encoder_kernel.h"

const pe::EncoderKernels& pe::encoder_kernels_avx512() { return encoder_kernels_here; }
