// The operators for Python, past torch's dispatcher: for plain tensors where nothing listens to operators. What the
// dispatcher costs (boxing every argument, twice) is more than a short attention.
//
// Each function returns None where a call is anything but plain, and where anything fails: the caller then goes by the
// dispatcher, which does whatever it is, or says what is wrong. So no error message is here.
//
// Tensors are read by DLPack's exchange API, which torch offers at torch.Tensor.__dlpack_c_exchange_api__. Python is
// called by its stable ABI, declared here by hand and weakly: the libraries are built without Python.h, and load in
// programs without Python.
//
// Each library has these functions of its own, by a struct Kernels: `kName` as users name the backend, `kOnHost`
// whether the host may read tensors, `takes` which dtypes, `forward<Host>` and, where there is one, `backward<Host>`.
#pragma once

// With the macro, ATen's headers refuse: they aren't stable. This one is DLPack's own, plain C with its own version.
#pragma push_macro("TORCH_TARGET_VERSION")
#undef TORCH_TARGET_VERSION
#include <ATen/dlpack.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>
#pragma pop_macro("TORCH_TARGET_VERSION")

#include <cmath>
#include <cstring>
#include <exception>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/operators.h"

#define PYTHON [[gnu::weak]] extern

extern "C" {
struct PyObject;
struct PyThreadState;
using Py_ssize_t = std::ptrdiff_t;
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, Py_ssize_t count);
  int flags;
  const char* doc;
};
PYTHON PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct, PyFloat_Type, PyLong_Type, PyTuple_Type,
    PyUnicode_Type;
PYTHON void Py_IncRef(PyObject*);
PYTHON void Py_DecRef(PyObject*);
PYTHON void PyErr_Clear();
PYTHON PyObject* PyErr_Occurred();
PYTHON PyThreadState* PyEval_SaveThread();
PYTHON void PyEval_RestoreThread(PyThreadState*);
PYTHON PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject* self, PyObject* module);
PYTHON void* PyCapsule_GetPointer(PyObject*, const char* name);
PYTHON double PyFloat_AsDouble(PyObject*);
PYTHON PyObject* PyFloat_FromDouble(double);
PYTHON long long PyLong_AsLongLong(PyObject*);
PYTHON PyObject* PyLong_FromLongLong(long long);
PYTHON PyObject* PyImport_ImportModule(const char* name);
PYTHON PyObject* PyObject_CallNoArgs(PyObject*);
PYTHON PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PYTHON PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
PYTHON PyObject* PyObject_GetAttrString(PyObject*, const char* name);
PYTHON int PyObject_IsTrue(PyObject*);
PYTHON PyObject* PyObject_Type(PyObject*);
PYTHON PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
PYTHON PyObject* PyTuple_New(Py_ssize_t);
PYTHON int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
PYTHON Py_ssize_t PyTuple_Size(PyObject*);
PYTHON PyObject* PyUnicode_InternFromString(const char*);
PYTHON int PyUnicode_CompareWithASCIIString(PyObject*, const char*);
PYTHON char* PyBytes_AsString(PyObject*);
PYTHON Py_ssize_t PyBytes_Size(PyObject*);
}

