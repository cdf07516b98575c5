// The Python module enginewright._cpu (types: src/enginewright/_cpu.pyi).

// clang-format off
#include "for_size.h"  // before all others
// clang-format on

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "adapters.h"
#include "cache_blocks.h"
#include "dispatch.h"
#include "executor.h"
#include "mapped_file.h"
#include "operands.h"
#include "roofline.h"
#include "sampling_binding.h"
#include "sentence.h"
#include "shared_ranks.h"
#include "socket_ranks.h"
#include "state_slots.h"

namespace enginewright {

namespace {

using Numbers = std::vector<int64_t>;

// By the positions of the plan's dims.
Sizes sizes_of(const Numbers& numbers) {
  require(numbers.size() <= kMaxDims, "a plan has no more than " + std::to_string(kMaxDims) + " dims");
  Sizes sizes{};
  std::copy(numbers.begin(), numbers.end(), sizes.begin());
  return sizes;
}

// The constant, then the factors.
Linear linear_of(const Numbers& numbers) {
  require(!numbers.empty(), "a number of rows or columns is missing");
  return {numbers[0], sizes_of({numbers.begin() + 1, numbers.end()})};
}

DType dtype_of(const std::string& name) {
  std::string known;
  for (const DTypeFacts& facts : kDTypes) {
    if (name == facts.name) return facts.dtype;
    known += (known.empty() ? "" : ", ") + std::string(facts.name);
  }
  throw std::invalid_argument("there is no dtype '" + name + "'; known: " + known);
}

Layout layout_of(const std::string& name) {
  if (name == "plain") return Layout::plain;
  if (name == "r16") return Layout::r16;
  if (name == "r16_pairs") return Layout::r16_pairs;
  if (name == "r16_columns") return Layout::r16_columns;
  require(name == "r16_columns_pairs",
          "there is no layout '" + name + "'; known: plain, r16, r16_pairs, r16_columns, r16_columns_pairs");
  return Layout::r16_columns_pairs;
}

struct StepSpec {
  std::string name;
};

struct OperandSpec {
  std::variant<WeightSpec, ArenaSpec, StepSpec, CachePlane, StateTensor, AdaptersSpec> where;
  py::object owner;  // of the memory that `where` points to, if that is not the executor
};

OperandSpec weight_spec(const py::buffer& buffer, const std::string& dtype, const std::string& layout,
                        int64_t rows, int64_t columns, int64_t matrices) {
  auto info = std::make_unique<py::buffer_info>(buffer.request());
  require(PyBuffer_IsContiguous(info->view(), 'C') != 0, "a weight's buffer must be contiguous");
  auto* data = static_cast<std::byte*>(info->ptr);
  const int64_t bytes = info->view()->len;
  const py::capsule owner(info.release(), [](void* p) { delete static_cast<py::buffer_info*>(p); });
  return {WeightSpec{data, bytes, dtype_of(dtype), layout_of(layout), rows, columns, matrices}, owner};
}

OperandSpec arena_spec(int64_t offset_bytes, const std::string& dtype, const Numbers& rows, int64_t columns,
                       int64_t stride, int64_t column_offset, int64_t pad) {
  return {ArenaSpec{offset_bytes, dtype_of(dtype), linear_of(rows), columns, stride, column_offset, pad},
          py::none()};
}

// Adapters, and the Python objects whose memory they use.
class PyAdapters {
 public:
  using Vector = std::optional<py::buffer>;
  using Factor = std::pair<py::buffer, Vector>;  // a matrix, and scales of its rows if it is int8
  using Piece = std::tuple<int64_t, int64_t, int64_t, int64_t, Factor>;
  using Change = std::tuple<int64_t, int64_t, Factor, std::vector<Piece>, Vector, Vector,
                            std::vector<int64_t>, std::string>;
  using Site = std::tuple<int64_t, int64_t, int64_t>;
  using Replaced = std::tuple<int64_t, int64_t, py::buffer, Factor>;  // site, count, ids and rows

