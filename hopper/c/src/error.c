/* What went wrong last on each thread. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

enum { MESSAGE_BYTES = 1024 };

static _Thread_local char message[MESSAGE_BYTES];

ha_status ha_fail(ha_status status, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(message, sizeof message, format, values);
  va_end(values);
  return status;
}

const char *ha_last_error_message(void) { return message; }

const char *ha_status_name(ha_status status) {
  switch (status) {
    case HA_SUCCESS: return "success";
    case HA_ERROR_INVALID_ARGUMENT: return "invalid argument";
    case HA_ERROR_NOT_SUPPORTED: return "not supported";
    case HA_ERROR_NOT_BUILT: return "kernel not built";
    case HA_ERROR_NO_DRIVER: return "no driver";
    case HA_ERROR_NO_DEVICE: return "no device";
    case HA_ERROR_CUDA: return "CUDA error";
  }
  return "unknown status";
}
