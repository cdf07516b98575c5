// all_gather@1: see ranks.h.
#include <cstring>
#include <string>
#include <vector>

#include "memory.h"
#include "ranks.h"
#include "sentence.h"

namespace enginewright {

namespace {

class AllGather final : public Kernel {
 public:
  AllGather(const Operand& x, int64_t unit, int64_t root, Ranks& ranks, const Operand* starts)
      : x_(x), ranks_(ranks) {
    require(x.kind == Operand::Kind::arena, "'" + x.label + "' must be a buffer of the arena");
    require(unit > 0 && x.columns % unit == 0,
            sentence("the %ld columns of '%s' are no multiple of %ld", x.columns, x.label.c_str(), unit));
    require(-1 <= root && root < ranks.size(),
            sentence("there is no rank %ld of %d that could receive", root, ranks.size()));
    root_ = static_cast<int>(root);
    if (starts != nullptr) bind_experts(*starts, unit);
    const int64_t units = x.columns / unit, item = bytes_of(x.dtype);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const bool has_all = starts != nullptr;
      const int64_t begin = has_all ? 0 : units * rank / ranks.size(),
                    end = has_all ? units : units * (rank + 1) / ranks.size();
      pieces_.push_back({begin * unit * item, end * unit * item});
      const int64_t bytes = checked_mul(x.max_rows, (end - begin) * unit * item);
      require(bytes <= ranks.slot_bytes() || ranks.size() == 1,
              sentence("rank %d would send %ld bytes, and slots have %ld", rank, bytes, ranks.slot_bytes()));
    }
  }

  Work work(const Sizes& sizes) const override {
    const Gather all = gather(sizes);
    Work work;  // of experts as if each rank sent all rows: which ones it does is not known before the step
    work.activation_bytes = all.reaches(ranks_.rank()) || starts_ != nullptr
                                ? all.rows * x_.columns * bytes_of(x_.dtype)
                                : all.bytes(ranks_.rank());
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Gather all = gather(sizes);
    if (all.rows == 0) return;
    const uint64_t exchange = ranks_.send(all, worker);
    if (!all.reaches(ranks_.rank())) return;
    zero_pad(all, worker);
    ranks_.receive(exchange, all, worker);
  }

 private:
  Gather gather(const Sizes& sizes) const {
    return {x_.data, x_.rows.at(sizes), x_.stride * bytes_of(x_.dtype), pieces_.data(), root_,
            starts_, experts_.data()};
  }

  void bind_experts(const Operand& starts, int64_t unit) {
    require(starts.kind == Operand::Kind::arena && starts.dtype == DType::i32 && starts.max_rows == 1 &&
                starts.columns > 1,
            "'starts' must be an i32 buffer of one row, with two columns or more");
    require(unit == x_.columns, "of experts, ranks compute whole rows");
    starts_ = starts.as<const int32_t>();
    const int64_t experts = starts.columns - 1;
    for (int64_t rank = 0; rank < ranks_.size(); ++rank) {
      experts_.push_back({experts * rank / ranks_.size(), experts * (rank + 1) / ranks_.size()});
    }
  }

  // Of those dtypes that have zeros there: see Operand.
  void zero_pad(const Gather& all, const Worker& worker) const {
    if (x_.pad == 0 || x_.dtype == DType::f32) return;
    const int64_t item = bytes_of(x_.dtype);
    const Range mine = share(all.rows, worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      std::memset(x_.data + row * all.stride_bytes + x_.columns * item, 0,
                  static_cast<size_t>(x_.pad * item));
    }
  }

  const Operand x_;
  Ranks& ranks_;
  int root_;
  std::vector<Range> pieces_, experts_;
  const int32_t* starts_ = nullptr;
};

}  // namespace

std::unique_ptr<Kernel> make_all_gather(const Operand& x, int64_t unit, int64_t root, Ranks& ranks,
                                        const Operand* starts) {
  return std::make_unique<AllGather>(x, unit, root, ranks, starts);
}

}  // namespace enginewright