  PyAdapters(const std::vector<Site>& sites, int64_t num_slots, int64_t max_rank, int64_t max_tokens,
             int64_t max_logit_rows, int64_t max_top, const std::vector<int64_t>& tables)
      : adapters_(sites_of(sites, tables), num_slots, max_rank, max_tokens, max_logit_rows, max_top) {}

  void load(int64_t slot, const std::vector<Change>& changes, const std::vector<Replaced>& replaced) {
    std::vector<SiteAdapter> all(static_cast<size_t>(adapters_.num_sites()));
    std::vector<py::buffer_info> owners;
    for (const auto& [index, rank, a, pieces, bias, gain, experts, shared] : changes) {
      const AdapterSite& site = adapters_.site(index);
      SiteAdapter& change = all[static_cast<size_t>(index)];
      require(0 <= rank && rank % 16 == 0, "the rank of an adapter must be a multiple of 16");
      change.rank = rank;
      change.matrices = matrices_of(experts, site.experts);
      const int64_t matrices = site.experts == 0 ? 1 : static_cast<int64_t>(experts.size());
      change.a = matrix(a, shared == "a" ? 1 : matrices, rank, site.inputs(), owners);
      change.a.is_shared = shared == "a";
      for (const auto& [begin, count, piece_rank, first_rank, b] : pieces) {
        require(count > 0 && piece_rank > 0, "a piece of an adapter is empty");
        FactorMatrix factor = matrix(b, shared == "b" ? 1 : matrices, count, piece_rank, owners);
        factor.is_shared = shared == "b";
        change.pieces.push_back({begin, count, piece_rank, first_rank, factor});
      }
      if (bias) change.bias = numbers<float>(*bias, site.rows, owners);
      if (gain) change.gain = numbers<float>(*gain, site.rows, owners);
    }
    for (const auto& [index, count, ids, rows] : replaced) {
      const AdapterSite& site = adapters_.site(index);
      require(0 < count && count <= site.rows, "an adapter replaces no rows, or more than there are");
      all[static_cast<size_t>(index)].replaced = {count, numbers<int32_t>(ids, count, owners),
                                                  matrix(rows, 1, count, site.columns, owners)};
    }
    adapters_.load(slot, std::move(all));
    owners_[slot] = std::move(owners);
  }

  void unload(int64_t slot) {
    adapters_.unload(slot);
    owners_.erase(slot);
  }

  Adapters& adapters() { return adapters_; }

 private:
  static std::vector<AdapterSite> sites_of(const std::vector<Site>& sizes,
                                           const std::vector<int64_t>& tables) {
    std::vector<AdapterSite> sites;
    for (const auto& [rows, columns, experts] : sizes) sites.push_back({rows, columns, experts, false});
    for (const int64_t table : tables) {
      require(0 <= table && table < static_cast<int64_t>(sites.size()), "a table is no site");
      sites[static_cast<size_t>(table)].is_table = true;
    }
    return sites;
  }

  // Of each of `count` experts the index in `experts`, or -1.
  static std::vector<int32_t> matrices_of(const std::vector<int64_t>& experts, int64_t count) {
    std::vector<int32_t> matrices(static_cast<size_t>(count), -1);
    for (size_t index = 0; index < experts.size(); ++index) {
      const int64_t expert = experts[index];
      require(0 <= expert && expert < count, "an adapter changes expert " + std::to_string(expert) +
                                                 ", and its layer has " + std::to_string(count));
      int32_t& matrix = matrices[static_cast<size_t>(expert)];
      require(matrix == -1, "an adapter changes an expert twice");
      matrix = static_cast<int32_t>(index);
    }
    return matrices;
  }

