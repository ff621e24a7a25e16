// The CPU's kernels for Python, past torch's dispatcher (common/direct.h).
#include "common/direct.h"

#include "cpu/operators.h"

namespace {

struct Cpu {
  static constexpr const char* kName = "cpu";
  static constexpr bool kOnHost = true;
  static bool takes(ScalarType) { return true; }

  template <class Host>
  static auto forward(const Inputs& inputs, const AttentionParams& params, bool need_lse, bool) {
    return attnkern::cpu::forward<Host>(inputs, params, need_lse);
  }
  template <class Host, class... Arguments>
  static auto backward(const Arguments&... arguments) {
    return attnkern::cpu::backward<Host>(arguments...);
  }
};

}  // namespace

// connect, call, forward, backward: the only symbol that the library exports, for ctypes.
extern "C" [[gnu::visibility("default")]] PyObject* attnkern_python_functions() {
  static PyMethodDef functions[] = {{"connect", connect, kFastCall, nullptr},
                                    {"call", call<Cpu>, kFastCall, nullptr},
                                    {"forward", forward<Cpu>, kFastCall, nullptr},
                                    {"backward", backward<Cpu>, kFastCall, nullptr}};
  return functions_of(functions);
}
