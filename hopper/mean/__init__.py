"""The mean of V over the keys that is worth subtracting before V becomes e4m3, in one pass over V on sm_90a."""