  // `matrices` of them, one after the other.
  static FactorMatrix matrix(const Factor& factor, int64_t matrices, int64_t rows, int64_t columns,
                             std::vector<py::buffer_info>& owners) {
    const auto& [data, scale] = factor;
    const int64_t count = checked_mul(checked_mul(matrices, round_up(rows, 16)), columns);
    if (!scale) {
      return {reinterpret_cast<const std::byte*>(numbers<uint16_t>(data, count, owners)), nullptr};
    }
    const auto* codes = reinterpret_cast<const std::byte*>(numbers<int8_t>(data, count, owners));
    return {codes, numbers<float>(*scale, checked_mul(matrices, rows), owners)};
  }

  template <class T>
  static const T* numbers(const py::buffer& buffer, int64_t count, std::vector<py::buffer_info>& owners) {
    owners.push_back(buffer.request());
    const py::buffer_info& info = owners.back();
    require(PyBuffer_IsContiguous(info.view(), 'C') != 0, "an adapter's buffer must be contiguous");
    require(info.view()->len == checked_mul(count, int64_t{sizeof(T)}),
            "an adapter's buffer has " + std::to_string(info.view()->len) + " bytes, but its shape takes " +
                std::to_string(count * int64_t{sizeof(T)}));
    require(reinterpret_cast<uintptr_t>(info.ptr) % sizeof(T) == 0, "an adapter's buffer is not aligned");
    return static_cast<const T*>(info.ptr);
  }

  Adapters adapters_;
  std::map<int64_t, std::vector<py::buffer_info>> owners_;  // of each slot
};

// View of memory that `owner` keeps alive.
template <class T>
py::array view(std::byte* data, const std::vector<py::ssize_t>& shape,
               const std::vector<py::ssize_t>& strides, const py::object& owner) {
  return py::array(py::dtype::of<T>(), shape, strides, reinterpret_cast<T*>(data), owner);
}

py::array plane_view(const CachePlane& plane, const py::object& owner) {
  const py::ssize_t item = plane.dtype == DType::bf16 ? 2 : 1, tile = plane.tile_bytes;
  const std::vector<py::ssize_t> shape{plane.num_blocks, plane.heads, tile / item};
  const std::vector<py::ssize_t> strides{plane.block_stride, tile, item};
  switch (plane.dtype) {
    case DType::bf16:
      return view<uint16_t>(plane.data, shape, strides, owner);
    case DType::i8:
      return view<int8_t>(plane.data, shape, strides, owner);
    default:
      return view<uint8_t>(plane.data, shape, strides, owner);
  }
}

// The executor, and the Python objects whose memory it uses.
class PyExecutor {
 public:
  PyExecutor(const std::string& isa, int threads, const Numbers& limits,
             const std::vector<std::tuple<std::string, Numbers, Numbers>>& inputs, int64_t arena_bytes)
      : executor_(isa, threads, sizes_of(limits), input_specs(inputs), arena_bytes),
        sampling_memory_(executor_.threads()) {}

  void add_kernel(const std::string& name, const std::map<std::string, OperandSpec>& specs,
                  const std::map<std::string, std::variant<int64_t, double, std::string>>& attributes) {
    if (!executor_.has_kernel(name)) throw py::key_error("there is no kernel '" + name + "'");
    Operands operands;
    for (const auto& [label, spec] : specs) operands[label] = bind(label, spec);
    executor_.add_kernel(name, operands, attributes);
    for (const auto& [label, spec] : specs) owners_.push_back(spec.owner);
  }

  void add_all_gather(const OperandSpec& spec, int64_t unit, int64_t root, const py::object& ranks,
                      const std::optional<OperandSpec>& starts) {
    const Operand of_experts = starts ? bind("starts", *starts) : Operand{};
    executor_.add_all_gather(bind("x", spec), unit, root, ranks.cast<Ranks&>(),
                             starts ? &of_experts : nullptr);
    owners_.push_back(ranks);
  }

  void run(const std::vector<py::array>& arrays, const Numbers& sizes) {
    const std::vector<InputArray> inputs = input_arrays(arrays);
    const py::gil_scoped_release release;
    executor_.run(inputs, sizes_of(sizes));
  }

