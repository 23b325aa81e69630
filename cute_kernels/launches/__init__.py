"""Several launches as one function of TVM FFI, for a caller that has but one order of arguments."""