namespace {

using attnkern::AttentionParams, attnkern::kUnbounded;
using torch::headeronly::ScalarType;

PyObject* const kNone = &_Py_NoneStruct;

PyObject* none() {
  Py_IncRef(kNone);
  return kNone;
}

// What `connect` was given; see attnkern/_library.py.
struct {
  const DLPackExchangeAPI* dlpack = nullptr;
  PyObject *tensor, *parameter, *is_neg, *empty_strided, *dtypes, *listeners, *for_the_caller, *is_grad_enabled,
      *requires_grad, *is_ours;
  DLDeviceType device;
} python;

// A reference of our own.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(Owned&& other) : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

bool is_type(PyObject* object, const PyObject* type) { return Owned(PyObject_Type(object)).get() == type; }

// A tensor of torch's own, with no methods that say otherwise.
bool is_tensor(PyObject* object) {
  const Owned type(PyObject_Type(object));
  return type.get() == python.tensor || type.get() == python.parameter;
}

// Whether a call of `function` gives something true, or fails.
bool answers_true(PyObject* function) {
  const Owned answer(PyObject_CallNoArgs(function));
  return answer.get() == nullptr || (answer.get() != &_Py_FalseStruct && PyObject_IsTrue(answer.get()) != 0);
}

bool any_answers_true(PyObject* functions) {
  const Py_ssize_t count = PyTuple_Size(functions);
  for (Py_ssize_t i = 0; i < count; ++i)
    if (answers_true(PyTuple_GetItem(functions, i))) return true;
  return false;
}

bool is_number(PyObject* x) { return is_type(x, &PyFloat_Type) || is_type(x, &PyLong_Type); }
bool is_bool(PyObject* x) { return x == &_Py_TrueStruct || x == &_Py_FalseStruct; }
bool is_string(PyObject* x, const char* expected) {
  return is_type(x, &PyUnicode_Type) && PyUnicode_CompareWithASCIIString(x, expected) == 0;
}

// torch's name of a DLPack type; what no kernel knows is Undefined.
ScalarType scalar_type_of(const DLDataType& type) {
  if (type.lanes != 1) return ScalarType::Undefined;
  if (type.code == kDLFloat && type.bits == 32) return ScalarType::Float;
  if (type.code == kDLFloat && type.bits == 64) return ScalarType::Double;
  if (type.code == kDLFloat && type.bits == 16) return ScalarType::Half;
  if (type.code == kDLBfloat && type.bits == 16) return ScalarType::BFloat16;
  if (type.code == kDLBool && type.bits == 8) return ScalarType::Bool;
  if (type.code == kDLUInt && type.bits == 8) return ScalarType::Byte;
  if (type.code == kDLInt && type.bits == 64) return ScalarType::Long;
  if (type.code == kDLInt && type.bits == 32) return ScalarType::Int;
  return ScalarType::Undefined;
}

// torch::stable::Tensor, as far as the operators need it, of a Python object: an argument's, which the caller keeps
// alive, or a result of our own.
class Tensor {
 public:
  Tensor() = default;
  static Tensor result(PyObject* object) {
    Tensor tensor;
    tensor.owned_ = Owned(object);
    STD_TORCH_CHECK(object != nullptr && (object == kNone || tensor.read(object)), "attnkern: no memory");
    return tensor;
  }
  // False if the object is no plain tensor of the library's device.
  bool read(PyObject* object) {
    if (!is_tensor(object) || python.dlpack->dltensor_from_py_object_no_sync(object, &view_) != 0) return false;
    scalar_type_ = scalar_type_of(view_.dtype);
    if (view_.device.device_type != python.device || scalar_type_ == ScalarType::Undefined) return false;
    if (view_.data == nullptr && numel() > 0) return false;  // a wrapper of torch's own that holds no elements
    const Owned negated(PyObject_CallFunctionObjArgs(python.is_neg, object, nullptr));  // x.conj().imag is -x, unsaid
    return negated.get() == &_Py_FalseStruct;
  }
  int32_t device() const { return get_device_index(); }  // all are of one type
  int32_t get_device_index() const { return view_.device.device_id; }
  int64_t dim() const { return view_.ndim; }
  int64_t size(int64_t dim) const { return own_ ? sizes_[dim] : view_.shape[dim]; }
  int64_t stride(int64_t dim) const { return own_ ? strides_[dim] : view_.strides[dim]; }
  int64_t element_size() const { return view_.dtype.bits / 8; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t d = 0; d < dim(); ++d) count *= size(d);
    return count;
  }
  bool is_contiguous() const {
    int64_t expected = 1;
    for (int64_t d = dim() - 1; d >= 0; --d) {
      if (size(d) != 1 && stride(d) != expected) return false;
      expected *= size(d);
    }
    return true;
  }
  // Reads elements of 16 bits as float32, from `buffer` on. At most two dimensions; others and other types stay.
  void widen(std::vector<float>& buffer) {
    const auto of = [&]<class T>(const T* source) {
      buffer.resize(static_cast<size_t>(numel()));
      const int64_t rows = dim() == 2 ? size(0) : 1, columns = size(dim() - 1);
      for (int64_t i = 0; i < rows * columns; ++i)
        buffer[i] =
            static_cast<float>(source[(dim() == 2 ? i / columns * stride(0) : 0) + i % columns * stride(dim() - 1)]);
      for (int64_t d = 0; d < dim(); ++d) sizes_[d] = size(d);
      strides_[0] = dim() == 2 ? columns : 1, strides_[1] = 1;
      view_.data = buffer.data(), view_.byte_offset = 0, own_ = true;
      scalar_type_ = ScalarType::Float;
    };
    if (dim() < 1 || dim() > 2) return;
    if (scalar_type_ == ScalarType::BFloat16) of(static_cast<const torch::headeronly::BFloat16*>(data_ptr()));
    if (scalar_type_ == ScalarType::Half) of(static_cast<const torch::headeronly::Half*>(data_ptr()));
  }
  // With dimensions of one in front, `dims` in all, which are kMostDimensions or fewer.
  void pad_dimensions(int64_t dims) {
    const int64_t more = dims - dim();
    if (more <= 0) return;
    for (int64_t d = dims - 1; d >= 0; --d) {
      sizes_[d] = d < more ? 1 : size(d - more);
      strides_[d] = d < more ? 0 : stride(d - more);
    }
    view_.ndim = static_cast<int32_t>(dims), own_ = true;
  }
  // The same of a query, for whose results as many dimensions are left out (Python::empty).
  void pad_query(int64_t dims) {
    left_out_ = dims > dim() ? dims - dim() : 0;
    pad_dimensions(dims);
  }
  int64_t left_out() const { return left_out_; }
  ScalarType scalar_type() const { return scalar_type_; }
  void* data_ptr() const { return static_cast<char*>(view_.data) + view_.byte_offset; }
  PyObject* release() { return owned_.release(); }

