// Tensors of torch, as its own C functions read them while the kernel runs: as they are then
#pragma once
#include <algorithm>
#include <cstdint>
#include <initializer_list>

// aoti_torch_get_... of libtorch_cpu, in the order in which build.py passes them. They return 0, or
// an error. A tensor is given to them as a pointer to what Python calls its _cdata.
struct Torch {
  int32_t (*data_ptr)(const void *, void **);
  int32_t (*dim)(const void *, int64_t *);
  int32_t (*sizes)(const void *, int64_t **), (*strides)(const void *, int64_t **);
  int32_t (*dtype)(const void *, int32_t *), (*device_type)(const void *, int32_t *);
};
static Torch torch;

enum { UINT8 = 0, FLOAT16 = 5, FLOAT32 = 6 };  // torch's numbers of dtypes

struct Tensor {
  const void *cdata;
  template <class T> T *data() const {  // null if it has none
    void *data = nullptr;
    return torch.data_ptr(this, &data) ? nullptr : (T *)data;
  }
  const int64_t *sizes(int64_t expected_dim) const {  // null if it has other dimensions
    int64_t dim, *sizes;
    if (torch.dim(this, &dim) || dim != expected_dim || torch.sizes(this, &sizes)) return nullptr;
    return sizes;
  }
  // Is it contiguous, on a CPU, not empty, and of this dtype and shape?
  bool is(int32_t expected_dtype, std::initializer_list<int64_t> shape) const {
    const int64_t *size = sizes(shape.size());
    if (!size || !std::equal(shape.begin(), shape.end(), size)) return false;
    int64_t *strides, step = 1;
    int32_t dtype, device;
    if (torch.strides(this, &strides) || torch.dtype(this, &dtype)) return false;
    if (torch.device_type(this, &device) || device != 0 || dtype != expected_dtype) return false;
    for (int64_t i = shape.size() - 1; i >= 0; step *= size[i--])
      if (size[i] < 1 || (size[i] > 1 && strides[i] != step)) return false;
    return data<void>();
  }
};
