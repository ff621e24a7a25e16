// The CUDA kernels for Python, past torch's dispatcher (common/direct.h): the forward pass. Where no backend is named,
// it runs the calls for which these kernels stand first (attnkern/backends/choice.py).
#include "common/direct.h"
#include "cuda/operators.h"

namespace {

// Of a device: a byte for each kind of call, with Hopper's kernels or without, and each head size, which says whether
// this library stands first.
constexpr int64_t kDevices = 64, kSizes = attnkern::kMaxHeadDim + 1, kCalls = 3 * 2 * kSizes;
PyObject* first[kDevices] = {};

struct Cuda {
  static constexpr const char* kName = "cuda";
  static constexpr bool kOnHost = false;
  // Whether torch lets float32 be rounded isn't asked here.
  static bool takes(ScalarType dtype) { return dtype != ScalarType::Float; }

  template <class Host>
  static auto forward(const Inputs& inputs, const AttentionParams& params, bool need_lse, bool named) {
    const auto accepts = [named](const auto& p, const auto& decoding, const auto& hopper, const auto& device) {
      if (named) return;
      const auto kind = static_cast<int64_t>(attnkern::cuda::kind_of(p, decoding, hopper));
      const bool for_hopper = decoding.splits == 0 && hopper.refusal == nullptr;
      const int64_t call = (2 * kind + for_hopper) * kSizes + std::max(p.head_dim, p.head_dim_v);
      PyObject* const known = device.index < kDevices ? first[device.index] : nullptr;
      STD_TORCH_CHECK(known != nullptr && PyBytes_AsString(known)[call] != 0, "attnkern: another backend's");
    };
    return attnkern::cuda::forward<Host>(inputs, params, need_lse, false, accepts);
  }
};

// (index of a device, bytes as `first` has them; None: it isn't known)
PyObject* stands_first(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const int64_t index = PyLong_AsLongLong(arguments[0]);
  if (index < 0 || index >= kDevices || (arguments[1] != kNone && PyBytes_Size(arguments[1]) != kCalls)) return none();
  PyObject* const before = first[index];
  first[index] = arguments[1] == kNone ? nullptr : arguments[1];
  if (first[index] != nullptr) Py_IncRef(first[index]);
  if (before != nullptr) Py_DecRef(before);
  return none();
}

}  // namespace

// connect, call, forward, stands_first: the only symbol that the library exports, for ctypes.
extern "C" [[gnu::visibility("default")]] PyObject* attnkern_python_functions() {
  static PyMethodDef functions[] = {{"connect", connect, kFastCall, nullptr},
                                    {"call", call<Cuda>, kFastCall, nullptr},
                                    {"forward", forward<Cuda>, kFastCall, nullptr},
                                    {"stands_first", stands_first, kFastCall, nullptr}};
  return functions_of(functions);
}