 private:
  static constexpr int64_t kMostDimensions = 5;
  DLTensor view_{};
  int64_t sizes_[kMostDimensions]{}, strides_[kMostDimensions]{};  // of what widen() and pad_dimensions() have made
  bool own_ = false;                                               // whether these count
  int64_t left_out_ = 0;
  ScalarType scalar_type_ = ScalarType::Undefined;
  Owned owned_;
};
using OptionalTensor = std::optional<Tensor>;
using Inputs = attnkern::Inputs<Tensor>;

struct Python {
  using Tensor = ::Tensor;
  static constexpr bool kWarns = false;  // torch's warnings become Python's in calls by its dispatcher alone

  // Lets other Python threads run.
  class WhileKernelsRun {
   public:
    WhileKernelsRun() : state_(PyEval_SaveThread()) {}
    ~WhileKernelsRun() { PyEval_RestoreThread(state_); }

   private:
    PyThreadState* state_;
  };

  static Tensor empty(const Tensor& like, int64_t dims, const int64_t* sizes, const int64_t* strides,
                      ScalarType dtype) {
    const int64_t first = like.left_out();
    const auto tuple = [&](const int64_t* numbers) {
      Owned result(PyTuple_New(dims - first));
      for (int64_t i = first; i < dims; ++i) PyTuple_SetItem(result.get(), i - first, PyLong_FromLongLong(numbers[i]));
      return result;
    };
    PyObject* const type = PyTuple_GetItem(python.dtypes, static_cast<int>(attnkern::dtype_of(dtype)));
    Tensor made = Tensor::result(
        PyObject_CallFunctionObjArgs(python.empty_strided, tuple(sizes).get(), tuple(strides).get(), type, nullptr));
    made.pad_dimensions(dims);
    return made;
  }