  std::pair<py::array_t<int64_t>, py::array_t<Work>> profile(const std::vector<py::array>& arrays,
                                                             const Numbers& sizes) {
    const std::vector<InputArray> inputs = input_arrays(arrays);
    std::vector<KernelProfile> profile;
    {
      const py::gil_scoped_release release;
      profile = executor_.profile(inputs, sizes_of(sizes));
    }
    py::array_t<int64_t> nanoseconds(static_cast<py::ssize_t>(profile.size()));
    py::array_t<Work> work(static_cast<py::ssize_t>(profile.size()));
    for (size_t i = 0; i < profile.size(); ++i) {
      nanoseconds.mutable_data()[i] = profile[i].nanoseconds;
      work.mutable_data()[i] = profile[i].work;
    }
    return {nanoseconds, work};
  }

  py::list sample(const RowArray<float>& logits, const Array<SamplingRow>& rows,
                  const Array<TokenCount>& history, const Array<TokenBias>& biases, const Masks& allowed) {
    return enginewright::sample(logits, rows, history, biases, allowed, sampling_memory_, &executor_);
  }

  static py::array buffer(const py::object& self, int64_t offset_bytes, int64_t rows, int64_t columns,
                          int64_t stride, const std::string& dtype_name) {
    const DType dtype = dtype_of(dtype_name);
    const int64_t item = bytes_of(dtype);
    require(rows >= 0 && columns > 0 && columns <= stride, "the buffer has no such columns");
    require(offset_bytes >= 0 && offset_bytes % item == 0, "the buffer starts at an odd address");
    const int64_t bytes = checked_mul(checked_mul(rows, stride), item);
    std::byte* data = self.cast<PyExecutor&>().executor_.arena(offset_bytes, bytes);
    const std::vector<py::ssize_t> shape{rows, columns}, strides{stride * item, item};
    switch (dtype) {
      case DType::f32:
        return view<float>(data, shape, strides, self);
      case DType::bf16:
        return view<uint16_t>(data, shape, strides, self);
      case DType::i32:
        return view<int32_t>(data, shape, strides, self);
      default:
        return view<int8_t>(data, shape, strides, self);
    }
  }

 private:
  // Checked, but for their shapes.
  static std::vector<InputArray> input_arrays(const std::vector<py::array>& arrays) {
    std::vector<InputArray> inputs;
    inputs.reserve(arrays.size());
    for (const py::array& array : arrays) {
      const py::dtype dtype = array.dtype();
      require(dtype.kind() == 'i' && dtype.itemsize() == 4 && dtype.byteorder() == '=',
              "the inputs of a step must be int32");
      require((array.flags() & py::array::c_style) != 0, "the inputs of a step must be contiguous");
      require(array.ndim() == 1 || array.ndim() == 2, "the inputs of a step must have one or two dimensions");
      inputs.push_back({static_cast<const int32_t*>(array.data()), array.shape(0),
                        array.ndim() == 2 ? array.shape(1) : 1});
    }
    return inputs;
  }

  static std::vector<InputSpec> input_specs(
      const std::vector<std::tuple<std::string, Numbers, Numbers>>& inputs) {
    std::vector<InputSpec> specs;
    for (const auto& [name, rows, columns] : inputs)
      specs.push_back({name, linear_of(rows), linear_of(columns)});
    return specs;
  }

  Operand bind(const std::string& label, const OperandSpec& spec) const {
    if (const auto* weight = std::get_if<WeightSpec>(&spec.where)) return executor_.bind(label, *weight);
    if (const auto* arena = std::get_if<ArenaSpec>(&spec.where)) return executor_.bind(label, *arena);
    if (const auto* step = std::get_if<StepSpec>(&spec.where)) return executor_.bind_step(step->name);
    if (const auto* adapters = std::get_if<AdaptersSpec>(&spec.where)) {
      return executor_.bind(label, *adapters);
    }
    if (const auto* state = std::get_if<StateTensor>(&spec.where)) return executor_.bind(label, *state);
    return executor_.bind(label, std::get<CachePlane>(spec.where));
  }

