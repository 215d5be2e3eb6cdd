// Names of kernel paths, put together at compile time.
#pragma once

namespace jagged_cuda {

// PathName("cuda.attention.forward.wgmma.d") + 64. A zero before and after the text lets
// jagged_cuda.testing.kernel_paths find it among the bytes of the library.
class PathName {
 public:
  constexpr explicit PathName(const char* text) { append(text); }

  constexpr PathName operator+(const char* text) const {
    PathName longer = *this;
    longer.append(text);
    return longer;
  }
  constexpr PathName operator+(int number) const {
    char digits[12] = {};
    int first = 11;
    do {
      digits[--first] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    return *this + (digits + first);
  }

  constexpr operator const char*() const { return text_ + 1; }

 private:
  constexpr void append(const char* text) {
    int end = 1;
    while (text_[end] != '\0') ++end;
    while (*text != '\0') text_[end++] = *text++;
  }

  char text_[96] = {};
};

}  // namespace jagged_cuda
