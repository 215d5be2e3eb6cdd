// The name of the kernel path that an operator took last, so that tests can assert it and `python
// -m jagged_cuda.info` can show it. Each of the two libraries keeps its own.
#pragma once

namespace jagged_cuda {

// `name`, such as "cpu.avx2", must live as long as the library.
void record_kernel(const char* name);

}  // namespace jagged_cuda