  Executor executor_;
  SamplingMemory sampling_memory_;
  std::vector<py::object> owners_;
};

// What all kinds of places have.
template <class Kind>
void bind_places(py::class_<Kind>& bound, const char* argument) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  bound.def_property_readonly("nbytes", [](Kind& self) { return self.places().bytes(); })
      .def(
          "scrub", [](Kind& self, const Numbers& places) { self.places().scrub(places); }, py::arg(argument),
          release)
      .def(
          "copy",
          [](Kind& self, const std::vector<std::pair<int64_t, int64_t>>& places) {
            self.places().copy(places);
          },
          py::arg(argument), release)
      .def("places", [](const py::object& self) {
        const Places& places = self.cast<Kind&>().places();
        return view<uint8_t>(places.data(), {places.count(), places.place_bytes()}, {places.place_bytes(), 1},
                             self);
      });
}

void bind_caches(py::module_& module) {
  using Planes = std::vector<std::tuple<std::string, int64_t, int64_t, std::string>>;
  py::class_<CacheBlocks> blocks(module, "CacheBlocks");
  blocks
      .def(py::init([](int64_t layers, int64_t num_blocks, int64_t block_size, const Planes& planes) {
             std::vector<PlaneSpec> specs;
             for (const auto& [name, heads, dim, dtype] : planes) {
               specs.push_back({name, heads, dim, dtype_of(dtype)});
             }
             return std::make_unique<CacheBlocks>(layers, num_blocks, block_size, specs);
           }),
           py::arg("layers"), py::arg("num_blocks"), py::arg("block_size"), py::arg("planes"))
      .def(
          "plane",
          [](const py::object& self, int64_t layer, const std::string& name) {
            return plane_view(self.cast<CacheBlocks&>().plane(layer, name), self);
          },
          py::arg("layer"), py::arg("name"));
  bind_places(blocks, "blocks");
  using Tensors = std::vector<std::tuple<std::string, int64_t, std::string>>;
  py::class_<StateSlots> slots(module, "StateSlots");
  slots
      .def(py::init([](int64_t layers, int64_t num_slots, const Tensors& tensors) {
             std::vector<StateTensorSpec> specs;
             for (const auto& [name, elements, dtype] : tensors) {
               specs.push_back({name, elements, dtype_of(dtype)});
             }
             return std::make_unique<StateSlots>(layers, num_slots, specs);
           }),
           py::arg("layers"), py::arg("num_slots"), py::arg("tensors"))
      .def(
          "tensor",
          [](const py::object& self, int64_t layer, const std::string& name) {
            const StateTensor tensor = self.cast<StateSlots&>().tensor(layer, name);
            return view<float>(tensor.data, {tensor.num_slots, tensor.elements}, {tensor.slot_stride, 4},
                               self);
          },
          py::arg("layer"), py::arg("name"));
  bind_places(slots, "slots");
}

void bind_executor(py::module_& module) {
  PYBIND11_NUMPY_DTYPE(Work, weight_bytes, activation_bytes, kv_bytes, int8_ops, bf16_ops, fp32_ops,
                       weight_passes);
  py::class_<OperandSpec>(module, "OperandSpec")
      .def_static("weight", &weight_spec, py::arg("buffer"), py::arg("dtype"), py::arg("layout"),
                  py::arg("rows"), py::arg("columns"), py::arg("matrices") = 1)
      .def_static("arena", &arena_spec, py::arg("offset_bytes"), py::arg("dtype"), py::arg("rows"),
                  py::arg("columns"), py::arg("stride"), py::arg("column_offset") = 0, py::arg("pad") = 0)
      .def_static(
          "step", [](const std::string& name) { return OperandSpec{StepSpec{name}, py::none()}; },
          py::arg("name"))
      .def_static(
          "cache",
          [](const py::object& blocks, int64_t layer, const std::string& plane) {
            return OperandSpec{blocks.cast<CacheBlocks&>().plane(layer, plane), blocks};
          },
          py::arg("blocks"), py::arg("layer"), py::arg("plane"))
      .def_static(
          "state",
          [](const py::object& slots, int64_t layer, const std::string& tensor) {
            return OperandSpec{slots.cast<StateSlots&>().tensor(layer, tensor), slots};
          },
          py::arg("slots"), py::arg("layer"), py::arg("tensor"))
      .def_static(
          "adapters",
          [](const py::object& adapters, int64_t site) {
            return OperandSpec{AdaptersSpec{&adapters.cast<PyAdapters&>().adapters(), site}, adapters};
          },
          py::arg("adapters"), py::arg("site"));
  py::class_<PyAdapters>(module, "Adapters")
      .def(py::init<const std::vector<PyAdapters::Site>&, int64_t, int64_t, int64_t, int64_t, int64_t,
                    const std::vector<int64_t>&>(),
           py::arg("sites"), py::arg("num_slots"), py::arg("max_rank"), py::arg("max_tokens"),
           py::arg("max_logit_rows"), py::arg("max_top"), py::arg("tables") = py::tuple())
      .def("load", &PyAdapters::load, py::arg("slot"), py::arg("changes"), py::arg("replaced") = py::tuple())
      .def("unload", &PyAdapters::unload, py::arg("slot"));
  py::class_<PyExecutor>(module, "Executor")
      .def(py::init<const std::string&, int, const Numbers&,
                    const std::vector<std::tuple<std::string, Numbers, Numbers>>&, int64_t>(),
           py::arg("isa"), py::arg("threads"), py::arg("limits"), py::arg("inputs"), py::arg("arena_bytes"))
      .def("add_kernel", &PyExecutor::add_kernel, py::arg("name"), py::arg("operands"), py::arg("attributes"))
      .def("add_all_gather", &PyExecutor::add_all_gather, py::arg("operand"), py::arg("unit"),
           py::arg("root"), py::arg("ranks"), py::arg("starts") = py::none())
      .def("run", &PyExecutor::run, py::arg("arrays"), py::arg("sizes"))
      .def("profile", &PyExecutor::profile, py::arg("arrays"), py::arg("sizes"))
      .def("sample", &PyExecutor::sample, py::arg("logits").noconvert(), py::arg("rows").noconvert(),
           py::arg("history").noconvert(), py::arg("biases").noconvert(),
           py::arg("allowed").noconvert() = py::none())
      .def("buffer", &PyExecutor::buffer, py::arg("offset_bytes"), py::arg("rows"), py::arg("columns"),
           py::arg("stride"), py::arg("dtype"));
}

// RuntimeError with a sentence, which may hold what another process has sent.
void check(const Ranks& ranks) {
  const std::string failure = ranks.failure();
  if (failure.empty()) return;
  const auto text = py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(failure.data(), static_cast<py::ssize_t>(failure.size()), "replace"));
  if (text) PyErr_SetObject(PyExc_RuntimeError, text.ptr());
  throw py::error_already_set();
}

