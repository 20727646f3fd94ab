"""Triton kernels: functions of tensors and numbers, no records."""
