/* Arguments as a compiled kernel takes them, and its launch. */
#include "internal.h"
#include "dsl_runtime.h"

/* Types of an argument, as TVM FFI numbers them, and of an element and a device, as DLPack does. */
enum { FFI_NONE = 0, FFI_INT = 1, FFI_REAL = 3, FFI_TENSOR = 7 };
enum { DL_INT = 0, DL_FLOAT = 2, DL_BFLOAT = 4, DL_FLOAT8_E4M3FN = 10, DL_CUDA = 2 };

static const struct {
  uint8_t code, bits;
} TYPES[] = {
    [FLOAT16] = {DL_FLOAT, 16}, [BFLOAT16] = {DL_BFLOAT, 16}, [FLOAT8_E4M3] = {DL_FLOAT8_E4M3FN, 8},
    [FLOAT32] = {DL_FLOAT, 32}, [INT32] = {DL_INT, 32},
};

void ha_call_begin(call *c, int device) {
  c->device = device;
  c->count = 0;
  c->num_tensors = 0;
}

static ffi_value *next(call *c, int32_t type) {
  ffi_value *value = &c->values[c->count++];
  value->type = type;
  value->padding = 0;
  return value;
}

void ha_add_nothing(call *c) { next(c, FFI_NONE)->value.integer = 0; }

void ha_add_nothings(call *c, int count) {
  while (count--) ha_add_nothing(c);
}

void ha_add_int(call *c, int64_t value) { next(c, FFI_INT)->value.integer = value; }

void ha_add_real(call *c, double value) { next(c, FFI_REAL)->value.real = value; }

void ha_add_tensor(call *c, const void *data, element type, int dimensions, const int64_t *shape,
                   const int64_t *strides) {
  tensor_argument *t = &c->tensors[c->num_tensors++];
  int64_t contiguous = 1;
  for (int i = dimensions - 1; i >= 0; i--) {
    t->shape[i] = shape[i];
    t->strides[i] = strides ? strides[i] : contiguous;
    contiguous *= shape[i];
  }
  t->dl.data = (void *)(uintptr_t)data;
  t->dl.device_type = DL_CUDA;
  t->dl.device_index = c->device;
  t->dl.dimensions = dimensions;
  t->dl.type_code = TYPES[type].code;
  t->dl.type_bits = TYPES[type].bits;
  t->dl.type_lanes = 1;
  t->dl.shape = t->shape;
  t->dl.strides = t->strides;
  t->dl.byte_offset = 0;
  next(c, FFI_TENSOR)->value.pointer = &t->dl;
}

ha_status ha_run(kernel_choice choice, const call *c, void *stream, bool only_load) {
  ffi_function *const entry = ha_entry_of(choice);
  if (!entry) {
    return ha_fail(HA_ERROR_NOT_BUILT,
                   "the kernel %s is not in this build: configure it with -DHOPPER_ATTENTION_KERNELS=default,%s",
                   ha_name_of(choice), ha_name_of(choice));
  }
  ffi_value result = {0};
  ha_enter(stream, c->device, only_load);
  return ha_leave(entry(NULL, c->values, c->count, &result));
}

element ha_element_of(ha_dtype dtype) {
  static const element ELEMENTS[] = {[HA_FLOAT16] = FLOAT16, [HA_BFLOAT16] = BFLOAT16, [HA_FLOAT8_E4M3] = FLOAT8_E4M3,
                                     [HA_FLOAT32] = FLOAT32};
  return ELEMENTS[dtype];
}

void ha_add_operand(call *c, const operand *o) {
  ha_add_tensor(c, o->given->data, ha_element_of(o->dtype), o->dimensions, o->shape, o->strides);
}

void ha_add_operands(call *c, const operand operands[NUM_OPERANDS], const lse_argument *lse, const void *workspace,
                     double scale) {
  for (int i = 0; i < NUM_OPERANDS; i++) ha_add_operand(c, &operands[i]);
  ha_add_lse(c, lse);
  ha_add_counter(c, workspace);
  ha_add_real(c, scale);
}

void ha_add_lse(call *c, const lse_argument *lse) {
  int64_t shape[3], strides[3], stride = 1;
  for (int i = lse->dimensions - 1; i >= 0; stride *= lse->shape[i--]) {
    shape[i] = lse->shape[i];
    strides[i] = stride;
  }
  /* A tensor without rows tells the kernel to write none. */
  if (!lse->data) shape[lse->dimensions - 1] = 0;
  ha_add_tensor(c, lse->data, FLOAT32, lse->dimensions, shape, strides);
}

void ha_add_counter(call *c, const void *workspace) {
  ha_add_tensor(c, workspace, INT32, 1, (const int64_t[]){2}, NULL);
}

static int64_t side_of(int64_t side) { return side == UNLIMITED ? NO_LIMIT : side; }

void ha_add_window(call *c, const mask *m) {
  if (ha_has_window(m)) {
    ha_add_int(c, side_of(m->left));
    ha_add_int(c, side_of(m->right));
  } else {
    ha_add_nothings(c, 2);
  }
  if (m->chunk) ha_add_int(c, m->chunk);
  else ha_add_nothing(c);
}