void fail(Ranks& ranks, int64_t rank, const std::string& reason) {
  require(0 <= rank && rank < ranks.size(), sentence("there is no rank %ld of %d", rank, ranks.size()));
  ranks.fail(sentence("rank %ld: %s", rank, reason.c_str()));
}

std::pair<int64_t, int64_t> stats(Ranks& ranks) {
  const Ranks::Stats taken = ranks.take_stats();
  return {taken.bytes_sent, taken.wait_nanoseconds};
}

void bind_ranks(py::module_& module) {
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Ranks>(module, "Ranks")
      .def_property_readonly("rank", &Ranks::rank)
      .def_property_readonly("size", &Ranks::size)
      .def_property_readonly("slot_bytes", &Ranks::slot_bytes)
      .def("check", &check)
      .def("fail", &fail, py::arg("rank"), py::arg("reason"), release)
      .def("close", &Ranks::close, release)
      .def("stats", &stats);
  py::class_<SharedRanks, Ranks>(module, "SharedRanks")
      .def(py::init<int, int64_t, int64_t, int64_t, double>(), py::arg("fd"), py::arg("rank"),
           py::arg("size"), py::arg("slot_bytes"), py::arg("timeout_s"))
      .def_static("bytes_needed", &SharedRanks::bytes_needed, py::arg("size"), py::arg("slot_bytes"));
  py::class_<SocketRanks, Ranks>(module, "SocketRanks")
      .def(py::init<const std::vector<int>&, int64_t, int64_t, double>(), py::arg("fds"), py::arg("rank"),
           py::arg("slot_bytes"), py::arg("timeout_s"));
}

