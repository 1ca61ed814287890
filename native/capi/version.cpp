extern "C" __attribute__((visibility("default"))) int unbounded_abi_version() { return 1; }