  // A result that isn't asked for. (The operators of the dispatcher must return a tensor.)
  static Tensor nothing(const Tensor&, ScalarType) { return Tensor::result(none()); }

  // Of the host's tensors.
  static void zero(Tensor& x) { std::memset(x.data_ptr(), 0, x.numel() * x.element_size()); }

  static void copy(Tensor&, const Tensor&) { throw std::runtime_error("attnkern: the dispatcher's"); }
};

// The arguments of an operator, one after the other.
class Arguments {
 public:
  Arguments(PyObject* const* arguments, Py_ssize_t count) : next_(arguments), end_(arguments + count) {}
  Tensor tensor() {
    Tensor read;
    PyObject* const object = next();
    plain_ = plain_ && read.read(object);
    return read;
  }
  OptionalTensor optional_tensor() {
    if (*next_ != kNone) return tensor();
    next();
    return {};
  }
  void read(Inputs& inputs) {
#define READ(type, name) read_tensor(inputs.name);
    ATTNKERN_TENSORS(READ)
#undef READ
    if (inputs.bias.has_value() && inputs.bias->dim() == 2) inputs.bias->pad_dimensions(4);  // a mask (L, S)
  }
  AttentionParams params() {
    AttentionParams read;
#define READ(type, name) read_number(read.name);
    ATTNKERN_PARAMS(READ)
#undef READ
    return read;
  }
  bool truth() { return next() == &_Py_TrueStruct; }
  // Whether all of them have been read, and are what they should be.
  bool plain() const { return plain_ && next_ == end_ && PyErr_Occurred() == nullptr; }
  // The last one: whether it names these kernels.
  bool names(const char* name) { return is_string(next(), name); }

 private:
  PyObject* next() { return *next_++; }
  void read_tensor(Tensor& x) { x = tensor(); }
  void read_tensor(OptionalTensor& x) { x = optional_tensor(); }
  void read_number(double& x) { x = PyFloat_AsDouble(next()); }
  void read_number(int64_t& x) { x = PyLong_AsLongLong(next()); }

  PyObject* const* next_;
  PyObject* const* end_;
  bool plain_ = true;
};

template <class... Tensors>
PyObject* tuple_of(Tensors&... tensors) {
  PyObject* const tuple = PyTuple_New(sizeof...(tensors));
  Py_ssize_t i = 0;
  (PyTuple_SetItem(tuple, i++, tensors.release()), ...);
  return tuple;
}

// What Python code has raised that isn't to be swallowed: torch's own, in which a checkpoint ends early, or the user's.
struct Raised {};

// None for a call that is not plain (`function` returns null) and for one that fails.
template <class Function>
PyObject* or_none(Function&& function) {
  PyObject* result = nullptr;
  try {
    if (python.dlpack != nullptr) result = function();
  } catch (const Raised&) {
    return nullptr;
  } catch (const std::exception&) {
  }
  if (result == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();
  return result == nullptr ? none() : result;
}

template <class Kernels>
PyObject* forward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return or_none([&]() -> PyObject* {
    constexpr int kOthers = 2;  // need_lse, backend
    if (count != attnkern::kTensorCount + attnkern::kParamCount + kOthers || any_answers_true(python.listeners))
      return nullptr;
    Arguments a(arguments, count);
    Inputs inputs;
    a.read(inputs);
    const AttentionParams params = a.params();
    const bool need_lse = a.truth();
    if (!a.names(Kernels::kName) || !a.plain() || !Kernels::takes(inputs.q.scalar_type())) return nullptr;
    auto [out, lse] = Kernels::template forward<Python>(inputs, params, need_lse, true);
    return tuple_of(out, lse);
  });
}