// A mapped file, and the Python object that has mapped it.
class PyMappedFile {
 public:
  explicit PyMappedFile(const py::buffer& buffer)
      : info_(buffer.request()), mapped_(info_.ptr, info_.size * info_.itemsize) {}
  bool faulted() const { return mapped_.faulted(); }

 private:
  py::buffer_info info_;
  MappedFile mapped_;
};

using Rates = std::map<std::string, std::pair<std::string, double>>;

Rates dot_rates(const std::string& isa, int threads, double seconds) {
  const std::vector<DotLoop> loops = dot_loops(isa);
  Rates rates;
  for (const DotLoop& loop : loops) {
    rates[loop.operands] = {loop.instruction,
                            dot_rate(loop, threads, seconds / static_cast<double>(loops.size()))};
  }
  return rates;
}

double read_rate_of(const std::vector<py::buffer>& buffers, int threads, double seconds) {
  std::vector<py::buffer_info> infos;
  std::vector<Bytes> memory;
  for (const py::buffer& buffer : buffers) {
    infos.push_back(buffer.request());
    require(PyBuffer_IsContiguous(infos.back().view(), 'C') != 0, "what is read must be contiguous");
    memory.push_back({static_cast<const std::byte*>(infos.back().ptr), infos.back().view()->len});
  }
  const py::gil_scoped_release release;
  return read_rate(memory, threads, seconds);
}

std::vector<std::pair<std::string, int>> dtypes() {
  std::vector<std::pair<std::string, int>> found;
  for (const DTypeFacts& facts : kDTypes) found.emplace_back(facts.name, facts.bits);
  return found;
}

std::vector<std::string> kernel_names(const std::string& isa) {
  std::vector<std::string> names;
  for (const auto& [name, factory] : kernel_table(isa)) names.push_back(name);
  return names;
}

}  // namespace
}  // namespace enginewright

PYBIND11_MODULE(_cpu, module) {
  module.doc() = "The CPU target: executor, kernels, caches, sampling.";
  module.def("isa_names", &enginewright::isa_names);
  module.def("dtypes", &enginewright::dtypes);
  module.def("kernel_names", &enginewright::kernel_names, pybind11::arg("isa"));
  module.def("dot_rates", &enginewright::dot_rates, pybind11::arg("isa"), pybind11::arg("threads"),
             pybind11::arg("seconds"), pybind11::call_guard<pybind11::gil_scoped_release>());
  module.def("read_rate", &enginewright::read_rate_of, pybind11::arg("buffers"), pybind11::arg("threads"),
             pybind11::arg("seconds"));
  pybind11::class_<enginewright::PyMappedFile>(module, "MappedFile")
      .def(pybind11::init<const pybind11::buffer&>(), pybind11::arg("mapping"))
      .def_property_readonly("faulted", &enginewright::PyMappedFile::faulted);
  enginewright::bind_caches(module);
  enginewright::bind_ranks(module);
  enginewright::bind_executor(module);
  enginewright::bind_sampling(module);
}
