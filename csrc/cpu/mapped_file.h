// A mapped file that may lose pages while it is read: somebody truncates it, or its disk fails.
#pragma once

#include <cstdint>

namespace enginewright {

struct MappedRange;

// While one exists, a page of the mapping that cannot be read does not end the process by SIGBUS: it reads as
// zeros from then on, as does all of the mapping after it, and `faulted` is true. A kernel that computes with
// the mapping has to look at `faulted` afterwards, before using a result.
class MappedFile {
 public:
  MappedFile(const void* data, int64_t bytes);  // data: where a page begins
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  bool faulted() const;

 private:
  MappedRange* range_;
};

}  // namespace enginewright