// The gradients of what an autograd Function has saved: (grad_out, grad_lse, (inputs, out, lse), params, which of its
// arguments need a gradient) -> as many gradients, None for those that need none.
template <class Kernels>
PyObject* backward(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return or_none([&]() -> PyObject* {
    constexpr int kArguments = 5, kResults = 2, kGradients = 5;
    if (count != kArguments || any_answers_true(python.listeners) || any_answers_true(python.for_the_caller) ||
        answers_true(python.is_grad_enabled))
      return nullptr;
    PyObject *const saved = arguments[2], *const numbers = arguments[3], *const needed = arguments[4];
    if (PyTuple_Size(saved) != attnkern::kTensorCount + kResults || PyTuple_Size(numbers) != attnkern::kParamCount ||
        PyTuple_Size(needed) < kGradients)
      return nullptr;
    std::vector<PyObject*> flat{arguments[0], arguments[1]};
    for (int i = 0; i < attnkern::kTensorCount + kResults; ++i) flat.push_back(PyTuple_GetItem(saved, i));
    for (int i = 0; i < attnkern::kParamCount; ++i) flat.push_back(PyTuple_GetItem(numbers, i));
    Arguments a(flat.data(), flat.size());
    const Tensor grad_out = a.tensor();
    const OptionalTensor grad_lse = a.optional_tensor();
    Inputs inputs;
    a.read(inputs);
    const Tensor out = a.tensor(), lse = a.tensor();
    const AttentionParams params = a.params();
    if (!a.plain()) return nullptr;
    constexpr int64_t bits[kGradients] = {attnkern::kGradQ, attnkern::kGradK, attnkern::kGradV, attnkern::kGradBias,
                                          attnkern::kGradSinks};
    const auto needs = [&](int i) { return PyTuple_GetItem(needed, i) == &_Py_TrueStruct; };
    int64_t grad_mask = 0;
    for (int i = 0; i < kGradients; ++i) grad_mask |= needs(i) ? bits[i] : 0;
    auto [dq, dk, dv, dbias, dsinks] =
        Kernels::template backward<Python>(grad_out, grad_lse, inputs, out, lse, params, grad_mask);
    Tensor* const grads[kGradients] = {&dq, &dk, &dv, &dbias, &dsinks};
    Owned tuple(PyTuple_New(PyTuple_Size(needed)));
    for (int i = 0; i < PyTuple_Size(needed); ++i)
      PyTuple_SetItem(tuple.get(), i, i < kGradients && needs(i) ? grads[i]->release() : none());
    return tuple.release();
  });
}

// A number of `window`; None: unbounded. Negative for what is neither.
int64_t bound_of(PyObject* x) {
  if (x == kNone) return kUnbounded;
  const int64_t bound = is_type(x, &PyLong_Type) ? PyLong_AsLongLong(x) : -1;
  return bound < kUnbounded ? bound : kUnbounded;
}

// AttentionParams of attnkern/params.py, as a tuple.
Owned numbers_of(const AttentionParams& params) {
  const auto object_of = []<class T>(T x) {
    if constexpr (std::is_same_v<T, double>) return PyFloat_FromDouble(x);
    else return PyLong_FromLongLong(x);
  };
  PyObject* const numbers[] = {
#define OBJECT(type, name) object_of(params.name),
      ATTNKERN_PARAMS(OBJECT)
#undef OBJECT
  };
  Owned tuple(PyTuple_New(attnkern::kParamCount));
  for (int i = 0; i < attnkern::kParamCount; ++i) PyTuple_SetItem(tuple.get(), i, numbers[i]);
  return tuple;
}

