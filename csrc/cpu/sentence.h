// Sentences with names and numbers in them, as printf writes these. Sums of strings are ten times the code.
#pragma once

#include <string>

namespace enginewright {

std::string sentence(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace enginewright
