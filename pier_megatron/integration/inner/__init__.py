"""The inner optimizers: where they keep FP32 main parameters and moments."""