// attnkern.attention with all of its arguments in order; then, if there is any, the bits of a Mask, as bytes, in place
// of its attn_mask; and what is called where there is a gradient, `eager` of attnkern/autograd. A call to which no rule
// of attnkern/problem.py applies but those here and in fill(): tensors of one batch, without a
// gradient also of none; no dropout.
template <class Kernels>
PyObject* call(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return or_none([&]() -> PyObject* {
    if (count < 16 || count > 18) return nullptr;
    PyObject *const mask = arguments[3], *const dropout_p = arguments[4], *const is_causal = arguments[5],
                    *const scale = arguments[6], *const enable_gqa = arguments[7], *const window = arguments[8],
                    *const alignment = arguments[9], *const softcap = arguments[10], *const key_ranges = arguments[11],
                    *const sinks = arguments[12], *const block_table = arguments[13], *const return_lse = arguments[14],
                    *const backend = arguments[15], *const bits = count > 16 ? arguments[16] : kNone,
                    *const with_gradient = count > 17 ? arguments[17] : kNone;
    // First of all: another device's users are not to wait for the rest.
    const auto has = [](PyObject* x, PyObject* attribute) {
      return Owned(PyObject_GetAttr(x, attribute)).get() == &_Py_TrueStruct;
    };
    if (!is_type(arguments[0], python.tensor) || !has(arguments[0], python.is_ours)) return nullptr;
    const bool bottom_right = is_string(alignment, "bottom_right");
    const bool named = is_string(backend, Kernels::kName);
    if (!(backend == kNone || named) || !is_bool(is_causal) || !is_bool(enable_gqa) || !is_bool(return_lse) ||
        !(bottom_right || is_string(alignment, "top_left")) || !is_number(dropout_p) ||
        PyFloat_AsDouble(dropout_p) != 0 || !(scale == kNone || is_number(scale)) ||
        !(softcap == kNone || is_number(softcap)) ||
        !(window == kNone || (is_type(window, &PyTuple_Type) && PyTuple_Size(window) == 2)))
      return nullptr;
    bool needs_grad = false;
    if (answers_true(python.is_grad_enabled))
      for (PyObject* x : {arguments[0], arguments[1], arguments[2], mask, sinks}) {
        if (x != kNone && !is_tensor(x)) return nullptr;
        needs_grad = needs_grad || (x != kNone && has(x, python.requires_grad));
      }
    if (needs_grad && (with_gradient == kNone || block_table != kNone)) return nullptr;
    if (any_answers_true(python.listeners) || any_answers_true(python.for_the_caller)) return nullptr;

    Inputs inputs;
    Tensor &q = inputs.q, &k = inputs.k, &v = inputs.v;
    if (!q.read(arguments[0]) || !Kernels::takes(q.scalar_type()) || !k.read(arguments[1]) || !v.read(arguments[2]))
      return nullptr;
    if (mask != kNone && (!inputs.bias.emplace().read(mask) || inputs.bias->scalar_type() == ScalarType::Byte))
      return nullptr;
    const int64_t dims = q.dim();
    if (dims < 2 || dims > 4 || k.dim() != dims || v.dim() != dims || q.numel() == 0) return nullptr;
    if (dims < 4 && (needs_grad || bits != kNone || block_table != kNone)) return nullptr;
    if (mask != kNone && inputs.bias->dim() > dims) return nullptr;
    if (dims == 2 && (enable_gqa == &_Py_TrueStruct || sinks != kNone)) return nullptr;  // there are no heads
    q.pad_query(4), k.pad_dimensions(4), v.pad_dimensions(4);
    if (mask != kNone) inputs.bias->pad_dimensions(4);
    if (bits != kNone && !inputs.bias.emplace().read(bits)) return nullptr;
    if (sinks != kNone && (!inputs.sinks.emplace().read(sinks) || inputs.sinks->dim() > dims - 2)) return nullptr;
    std::vector<float> wide_sinks;
    if (sinks != kNone && inputs.sinks->scalar_type() == q.scalar_type()) {
      // (Autograd would save them as they are; the backward pass reads them as float32.)
      if (!Kernels::kOnHost || (needs_grad && q.element_size() == 2)) return nullptr;
      inputs.sinks->widen(wide_sinks);
    }
    if (key_ranges != kNone && !inputs.key_ranges.emplace().read(key_ranges)) return nullptr;
    if (key_ranges != kNone && inputs.key_ranges->dim() > 1) inputs.key_ranges->pad_dimensions(5);
    if (block_table != kNone && !inputs.block_table.emplace().read(block_table)) return nullptr;
    const auto same_heads = [&](const Tensor& x) { return x.size(1) == q.size(1) || x.size(1) == 1; };
    if (enable_gqa == &_Py_FalseStruct && !(same_heads(k) && same_heads(v))) return nullptr;
    AttentionParams params{};
    params.softmax_scale = scale == kNone ? 1 / std::sqrt(static_cast<double>(q.size(3))) : PyFloat_AsDouble(scale);
    params.softcap = softcap == kNone ? 0 : PyFloat_AsDouble(softcap);
    params.window_left = window == kNone ? kUnbounded : bound_of(PyTuple_GetItem(window, 0));
    params.window_right = window == kNone ? kUnbounded : bound_of(PyTuple_GetItem(window, 1));
    if (params.window_left < 0 || params.window_right < 0 || PyErr_Occurred() != nullptr) return nullptr;
    if (is_causal == &_Py_TrueStruct) params.window_right = 0;  // bounds are not negative: this is the tighter one
    const int64_t pages = block_table == kNone ? 1 : inputs.block_table->dim() == 2 ? inputs.block_table->size(1) : 0;
    params.band_offset = bottom_right ? pages * k.size(2) - q.size(2) : 0;
    const bool need_lse = return_lse == &_Py_TrueStruct;
    auto [out, lse] = Kernels::template forward<Python>(inputs, params, need_lse || needs_grad, named);
    if (!needs_grad) return need_lse ? tuple_of(out, lse) : out.release();
    const Owned values[] = {Owned(out.release()), Owned(lse.release())};
    Owned results(PyObject_CallFunctionObjArgs(with_gradient, arguments[0], arguments[1], arguments[2],
                                               bits == kNone ? mask : bits, sinks, key_ranges, numbers_of(params).get(),
                                               values[0].get(), values[1].get(), nullptr));
    if (results.get() == nullptr) throw Raised();
    if (need_lse) return results.release();
    PyObject* const differentiable = PyTuple_GetItem(results.get(), 0);
    Py_IncRef(differentiable);
    return differentiable;
  });
}

