#include "encoder_kernel.h"

const pe::EncoderKernels& pe::encoder_kernels_portable() { return encoder_kernels_here; }
