// Everything that kernels.inl needs, included ahead of the target pragma of an instruction set, so
// that inline functions of the standard library are compiled for every machine.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "contract/dropout_words.h"
#include "cpu/kernels.h"

// GCC compiles functions for an instruction set under a pragma; other compilers build the baseline
// only.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define JAGGED_TARGET_PRAGMA 1
#include <immintrin.h>
#else
#define JAGGED_TARGET_PRAGMA 0
#endif

#define JAGGED_INLINE inline __attribute__((always_inline))