// (exchange API's capsule, Tensor, Tensor.is_neg, empty_strided, dtypes as in attnkern::DType, functions that must all
// answer false before any call, those before `call` and `backward`, is_grad_enabled, DLPack's number of the kernels'
// device, the attribute by which tensors say that they are there)
PyObject* connect(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  const auto* api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(arguments[0], "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  if (api == nullptr || api->header.version.major != DLPACK_MAJOR_VERSION ||
      api->dltensor_from_py_object_no_sync == nullptr)
    return none();
  PyObject** const kept[] = {&python.tensor,    &python.is_neg,         &python.empty_strided,  &python.dtypes,
                             &python.listeners, &python.for_the_caller, &python.is_grad_enabled};
  const Owned module(PyImport_ImportModule("torch.nn.parameter"));
  if (module.get() != nullptr) python.parameter = PyObject_GetAttrString(module.get(), "Parameter");
  if (python.parameter == nullptr) PyErr_Clear();
  for (PyObject** place : kept) Py_IncRef(*place = *++arguments);
  python.device = static_cast<DLDeviceType>(PyLong_AsLongLong(*++arguments));
  Py_IncRef(python.is_ours = *++arguments);
  python.requires_grad = PyUnicode_InternFromString("requires_grad");
  python.dlpack = api;
  return none();
}

template <size_t kCount>
PyObject* functions_of(PyMethodDef (&functions)[kCount]) {
  PyObject* const tuple = PyTuple_New(kCount);
  for (size_t i = 0; i < kCount; ++i) PyTuple_SetItem(tuple, i, PyCFunction_NewEx(&functions[i], nullptr, nullptr));
  return tuple;
}
constexpr int kFastCall = 0x80;  // METH_FASTCALL

}  // namespace
